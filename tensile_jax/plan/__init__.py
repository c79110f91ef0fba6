"""Plans steps: takes a step's graph, a device profile and a memory limit, and gives a plan.

A plan cuts the step into *segments*, stretches of operators that are each compiled as one executable. It also says which tensors
are copied to the host and back, and which are computed again. The same input always gives the same plan. Nothing here runs on a
device or imports JAX.

planner.py      plans one step: the `Planner`
comparison.py   compares the plans of all policies (ways to plan) for one step
drift.py        follows the latencies of a running plan, and chooses a new plan from them
policies/       the policies: `auto`, the algorithms of the paper TENSILE, and the baselines
search/         how `auto` searches for a plan
analysis/       computes facts about a step: latencies, copy times, lifetimes of tensors, fusion
result/         builds a plan from a policy's choice, simulates the plan and checks it
multi_job/      several jobs under one budget: which ones are admitted, what may run now, what state is on the host

latest_results.py   remembers what several of these would otherwise compute twice
"""

from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.comparison import Comparison, compare_policies
from tensile_jax.plan.planner import Choice, CompiledSizes, Goal, Planned, Planner
from tensile_jax.plan.policies.registry import POLICIES, PolicyName, known_policy

__all__ = [
    "POLICIES", "Choice", "Comparison", "CompiledSizes", "DeviceProfile", "Goal", "Planned", "Planner", "PolicyName",
    "compare_policies", "known_policy",
]  # fmt: skip
