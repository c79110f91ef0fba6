"""No schedule has a lower peak than what is said to be necessary, and where less is allowed, none is sought."""

import random

import pytest

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.search.bounds.memory_bound import bytes_at_ends, necessary_bytes
from tensile_jax.plan.search.search import fastest, least
from tests.plan.search.schedules import model_of, odd_step, random_schedule, wander


@pytest.mark.parametrize("seed", range(100))
def test_no_schedule_needs_less(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    evaluator = model_of(step)
    first = random_schedule(evaluator, rng)
    for schedule in (first, least(step, CompiledSizes()), *(schedule for _, schedule in wander(first, rng, 8))):
        assert necessary_bytes(schedule.evaluator) <= schedule.peak
        assert bytes_at_ends(step.graph, state_may_stay_out=step.state_may_stay_out) <= schedule.peak
    assert necessary_bytes(evaluator) <= necessary_bytes(evaluator.without_state_out())


def test_where_less_is_allowed_no_segment_is_evaluated() -> None:
    tight = 0
    for seed in range(20):
        step = odd_step(seed)
        evaluator = step.search_evaluator
        necessary = necessary_bytes(evaluator)
        before = evaluator.evaluated
        assert fastest(step, necessary - 1, CompiledSizes()) is None and evaluator.evaluated == before
        tight += necessary == least(step, CompiledSizes()).peak
    assert tight >= 5  # it often is all that is needed
