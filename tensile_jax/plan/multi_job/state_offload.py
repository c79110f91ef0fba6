"""Chooses which state tensors of each job are kept in host memory while other jobs run (TENSILE sections IV-D and V).

Jobs that share a device take turns, an iteration at a time. While one job runs, the others hold their state. For job k, peak_k is
the most that an iteration needs, idle_k is what the job holds between iterations if nothing is moved, and out_k are the bytes of
its state that are moved to the host between their uses. A job is *parked* when its whole state is on the host. Job j can run an
iteration without any job being parked if

    peak_j + sum over the others k of (idle_k - out_k) <= budget

If this fails for some job, state is moved to the host. The tensors of all jobs then compete for the time of the link between
device and host. A *round*, in which every job runs one iteration, must be long enough for all copies in each direction:

    (bytes swapped by the plans + sum over k of out_k) / rate <= sum over k of step_k

Here rate is the rate of the link in that direction, and step_k is the time of one iteration of job k. Copies also slow
computation down. The jobs may lose at most a tenth of the time of a round in this way, which is about the time that parking
would cost.

As in the paper's greedy algorithm, the largest tensor of any job is chosen first. A job's tensors may be chosen while the job's
part of all swapped bytes is at most its *maximal swapping rate*, which the user sets. When every job has enough room, the
chosen tensors are checked once more, the smallest first. A tensor stays on the device if every job has enough room without
moving this tensor. If a job cannot get all the room that it lacks, nothing is moved for its sake, and jobs are parked instead.

Sizes in bytes, times in microseconds. Ties go to the earlier job, then to the lower tensor id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import Plan

_WORTH = 0.1  # of a round: copies may take so much from computation, since parking costs about as much; not tuned


@dataclass(frozen=True, slots=True)
class SharingJob:
    """What the choice must know of one job.

    All sizes are those of a plan without offloaded state. `candidates` are the state tensors that could be offloaded, with their
    bytes. `swapped_bytes` is what the plan copies out in an iteration; it copies in as much.
    """

    peak_bytes: int
    idle_bytes: int
    step_us: float
    swapped_bytes: int
    max_swap_rate: float
    candidates: tuple[tuple[TensorId, int], ...]

    @classmethod
    def of(
        cls, plan: Plan, memory: MemoryProfile, candidates: tuple[tuple[TensorId, int], ...], max_swap_rate: float
    ) -> "SharingJob":
        """The job whose plan, without offloaded state, is this one."""
        swapped, idle = plan.swapped_out_bytes, memory.idle_bytes
        return cls(memory.peak_bytes, idle, plan.step_us, swapped, max_swap_rate, candidates)


def choose_offloaded(jobs: Sequence[SharingJob], budget_bytes: int, profile: DeviceProfile) -> tuple[frozenset[TensorId], ...]:
    """For each job, the state tensors to keep on the host between their uses."""
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
    """The bytes that job j lacks to run an iteration while the others hold their state; zero or less if it has room."""
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
    """The chosen tensors without those whose room no job needs. The smallest tensors are taken back first."""
    out = [sum(nbytes for _, nbytes in of_job) for of_job in chosen]
    for nbytes, k, t in sorted((nbytes, k, t) for k, of_job in enumerate(chosen) for t, nbytes in of_job):
        without = [nb - (nbytes if at == k else 0) for at, nb in enumerate(out)]
        if all(_shortage(jobs, j, without, budget_bytes) <= 0 for j in helped):
            out = without
            chosen[k].remove((t, nbytes))
    return chosen
