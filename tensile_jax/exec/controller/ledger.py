"""Counts the device memory that all jobs hold, and answers what fits. A ledger lasts while the controller handles one event.

A *move* is a part of an iteration, such as a launch or a wait for copies. A *run* is a sequence of moves of one iteration that
are issued at once. A job is *parked* while its state is in host memory, and *idle* while its state is on the device between two
iterations. The *parked bytes* of a job are what remains on the device while the job is parked, such as its constants.

    held       the bytes that all jobs hold, by their memory profiles (`plan/multi_job/memory_profile.py`). For a job with runs
               in flight, these are the bytes that the job will hold after those runs
    transient  the most bytes that any run in flight needs beyond what its job holds after that run
    free       budget - held - transient
    settled    the bytes that all jobs hold once every iteration is over: a parked job holds its parked bytes, and any other job
               its idle bytes
    spare      budget - the parked bytes of all jobs
    can run    whether a job's peak fits beside the parked bytes of all other jobs
    safe       whether every iteration under way can be finished while all other jobs keep what they hold, as in the banker's
               algorithm (`plan/multi_job/safety.py`)

A `Ledger` is a mutable copy of the controller's `State`. Only `machine.step` and the functions that it calls see a ledger. The
states that `machine.step` takes and returns are never changed.
"""

from collections.abc import Callable
from dataclasses import replace

from tensile_jax.exec.controller.messages import Instruction
from tensile_jax.exec.controller.state import JobId, JobRecord, State
from tensile_jax.plan.multi_job.admission import admits
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, MemoryProfile
from tensile_jax.plan.multi_job.safety import is_safe
from tensile_jax.story import Story


