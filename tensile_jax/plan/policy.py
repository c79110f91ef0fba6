"""The policies by name, and the smallest limit that each can keep."""

from collections.abc import Iterator, Mapping

from tensile_jax.plan.auto import auto, hopeful_floor, refuted_floors
from tensile_jax.plan.capuchin import capuchin
from tensile_jax.plan.checkpoint import checkpoint
from tensile_jax.plan.choice import LEAST, Choice, Policy, peak_of
from tensile_jax.plan.ladder import Ladder
from tensile_jax.plan.none import none
from tensile_jax.plan.tensile import tensile
from tensile_jax.plan.vdnn import vdnn
from tensile_jax.plan.workspace import Measured
from tensile_jax.schedule import PolicyName

POLICIES: Mapping[PolicyName, Policy] = {
    "auto": auto,
    "tensile": tensile,
    "capuchin": capuchin,
    "vdnn": vdnn,
    "checkpoint": checkpoint,
    "none": none,
}


def floor(ladder: Ladder, measured: Measured, policy: Policy = auto) -> tuple[int, Choice]:
    """The smallest limit for which the policy has a plan, and its choice then."""
    if policy is auto:
        return hopeful_floor(ladder, measured)
    choice = policy(ladder, LEAST, measured)
    assert choice is not None  # a policy always has one for that
    return peak_of(ladder, choice, measured), choice


def floors(ladder: Ladder, measured: Measured, policy: Policy) -> Iterator[tuple[int, Choice]]:
    """The same when compiling has refuted the floor, the likeliest first."""
    yield from refuted_floors(ladder, measured) if policy is auto else [floor(ladder, measured, policy)]
