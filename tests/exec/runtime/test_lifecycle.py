"""Events in, instructions out: small cases worked by hand, and all that can happen to a small job.

What is checked in every state is in `lifecycle_world.check` and `World.perform`, and at every end in `check_end`.
"""

import itertools
from dataclasses import replace

import pytest

from tensile_jax.exec.actor.feed_events import BatchesEnded, BatchReady, CallbacksMade, UserCodeFailed
from tensile_jax.exec.controller.messages import BatchLoaded, Wished
from tensile_jax.exec.controller.state import JobId, JobRecord, Wish
from tensile_jax.exec.runtime.lifecycle import Lifecycle, SaveEnd, step
from tensile_jax.exec.runtime.messages import (
    Admitted,
    CheckpointMade,
    Close,
    Deliver,
    Event,
    Instruction,
    JoinController,
    Lost,
    Paused,
    Planned,
    PreparationFailed,
    Preparing,
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
    UserWished,
)
from tests.exec.runtime import lifecycle_world as exploring
from tests.exec.runtime.lifecycle_world import PLAN, Broken, World, explore

A = JobId(0)
NEW = Lifecycle(A, "job", 2, makes_checkpoints=True)
ERROR = OSError("the disk is gone")


def say(life: Lifecycle, *events: Event) -> tuple[Lifecycle, list[Instruction]]:
    """The instructions that answer these events, all in one list."""
    instructions: list[Instruction] = []
    for one in events:
        life, more = step(life, one)
        instructions += more
    return life, instructions


def running(life: Lifecycle = NEW) -> Lifecycle:
    """The job, admitted, with both of its batches drawn."""
    return say(life, Submitted(""), BatchReady(0), Planned(PLAN, "", {}), BatchReady(1), Admitted())[0]


def test_a_job_is_prepared_joins_the_controller_and_is_admitted() -> None:
    life, instructions = say(NEW, Submitted("resumed at step 0"), BatchReady(0), BatchReady(1), Planned(PLAN, "one segment", {}))
    record = JobRecord(A, PLAN.memory, 1.0, 2, batches=2)
    assert instructions == [
        Report("submitted", 0, "resumed at step 0"), StartPreparing(), Report("planned", 0, "one segment", {}),
        JoinController(record),
    ]  # fmt: skip
    life, instructions = say(life, Admitted(), BatchReady(2))
    assert instructions == [Report("started", 0), ShareState(), TellController(BatchLoaded(A))]
    assert life.state == "running"


def test_each_phase_of_preparing_is_reported_once_and_the_note_says_how_far_it_is() -> None:
    phases = [
        Preparing("tracing", 0, 1), Preparing("tracing", 1, 1), Preparing("planning", 0, 2), Preparing("planning", 1, 3),
        Preparing("compiling segments", 0, 12), Preparing("compiling segments", 2, 12),
    ]  # fmt: skip
    life, instructions = say(NEW, Submitted(""), BatchReady(0), *phases)
    assert instructions[2:] == [
        Report("preparing", 0, "tracing"), Report("preparing", 0, "planning"), Report("preparing", 0, "compiling 12 segments"),
    ]  # fmt: skip
    assert (life.state, life.shown_note) == ("preparing", "compiling 3 of 12 segments")
    assert say(NEW, Submitted(""))[0].shown_note == "drawing its first batch"
    assert (
        say(NEW, Submitted(""), BatchReady(0), Preparing("waiting to be planned", 0, 1))[0].shown_note == "waiting to be planned"
    )
    life = say(life, Planned(PLAN, "", {}))[0]
    assert life.shown_note == ""
    assert say(life, Preparing("planning", 0, 1)) == (life, [])  # a running job is planned again


def test_what_is_said_of_preparing_takes_no_notes_place() -> None:
    life = say(replace(NEW, steps=9), Submitted(""), BatchReady(0), Preparing("planning", 0, 1), BatchesEnded(1))[0]
    assert life.shown_note == "its batches ended: 1 of 9 steps"
    life, instructions = say(life, UserWished("stop"), Preparing("planning", 0, 1), StateFetched("given", None))
    assert life.state == "cancelled" and not any(isinstance(one, Report) and one.kind == "preparing" for one in instructions)


def test_a_job_has_finished_once_its_state_is_saved_and_its_last_callback_has_returned() -> None:
    life, instructions = say(running(), Stepped("m1", {"loss": 1.0}), Stepped("m2", {}), Released("state", 2))
    assert instructions == [
        Report("step", 1, "", {"loss": 1.0}), Deliver(1, "m1"), Report("step", 2, "", {}), Deliver(2, "m2"), StartSaving(),
    ]  # fmt: skip
    assert life.saves == (SaveEnd("finished", "state", 2),)
    life, instructions = say(life, CheckpointMade(2, "step 2", None), StateFetched("state", None))
    assert instructions == [Report("checkpointed", 2, "step 2"), StopFeed()]
    assert life.state == "running"
    life, instructions = say(life, CallbacksMade())
    assert instructions == [Close(), ReleaseFolder(), Report("finished", 2), ShareState()]
    assert (life.state, life.result, life.error) == ("finished", "state", None)


def test_a_job_that_is_cancelled_before_it_runs_gives_back_the_state_that_it_was_given() -> None:
    life, instructions = say(NEW, Submitted(""), BatchReady(0), UserWished("stop"), Planned(PLAN, "", {}), UserWished("run"))
    assert instructions == [Report("submitted", 0), StartPreparing(), StartSaving()]
    assert life.saves == (SaveEnd("cancelled"),)
    life, instructions = say(life, StateFetched("given", None))
    assert instructions == [Close(), ReleaseFolder(), Report("cancelled", 0), ShareState()]
    assert (life.state, life.result) == ("cancelled", "given")