class Ledger:
    """A mutable copy of a `State`, and the instructions that were given while the present event was handled.

    `held_bytes` is without the transient bytes of runs in flight; `State.held_bytes` includes them.
    """

    __slots__ = (
        "budget_bytes", "clock_us", "depth", "held_bytes", "host_budget_bytes", "in_flight", "next_budget_bytes", "instructions",
        "parked_bytes", "pending", "records", "settled_bytes",
    )  # fmt: skip

    def __init__(self, state: State) -> None:
        self.budget_bytes = state.budget_bytes
        self.host_budget_bytes = state.host_budget_bytes
        self.depth = state.depth
        self.records = list(state.records)
        self.pending = state.pending
        self.in_flight = state.in_flight
        self.next_budget_bytes = state.next_budget_bytes
        self.clock_us = state.clock_us
        self.instructions: list[Instruction] = []
        self.held_bytes = state.jobs_bytes
        self.settled_bytes = state.settled_bytes
        self.parked_bytes = state.parked_bytes

    def state(self, story: Story) -> State:
        """An immutable copy of the ledger as a `State`."""
        return State(
            self.budget_bytes, self.host_budget_bytes, self.depth, tuple(self.records), self.pending, self.in_flight,
            self.next_budget_bytes, self.clock_us, self.held_bytes, self.settled_bytes, self.parked_bytes, story,
        )  # fmt: skip

    # -- changes ----------------------------------------------------------------------------------------------------------------

    def queue(self, record: JobRecord) -> None:
        """Add a job to the pending ones."""
        self.pending = (*self.pending, record)

    def unqueue(self, job: JobId) -> None:
        """Remove a job from the pending ones, if it is one of them."""
        self.pending = tuple([r for r in self.pending if r.job != job])

    def requeue(self, job: JobId, change: Callable[[JobRecord], JobRecord]) -> None:
        """Change the record of a pending job, if it is one of them."""
        self.pending = tuple([change(r) if r.job == job else r for r in self.pending])

    def end_run(self, job: JobId) -> bool:
        """Remove the job's oldest run from those in flight; False if there is none, since the job was lost."""
        in_flight = self.in_flight
        for k, (one, _) in enumerate(in_flight):
            if one == job:
                self.in_flight = in_flight[:k] + in_flight[k + 1 :]
                return True
        return False

    def end_all_runs(self, job: JobId) -> None:
        """Remove all runs of a job that was lost."""
        self.in_flight = tuple([one for one in self.in_flight if one[0] != job])

    def request_budget(self, nbytes: int) -> None:
        """Take note of a budget that is asked for."""
        self.next_budget_bytes = nbytes

    def use_budget(self, nbytes: int) -> None:
        """Use a budget from now on; none is asked for any more."""
        self.budget_bytes, self.next_budget_bytes = nbytes, None

    def advance_clock(self, us: float) -> None:
        """Advance the virtual clock to `us`, unless it is later already."""
        self.clock_us = max(self.clock_us, us)

    def put(self, index: int, record: JobRecord) -> None:
        """Replace the record at `index`."""
        before = self.records[index]
        self.held_bytes += record.held_bytes - before.held_bytes
        self.settled_bytes += record.settled_bytes - before.settled_bytes
        self.parked_bytes += record.memory.parked_bytes - before.memory.parked_bytes
        self.records[index] = record

    def add(self, record: JobRecord) -> None:
        """Add a record."""
        self._count(record, 1)
        self.records.append(record)

    def remove(self, index: int) -> None:
        """Remove the record at `index`."""
        self._count(self.records.pop(index), -1)

    def _count(self, record: JobRecord, sign: int) -> None:
        self.held_bytes += sign * record.held_bytes
        self.settled_bytes += sign * record.settled_bytes
        self.parked_bytes += sign * record.memory.parked_bytes

    def issue(self, index: int) -> int:
        """Enter the job's next run, and return where it ends; 0 if there can be none now. It does not begin with a WAIT.

        The run has as many moves as fit into the budget, if the state after them is safe. Otherwise it ends at a position that
        is certainly safe. If no such position is known, the run is the next move alone, provided that the state after it is safe.
        """
        record = self.records[index]
        memory, begin = record.memory, record.position
        other = self.held_bytes - memory.holds[begin]
        last = self._last(memory, begin)
        end = self._fitting_end(memory, begin, last, other)
        if end == begin:
            return 0
        lowest = self._lowest(memory, begin, last, other)
        if end > lowest and not self._is_safe_after(index, end, other):
            if lowest > begin:
                end = lowest
            elif end > begin + 1 and self._is_safe_after(index, begin + 1, other):
                end = begin + 1
            else:
                return 0
        launched = LAUNCH in memory.kinds[begin:end]
        self.records[index] = _after(record, end, busy=launched and self.depth == 1)
        self.held_bytes = other + memory.holds[end]
        if launched:
            self.in_flight = (*self.in_flight, (record.job, self._transient_of(memory, begin, end)))
        return end

    def _last(self, memory: MemoryProfile, begin: int) -> int:
        """Where a run from `begin` ends at the latest. A wait does not end it if no other job could run meanwhile."""
        last = len(memory.kinds) - 1
        alone = self.depth == 1 and len(self.records) == 1
        return last if alone and 0 < begin < last and LAUNCH in memory.kinds[begin:last] else memory.run_end[begin]

    def _fitting_end(self, memory: MemoryProfile, begin: int, last: int, other: int) -> int:
        """Where the longest run from `begin` to `last` ends that fits into the budget, if the other jobs hold `other` bytes."""
        room, kinds, needs, holds = self.budget_bytes - other, memory.kinds, memory.needs, memory.holds
        end, in_flight = begin, self.in_flight
        if self.depth == 1 and not in_flight:  # each move is carried out when the one before it is over
            if max(needs[begin:last]) <= room:
                return last
            while needs[end] <= room:
                end += 1
            return end
        full, transient = len(in_flight) >= self.depth, self.transient_bytes
        runs = bool(in_flight)
        while end < last:
            need, held = needs[end], holds[end + 1]
            if kinds[end] == LAUNCH:  # it runs after those in flight
                if full or need > room or (runs and held + transient > room):
                    break
                runs, transient = True, max(transient, need - held)
            elif need + transient > room:  # an instant move needs its memory while the launches in flight run
                break
            end += 1
        return end

    def _lowest(self, memory: MemoryProfile, begin: int, last: int, other: int) -> int:
        """A position up to `last` such that a run from `begin` to there, or to any position before it, ends in a safe state.

        If the job can advance to a position where it holds no more than now, the state there is as safe as now, and so is every
        state on the way. The same holds of a whole iteration that fits.
        """
        if begin == 0:
            return 1 if other + memory.peak_bytes <= self.budget_bytes else 0
        lower, hill, room = memory.lower, memory.hill, self.budget_bytes - other
        position = begin
        while position < last and lower[position] != -1 and hill[position] <= room:
            position = lower[position]
        return position if position <= last else last

    def _is_safe_after(self, index: int, end: int, other: int) -> bool:
        """Whether the state is safe once the job has reached position `end`."""
        record = self.records[index]
        self.records[index] = _after(record, end, busy=False)
        safe = self.is_safe(other + record.memory.holds[end])
        self.records[index] = record
        return safe

    def _transient_of(self, memory: MemoryProfile, begin: int, end: int) -> int:
        """The most that a run needs beyond what its job holds after the run."""
        transient = max(memory.needs[begin:end]) - memory.holds[end]
        if self.depth > 1:  # the moves after a launch are carried out, and allocate, while that launch runs
            moves = zip(memory.kinds[begin:end], memory.needs[begin:end], memory.holds[begin + 1 : end + 1], strict=True)
            transient = max(transient, *[need - held for kind, need, held in moves if kind == LAUNCH])
        return transient

    # -- arithmetic -------------------------------------------------------------------------------------------------------------

    @property
    def transient_bytes(self) -> int:
        """The most that a run in flight needs beyond what its job holds once the run has ended."""
        return max([transient for _, transient in self.in_flight]) if self.in_flight else 0

    @property
    def is_idle(self) -> bool:
        """Whether no iteration, run or copy is under way."""
        return not self.in_flight and not any([r.position or r.busy for r in self.records])

    def is_safe(self, held_bytes: int) -> bool:
        """Whether every iteration under way can be finished, if all jobs together hold `held_bytes` now."""
        under_way = [(r.memory, r.position, r.memory.idle_bytes) for r in self.records if r.position]
        return is_safe(self.budget_bytes - held_bytes, under_way)

    def has_room(self, more_bytes: int) -> bool:
        """Whether the jobs can hold `more_bytes` more from now on, within the budget and in a safe state."""
        held_bytes = self.held_bytes + more_bytes
        return held_bytes + self.transient_bytes <= self.budget_bytes and self.is_safe(held_bytes)

    @property
    def spare_bytes(self) -> int:
        """How many bytes above its parked bytes one job may need while all other jobs are parked."""
        return self._limit_bytes - self.parked_bytes

    @property
    def _limit_bytes(self) -> int:
        """The budget, or a lower budget that was requested and is applied once the iterations under way have ended."""
        return self.budget_bytes if self.next_budget_bytes is None else min(self.budget_bytes, self.next_budget_bytes)

    def admits(self, memory: MemoryProfile, beside: list[JobRecord]) -> bool:
        """Whether a job with that memory profile can run beside the jobs in `beside`, and each of them that can run still can."""
        others = [r.memory for r in beside]
        return admits(memory, others, budget_bytes=self._limit_bytes, host_budget_bytes=self.host_budget_bytes)

    def next_pending(self) -> int:
        """The index of the pending job that is to be admitted as soon as there is room; -1 for none.

        That is the job with the greatest weight that can be admitted beside the admitted jobs. A job of less weight
        must wait while a job of greater weight waits only for running jobs to end.
        """
        if not self.pending or self.next_budget_bytes is not None:
            return -1
        spare = self.spare_bytes
        for k in sorted(range(len(self.pending)), key=lambda k: -self.pending[k].weight):
            record = self.pending[k]
            if record.wish == "pause":
                continue
            if self.admits(record.memory, self.records):
                return k
            not_running = [r for r in self.records if r.wish == "pause" or r.memory.rise_bytes > spare]
            if self.admits(record.memory, not_running):
                return -1
        return -1

    def can_renew(self, index: int) -> bool:
        """Whether, with the job's new plan, every job that can run now still can, and host memory suffices for all."""
        record = self.records[index]
        assert record.renewal is not None
        return admits(
            record.renewal.memory,
            [r.memory for r in self.records if r is not record],
            budget_bytes=self._limit_bytes,
            host_budget_bytes=self.host_budget_bytes,
            replaces=record.memory,
        )


def _after(record: JobRecord, end: int, *, busy: bool) -> JobRecord:
    """The record once the job has reached position `end`; at the end of an iteration that is position 0 of the next one."""
    if end < len(record.memory.kinds):
        return record.at(end, busy=busy)
    return replace(record, position=0, busy=busy, batches=record.batches - 1, steps_left=record.steps_left - 1)
