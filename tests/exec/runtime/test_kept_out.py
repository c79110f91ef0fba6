"""State that is out while other jobs run: chosen when a job comes or goes, without a change of results."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, Step, step_of
from tensile_jax.exec.fitting.find_plan import begin_to_predict, predict
from tensile_jax.installed_models import MODELS
from tensile_jax.plan.multi_job.admission import JobLimits, plan_job
from tensile_jax.runtime_records import JobEvent
from tensile_jax.trace import trace_step

FOREVER = 10**6


def replay(model: Any, job: tensile.Job, steps: int, profile: str) -> Any:
    """The job's last state from a lonely run, plan by plan."""
    state, batches = model.init(), model.batches()
    plans = job.plans
    for (first, plan), last in zip(plans, [*(first for first, _ in plans[1:]), steps], strict=True):
        step = tensile.jit(model.step, donate_argnums=0, plan=plan, state_memory="any", device_profile=profile)
        for _ in range(first, last):
            state, _ = step(state, next(batches))
    return state


def same_bits(a: Any, b: Any) -> bool:
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_one_jobs_state_makes_room_for_the_other_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "can_save_memory", False)  # else both jobs fit
    large = MODELS["cnn"](batch_size=64, image_size=16, seed=0)
    small = MODELS["cnn"](batch_size=32, image_size=16, seed=1)
    renewed: list[JobEvent] = []
    # 12,200 KiB: the large one's peak fits, but not beside all of the small one's state
    with tensile.Runtime(budget="12200KiB", look="always", device_profile="h200") as runtime:
        a = runtime.submit(large.step, large.init(), large.batches, steps=FOREVER, name="a", policy="none")
        b = None
        for event in runtime.events():
            if b is None and event.kind == "started":
                b = runtime.submit(small.step, small.init(), small.batches, steps=FOREVER, name="b", policy="none")
            elif b is not None and event.job == "b":
                if event.kind == "renewed":
                    renewed.append(event)
                elif event.kind == "step" and renewed and event.step == renewed[0].step + 3:
                    b.cancel()
                elif event.kind == "cancelled":
                    a.cancel()
        assert b is not None
    steps = b.status.step
    assert "of its state out while others run" in renewed[0].note
    assert runtime.peak_bytes <= 12200 * 1024
    assert len(b.plans) > 1 and b.plans[0][1].swapped_out_bytes == 0 and b.plans[1][1].swapped_out_bytes > 0
    spans = [(s.operators, s.recomputes) for s in b.plans[0][1].segments]
    assert all([(s.operators, s.recomputes) for s in plan.segments] == spans for _, plan in b.plans)
    assert same_bits(b.result(), replay(small, b, steps, "h200"))
    lonely = tensile.jit(small.step, donate_argnums=0, plan=b.plans[0][1], device_profile="h200")  # one plan for all of it
    state = small.init()
    for _, batch in zip(range(steps), small.batches(), strict=False):
        state, _ = lonely(state, batch)
    assert same_bits(b.result(), state)


def plan_only(step: Step, budget_bytes: int) -> Any:
    """Compiles nothing."""
    plan = predict(begin_to_predict(step, Budget(budget_bytes, None))).plan
    return SimpleNamespace(plan=plan, memory=SimpleNamespace(host_bytes=plan.swapped_out_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("most", ["most_swapped_bytes", "most_host_bytes"])
def test_a_job_that_may_swap_no_more_gets_a_plan_without_swaps(most: str) -> None:
    model, device = MODELS["cnn"](batch_size=64, image_size=16), jax.devices()[0]
    traced = trace_step(jax.jit(model.step, donate_argnums=0), model.step, (model.state_shape, model.batch_shape), {})
    profile = load_profile("cpu")
    step = step_of(traced, Options("auto", profile, "any"), Compiler(device))
    limit = 7900 * 1024  # auto swaps here
    free = plan_job(plan_only, step, JobLimits(limit, limit)).plan
    bound = plan_job(plan_only, step, JobLimits(limit, limit, **{most: 0})).plan
    assert free.swapped_out_bytes > 0 and bound.swapped_out_bytes == 0
    assert bound.peak_bytes <= limit and bound.step_us > free.step_us
    lowest = plan_job(plan_only, step, JobLimits(free.floor_bytes, limit, **{most: 0})).plan
    assert lowest.swapped_out_bytes == 0 and lowest.peak_bytes <= limit  # with a higher peak, rather than swaps
    tight = plan_job(plan_only, step, JobLimits(free.floor_bytes, free.floor_bytes, **{most: 0})).plan
    assert tight.swapped_out_bytes > 0  # only swaps keep that