def test_a_checkpoint_while_the_job_runs_is_written_while_it_goes_on_and_the_next_one_waits_for_it() -> None:
    life, instructions = say(running(), Paused("one", 1))
    assert instructions == [StartSaving(), TellController(Wished(A, "run"))]
    life, instructions = say(life, Paused("two", 2))
    assert instructions == []  # one at a time, and the job waits meanwhile
    life, instructions = say(life, CheckpointMade(1, "step 1", None))
    assert instructions == [Report("checkpointed", 1, "step 1")]
    life, instructions = say(life, CheckpointMade(2, "no space", ERROR))
    assert instructions == [Report("checkpoint_failed", 2, "no space"), TellController(Wished(A, "run"))]
    assert life == running()


def test_a_pause_and_a_resume_are_told_and_a_stop_is_final() -> None:
    life, instructions = say(running(), UserWished("pause"), Paused("state", 0))
    assert instructions == [TellController(Wished(A, "pause")), StartSaving(), Report("paused", 0), ShareState()]
    assert life.state == "paused"
    life, instructions = say(life, UserWished("run"))
    assert instructions[:3] == [TellController(Wished(A, "run")), Report("resumed", 0), ShareState()]
    assert life.state == "running"
    assert say(life, UserWished("stop"), UserWished("run"))[1] == [TellController(Wished(A, "stop"))]


def test_batches_that_end_early_stop_the_job_after_the_last_of_them() -> None:
    life, instructions = say(running(replace(NEW, steps=5)), BatchesEnded(2), Stepped(None, {}), Stepped(None, {}))
    assert life.note == "its batches ended: 2 of 5 steps"
    assert instructions[-2:] == [TellController(Wished(A, "stop")), Deliver(2, None)]
    life = say(life, Released("state", 2), StateFetched("state", None), CallbacksMade())[0]
    assert (life.state, life.note) == ("finished", "its batches ended: 2 of 5 steps")


def test_user_code_that_raises_fails_the_job_with_the_state_it_had_reached() -> None:
    life, instructions = say(running(), Stepped(None, {}), UserCodeFailed(ERROR, "callback"))
    assert instructions[-1] == TellController(Wished(A, "stop"))
    life = say(life, Released("state", 1), StateFetched("state", None))[0]
    assert (life.state, life.result, life.error) == ("failed", "state", ERROR)
    assert life.note == "its callback raised OSError: the disk is gone"


def test_a_job_that_was_lost_in_the_middle_of_a_step_ends_at_once_and_its_checkpoint_is_still_made() -> None:
    life, instructions = say(running(), Paused("one", 1), Lost(ERROR, None, 1))
    assert instructions[2:] == [Close(), Report("failed", 0, "OSError: the disk is gone"), ShareState()]
    assert say(life, UserWished("pause"), Stepped(None, {}), PreparationFailed(ERROR))[1] == []
    assert say(life, CheckpointMade(1, "step 1", None))[1] == [Report("checkpointed", 1, "step 1"), ReleaseFolder()]


def test_a_job_that_was_done_when_it_was_submitted_gives_back_its_state() -> None:
    done = replace(NEW, first=2, done=2)
    life, _ = say(done, Submitted("resumed at step 2"), StateFetched("state", None), CallbacksMade())
    assert (life.state, life.result, life.note) == ("finished", "state", "its checkpoint has all 2 steps already")


# -- all that can happen ------------------------------------------------------------------------------------------------------

WISHES: tuple[tuple[Wish, ...], ...] = ((), ("stop",), ("pause",), ("pause", "run"), ("pause", "stop"))
TROUBLES = ("batches", "prepare", "waits", "launch", "batch", "process", "save", "fetch", "checkpoint")


@pytest.mark.parametrize("wishes", WISHES, ids=" ".join)
@pytest.mark.parametrize("makes_checkpoints", [True, False])
@pytest.mark.parametrize("together", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_ends_once_and_nothing_of_it_is_lost_whatever_comes_when(
    wishes: tuple[Wish, ...], makes_checkpoints: bool, together: int
) -> None:
    seen = set[str]()
    for troubles in itertools.combinations((*TROUBLES, ""), together):
        if makes_checkpoints or not {"save", "checkpoint"} & set(troubles):
            world = World(2, troubles=frozenset(troubles) - {""}, wishes=wishes)
            seen |= explore(world, 2, makes_checkpoints=makes_checkpoints)
    assert seen - {"cancelled", "paused"} == {"finished", "failed"}
    assert ("cancelled" in seen) == ("stop" in wishes)
    assert ("paused" in seen) == (wishes == ("pause",))


@pytest.mark.parametrize("batches", [0, 1])
def test_batches_that_end_early_leave_nothing_undone_whatever_comes_when(batches: int) -> None:
    for trouble in TROUBLES:
        ends = explore(World(batches, ends=True, troubles=frozenset({trouble})), 2, makes_checkpoints=True)
        assert "finished" in ends if batches else ends == {"failed"}


def test_the_check_finds_a_state_that_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(life: Lifecycle, event: Event) -> tuple[Lifecycle, list[Instruction]]:
        return (life, []) if isinstance(event, Paused) else step(life, event)

    monkeypatch.setattr(exploring, "step", forgetful)
    with pytest.raises(Broken, match="were handed over"):
        explore(World(2, troubles=frozenset({"checkpoint"}), wishes=("stop",)), 2, makes_checkpoints=True)
