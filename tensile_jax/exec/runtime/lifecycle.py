"""Decides what happens to one job, from its submission to its end.

The module is a pure state machine: `step` maps (record, event) to (record, instructions).

    preparing -> (queued) -> running <-> paused -> finished | failed | cancelled

A job can fail or be cancelled in each of the first four states. A running job becomes queued again if the budget is lowered
below what it needs.

The controller (`exec/controller/machine.py`) decides about the memory of all jobs together. This module decides about the life
of one job. The events of a job come from the thread of its user code, the planner, the dispatcher, the saver and the user. For
each event, a `Runtime` calls `step` and carries out the instructions in their order. Meanwhile it holds the lock of its store
(`store.py`). This module uses no JAX, clock, lock or thread. It only passes on errors, metrics and saved states.

A job ends in two stages. In the first stage its last state is saved; `leaving` is true from the beginning of this stage. In the
second stage the job waits until the last call of the user's callback has returned; `ending` says how the job will end. A job
that failed or was cancelled has no second stage. The saves of one job are made one after another, in the order of `saves`.

Three events hand over a job's state: `Paused` (the controller has paused the job), `Released` (the job has stopped or done all
of its steps) and `Lost` (the job has failed). The following holds for any order of events:

    - A job ends exactly once. After that it causes no instructions, except those that report saves still under way.
    - If the job makes checkpoints, every state that these events hand over is saved, in the order of steps.
    - The last state of a job that failed or was cancelled is kept for the user, unless it is lost. It is lost in three cases: the
      job failed in the middle of an iteration, its process died, or the device does not respond. `Lost` then hands over no
      state.
    - The folder of checkpoints is released exactly once: when the job has ended and nothing is being saved.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tensile_jax.exec.actor.feed_events import BatchesEnded, BatchReady, CallbacksMade, UserCodeFailed
from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.controller.messages import BatchLoaded, Wished
from tensile_jax.exec.controller.state import JobId, JobRecord, Wish
from tensile_jax.exec.runtime.messages import (
    Admitted,
    BudgetSuffices,
    CannotRunNow,
    CheckpointMade,
    Close,
    Deliver,
    Drifted,
    DropPlan,
    Event,
    ExplainWait,
    Instruction,
    JoinController,
    LoseJob,
    Lost,
    Parked,
    Paused,
    Pending,
    PlanAdopted,
    PlanAgain,
    PlanDeclined,
    Planned,
    PreparationFailed,
    Preparing,
    ProcessDied,
    Released,
    ReleaseFolder,
    Report,
    ShareState,
    StartPreparing,
    StartSaving,
    StateFetched,
    Stepped,
    StopFeed,
    Submitted,
    TellController,
    UsePlan,
    UserWished,
)
from tensile_jax.progress.phases import phase_title, phase_words
from tensile_jax.runtime_records import FINAL, EventName, JobState
from tensile_jax.story import Story

Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """A checkpoint to be made of `kept`, the state after `steps` steps. With `then_run` the job is paused until it is made."""

    kept: Any
    steps: int
    then_run: bool


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """The job's last state, to be fetched for the user. Unless `steps` is None, a checkpoint of it is made first.

    `kept` is a snapshot of that state. It is None if the job has not begun: its state is then the one that was submitted.
    """

    outcome: Outcome
    kept: Any = None
    steps: int | None = None
    error: BaseException | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """All steps are done and the last state is saved: the job ends once its last callback has returned."""

    state: Any
    note: str | None


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where a job stands in its life.

    Attributes:
        steps: how many steps the job is to do in all.
        first: how many of them were done before the job was submitted.
        checkpoint_every: after each so many steps the job pauses for a checkpoint; None: never.
        done: how many of them are done now.
        batches: how many batches were drawn.
        last: the step after which there are no more batches, if the batches end before `steps`; None if that is not known.
        phase: what is done to prepare the job now; None before that, and once it is prepared.
        joined: whether the controller knows of the job.
        admitted: whether the controller has admitted the job.
        saves: the save that is being made, and those that wait for it.
        leaving: whether the job's last state is among the `saves` or has been saved.
        error: why the job failed.
        result: the job's last state.
        story: the last events.
    """

    job: JobId
    name: str
    steps: int
    first: int = 0
    priority: float = 1.0
    makes_checkpoints: bool = False
    checkpoint_every: int | None = None
    state: JobState = "preparing"
    note: str = ""
    wish: Wish = "run"
    done: int = 0
    batches: int = 0
    last: int | None = None
    phase: Preparing | None = None
    joined: bool = False
    admitted: bool = False
    callbacks_made: bool = False
    leaving: bool = False
    saves: tuple[SaveCheckpoint | SaveEnd, ...] = ()
    ending: Ending | None = None
    error: BaseException | None = None
    result: Any = field(default=NO_STATE)
    story: Story = field(default=Story(), compare=False, repr=False)

    @property
    def has_ended(self) -> bool:
        """Whether the job is in one of its final states. A save may still be under way."""
        return self.state in FINAL

    @property
    def shown_note(self) -> str:
        """The note, or, where there is none, what is done to prepare the job."""
        if self.note or self.joined or self.state != "preparing":
            return self.note
        if self.phase is None:
            return "drawing its first batch" if not self.batches else "beginning to trace"
        return phase_words(*self.phase)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and no save is under way."""
        return self.has_ended and not self.saves

    @property
    def is_given_up(self) -> bool:
        """Whether the job need not be prepared: it has ended, or was cancelled or failed before the controller knew of it."""
        return self.has_ended or (not self.joined and (self.wish == "stop" or self.leaving))


def step(record: Lifecycle, event: Event) -> tuple[Lifecycle, list[Instruction]]:
    """The record after `event`, and the instructions to carry out now, in their order. An error quotes the last events."""
    change = _Change(replace(record, story=record.story.with_event(event)))
    try:
        if isinstance(event, CheckpointMade | StateFetched):
            change.receive_save(event)
        elif not record.has_ended:
            change.receive(event)
    except Exception as error:
        change.record.story.add_to(error)
        raise
    return change.record, change.instructions


class _Change:
    """The record while one event is handled, and the instructions so far."""

    __slots__ = ("instructions", "record")

    def __init__(self, record: Lifecycle) -> None:
        self.record = record
        self.instructions: list[Instruction] = []

    def put(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)

    def do(self, *instructions: Instruction) -> None:
        self.instructions += instructions

    def report(self, kind: EventName, note: str = "", values: dict[str, float] | None = None) -> None:
        self.do(Report(kind, self.record.done, note, values))

    def receive(self, event: Event) -> None:
        record = self.record
        match event:
            case Submitted(note):
                self.report("submitted", note)
                if record.first >= record.steps:
                    self.leave(SaveEnd("finished", note=f"its checkpoint has all {record.steps} steps already"))
            case UserWished(wish) if record.wish != "stop":  # a stop is final
                self.receive_request(wish)
            case CallbacksMade():
                self.put(callbacks_made=True)
                self.end_if_called_back()
            case BatchReady() | BatchesEnded() | UserCodeFailed() if not record.is_given_up:
                self.receive_user_code(event)
            case Preparing() if not record.joined and not record.is_given_up:
                self.prepare(event)
            case PreparationFailed(error) if not record.is_given_up:
                self.leave(SaveEnd("failed", error=error))
            case Planned() if not record.is_given_up:
                self.join(event)
            case ProcessDied(error):
                if record.joined:
                    self.do(LoseJob(error))
                else:
                    self.end("failed", error=error)
            case Admitted():
                self.put(admitted=True, state="running", note="" if record.last is None else record.note)
                self.report("started")
                self.do(ShareState())
            case Pending() if record.wish == "pause":
                self.pause()
            case Pending(note, values) | CannotRunNow(note, values):
                waits = isinstance(event, Pending) or record.state == "running"
                self.put(state="queued" if waits else record.state, note=note)
                self.report("queued", note, values)
            case BudgetSuffices() if record.state == "queued" and record.admitted:
                self.put(state="running", note="")
            case PlanAdopted(plan, steps):
                if record.state == "queued":
                    self.put(state="running", note="")
                self.do(UsePlan(plan, steps))
            case PlanDeclined(plan):
                self.do(DropPlan(plan))
            case Stepped(metrics, values):
                self.put(done=record.done + 1)
                self.report("step", values=values)
                if record.last is not None and self.record.done >= record.last:
                    self.do(TellController(Wished(record.job, "stop")))
                self.do(Deliver(self.record.done, metrics))
            case Drifted(tracked, reason):
                self.do(PlanAgain(tracked, reason))
            case Parked() if record.wish == "run":
                self.report("parked")
            case Paused(kept, steps):
                self.receive_pause(kept, steps)
            case Released(kept, steps):
                all_done = record.done >= (record.steps if record.last is None else record.last)
                outcome: Outcome = "failed" if record.error is not None else "finished" if all_done else "cancelled"
                self.leave(SaveEnd(outcome, kept, steps, record.error))
            case Lost(error, kept, steps):
                if kept is None:
                    self.end("failed", error=error)
                else:
                    self.leave(SaveEnd("failed", kept, steps, error))
            case _:
                pass

    # -- preparing, queued, running, paused -------------------------------------------------------------------------------------

    def receive_user_code(self, event: BatchReady | BatchesEnded | UserCodeFailed) -> None:
        record = self.record
        if isinstance(event, BatchReady):
            if record.batches == 0:
                self.do(StartPreparing())
            self.put(batches=record.batches + 1)
            if record.joined:
                self.do(TellController(BatchLoaded(record.job)))
        elif isinstance(event, UserCodeFailed):
            self.put(error=event.error, note=f"its {event.where} raised {type(event.error).__name__}: {event.error}")
            if record.joined:
                self.do(TellController(Wished(record.job, "stop")))
            else:
                self.leave(SaveEnd("failed", error=event.error))
        elif not record.batches:
            error = f"batches of {record.name!r} gave nothing. Give at least one batch."
            if record.first:
                error = (
                    f"batches of {record.name!r} gave no more than those of the {record.first} steps that are done, which are "
                    "skipped. Give them from the first one on, and more of them."
                )
            self.leave(SaveEnd("failed", error=ValueError(error)))
        elif (last := record.first + record.batches) < record.steps:
            self.put(last=last, note=f"its batches ended: {last} of {record.steps} steps")
            if record.done >= last:
                self.do(TellController(Wished(record.job, "stop")))

    def prepare(self, phase: Preparing) -> None:
        before, title = self.record.phase, phase_title(phase.what, phase.of)
        self.put(phase=phase)
        if before is None or phase_title(before.what, before.of) != title:
            self.report("preparing", title)

    def join(self, event: Planned) -> None:
        record = self.record
        self.put(joined=True, phase=None)
        self.report("planned", event.note, event.values)
        plan, left, every = event.plan, record.steps - record.first, record.checkpoint_every
        at = -1 if every is None else left - every + record.first % every
        joined = JobRecord(
            record.job, plan.memory, record.priority, left, wish=record.wish, batches=record.batches, plan=plan.id,
            checkpoint_every=every or 0, checkpoint_at=at,
        )  # fmt: skip
        self.do(JoinController(joined))

    def receive_request(self, wish: Wish) -> None:
        before = self.record.wish
        self.put(wish=wish)
        record = self.record
        if record.ending is not None:
            self.end_if_called_back()
            return
        if record.joined:
            self.do(TellController(Wished(record.job, wish)))
        elif wish == "stop":
            self.leave(SaveEnd("cancelled"))
        if wish == "run" and before == "pause":
            self.put(state="running" if record.admitted else "queued" if record.joined else "preparing")
            self.report("resumed")
            self.do(ShareState())
            if record.joined:
                self.do(ExplainWait())

    def receive_pause(self, kept: Any, steps: int) -> None:
        record = self.record
        if record.wish != "run":
            if record.makes_checkpoints:
                self.save(SaveCheckpoint(kept, steps, then_run=False))
            self.pause()
            self.do(ShareState())
            return
        # The controller paused the job for a checkpoint. The job runs on while the checkpoint is written. Only if the checkpoint
        # before this one is still being written, the job waits until this one is written.
        waits = bool(record.saves) and record.makes_checkpoints
        if record.makes_checkpoints:
            self.save(SaveCheckpoint(kept, steps, then_run=waits))
        if not waits:
            self.continue_running()

    def pause(self) -> None:
        if self.record.state != "paused":  # a pending job may have been reported already
            self.put(state="paused")
            self.report("paused")

    def continue_running(self) -> None:
        if self.record.wish == "run":
            self.do(TellController(Wished(self.record.job, "run")))

    # -- saving and ending ------------------------------------------------------------------------------------------------------

    def save(self, one: SaveCheckpoint | SaveEnd) -> None:
        if not self.record.saves:
            self.do(StartSaving())
        self.put(saves=(*self.record.saves, one))

    def leave(self, one: SaveEnd) -> None:
        if not self.record.leaving:
            self.put(leaving=True)
            self.save(one)

    def receive_save(self, event: CheckpointMade | StateFetched) -> None:
        had_ended = self.record.has_ended
        one, *others = self.record.saves
        if isinstance(event, CheckpointMade):
            kind: EventName = "checkpointed" if event.error is None else "checkpoint_failed"
            self.do(Report(kind, event.steps, event.note))
            if isinstance(one, SaveEnd):
                self.put(saves=(replace(one, error=one.error or event.error), *others))
                return
            self.put(saves=tuple(others))
            if one.then_run and not had_ended:
                self.continue_running()
        else:
            assert isinstance(one, SaveEnd)
            self.put(saves=tuple(others))
            if not had_ended:
                self.leave_with(one, event)
        if had_ended and self.record.is_over:
            self.do(ReleaseFolder())

    def leave_with(self, one: SaveEnd, event: StateFetched) -> None:
        """End the job, or wait for its last callback, now that its last state is fetched or cannot be fetched."""
        error, note = one.error, one.note
        if event.error is not None:
            if one.outcome == "cancelled" and not self.record.joined:
                note = f"cancelled before its first step; {event.error}"
            else:
                error = error or event.error
        if error is None and one.outcome == "finished":
            self.do(StopFeed())
            self.put(ending=Ending(event.state, note))
            self.end_if_called_back()
        else:
            self.end("failed" if error is not None else one.outcome, event.state, error, note)

    def end_if_called_back(self) -> None:
        """If all steps are done, end the job once its last callback has returned, or if it is cancelled."""
        record = self.record
        if record.ending is not None and (record.callbacks_made or record.wish == "stop"):
            outcome: Outcome = "finished" if record.error is None else "failed"
            self.end(outcome, record.ending.state, record.error, record.ending.note)

    def end(
        self, outcome: Outcome, state: Any = NO_STATE, error: BaseException | None = None, note: str | None = None
    ) -> None:  # fmt: skip
        record = self.record
        if note is None:
            note = record.note
            if error is not None and not note:
                note = f"{type(error).__name__}: {error}"
            elif outcome == "finished" and record.last is None:
                note = ""
        self.put(state=outcome, error=error, result=state, note=note, ending=None)
        self.do(Close())
        if not record.saves:
            self.do(ReleaseFolder())
        self.report(outcome, note)
        self.do(ShareState())
