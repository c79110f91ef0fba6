"""Chooses the moves of a repair: each adds the least time for each byte by which it lowers what segments hold above the limit.

A *schedule* is a plan that the search is working on (`schedule.py`), and a *segment* is a stretch of operators that is compiled
as one executable. The *rate* of a move (`lowering_moves.py`) is the time that it adds for each byte of the excess that it
removes. To know it, the move must be made, and that is what a search spends its time on. Two observations save most of it:

    - A move that was bad is still bad after other moves. If its last rate in this repair is far above the best one, the move is
      not tried.
    - A move that was good mostly stays so. After one move of a segment was made, the next best of the moves that were tried with
      it is tried first, and is made if its rate is still the lowest (lazy greedy search: Minoux, "Accelerated greedy algorithms
      for maximizing submodular set functions", 1978). The moves of the segment are listed anew only if none is as good.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tensile_jax.plan.search.moves.addressed_moves import LEAST_GAIN, Move
from tensile_jax.plan.search.moves.lowering_moves import lowering, tensor_of
from tensile_jax.plan.search.schedule import Schedule

# Each trades the time of the plan for the time of planning (`make bench-constants`).
_FAR_ABOVE = 5.0  # of the best rate: what a move's last rate must exceed for the move not to be tried
_TRIED_AGAIN = 16  # moves of an earlier list that are tried before the moves are listed anew
_AS_GOOD = 2.0  # of the best rate of a list: what the rate of a later move of the same list may be
_SEGMENTS = 3  # that exceed the limit most, of which moves are tried in turn

Elsewhere = Callable[[Schedule, Move, Schedule], Schedule | None]
"""Given a schedule, a move, and the schedule after the move: makes the move elsewhere, too (`in_all_iterations.py`)."""

_Waiting = tuple[float, int, Move]
"""The rate of a move when it was tried last, its number in the list, and the move."""


class _Listed(NamedTuple):
    """The moves of a segment that were tried on one schedule and not made, as a heap, and the highest rate that they may have."""

    schedule: Schedule
    waiting: list[_Waiting]
    most: float


class BestMoves:
    """Makes the best moves of one repair, one after another.

    Args:
        upper: the cost that no schedule may reach.
        elsewhere: makes each move elsewhere, too.
    """

    def __init__(self, upper: float, elsewhere: Elsewhere | None) -> None:
        self._upper = upper
        self._elsewhere = elsewhere
        self._rates: dict[tuple[int, Move], float] = {}  # when tried last, by number of segments, since moves name these
        self._listed: dict[int, _Listed] = {}  # by segment, for schedules with the same boundaries and the same limit
        self._listed_for = 0, 0.0

    def make_one(self, schedule: Schedule, limit: float) -> Schedule | None:
        """The schedule after the best move of a segment that exceeds the limit; None if there is none."""
        if self._listed_for != (schedule.count, limit):
            self._listed_for = schedule.count, limit
            self._listed.clear()
        for j in worst(schedule, limit):
            found = self._as_listed(schedule, j, limit) or self._of_all(schedule, j, limit)
            if found is not None:
                return found
        return None

    def _as_listed(self, schedule: Schedule, j: int, limit: float) -> Schedule | None:
        """The schedule after the best of the moves that were listed for the segment before; None if a new list may have a better
        one."""
        if j not in self._listed:
            return None
        before, waiting, most = self._listed[j]
        excess = schedule.excess(limit)
        for _ in range(_TRIED_AGAIN):
            if not waiting or waiting[0][0] > most:
                break
            _, number, move = heappop(waiting)
            t = tensor_of(move)
            if t is not None and before.residencies[t] is not schedule.residencies[t]:
                continue  # what it says of the tensor is no longer so
            best = min(waiting[0][0], most) if waiting else most
            new, rate = self._tried(schedule, move, limit, excess, best)
            if new is not None and rate <= best:
                return new
            if rate < float("inf"):
                heappush(waiting, (rate, number, move))
        del self._listed[j]
        return None

    def _of_all(self, schedule: Schedule, j: int, limit: float) -> Schedule | None:
        """The schedule after the best of all moves of the segment, those first that were good before; None if there is none."""
        excess, rates, count = schedule.excess(limit), self._rates, schedule.count
        moves = [
            (rates.get((count, move)), least, move) for least, move in lowering(schedule, j, limit, self._upper - schedule.cost)
        ]
        moves.sort(key=_as_known)
        best: Schedule | None = None
        best_rate, best_number = float("inf"), -1
        waiting: list[_Waiting] = []
        for number, (known, least, move) in enumerate(moves):
            if least > best_rate or (known is not None and known > _FAR_ABOVE * best_rate):
                continue
            new, rate = self._tried(schedule, move, limit, excess, best_rate)
            rates[count, move] = rate
            if rate < float("inf"):
                waiting.append((rate, number, move))
            if rate < best_rate:
                best, best_rate, best_number = new, rate, number
        waiting = [one for one in waiting if one[1] != best_number]
        heapify(waiting)
        self._listed[j] = _Listed(schedule, waiting, _AS_GOOD * best_rate)
        return best

    def _tried(self, schedule: Schedule, move: Move, limit: float, excess: float, best: float) -> tuple[Schedule | None, float]:
        """The schedule after the move, and the move's rate, or a lower bound of the rate that is above `best`."""
        new = move(schedule)
        rate = self._rate(schedule, new, limit, excess, best)
        if new is not None and self._elsewhere is not None and rate < _FAR_ABOVE * best:
            new = self._elsewhere(schedule, move, new)
            rate = self._rate(schedule, new, limit, excess, best)
        return new, rate

    def _rate(self, schedule: Schedule, new: Schedule | None, limit: float, excess: float, best: float) -> float:
        """Time for each byte, or a lower bound of it that is above `best`; infinite if the move must not be made."""
        less = 0.0 if new is None else excess - new.excess(limit)
        if new is None or less <= 0 or (least := new.least_cost) >= self._upper:
            return float("inf")
        cost = schedule.cost
        bound = (max(least - cost, 0.0) + LEAST_GAIN) / less
        if bound > best:
            return bound
        is_allowed = new.cost < self._upper and new.keeps_host_limit
        return (max(new.cost - cost, 0.0) + LEAST_GAIN) / less if is_allowed else float("inf")


def worst(schedule: Schedule, limit: float) -> list[int]:
    """The segments that exceed the limit most, the worst first."""
    over = [j for j, p in enumerate(schedule.peaks) if p > limit]
    return sorted(over, key=lambda j: -schedule.peaks[j])[:_SEGMENTS]


def _as_known(one: tuple[float | None, float, Move]) -> tuple[int, float]:
    """Orders moves by their last rates; unknown ones come in their order before those that could not be made."""
    known = one[0]
    return (1, 0.0) if known is None else (0, known) if known < float("inf") else (2, 0.0)
