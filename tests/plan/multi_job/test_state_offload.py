"""One plan for the state of all jobs."""

import random
from itertools import combinations

from tensile_jax.device_profiles import load_profile
from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.multi_job.state_offload import SharingJob, choose_offloaded

FAST: DeviceProfile = load_profile("h200")  # 50,000 bytes per microsecond, both ways
NOTHING: frozenset[TensorId] = frozenset()


def job(peak: int, idle: int, *sizes: int, us: float = 1000.0, swapped: int = 0, rate: float = 1.0) -> SharingJob:
    candidates = tuple((TensorId(k), nbytes) for k, nbytes in enumerate(sizes))
    return SharingJob(peak, idle, us, swapped, rate, candidates)


def out(*tensors: int) -> frozenset[TensorId]:
    return frozenset(map(TensorId, tensors))


def test_where_all_have_room_nothing_goes() -> None:
    assert choose_offloaded([job(10, 4, 2, 2), job(10, 4, 2, 2)], 14, FAST) == (NOTHING, NOTHING)


def test_the_largest_tensor_of_any_other_job_goes() -> None:
    # the first lacks 2: of the second's 1, 3 and 2 the 3 goes; the second has room
    assert choose_offloaded([job(12, 4), job(8, 6, 1, 3, 2)], 16, FAST) == (NOTHING, out(1))


def test_what_nobody_needs_in_the_end_is_taken_back() -> None:
    # the first lacks 3, the second 5; the second's own 4 goes first, for the first's sake, then the third's 3 and 2 for both
    jobs = [job(14, 0), job(20, 4, 4), job(10, 5, 3, 2)]
    assert choose_offloaded(jobs, 20, FAST) == (NOTHING, NOTHING, out(0, 1))


def test_each_jobs_tensors_make_room_for_the_others_only() -> None:
    jobs = [job(12, 4, 4), job(12, 4, 4)]
    assert choose_offloaded(jobs, 12, FAST) == (out(0), out(0))


def test_a_job_that_cannot_be_helped_in_full_is_left_to_parking() -> None:
    jobs = [job(30, 4), job(8, 6, 1, 3, 2)]
    assert choose_offloaded(jobs, 16, FAST) == (NOTHING, NOTHING)


def test_the_link_must_have_time_for_all_copies_of_a_round() -> None:
    large = 40_000_000  # 800 us each way
    jobs = [job(2 * large, 0), job(large, 2 * large, large, large, us=500.0)]
    assert choose_offloaded(jobs, 3 * large, FAST) == (NOTHING, out(0))  # 800 of 1,500 us
    assert choose_offloaded(jobs, 2 * large, FAST) == (NOTHING, NOTHING)  # would take 1,600


def test_copies_that_cost_as_much_as_parking_are_not_made() -> None:
    slow = load_profile("cpu")  # its cores copy: 4,000 bytes per microsecond
    jobs = [job(12_000_000, 0), job(8_000_000, 6_000_000, 3_000_000, us=10_000.0)]
    assert choose_offloaded(jobs, 15_000_000, slow) == (NOTHING, NOTHING)  # 1,500 us of 11,000
    longer = [jobs[0], job(8_000_000, 6_000_000, 3_000_000, us=20_000.0)]
    assert choose_offloaded(longer, 15_000_000, slow) == (NOTHING, out(0))


def test_a_jobs_part_of_all_that_is_swapped_is_limited() -> None:
    jobs = [job(20, 0, swapped=10), job(9, 12, 5, 4, rate=0.3)]
    # 0 of 10 is within 0.3, 5 of 15 is not any more: alone, the 5 does not do
    assert choose_offloaded(jobs, 27, FAST) == (NOTHING, out(0))
    assert choose_offloaded(jobs, 26, FAST) == (NOTHING, NOTHING)
    never = [jobs[0], job(9, 12, 5, 4, rate=0.0)]
    assert choose_offloaded(never, 30, FAST) == (NOTHING, NOTHING)


def test_everybody_helped_has_room_and_nothing_could_stay() -> None:
    rng = random.Random(0)
    seen = 0
    for _ in range(300):
        jobs = [
            job(rng.randint(6, 14), idle := rng.randint(0, 6), *(rng.randint(1, 3) for _ in range(idle // 3)))
            for _ in range(rng.randint(2, 4))
        ]
        budget = rng.randint(10, 30)
        found = choose_offloaded(jobs, budget, FAST)
        bytes_out = [sum(n for t, n in job.candidates if t in chosen) for job, chosen in zip(jobs, found, strict=True)]

        def has_room(j: int, taken: list[int], jobs: list[SharingJob] = jobs, budget: int = budget) -> bool:
            return jobs[j].peak_bytes + sum(s.idle_bytes - taken[k] for k, s in enumerate(jobs) if k != j) <= budget

        helped = [j for j in range(len(jobs)) if has_room(j, bytes_out) and not has_room(j, [0] * len(jobs))]
        seen += bool(helped)
        for k, chosen in enumerate(found):
            for t in chosen:
                less = [n - (dict(jobs[k].candidates)[t] if at == k else 0) for at, n in enumerate(bytes_out)]
                assert not all(has_room(j, less) for j in helped), "a tensor could have stayed"
        if not helped:  # then no choice at all helps everyone who lacks room
            assert all(not c for c in found)
            every = [(k, t) for k, job in enumerate(jobs) for t, _ in job.candidates]
            lacking = [j for j in range(len(jobs)) if not has_room(j, [0] * len(jobs))]
            for j in lacking:
                most = [sum(n for t, n in s.candidates) for s in jobs]
                assert not has_room(j, most) or len(lacking) > 1 or not list(combinations(every, 1))
    assert seen > 20
