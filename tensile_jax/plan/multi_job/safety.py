"""Whether all iterations under way can still be finished under a budget: the safe states of the banker's algorithm.

Several jobs share a device, and each job's iteration is a chain of moves (`memory_profile.py`). A state of the jobs is *safe* if
some order of all remaining moves, one at a time, never needs more than the budget. The paper adds up the jobs' peaks (TENSILE
section III-B, "MP = sum of MP_j"), and Dijkstra's banker knows only each job's peak; here one job's peak may fall into another's
valley, so that more states are safe. Safety is decided exactly, by the exchange argument of Abdel-Wahab and Kameda (1978):

    forward     A chain that can advance, under the budget, to a place where it holds no more than now does so: no other chain is
                worse off. This goes on until every chain is at the place of its remaining moves where it holds least. If one
                chain cannot get there, the state is not safe.
    backward    The same in reverse time: from the end of all iterations, every chain goes back to the place where it holds least.

Every order of moves can be rearranged to pass through the moment at which all chains hold least, so a state is safe exactly if
both passes succeed. A job that can be parked holds `parked_bytes` at its end, which is never more than it holds on the way. Its
least place is therefore its end, and the backward pass has nothing to do.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensile_jax.plan.multi_job.memory_profile import MemoryProfile, descents


class UnderWay(NamedTuple):
    """An iteration under way: at `position`; when it is over, the job can come down to `rest_bytes`."""

    demand: MemoryProfile
    position: int
    rest_bytes: int


def is_safe(free: int, under_way: Sequence[tuple[MemoryProfile, int, int]]) -> bool:
    """Whether all iterations under way can end, where so many bytes are free beside what all jobs hold now.

    Args:
        under_way: each an `UnderWay`, or a plain tuple like it, which the controller makes faster.
    """
    if free < 0:
        return False
    lowest: list[UnderWay] = []  # chains that are lower now than at rest
    left = under_way
    while left:
        stuck: list[tuple[MemoryProfile, int, int]] = []
        moved = False
        for one in left:
            demand, position, rest = one
            holds, hill = demand.holds, demand.hill
            held = holds[position]
            if demand.ahead[position] - held <= free and rest <= demand.floor[position]:  # to the end at once
                free += held - rest
                moved = True
                continue
            lower = demand.lower
            while lower[position] != -1 and hill[position] - held <= free:
                moved = True
                position = lower[position]
                free += held - holds[position]
                held = holds[position]
            if lower[position] == -1 and (rest > held or hill[position] - held <= free):
                moved = True
                if rest > held:
                    lowest.append(UnderWay(demand, position, rest))
                else:
                    free += held - rest
            else:
                stuck.append((demand, position, rest))
        if not moved:
            return False
        left = stuck
    return not lowest or _can_rise(free, lowest)


def _can_rise(free: int, lowest: Sequence[UnderWay]) -> bool:
    """Whether all chains can get from their lowest places to their ends: in reverse, from the ends down."""
    chains: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for demand, position, rest in lowest:
        needs = tuple(reversed(demand.needs[position:]))
        holds = (rest, *reversed(demand.holds[position:-1]))
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


def serial_peak(demands: Iterable[tuple[MemoryProfile, int]]) -> int:
    """What all jobs need, one iteration at a time, each of the others holding the number of bytes that stands beside it."""
    jobs = list(demands)
    resting = sum(rest for _, rest in jobs)
    return max((resting - rest + demand.peak_bytes for demand, rest in jobs), default=0)
