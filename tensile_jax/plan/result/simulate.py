"""Predicts when the segments and copies of plans happen, by simulating the plans of one or several jobs that share a device.

TENSILE simulates its tensor access sequence in the same way (section IV-B, "a discrete simulation process"). Here segments and
copies are simulated. There are three lanes: computation, copies to the host, and copies to the device. Each serves one request at
a time, in the order in which they come. A job acts in phases:

    boundary i   Segment i - 1 has ended. The copies out that come before segment i are issued.
    left i       The copies out that must end before segment i have ended, and their device memory is free. The copies in that
                 come before segment i are issued.
    ready i      The copies in that must end before segment i have ended.
    segment i    It begins when it is ready and the compute lane is free, and takes launch_us + latency_us. The time from boundary
                 i to its begin is the stall; waiting at the end of the iteration counts as stall too.

A copy begins when it is issued and its lane is free, and takes nbytes / rate. The next segment that is launched takes longer by
`copy_share` of the copy's time. An iteration ends when its last segment and all its copies have ended; then the job's next
iteration begins. The executor acts in the same order. The bytes on the device change when a segment begins (outputs, workspace),
when it ends (workspace, what it frees), when a copy in is issued, and at *left*. The bytes of several jobs add up; this module
does not decide whether they may run together.

Times in microseconds since the first iteration began, sizes in bytes.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan_format import EventKind, Plan


@dataclass(frozen=True, slots=True)
class Span:
    """Segment or event `index` of a job's plan ran over `[begin_us, end_us)` in that iteration of the job."""

    job: int
    iteration: int
    index: int
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened, in order of time.

    `copies_out` and `copies_in` index `plan.events`. `step_us[job][iteration]` and `stall_us[job][iteration]` are how long
    an iteration took, and for how much of that the job waited. `memory` are (time, bytes on the device from then on).
    """

    segments: tuple[Span, ...]
    copies_out: tuple[Span, ...]
    copies_in: tuple[Span, ...]
    step_us: tuple[tuple[float, ...], ...]
    stall_us: tuple[tuple[float, ...], ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        """The most that was on the device at any time."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    @property
    def end_us(self) -> float:
        """When the last iteration of any job ended."""
        return max(sum(steps) for steps in self.step_us)


def simulate(plans: Sequence[Plan], profile: DeviceProfile, *, iterations: int = 1) -> Simulation:
    """The simulation of all plans together, each for so many iterations. All begin at time 0."""
    lanes = _Lanes(0.0, 0.0, 0.0, 0.0)
    jobs = [_Job(number, plan, iterations) for number, plan in enumerate(plans)]
    waiting = [(0.0, _BOUNDARY, job.number) for job in jobs]  # a heap; at one time, by phase, then jobs in their order
    while waiting:
        now, phase, number = heapq.heappop(waiting)
        act = (jobs[number].boundary, jobs[number].left, jobs[number].launch)[phase]
        following = act(now, lanes, profile)
        if following is not None:
            heapq.heappush(waiting, (*following, number))
    return Simulation(
        segments=_in_time(span for job in jobs for span in job.segments),
        copies_out=_in_time(span for job in jobs for span in job.copies["swap_out"]),
        copies_in=_in_time(span for job in jobs for span in job.copies["swap_in"]),
        step_us=tuple(tuple(job.step_us) for job in jobs),
        stall_us=tuple(tuple(job.stall_us) for job in jobs),
        memory=_summed([change for job in jobs for change in job.changes]),
    )


_BOUNDARY, _LEFT, _READY = range(3)
_Following = tuple[float, int] | None
"""When the job acts next, and in which phase; None when it is through."""


@dataclass(slots=True)
class _Lanes:
    """When each lane is free."""

    compute: float
    out: float
    into: float
    delay_us: float  # microseconds that copies take from compute


