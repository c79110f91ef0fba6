"""Takes a graph, a device profile and a budget, gives a plan. Pure arithmetic: the same plan for the same input."""

from tensile_jax.plan.assemble import Layout, assemble, empty_plan, planned_whole
from tensile_jax.plan.bounds import least_step_us
from tensile_jax.plan.check import check
from tensile_jax.plan.choice import LEAST, WHOLE, Choice, layout, whole_peak
from tensile_jax.plan.ladder import Ladder
from tensile_jax.plan.latency import DeviceProfile, operator_latency
from tensile_jax.plan.order import order
from tensile_jax.plan.passive import PassiveIteration, passive_iteration
from tensile_jax.plan.policy import POLICIES, floor, floors
from tensile_jax.plan.slowdown import least_limit
from tensile_jax.plan.workspace import Measured

__all__ = [
    "LEAST", "POLICIES", "WHOLE", "Choice", "DeviceProfile", "Ladder", "Layout", "Measured", "PassiveIteration", "assemble",
    "check", "empty_plan", "floor", "floors", "layout", "least_limit", "least_step_us", "operator_latency", "order",
    "passive_iteration", "planned_whole", "whole_peak",
]  # fmt: skip
