"""What a job's latencies say is learned of the plan that they belong to, and asks for one new plan at a time."""

from dataclasses import replace
from typing import Any, cast

from tensile_jax.exec.actor.plan_memory import memory_profile_of
from tensile_jax.exec.runtime.dispatched_job import DispatchedJob
from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.drift import Follower
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, training_graph


def planned() -> tuple[Plan, DispatchedJob]:
    """A plan of some segments, and a job that runs under it and is planned again if latencies differ by more than 30 %."""
    planner = Planner(training_graph(8, activation=100_000, weight=1_000), PROFILE)
    found = planner.plan(Goal(0.6 * planner.whole_peak_bytes(CompiledSizes())), CompiledSizes())
    assert found is not None and len(found.plan.segments) > 2
    plan = found.plan
    memory = memory_profile_of(plan, planner.graph, PROFILE)
    follower = Follower(0.0, threshold=0.3)
    return plan, DispatchedJob("a", cast(Any, None), lambda: None, memory, plan, 0, planning_s=1.0, follower=follower)


def run(job: DispatchedJob, plan: Plan, *, times: float, now_s: float = 100.0) -> str | None:
    """Why a new plan is due after one more iteration, in which the segments take so many times what `plan` predicts."""
    iteration = job.begin(0.0, look=True)
    iteration.segment_us += [times * (s.latency_us + plan.launch_us) for s in plan.segments]
    return job.follow_latencies(iteration, now_s)


def test_a_drift_is_confirmed_by_a_second_iteration_and_the_slow_first_one_does_not_count() -> None:
    plan, job = planned()
    assert [run(job, plan, times=3.0) for _ in range(2)] == [None, None]
    reason = run(job, plan, times=3.0)
    assert reason is not None and reason.startswith("After 3 iterations under the plan before, segments took")


def test_no_other_plan_is_asked_for_while_one_is_made_and_then_the_drift_is_confirmed_anew() -> None:
    plan, job = planned()
    assert [run(job, plan, times=3.0) is not None for _ in range(5)] == [False, False, True, False, False]
    job.renewed()
    assert [run(job, plan, times=3.0) is not None for _ in range(3)] == [False, True, False]


def test_a_plan_runs_ten_times_as_long_as_planning_takes_before_another_is_made() -> None:
    plan, job = planned()
    assert [run(job, plan, times=3.0, now_s=9.9) for _ in range(4)] == [None] * 4
    assert run(job, plan, times=3.0, now_s=10.0) is not None


def test_an_iteration_that_ends_under_the_next_plan_says_nothing_of_it() -> None:
    plan, job = planned()
    begun = job.begin(0.0, look=True)
    job.use(plan, replace(job.memory), 0.0)
    begun.segment_us += [1.0] * len(plan.segments)
    assert job.follow_latencies(begun, 100.0) is None and job.follower.drift(plan) is None


def test_nothing_is_learned_before_all_segments_have_run_or_of_a_step_that_runs_whole() -> None:
    plan, job = planned()
    run(job, plan, times=1.0)
    part = job.begin(0.0, look=True)
    part.segment_us += [1.0] * (len(plan.segments) - 1)
    assert job.follow_latencies(part, 100.0) is None and job.follower.drift(plan) is None
    job.use(replace(plan, whole=True), job.memory, 0.0)
    assert [run(job, plan, times=3.0) for _ in range(4)] == [None] * 4
