"""Lists the policies by name, and finds the smallest limit for which a policy has a plan.

A new policy is added to `POLICIES` here, and its name to `PolicyName` in `plan_format.py`."""

from collections.abc import Mapping

from tensile_jax.plan.policies.auto import auto
from tensile_jax.plan.policies.auto import floor_bytes as auto_floor_bytes
from tensile_jax.plan.policies.capuchin.policy import capuchin
from tensile_jax.plan.policies.checkpoint_blocks import checkpoint
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.tensile.policy import tensile
from tensile_jax.plan.policies.vdnn import vdnn
from tensile_jax.plan.search.choice import LEAST, Policy, peak_of
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.workspace import Measured
from tensile_jax.plan_format import PolicyName

POLICIES: Mapping[PolicyName, Policy] = {
    "auto": auto,
    "tensile": tensile,
    "capuchin": capuchin,
    "vdnn": vdnn,
    "checkpoint": checkpoint,
    "none": none,
}


def floor_bytes(step: StepModel, measured: Measured, policy: Policy) -> int:
    """The smallest limit for which the policy has a plan, in bytes."""
    if policy is auto:
        return auto_floor_bytes(step, measured)
    choice = policy(step, LEAST, measured)
    assert choice is not None  # every policy has a choice for the limit `LEAST`
    return peak_of(step, choice, measured)
