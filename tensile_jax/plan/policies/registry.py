"""Lists the policies by name, and finds a policy's choice with the least peak.

A new policy is added to `POLICIES` here, and its name to `PolicyName` in `plan_format.py`."""

from collections.abc import Mapping

from tensile_jax.plan.policies.auto import auto
from tensile_jax.plan.policies.capuchin.policy import capuchin
from tensile_jax.plan.policies.checkpoint_blocks import checkpoint
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.tensile.policy import tensile
from tensile_jax.plan.policies.vdnn import vdnn
from tensile_jax.plan.search.choice import LEAST, Choice, Policy
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


def least(step: StepModel, measured: Measured, policy: Policy) -> Choice:
    """The choice with the least peak that the policy knows."""
    choice = policy(step, LEAST, measured)
    assert choice is not None  # every policy has a choice for the limit `LEAST`
    return choice
