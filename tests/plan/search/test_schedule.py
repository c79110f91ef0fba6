"""After any moves, a schedule is what it would be if it were assembled anew, and what its plan says."""

import random

import pytest

from tensile_jax.plan.search.starts.start_schedules import assemble
from tests.plan.search.schedules import model_of, odd_step, plan_of, random_schedule, wander

SEEDS = (*range(60), 1043, 1158, 1161, 1189, 2912)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_moves_leave_what_would_be_assembled_anew(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    for _, schedule in wander(random_schedule(model_of(step), rng), rng, 12):
        anew = assemble(schedule.evaluator, schedule.cuts[:], schedule.residencies[:], as_they_are=True)
        assert anew is not None
        assert (schedule.at, schedule.after, schedule.held) == (anew.at, anew.after, anew.held)
        assert schedule.accounts == anew.accounts
        assert (schedule.peaks, schedule.us, schedule.written_us) == (anew.peaks, anew.us, anew.written_us)
        assert schedule.swapped == anew.swapped
        assert schedule.timing == anew.timing and schedule.cost == anew.cost >= schedule.least_cost - 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_schedule_says_is_what_its_plan_says(seed: int) -> None:
    """Every plan is replayed; its simulation gives the same time, and its segments need the same memory."""
    rng, step = random.Random(seed), odd_step(seed)
    first = random_schedule(model_of(step), rng)
    for schedule in (first, *(schedule for _, schedule in wander(first, rng, 8))):
        plan = plan_of(step, schedule)
        assert [segment.device_bytes for segment in plan.segments] == schedule.peaks
        assert plan.step_us == pytest.approx(schedule.step_us, abs=0.02)
        us = sum(schedule.evaluator.condensed.us)
        each_us = max(schedule.evaluator.profile.launch_us, us / 250)  # a segment counts for no less: it must be compiled
        more_us = schedule.count * (each_us - schedule.evaluator.profile.launch_us) + sum(schedule.written_us)
        assert schedule.cost == pytest.approx(schedule.step_us + more_us)
        assert plan.recomputed_us == pytest.approx(sum(contents.again_us for contents in schedule.accounts), abs=0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_kept_for_longer_than_needed(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    evaluator = model_of(step)
    for _, schedule in wander(random_schedule(evaluator, rng), rng, 8):
        for t, several in enumerate(schedule.residencies):
            for first, last, _, leaves in several:
                needed = [
                    j for j in range(max(first, 0), min(last, schedule.count - 1) + 1) if schedule.accounts[j].used >> t & 1
                ]
                returned = last == schedule.count and evaluator.condensed.at_end >> t & 1
                assert returned or leaves or last == max(needed, default=0)
