"""Takes a graph, a device profile and a budget, gives a plan. Pure arithmetic: the same plan for the same input."""

from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.capuchin.passive_mode import PassiveIteration, passive_iteration
from tensile_jax.plan.policies.registry import POLICIES, floor, floors
from tensile_jax.plan.result.build import Layout, build_plan, build_whole_plan, empty_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, WHOLE, Choice, layout, whole_peak
from tensile_jax.plan.search.lower_bound import least_step_us
from tensile_jax.plan.search.slowdown import least_limit
from tensile_jax.plan.search.workspace import Measured

__all__ = [
    "LEAST", "POLICIES", "WHOLE", "Choice", "DeviceProfile", "Candidates", "Layout", "Measured", "PassiveIteration", "build_plan",
    "check", "empty_plan", "floor", "floors", "layout", "least_limit", "least_step_us", "order",
    "passive_iteration", "build_whole_plan", "whole_peak",
]  # fmt: skip
