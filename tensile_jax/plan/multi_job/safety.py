"""Decides whether all running iterations can still be finished under a budget, as the banker's algorithm does.

Several jobs share a device, and each job's iteration is a chain of *moves*, such as launches of executables and waits for
copies (`memory_profile.py`). A state of the jobs is *safe* if all remaining moves can be made in some order, one at a time,
without ever needing more than the budget.

Other rules are stricter. The paper adds up the jobs' peaks (TENSILE section III-B, "MP = sum of MP_j"), and Dijkstra's banker's
algorithm knows only each job's peak. Here the peak of one job may come while another job holds little. Safety is decided
exactly, by the exchange argument of Abdel-Wahab and Kameda (1978). Of the positions that a chain has not passed, its *least
position* is the one at which its job holds the fewest bytes. There are two passes:

    forward     Each chain advances, under the budget, to any position at which it holds no more than now, since that harms no
                other chain. This is repeated until every chain is at its least position. If a chain cannot get there, the state
                is not safe.
    backward    The same in reverse time: from the end of all iterations, every chain goes back to its least position.

Every order of moves can be rearranged so that at some moment all chains are at their least positions. So a state is safe
exactly if both passes succeed. A job that can be *parked* (its state copied to the host between iterations) holds least at the
end: `parked_bytes`, which it never falls below. The backward pass has nothing to do for such a job.

Sizes in bytes.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensile_jax.plan.multi_job.memory_profile import MemoryProfile, descents


class UnderWay(NamedTuple):
    """A running iteration that has reached `position`. When it has ended, the job can be reduced to `rest_bytes`."""

    memory: MemoryProfile
    position: int
    rest_bytes: int


def is_safe(free: int, under_way: Sequence[tuple[MemoryProfile, int, int]]) -> bool:
    """Whether all running iterations can end if `free` bytes are free now.

    Args:
        under_way: each an `UnderWay`, or a plain tuple of the same fields, which the controller makes in less time.
    """
    if free < 0:
        return False
    lowest: list[UnderWay] = []  # chains at their least position, where they hold less than after their end
    left = under_way
    while left:
        stuck: list[tuple[MemoryProfile, int, int]] = []
        moved = False
        for one in left:
            memory, position, rest = one
            holds, hill = memory.holds, memory.hill
            held = holds[position]
            if memory.ahead[position] - held <= free and rest <= memory.floor[position]:  # to the end at once
                free += held - rest
                moved = True
                continue
            lower = memory.lower
            while lower[position] != -1 and hill[position] - held <= free:
                moved = True
                position = lower[position]
                free += held - holds[position]
                held = holds[position]
            if lower[position] == -1 and (rest > held or hill[position] - held <= free):
                moved = True
                if rest > held:
                    lowest.append(UnderWay(memory, position, rest))
                else:
                    free += held - rest
            else:
                stuck.append((memory, position, rest))
        if not moved:
            return False
        left = stuck
    return not lowest or _can_rise(free, lowest)


def _can_rise(free: int, lowest: Sequence[UnderWay]) -> bool:
    """The backward pass: whether all chains can get from their least positions to their ends, computed in reverse time."""
    chains: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for memory, position, rest in lowest:
        needs = tuple(reversed(memory.needs[position:]))
        holds = (rest, *reversed(memory.holds[position:-1]))
        free -= rest - holds[-1]
        chains.append((holds, *descents(needs, holds)))
    if free < 0:
        return False
    at = [0] * len(chains)
    moved = True
    while moved:
        moved = False
        for k, (holds, lower, hill) in enumerate(chains):
            while at[k] < len(holds) - 1 and lower[at[k]] != -1 and hill[at[k]] - holds[at[k]] <= free:
                free += holds[at[k]] - holds[lower[at[k]]]
                at[k] = lower[at[k]]
                moved = True
    return all(at[k] == len(holds) - 1 for k, (holds, _, _) in enumerate(chains))


def serial_peak(memories: Iterable[tuple[MemoryProfile, int]]) -> int:
    """The memory that all jobs need if one iteration runs at a time.

    `memories` are pairs of a profile and the bytes that its job holds while another job runs.
    """
    jobs = list(memories)
    resting = sum(rest for _, rest in jobs)
    return max((resting - rest + memory.peak_bytes for memory, rest in jobs), default=0)
