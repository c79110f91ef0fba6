"""Which state tensors of each job are kept in host memory while other jobs run (TENSILE sections IV-D and V).

Jobs take turns, an iteration at a time; while one runs, the others are at rest and hold their state. Let out_k be the bytes of
job k's state that are on the host between its uses. Job j can run an iteration without any job being parked if

    peak_j + sum over the others k of (idle_k - out_k) <= budget

Where that does not hold, tensors of all jobs compete for the same windows on the link: one *round*, in which every job runs an
iteration, must be long enough for all copies in each direction,

    (swapped by the plans + sum over k of out_k) / rate <= sum over k of step_k

and what copies take from computation must cost less than parking would. As in the paper's greedy algorithm, the largest tensor of
any job goes first, if its job's part of all that is swapped is not above the job's *maximal swapping rate*. At the end, tensors
whose room no job needs are taken back. A job that cannot get all the room that it lacks is parked when others run, and nothing is
sent to the host for its sake.

Sizes in bytes, times in microseconds. Ties go to the earlier job, then to the lower tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.multi_job.admission import JobProgram

_WORTH = 0.1  # of a round: what copies may take from computation; parking costs about as much


@dataclass(frozen=True, slots=True)
class SharingJob:
    """One job: what its plan needs with nothing kept out, and the state tensors that could be kept out, with their bytes.

    `swapped_bytes` are what its plan copies out in an iteration, and as much back.
    """

    peak_bytes: int
    idle_bytes: int
    step_us: float
    swapped_bytes: int
    max_swap_rate: float
    candidates: tuple[tuple[TensorId, int], ...]


def offload_state(
    programs: Sequence[JobProgram], max_swap_rates: Sequence[float], budget_bytes: int, profile: DeviceProfile
) -> tuple[frozenset[TensorId], ...]:
    """For each program, which is one with nothing kept out, the state tensors that are to be on the host between their uses."""
    jobs = [
        SharingJob(
            program.demand.peak_bytes,
            program.demand.idle_bytes,
            program.plan.step_us,
            program.plan.swapped_out_bytes,
            rate,
            program.may_be_offloaded(),
        )
        for program, rate in zip(programs, max_swap_rates, strict=True)
    ]
    return choose_offloaded(jobs, budget_bytes, profile)


def choose_offloaded(jobs: Sequence[SharingJob], budget_bytes: int, profile: DeviceProfile) -> tuple[frozenset[TensorId], ...]:
    """For each job, the state tensors that are to be on the host between their uses."""
    helped = [j for j in range(len(jobs)) if _shortage(jobs, j, [0] * len(jobs), budget_bytes) > 0]
    while helped:
        chosen = _choose(jobs, helped, budget_bytes, profile)
        out = [sum(nbytes for _, nbytes in of_job) for of_job in chosen]
        still = [j for j in helped if _shortage(jobs, j, out, budget_bytes) > 0]
        if not still:
            return tuple(frozenset(t for t, _ in of_job) for of_job in _needed(jobs, chosen, budget_bytes, helped))
        worst = max(still, key=lambda j: (_shortage(jobs, j, out, budget_bytes), -j))
        helped.remove(worst)
    return tuple(frozenset[TensorId]() for _ in jobs)


def _shortage(jobs: Sequence[SharingJob], j: int, out: Sequence[int], budget_bytes: int) -> int:
    """Bytes that job j lacks for an iteration while the others are at rest; not above zero if it has room."""
    others = sum(job.idle_bytes - out[k] for k, job in enumerate(jobs) if k != j)
    return jobs[j].peak_bytes + others - budget_bytes


_Chosen = list[list[tuple[TensorId, int]]]


def _choose(jobs: Sequence[SharingJob], helped: Sequence[int], budget_bytes: int, profile: DeviceProfile) -> _Chosen:
    """The largest tensors first, until every one of `helped` has room or nothing more may go."""
    chosen: _Chosen = [[] for _ in jobs]
    out = [0] * len(jobs)
    swapped = [job.swapped_bytes for job in jobs]
    round_us = sum(job.step_us for job in jobs)
    candidates = sorted((-nbytes, k, t) for k, job in enumerate(jobs) for t, nbytes in job.candidates)
    for size, k, t in candidates:
        nbytes = -size
        if not any(j != k and _shortage(jobs, j, out, budget_bytes) > 0 for j in helped):
            continue
        total = sum(swapped)
        if jobs[k].max_swap_rate == 0 or swapped[k] > jobs[k].max_swap_rate * total:
            continue
        out_us = copy_out_us(total + nbytes, profile)
        into_us = copy_in_us(total + nbytes, profile)
        if max(out_us, into_us) > round_us or profile.copy_share * (out_us + into_us) > _WORTH * round_us:
            continue
        chosen[k].append((t, nbytes))
        out[k] += nbytes
        swapped[k] += nbytes
    return chosen


def _needed(jobs: Sequence[SharingJob], chosen: _Chosen, budget_bytes: int, helped: Sequence[int]) -> _Chosen:
    """What is left when every tensor whose room no job needs is taken back, the smallest first."""
    out = [sum(nbytes for _, nbytes in of_job) for of_job in chosen]
    for nbytes, k, t in sorted((nbytes, k, t) for k, of_job in enumerate(chosen) for t, nbytes in of_job):
        without = [nb - (nbytes if at == k else 0) for at, nb in enumerate(out)]
        if all(_shortage(jobs, j, without, budget_bytes) <= 0 for j in helped):
            out = without
            chosen[k].remove((t, nbytes))
    return chosen
