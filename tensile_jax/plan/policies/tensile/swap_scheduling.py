"""Schedules swaps: which tensor of the memory peak is swapped out and in, and when.

TENSILE section IV-C and Algorithm 2, in the paper's terms (`analysis/access.py`): the *TGA* (Tensor Generating Access) is the
execution of the operator that generates a tensor, a *TUA* (Tensor Using Access) that of an operator that uses it, and *MPTime* is
the time of the memory peak. One call of Algorithm 2 looks at the tensors that are on the device at the peak, the largest first.
It schedules the first tensor for which it finds *windows*, free times on the link between device and host:

    swap-out          in [TGA.end, MPTime], as early as possible
    swap-in           in [swap-out.end, TUA.begin], as late as possible, for the first TUA after the swap-out
    further swap-ins  in [TUA(i - 1).end, TUA(i).begin], as late as possible, for every later TUA where there is room

A window overlaps no other window ("there can only be one tensor being swapped simultaneously") and no access of its tensor. If
there is no room for the first swap-in, the swap-out is withdrawn and tried again after that TUA. After a swap-in, the copy in
host memory is kept "until the last access of the tensor is finished". Before a further swap-in the tensor is therefore only
released, not copied out again.

Some printed lines of Algorithm 2 are ambiguous. The module reads them as follows (line numbers on the left):

    14     The swap-in also fails if no TUA follows the swap-out, and line 18 withdraws the swap-out. Such a swap-out would
           save nothing: a tensor that nothing needs any more is released anyway, and a result must be on the device in the end.
    19     The line says `latest_time`; the text says "we will update the Swap-Out Event's *earliest* start time". The module
           follows the text, since with the line as printed every try would be the same. `latest_time` is always the time of the
           peak, and the whole copy must end by then.
    22     "Choosing the largest tensor": ties go to the lower id. "Since the scheduling for each tensor can change the GPU memory
           peak, we must analyze the GPU memory peak and generate the swap events iteratively": a call ends at its first success.
    25     "Has not been swapped out": neither in an earlier call nor earlier in the loop.
    26     This line applies only with the option `across_iterations`: an updated parameter may then be on the host when the
           iteration ends. Without the option, an updated parameter is a tensor like any other. The updated parameter of this
           iteration is the old parameter of the next one. To save memory at a peak before the first use of old parameters, the
           updated parameter is swapped out after its last access in this iteration, and swapped in during the next one.
           Neither copy crosses the end of the iteration, because there "the Executor pauses to wait for the unfinished swap
           events".
    28     SON is the number of a job's swapped tensors. MSR, the maximal swapping rate, is an upper bound that the user sets
           for each job. The paper defines the rate as "the rate of tensors swapped in a job to tensors swapped in the whole
           system". So the condition is read as SON(job) / sum of SON <= MSR(job).
    29-34  An old parameter that was on the host when the iteration began needs no second swap-out. It is only released (line 34).

A tensor for which no windows were found is not tried again with the same latest time or an earlier one. It would fail again,
because the link only gets fuller.

Several jobs share one link, and the rate of line 28 compares them. Each job has its own `SwapScheduling`, and all have the same
`SharedLink`. `multi_job/joint_swaps.py` chooses the largest tensor among those of all jobs.

Difference from the paper: the paper's link has one channel. With the option `duplex` of `SharedLink`, each direction of the
link has a channel of its own, as with PCIe. The policy `tensile` uses one channel, like the paper.

Times in microseconds since the iteration began, sizes in bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import PLACEHOLDER, Access, AccessSequence
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.policies.tensile.footprint import Peak


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """`tensor` is not on the device between two operators: it leaves when `after` has ended, and `before` uses it next.

    The swap-out takes `[out_begin, out_end)` and the swap-in `[in_begin, in_end)`. Without `copies_out` the host has a copy
    already, and the tensor is released at `out_end`. A swap across the iteration boundary has two records. In that of the updated
    parameter, `before` is the number of operators, and the swap-in is empty, at the end of the iteration. In that of the old
    parameter, `after` is -1, and the swap-out is empty, at time 0.
    """

    tensor: TensorId
    after: int
    before: int
    copies_out: bool
    out_begin_us: float
    out_end_us: float
    in_begin_us: float
    in_end_us: float


class Interval(NamedTuple):
    """`[begin, end)` in microseconds."""

    begin: float
    end: float


class _Attempt(NamedTuple):
    """What `scheduling_swap` returns (line 21): the windows that it found, and the access that the swap-in is for."""

    swap_out: Interval | None
    swap_in: Interval | None
    first_access: Access | None


def feasible_intervals(begin: float, end: float, busy: Iterator[Interval]) -> Iterator[Interval]:
    """The parts of `[begin, end)` that no interval of `busy` covers, ascending. `busy` is ordered by begin."""
    for taken in busy:
        if taken.begin >= end:
            break
        if taken.begin > begin:
            yield Interval(begin, taken.begin)
        begin = max(begin, taken.end)
    if begin < end:
        yield Interval(begin, end)


class SharedLink:
    """The link and how much each job uses it: the busy windows of all jobs (SE in the paper), SON and MSR of each job.

    Args:
        duplex: the link has a channel in each direction, rather than the paper's one.
        max_swapping_rate: MSR of each job; 1 for a job that is not in it.
        swapped: SON of each job; 0 for a job that is not in it.
    """

    def __init__(
        self,
        *,
        duplex: bool = False,
        max_swapping_rate: Mapping[int, float] | None = None,
        swapped: Mapping[int, int] | None = None,
    ) -> None:
        self.out: list[Interval] = []  # busy windows of the channel, disjoint and ascending
        self.into: list[Interval] = [] if duplex else self.out
        self.swapped = dict(swapped or {})
        self._rates = max_swapping_rate or {}

    def within_rate(self, job: int) -> bool:
        """Line 28: whether SON(job) / sum of SON <= MSR(job); true while nothing has been swapped."""
        return self.swapped.get(job, 0) <= self._rates.get(job, 1.0) * sum(self.swapped.values())


class SwapScheduling:
    """Algorithm 2 for one job, with the swap events scheduled so far, to which every run adds.

    Args:
        across_iterations: whether an updated parameter may be on the host when the iteration ends.
        link: the link that the job shares with others; by default the job is alone.
    """

    def __init__(
        self,
        sequence: AccessSequence,
        profile: DeviceProfile,
        *,
        across_iterations: bool,
        link: SharedLink | None = None,
    ) -> None:
        self._sequence = sequence
        self._profile = profile
        self._across_iterations = across_iterations
        self._link = SharedLink() if link is None else link
        self._out, self._into = self._link.out, self._link.into
        self._updated = {old: new for new, old in sequence.updates.items()} if across_iterations else {}
        self._on_host: set[TensorId] = set()  # old parameters that are there when the iteration begins
        self._swapped: set[TensorId] = set()
        self._failed: dict[TensorId, float] = {}  # the latest time with which a tensor has failed

    @property
    def swapped(self) -> frozenset[TensorId]:
        """The tensors with swap events."""
        return frozenset(self._swapped | self._on_host)

    def run(self, peak: Peak) -> tuple[SwappedOut, ...]:
        """The swaps of the largest tensor of the peak that can be swapped; empty if none can."""
        nbytes = self._sequence.nbytes
        by_size = sorted(peak.tensors, key=lambda t: (-nbytes[t], t))  # line 22
        return next((found for found in (self.swap(tensor, peak) for tensor in by_size) if found), ())

    def swap(self, tensor: TensorId, peak: Peak) -> tuple[SwappedOut, ...]:
        """The swaps of one tensor of the peak; empty if it cannot be swapped."""
        if tensor in self._sequence.fixed or not self._sequence.nbytes[tensor]:
            return ()
        updated, latest_time = self._updated_parameter(tensor, peak)  # line 23
        candidate = tensor if updated is None else updated
        if candidate in self._swapped or latest_time <= self._failed.get(candidate, -1.0):  # line 25
            return ()
        job = self._sequence.job
        if updated is not None:  # line 26
            found = self._across_the_iteration(updated, latest_time)
        elif self._link.within_rate(job) and len(self._sequence.accesses[tensor]) > 1:  # line 28
            found = self._within_the_iteration(tensor, latest_time)
        else:
            return ()
        if found:
            self._swapped.add(found[0].tensor)
            self._link.swapped[job] = self._link.swapped.get(job, 0) + 1
        else:
            self._failed[candidate] = latest_time
        return found

    def _updated_parameter(self, tensor: TensorId, peak: Peak) -> tuple[TensorId | None, float]:
        """The updated parameter to schedule if the tensor is a parameter (line 26), and the latest time of the swap-out."""
        if self._across_iterations and tensor in self._sequence.updates:
            return tensor, peak.time_us
        if tensor in self._updated:
            first = self._sequence.first_use_from(tensor, 0.0)
            if first is not None and peak.time_us < first.begin_us:
                return self._updated[tensor], self._sequence.end_us
        return None, peak.time_us

    def _across_the_iteration(self, updated: TensorId, latest_time: float) -> tuple[SwappedOut, ...]:
        """Lines 26-27: the updated parameter leaves, and the old one comes back in the next iteration."""
        last = self._sequence.accesses[updated][-1]
        swap_out, swap_in, first = self._scheduling_swap(updated, last.end_us, latest_time)
        if swap_out is None or swap_in is None or first is None:
            return ()
        old, end, count = self._sequence.updates[updated], self._sequence.end_us, len(self._sequence.ends_us)
        self._on_host.add(old)
        self._failed.pop(old, None)
        after = self._sequence.last_ended(swap_out.begin)
        return (
            SwappedOut(updated, after, count, True, *swap_out, end, end),
            SwappedOut(old, PLACEHOLDER, first.operator, False, 0.0, 0.0, *swap_in),
        )

    def _within_the_iteration(self, tensor: TensorId, latest_time: float) -> tuple[SwappedOut, ...]:
        """Lines 29-34."""
        uses = self._sequence.uses(tensor)
        earliest_time = self._sequence.generating(tensor).end_us  # line 24
        if tensor in self._updated and uses:
            earliest_time = uses[0].end_us
        if tensor in self._on_host:
            return self._rest(tensor, uses[0])
        while latest_time > earliest_time:  # line 32
            swap_out, swap_in, first = self._scheduling_swap(tensor, earliest_time, latest_time)  # line 33
            if swap_out is None or first is None:
                break
            if swap_in is not None:
                after = self._sequence.last_ended(swap_out.begin)
                return SwappedOut(tensor, after, first.operator, True, *swap_out, *swap_in), *self._rest(tensor, first)
            earliest_time = first.end_us  # line 19
        return ()

    def _scheduling_swap(self, tensor: TensorId, earliest_time: float, latest_time: float) -> _Attempt:
        """Lines 1-21: one swap-out and the swap-in for the first access after it, both or neither."""
        length = copy_out_us(self._sequence.nbytes[tensor], self._profile)
        for interval in self._feasible(self._out, tensor, earliest_time, latest_time):  # lines 3-4
            if interval.begin + length <= interval.end:  # line 5
                swap_out = Interval(interval.begin, interval.begin + length)
                insort(self._out, swap_out)  # lines 6-7
                if self._across_iterations and tensor in self._sequence.updates:  # line 8
                    old, ready = self._sequence.updates[tensor], 0.0
                    first = self._sequence.first_use_from(old, 0.0)  # line 9
                else:
                    old, ready = tensor, swap_out.end
                    first = self._sequence.first_use_from(tensor, swap_out.end)  # lines 10-11
                swap_in = None if first is None else self._try_swap_in(old, ready, first)  # lines 12-14
                if swap_in is None:
                    self._out.remove(swap_out)  # lines 17-18
                return _Attempt(swap_out, swap_in, first)  # lines 20-21
        return _Attempt(None, None, None)

    def _rest(self, tensor: TensorId, first: Access) -> tuple[SwappedOut, ...]:
        """Line 34: swaps before those later accesses for whose swap-in there is room, in order of time."""
        found: list[SwappedOut] = []
        for before, access in pairwise(a for a in self._sequence.uses(tensor) if a.operator >= first.operator):
            swap_in = self._try_swap_in(tensor, before.end_us, access)
            if swap_in is not None:
                released = before.end_us
                found.append(SwappedOut(tensor, before.operator, access.operator, False, released, released, *swap_in))
        return tuple(found)

    def _try_swap_in(self, tensor: TensorId, ready: float, access: Access) -> Interval | None:
        """`try_schedule_swap_in`: the latest window before the access, which is added to SE (lines 15-16)."""
        length = copy_in_us(self._sequence.nbytes[tensor], self._profile)
        for interval in reversed([*self._feasible(self._into, tensor, ready, access.begin_us)]):
            if interval.begin <= interval.end - length:
                swap_in = Interval(interval.end - length, interval.end)
                insort(self._into, swap_in)
                return swap_in
        return None

    def _feasible(self, channel: list[Interval], tensor: TensorId, begin: float, end: float) -> Iterator[Interval]:
        """The parts of `[begin, end)` in which neither the channel is busy nor the tensor is accessed."""
        first = max(bisect_left(channel, Interval(begin, begin)) - 1, 0)
        last = bisect_left(channel, Interval(end, end))
        accesses = (Interval(a.begin_us, a.end_us) for a in self._sequence.accesses[tensor])
        return feasible_intervals(begin, end, merge(channel[first:last], accesses))
