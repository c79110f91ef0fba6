"""Defines the memory profile of a job: how many bytes each move of its iteration needs, and how many it leaves on the device.

Several jobs share a device. A job's iteration is a chain of *moves*, such as launches of executables and waits for copies.
Position i lies before move i, and position n, the number of moves, lies at the end. The runtime issues several moves together,
as a *run*: the run `[begin, end)` leads from position `begin` to position `end`.

    move i      uses needs[i] bytes until it is over; then the job holds holds[i + 1] bytes
    kinds       INSTANT   issued and over at once: copies are started, the batch comes, results are taken
                WAIT      over when copies have ended; until then the job holds what it held before
                LAUNCH    occupies the compute stream until it ends

    holds[0] = holds[n] = idle_bytes: what the job holds between iterations, that is, the state that is on the device then
    parked_bytes: what remains on the device while the job is *parked*, that is, while its whole state is on the host

The other fields follow from these. They are computed once, when the profile is made, so that the runtime decides quickly which
job may go on:

    peak_bytes  the most that any move needs
    rise_bytes  peak_bytes - parked_bytes
    lower[i]    the first position after i at which the job holds no more than at i; -1 if there is none
    hill[i]     the most that the job needs on the way from i to lower[i], or to the end if lower[i] is -1
    ahead[i]    the most that any move from position i to the end needs
    floor[i]    the least that the job holds at any position from i to the end
    run_end[i]  where a run that begins at position i ends at the latest: before the next WAIT and before the last move. The first
                move, the last move and a WAIT are each issued alone. A job alone on a CPU has longer runs
                (`exec/controller/ledger.py`)

This is the hill and valley form of a chain (Abdel-Wahab and Kameda, "Scheduling to minimize maximum cumulative cost subject to
series-parallel precedence constraints", 1978). Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

INSTANT, WAIT, LAUNCH = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryProfile:
    """The memory of one iteration, as above.

    `host_bytes` is the most that the job has on the host, during an iteration or parked. `state_bytes` is the size of its state.
    `labels` name the segment of each launch, for people. `step_us` is the predicted time of an iteration.
    """

    kinds: tuple[int, ...]
    needs: tuple[int, ...]
    holds: tuple[int, ...]
    parked_bytes: int
    state_bytes: int
    host_bytes: int
    step_us: float = 1.0
    switch_us: float = 0.0
    labels: tuple[str, ...] = ()
    idle_bytes: int = field(init=False)
    peak_bytes: int = field(init=False)
    rise_bytes: int = field(init=False)
    lower: tuple[int, ...] = field(init=False)
    hill: tuple[int, ...] = field(init=False)
    ahead: tuple[int, ...] = field(init=False)
    floor: tuple[int, ...] = field(init=False)
    run_end: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.holds) != len(self.kinds) + 1 or len(self.needs) != len(self.kinds) or not self.kinds:
            raise ValueError(
                f"A memory profile of {len(self.kinds)} moves must have as many needs and one more hold: got "
                f"{len(self.needs)} needs and {len(self.holds)} holds."
            )
        if WAIT in (self.kinds[0], self.kinds[-1]):
            raise ValueError(
                "An iteration must neither begin nor end with a wait, since nothing is under way between iterations: "
                f"got {self.kinds}."
            )
        for i, need in enumerate(self.needs):
            if need < max(self.holds[i], self.holds[i + 1]):
                raise ValueError(
                    f"Move {i} must need what is held before and after it: got {need} bytes for {self.holds[i : i + 2]}."
                )
            if self.kinds[i] == WAIT and need > self.holds[i]:
                raise ValueError(f"Move {i} is a wait and must need what is held before it, {self.holds[i]} bytes: got {need}.")
        if self.holds[0] != self.holds[-1] or self.parked_bytes > min(self.holds):
            raise ValueError(
                f"An iteration must end as it began and hold no less than what stays when parked: got {self.holds[0]} bytes "
                f"at its begin, {self.holds[-1]} at its end, {min(self.holds)} at least, {self.parked_bytes} parked."
            )
        lower, hill = descents(self.needs, self.holds)
        object.__setattr__(self, "idle_bytes", self.holds[0])
        object.__setattr__(self, "peak_bytes", max(self.needs))
        object.__setattr__(self, "rise_bytes", self.peak_bytes - self.parked_bytes)
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "hill", hill)
        object.__setattr__(self, "floor", tuple(accumulate(reversed(self.holds), min))[::-1])
        object.__setattr__(self, "run_end", _run_ends(self.kinds))
        object.__setattr__(self, "ahead", tuple(accumulate(reversed((*self.needs, 0)), max))[::-1])


def descents(needs: Sequence[int], holds: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`lower` and `hill` of a chain, as above. At the last position they are -1 and 0.

    >>> descents(needs=[5, 9, 4], holds=[2, 3, 1, 2])
    ((2, 2, -1, -1), (9, 9, 4, 0))
    """
    count = len(needs)
    lower, hill = [-1] * (count + 1), [0] * (count + 1)
    for i in range(count - 1, -1, -1):
        high, at = needs[i], i + 1
        while at != -1 and holds[at] > holds[i]:
            high, at = max(high, hill[at]), lower[at]
        lower[i], hill[i] = at, high
    return tuple(lower), tuple(hill)


def _run_ends(kinds: Sequence[int]) -> tuple[int, ...]:
    """`run_end` of a chain, as above."""
    last = len(kinds) - 1
    ends = list(range(1, last + 2))
    for i in range(last - 2, 0, -1):
        if WAIT not in (kinds[i], kinds[i + 1]):
            ends[i] = ends[i + 1]
    return tuple(ends)
