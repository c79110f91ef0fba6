"""Admission is exact: the same answer as trying every interleaving."""

import random
from functools import cache

import pytest

from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile, descents
from tensile_jax.plan.multi_job.safety import UnderWay, is_safe, serial_peak


def memory(*steps: int, parked: int = 0) -> MemoryProfile:
    """Holds and needs in turn: hold, need, hold, ..., hold."""
    holds, needs = steps[::2], steps[1::2]
    return MemoryProfile((LAUNCH,) * len(needs), needs, holds, parked, holds[0], holds[0])


def can_finish(budget: int, under_way: list[UnderWay], resting: int = 0) -> bool:
    return is_safe(budget - resting - sum(job.holds[position] for job, position, _ in under_way), under_way)


def by_trying(budget: int, under_way: list[UnderWay], resting: int) -> bool:
    """Every interleaving, one move at a time."""

    @cache
    def possible(at: tuple[int, ...]) -> bool:
        def held(k: int) -> int:
            one = under_way[k]
            return one.rest_bytes if at[k] == len(one.memory.kinds) else one.memory.holds[at[k]]

        total = resting + sum(map(held, range(len(at))))
        if total > budget:
            return False
        if all(at[k] == len(one.memory.kinds) for k, one in enumerate(under_way)):
            return True
        for k, one in enumerate(under_way):
            if at[k] < len(one.memory.kinds) and total - held(k) + one.memory.needs[at[k]] <= budget:
                after = at[:k] + (at[k] + 1,) + at[k + 1 :]
                if possible(after):
                    return True
        return False

    return possible(tuple(one.position for one in under_way))


def random_demand(rng: random.Random) -> MemoryProfile:
    count = rng.randint(1, 5)
    idle = rng.randint(0, 4)
    holds = [idle, *(rng.randint(0, 8) for _ in range(count - 1)), idle]
    needs = [max(holds[i], holds[i + 1]) + rng.choice([0, 0, 1, 3]) for i in range(count)]
    return MemoryProfile((LAUNCH,) * count, tuple(needs), tuple(holds), rng.randint(0, min(holds)), idle, idle)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_an_order_exactly_where_there_is_one(seed: int) -> None:
    rng = random.Random(seed)
    answers: list[bool] = []
    for _ in range(200):
        under_way: list[UnderWay] = []
        for _ in range(rng.randint(1, 3)):
            one = random_demand(rng)
            rest = rng.choice([one.parked_bytes, one.idle_bytes])
            under_way.append(UnderWay(one, rng.randint(0, len(one.kinds) - 1), rest))
        resting = rng.randint(0, 3)
        budget = rng.randint(4, 24)
        answers.append(can_finish(budget, under_way, resting))
        assert answers[-1] == by_trying(budget, under_way, resting), (budget, under_way, resting)
    assert 20 < sum(answers) < 180


def test_one_jobs_peak_falls_into_anothers_valley() -> None:
    job = memory(2, 10, 3, 10, 2)
    assert can_finish(13, [UnderWay(job, 1, 2), UnderWay(job, 1, 2)])  # 3 + 10
    assert not can_finish(12, [UnderWay(job, 1, 2), UnderWay(job, 1, 2)])


def test_a_chain_that_only_rises_is_decided_from_its_end() -> None:
    rising = memory(0, 4, 4, 8, 0)
    assert can_finish(8, [UnderWay(rising, 0, 0), UnderWay(rising, 0, 0)])
    assert not can_finish(8, [UnderWay(rising, 1, 0), UnderWay(rising, 1, 0)])  # each waits for the other


def test_where_jobs_cannot_be_parked_they_must_all_fit_at_rest() -> None:
    streamed = memory(4, 5, 1, 5, 4)
    assert can_finish(9, [UnderWay(streamed, 1, 4), UnderWay(streamed, 1, 4)])
    assert not can_finish(8, [UnderWay(streamed, 1, 4), UnderWay(streamed, 1, 4)])


def test_the_serial_peak_is_the_highest_job_beside_the_others_at_rest() -> None:
    assert serial_peak([(memory(2, 10, 2), 2), (memory(3, 6, 3), 0)]) == 10
    assert serial_peak([]) == 0


def test_a_descent_is_the_first_place_that_is_no_higher() -> None:
    assert descents([5, 9, 4], [2, 3, 1, 2]) == ((2, 2, -1, -1), (9, 9, 4, 0))
    assert descents([1], [1, 1]) == ((1, -1), (1, 0))


@pytest.mark.parametrize(
    ("kinds", "needs", "holds", "parked", "says"),
    [
        ((LAUNCH,), (4,), (1, 5), 0, "must need what is held"),
        ((LAUNCH,), (4,), (1, 2), 0, "must end as it began"),
        ((LAUNCH,), (4,), (1, 1), 2, "no less than what stays when parked"),
        ((WAIT, INSTANT), (4,), (1, 1), 0, "one more hold"),
        ((), (), (1,), 0, "one more hold"),
        ((WAIT, LAUNCH), (1, 1), (1, 1, 1), 0, "neither begin nor end with a wait"),
        ((LAUNCH, WAIT, LAUNCH), (1, 2, 1), (1, 1, 1, 1), 0, "is a wait and must need what is held before it, 1 bytes: got 2"),
        ((LAUNCH, WAIT), (1, 1), (1, 1, 1), 0, "neither begin nor end with a wait"),
    ],
)
def test_a_demand_that_cannot_be_is_refused(
    kinds: tuple[int, ...], needs: tuple[int, ...], holds: tuple[int, ...], parked: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        MemoryProfile(kinds, needs, holds, parked, 0, 0)
