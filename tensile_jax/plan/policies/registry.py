"""Lists the policies (ways to plan) by name, and asks a policy for its choice (cuts and copies) with the lowest peak.

A new policy is added here, to `PolicyName` and at the end of `POLICIES`, and nowhere else. Pictures and pages give each policy a
colour and a mark by its place in `POLICIES`.
"""

from collections.abc import Mapping
from typing import Literal

from tensile_jax.plan.policies.auto import auto
from tensile_jax.plan.policies.auto import lowest as lowest_of_auto
from tensile_jax.plan.policies.capuchin.policy import capuchin
from tensile_jax.plan.policies.checkpoint_blocks import checkpoint
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.tensile.policy import tensile
from tensile_jax.plan.policies.vdnn import vdnn
from tensile_jax.plan.search.choice import LEAST, Choice, Policy
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel

PolicyName = Literal["auto", "capuchin", "checkpoint", "none", "tensile", "vdnn"]
POLICIES: Mapping[PolicyName, Policy] = {
    "auto": auto,
    "tensile": tensile,
    "capuchin": capuchin,
    "vdnn": vdnn,
    "checkpoint": checkpoint,
    "none": none,
}


def known_policy(name: object) -> PolicyName:
    """The name, if a policy has it.

    Raises:
        ValueError: no policy has this name.
    """
    for known in POLICIES:
        if known == name:
            return known
    raise ValueError(f"policy={name!r} is not known. Known: {', '.join(sorted(POLICIES))}.")


def lowest(model: StepModel, measured: CompiledSizes, policy: Policy) -> Choice:
    """The choice of the policy with the least peak. For `auto`, it is found quickly and may be slow."""
    choice = lowest_of_auto(model, measured) if policy is auto else policy(model, LEAST, measured)
    assert choice is not None  # every policy has a choice for the limit `LEAST`
    return choice
