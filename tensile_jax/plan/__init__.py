"""Takes a step's graph, a device profile and a memory limit, and gives a plan. Pure arithmetic: the same plan for the same input.

planner.py      the front door: a `Planner` of one step
comparison.py   all policies on one step, side by side
policies/       how a plan is chosen: `auto`, the paper's algorithms, and the baselines
search/         what `auto` searches: candidates, segments, swaps
analysis/       facts about a step: latencies, copy times, lifetimes, fusion
result/         a choice becomes a plan, which is simulated and checked
multi_job/      several jobs under one budget: admission, safety, state on the host
"""

from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.comparison import Comparison, compare_policies
from tensile_jax.plan.planner import Choice, Goal, Measured, Planned, Planner
from tensile_jax.plan.policies.registry import POLICIES

__all__ = ["POLICIES", "Choice", "Comparison", "DeviceProfile", "Goal", "Measured", "Planned", "Planner", "compare_policies"]
