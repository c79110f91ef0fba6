"""Implements TENSILE's complete scheduling algorithm, which adds swaps as long as it finds any, and then recomputations.

The module follows Algorithm 3 line by line. MP is the memory peak, Free_GPU_Memory is the budget, and `iter` counts the
iterations of the algorithm's loop. Some printed lines are ambiguous. The module reads them as follows (line numbers on the left):

    2      "Activity analysis" releases every tensor after the tensor's last access. Here the peak analysis (`footprint.py`) does
           so.
    4      An iteration lowers MP by the share (MP before - MP after) / MP before. The loop stops if the mean of this share over
           the past 3 iterations is below 0.0005 "and iter > 100". So this rule never stops the first 100 iterations.
    5      If the rule of line 4 holds, the loop ends here, whether MP is within the budget or not.
    6-7    These lines analyse the peak "if iter = 0"; the text says "at each iteration". The module analyses it in each
           iteration, since all later lines need the current peak.
    9-12   As printed, these lines only ever set swap_succeed to False. Here it stays True while a swap is found.
    13     As printed, the loop never ends if MP < Free_GPU_Memory, because recomputation_succeed stays as it is. Here the loop
           ends. If MP = Free_GPU_Memory, the loop goes on, as printed.
    14     Swapping is not tried again after a recomputation, as printed.

All swaps are found before the first recomputation. So the swaps of several jobs can be chosen together
(`multi_job/joint_swaps.py`), and then the recomputations of each job, for the memory that this job may use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.policies.tensile.footprint import Footprint, Recomputation
from tensile_jax.plan.policies.tensile.recompute_scheduling import recompute_scheduling
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut, SwapScheduling

# The values of the paper's Algorithm 3.
_PAST_ITERATIONS = 3
_REDUCES_LESS = 0.0005  # 0.05 %
_AT_LEAST_ITERATIONS = 100


@dataclass(frozen=True, slots=True)
class Schedule:
    """What Algorithm 3 decides for one job, and the peak that it reaches."""

    swaps: tuple[SwappedOut, ...]
    recomputed: tuple[Recomputation, ...]
    peak_bytes: int
    iterations: int


def find_schedule(
    sequence: AccessSequence, swapping: SwapScheduling, *, free_bytes: float, agreed: Sequence[SwappedOut] | None = None
) -> Schedule:
    """Algorithm 3: as many swaps as Algorithm 2 finds, then recomputations while the peak is not below `free_bytes`.

    Args:
        swapping: Algorithm 2 for the sequence, which has scheduled nothing yet.
        agreed: the swaps that were chosen for several jobs together, instead of those that Algorithm 2 would find.
    """
    swap_succeed, recomputation_succeed = agreed is None, True  # line 1
    iteration = 0
    footprint = Footprint(sequence)  # line 2
    swaps = [*(agreed or ())]
    for away in swaps:
        take_away(footprint, away)
    recomputed: list[Recomputation] = []
    peaks: list[int] = []
    while swap_succeed or recomputation_succeed:  # line 3
        peak = footprint.peak()  # lines 6-7
        peaks.append(peak.nbytes)
        if hardly_reduces(peaks):  # line 4
            break  # line 5
        if swap_succeed:  # line 8
            found = swapping.run(peak)  # lines 9-10
            swap_succeed = bool(found)  # lines 11-12
            for away in found:
                take_away(footprint, away)
            swaps += found
        elif peak.nbytes >= free_bytes:  # line 13
            again = recompute_scheduling(sequence, peak, swapped={a.tensor for a in swaps}, recomputed=recomputed)  # line 14
            if again is None:  # line 15
                recomputation_succeed = False  # line 16
            else:
                leave, back = sequence.ends_us[again.after], sequence.begins_us[again.before]
                footprint.take_away(again.tensor, leave, back, released_by=again.after)
                recomputed.append(again)
        else:
            recomputation_succeed = False
        iteration += 1  # line 17
    ordered = sorted(swaps, key=lambda away: (away.tensor, away.after))
    return Schedule(tuple(ordered), tuple(recomputed), footprint.peak().nbytes, iteration)


def take_away(footprint: Footprint, away: SwappedOut) -> None:
    """Take the tensor of a swap out of the footprint while the swap lasts."""
    released_by = None if away.copies_out or away.after < 0 else away.after
    footprint.take_away(away.tensor, away.out_end_us, away.in_end_us, released_by=released_by)


def hardly_reduces(peaks: Sequence[int]) -> bool:
    """Line 4: whether more than 100 iterations have been made, and the past 3 reduce the peak by less than 0.05 % on average."""
    past = peaks[-_PAST_ITERATIONS - 1 :]
    mean = sum((before - after) / before if before else 0.0 for before, after in pairwise(past)) / _PAST_ITERATIONS
    return len(peaks) - 1 > _AT_LEAST_ITERATIONS and mean < _REDUCES_LESS
