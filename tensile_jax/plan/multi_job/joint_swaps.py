"""Chooses the swaps of several jobs together, for the jobs whose policy is `tensile` (TENSILE, Algorithms 2 and 3).

All jobs share one link between device and host, and one time axis, on which one iteration of each job begins at time zero. The
paper's greedy algorithm works in rounds. Each round chooses one swap, until there is none left to choose. In the paper's terms:

    MP_j      the peak of job j with the swaps that were chosen so far; MP is their sum over all jobs
    MPT       the tensors that are on the device at these peaks. The largest that can be swapped is chosen, from whichever job
    SON       how many tensors of a job were chosen
    MSR       the job's maximal swapping rate. If a job's SON / (sum of all SON) exceeds its MSR, a round chooses no tensor of
              this job for a swap within one iteration. An updated parameter may still be copied to the host after its last
              access in an iteration, and back during the next one
    SE        the copies of all jobs; as in the paper, no two overlap on the link, not even in different directions

Line 4 of Algorithm 3 ends the search when the average of MP_j, over the jobs whose tensors were selected, hardly falls any
more. This module ends the search when MP hardly falls any more. A round changes the MP_j of one job only, so MP falls by as
many bytes as that MP_j.

The recomputations are then chosen for each job alone (`policies/tensile/complete_scheduling.py`), as Algorithm 3 chooses them
after the swaps.

Differences from the paper:

    - Here jobs take turns on the device, one *segment* (a stretch of operators that is compiled as one executable) at a time. So
      a job's times are right only while it runs alone.
    - Recomputations are chosen for each job under its own limit, because the runtime gives each job a limit.
    - A job whose whole step fits its limit runs as one executable, without its chosen swaps.

Ties go to the earlier job, then to the lower tensor id. Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.policies.tensile.complete_scheduling import hardly_reduces, take_away
from tensile_jax.plan.policies.tensile.footprint import Footprint, Peak
from tensile_jax.plan.policies.tensile.swap_scheduling import SharedLink, SwappedOut, SwapScheduling


@dataclass(frozen=True, slots=True)
class SwappingJob:
    """What the choice must know of a job: its accesses, whether its state may be on the host between iterations, its MSR."""

    sequence: AccessSequence
    across_iterations: bool
    max_swap_rate: float


def agree_on_swaps(jobs: Sequence[SwappingJob], profile: DeviceProfile) -> tuple[tuple[SwappedOut, ...], ...]:
    """The swaps of every job, each job's ordered by tensor and time."""
    link = SharedLink(max_swapping_rate={k: job.max_swap_rate for k, job in enumerate(jobs)})
    sequences = [replace(job.sequence, job=k) for k, job in enumerate(jobs)]
    footprints = [Footprint(sequence) for sequence in sequences]
    scheduling = [
        SwapScheduling(sequence, profile, across_iterations=job.across_iterations, link=link)
        for sequence, job in zip(sequences, jobs, strict=True)
    ]
    swaps: list[list[SwappedOut]] = [[] for _ in jobs]
    peaks = [footprint.peak() for footprint in footprints]
    totals = [sum(peak.nbytes for peak in peaks)]
    while not hardly_reduces(totals):
        chosen = _largest(scheduling, sequences, peaks)
        if chosen is None:
            break
        k, found = chosen
        swaps[k] += found
        for away in found:
            take_away(footprints[k], away)
        peaks[k] = footprints[k].peak()
        totals.append(sum(peak.nbytes for peak in peaks))
    return tuple(tuple(sorted(of_job, key=lambda away: (away.tensor, away.after))) for of_job in swaps)


def _largest(
    scheduling: Sequence[SwapScheduling], sequences: Sequence[AccessSequence], peaks: Sequence[Peak]
) -> tuple[int, tuple[SwappedOut, ...]] | None:
    """The job and the swaps of the largest tensor that can be swapped, of the tensors at any peak."""
    tensors = sorted((-sequences[k].nbytes[t], k, t) for k, peak in enumerate(peaks) for t in peak.tensors)
    for _, k, t in tensors:
        found = scheduling[k].swap(t, peaks[k])
        if found:
            return k, found
    return None


def agreed_swaps(
    accesses: Sequence[AccessSequence | None], max_swap_rates: Sequence[float], profile: DeviceProfile
) -> list[tuple[SwappedOut, ...] | None]:
    """The swaps of every job that takes part, and None for the others, whose accesses are None.

    State may be on the host between iterations, as always where several jobs share a device.
    """
    pairs = zip(accesses, max_swap_rates, strict=True)
    agreed = iter(agree_on_swaps([SwappingJob(one, True, rate) for one, rate in pairs if one is not None], profile))
    return [None if one is None else next(agreed) for one in accesses]
