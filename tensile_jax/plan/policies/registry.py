"""Lists the policies by name, and finds the smallest limit (a budget in bytes) for which a policy has a plan.

A new policy is added to `POLICIES` here, and its name to `PolicyName` in `plan_format.py`."""

from collections.abc import Iterator, Mapping

from tensile_jax.plan.policies.auto import auto, floor_lower_estimate, floors_after_compiling
from tensile_jax.plan.policies.capuchin.policy import capuchin
from tensile_jax.plan.policies.checkpoint_blocks import checkpoint
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.tensile.policy import tensile
from tensile_jax.plan.policies.vdnn import vdnn
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, Policy, peak_of
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


def floor(candidates: Candidates, measured: Measured, policy: Policy = auto) -> tuple[int, Choice]:
    """The smallest limit for which the policy has a plan, and its choice then."""
    if policy is auto:
        return floor_lower_estimate(candidates, measured)
    choice = policy(candidates, LEAST, measured)
    assert choice is not None  # every policy has a choice for the limit `LEAST`
    return peak_of(candidates, choice, measured), choice


def floors(candidates: Candidates, measured: Measured, policy: Policy) -> Iterator[tuple[int, Choice]]:
    """Floors and their choices, for when compiling has shown that `floor` is too low; the likeliest first."""
    yield from floors_after_compiling(candidates, measured) if policy is auto else [floor(candidates, measured, policy)]