class _Job:
    """The state of one job in the simulation: its plan, and the segment that is launched next."""

    def __init__(self, number: int, plan: Plan, iterations: int) -> None:
        self.number = number
        self.segments: list[Span] = []
        self.copies: dict[EventKind, list[Span]] = {"swap_out": [], "swap_in": []}
        self.step_us: list[float] = []
        self.stall_us: list[float] = []
        self.changes: list[tuple[float, int]] = []  # (time, bytes more or less)
        self._plan = plan
        self._iterations = iterations
        self._size = {t.id: t.nbytes for t in plan.tensors}
        self._issued: dict[tuple[EventKind, int], list[int]] = {}  # by segment, the copies issued before it
        self._leaves: dict[int, int] = {}  # by segment, bytes of swap-outs that must end before it
        for place, event in enumerate(plan.events):
            if event.kind in ("swap_out", "swap_in"):
                self._issued.setdefault((event.kind, event.trigger + 1), []).append(place)
            if event.kind == "swap_out":
                self._leaves[event.until] = self._leaves.get(event.until, 0) + event.nbytes
        arriving = sum(plan.events[i].nbytes for i in self._issued.get(("swap_in", 0), ()))
        self._resident = plan.segments[0].resident_bytes - self._made(0) - arriving + self._leaves.get(0, 0)
        self._start(0.0)

    def _start(self, now: float) -> None:
        """Begin an iteration."""
        self._index = 0
        self._until: dict[tuple[EventKind, int], float] = {}  # by segment, when all that must end before it has ended
        self._began = self._ended = now  # when the latest segment or copy ends
        self._stalled = 0.0
        self._on_device = 0
        self._change(now, self._resident)

    def boundary(self, now: float, lanes: _Lanes, profile: DeviceProfile) -> _Following:
        """Issue the copies out."""
        self._arrived = now
        for place in self._issued.get(("swap_out", self._index), ()):
            begin = max(lanes.out, now)
            lanes.out = begin + copy_out_us(self._plan.events[place].nbytes, profile)
            lanes.delay_us += profile.copy_share * (lanes.out - begin)
            self._copied(place, begin, lanes.out)
        return max(now, self._until.get(("swap_out", self._index), 0.0)), _LEFT

    def left(self, now: float, lanes: _Lanes, profile: DeviceProfile) -> _Following:
        """Issue the copies in, then go on to the next segment or the next iteration."""
        index = self._index
        self._change(now, -self._leaves.get(index, 0))
        for place in self._issued.get(("swap_in", index), ()):
            begin = max(lanes.into, now)
            lanes.into = begin + copy_in_us(self._plan.events[place].nbytes, profile)
            lanes.delay_us += profile.copy_share * (lanes.into - begin)
            self._change(now, self._plan.events[place].nbytes)
            self._copied(place, begin, lanes.into)
        if index < len(self._plan.segments):
            return max(now, self._until.get(("swap_in", index), 0.0)), _READY
        finish = max(now, self._ended)
        self.step_us.append(finish - self._began)
        self.stall_us.append(self._stalled + finish - self._arrived)
        self._change(finish, -self._on_device)
        if len(self.step_us) == self._iterations:
            return None
        self._start(finish)
        return finish, _BOUNDARY

    def launch(self, now: float, lanes: _Lanes, profile: DeviceProfile) -> _Following:
        """Launch the segment."""
        segment = self._plan.segments[self._index]
        begin = max(now, lanes.compute)
        end = lanes.compute = begin + self._plan.launch_us + segment.latency_us + lanes.delay_us
        lanes.delay_us = 0.0
        self._stalled += begin - self._arrived
        self._ended = max(self._ended, end)
        self.segments.append(Span(self.number, len(self.step_us), self._index, begin, end))
        self._change(begin, self._made(self._index) + segment.workspace_bytes)
        self._change(end, -segment.workspace_bytes - sum(self._size[t] for t in segment.frees))
        self._index += 1
        return end, _BOUNDARY

    def _copied(self, place: int, begin: float, end: float) -> None:
        event = self._plan.events[place]
        by = event.kind, event.until
        self._until[by] = max(end, self._until.get(by, 0.0))
        self._ended = max(self._ended, end)
        self.copies[event.kind].append(Span(self.number, len(self.step_us), place, begin, end))

    def _made(self, index: int) -> int:
        segment = self._plan.segments[index]
        return sum(self._size[t] for t in segment.outputs) - sum(self._size[t] for t in segment.donated)

    def _change(self, time: float, nbytes: int) -> None:
        if nbytes:
            self._on_device += nbytes
            self.changes.append((time, nbytes))


def _in_time(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda s: (s.begin_us, s.job, s.index)))


def _summed(changes: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """The bytes on the device from each time on. At equal times, decreases come before increases."""
    changes.sort()
    levels = accumulate(nbytes for _, nbytes in changes)
    return tuple(zip((time for time, _ in changes), levels, strict=True))
