"""A job may have a slowdown and a budget: under the budget, the slowdown no longer counts."""

import jax
import pytest

from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, step_of
from tensile_jax.exec.fitting.find_plan import begin, fit
from tensile_jax.plan import PolicyName
from tensile_jax.trace import trace_step
from tests.builders import batch, sgd_step, weights


@pytest.mark.parametrize("policy", ["checkpoint", "tensile", "auto"])
def test_a_plan_for_a_slowdown_does_not_stand_for_a_lower_budget(policy: PolicyName) -> None:
    traced = trace_step(jax.jit(sgd_step, donate_argnums=0), sgd_step, (weights(6), batch(rows=1024)), {})
    options = Options(policy, load_profile("cpu"), "any", max_slowdown=1.05)
    step = step_of(traced, options, Compiler(jax.devices()[0]))
    roomy = fit(begin(step, None))
    floor = begin(step, None).floor_bytes()
    budget = (floor + roomy.plan.peak_bytes) // 2
    assert floor < budget < roomy.plan.peak_bytes
    lower = fit(begin(step, Budget(budget, None)))
    assert lower.plan.peak_bytes <= budget == lower.plan.budget_bytes
