"""An error that says that the device is out of memory gets a note of what held the memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

import tensile_jax as tensile
from tensile_jax.memory_report import out_of_memory
from tensile_jax.memory_report.out_of_memory import explain
from tests.exec.call.test_device_memory import fail_once
from tests.memory_report.small_functions import STATE, train_step

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."


class Device:
    """A device with 1 GiB, whatever it stands for."""

    id, device_kind = 3, "H200"

    def __str__(self) -> str:
        return "gpu:3"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 2**30, "bytes_in_use": 2**30 - 2**20}


def note_of(error: Exception) -> str:
    explain(error)
    (note,) = error.__notes__
    return note


def test_an_array_that_no_device_can_hold_is_explained_with_the_live_arrays() -> None:
    held = [jnp.full((3, 50_021), float(i)) for i in range(4)]
    with pytest.raises(JaxRuntimeError, match="^RESOURCE_EXHAUSTED") as failed, tensile.explain_out_of_memory():
        jnp.zeros(1 << 50)
    note = failed.value.__notes__[-1]
    assert note.startswith("What held the memory of the device:\n  4.194e+06 GiB were being allocated.\n")
    assert "tells no limit of its memory" in note
    assert "     2.29 MiB  4 arrays float32[3,50021], 586.2 KiB each" in note
    assert note.endswith("How to read this, and what helps: tensile errors RESOURCE_EXHAUSTED")
    del held


def test_the_groups_are_ordered_by_their_bytes_and_the_rest_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device()
    forms = {("float32", (i, 256), i * 1024): 2 for i in range(1, 12)} | {("int8", (7,), 7): 1}
    monkeypatch.setattr(out_of_memory, "_live_arrays", lambda: {device: forms})
    assert note_of(JaxRuntimeError(EXHAUSTED)).splitlines() == [
        "What held the memory of the device:",
        "  64 KiB were being allocated.",
        "  gpu:3 (H200) has 1 GiB: 1023 MiB are in use, and 1 MiB are free, not always in one piece.",
        "  23 arrays with 132 KiB are live on gpu:3:",
        *(f"{2 * i:>10} KiB  2 arrays float32[{i},256], {i} KiB each" for i in range(11, 3, -1)),
        "     12.01 KiB  7 arrays of 4 more forms",
        "How to read this, and what helps: tensile errors RESOURCE_EXHAUSTED",
    ]


def test_arrays_that_share_a_buffer_count_once() -> None:
    x = jnp.ones((7, 50_023))
    same = jax.device_put(x, x.sharding)
    assert same is not x and "1 array float32[7,50023]" in note_of(JaxRuntimeError(EXHAUSTED))


def test_deleted_arrays_and_those_in_host_memory_are_not_on_the_device() -> None:
    gone, away = jnp.ones((7, 50_027)), jnp.ones((7, 50_029))
    gone.delete()
    away = jax.device_put(away, away.sharding.with_memory_kind("pinned_host"))
    note = note_of(JaxRuntimeError(EXHAUSTED))
    assert "50027" not in note and "50029" not in note
    del away


def test_other_errors_pass_unchanged() -> None:
    for error in (ValueError("wrong"), JaxRuntimeError("INTERNAL: a broken device")):
        with pytest.raises(type(error)) as failed, tensile.explain_out_of_memory():
            raise error
        assert failed.value is error and not hasattr(error, "__notes__")


def test_an_error_is_explained_once() -> None:
    @tensile.explain_out_of_memory()
    def inner() -> None:
        raise JaxRuntimeError(EXHAUSTED)

    with pytest.raises(JaxRuntimeError) as failed, tensile.explain_out_of_memory():
        inner()
    assert len(failed.value.__notes__) == 1


def test_an_explanation_that_fails_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(out_of_memory, "_live_arrays", broken)
    with pytest.raises(JaxRuntimeError, match="RESOURCE_EXHAUSTED") as failed, tensile.explain_out_of_memory():
        raise JaxRuntimeError(EXHAUSTED)
    assert "asking for it failed: RuntimeError: the device is gone" in failed.value.__notes__[0]


def test_the_cause_of_an_error_of_this_package_says_what_was_being_allocated() -> None:
    error = tensile.OutOfMemory("the segment has no room")
    error.__cause__ = JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2097152 bytes.")
    assert "  2 MiB were being allocated." in note_of(error)


def test_where_plain_jit_runs_out_of_memory_in_a_planned_function_its_step_is_explained_too() -> None:
    state: Any = jax.tree.map(lambda shape: jnp.ones(shape.shape), STATE)
    step = tensile.jit(train_step, donate_argnums=0, progress=False)
    fail_once(step, EXHAUSTED, after=True)  # the state is gone, so that no other plan can help
    with pytest.raises(JaxRuntimeError, match="RESOURCE_EXHAUSTED") as failed:
        step(state, jnp.ones((256, 64)))
    note = next(note for note in failed.value.__notes__ if note.startswith("What held"))
    predicted = tensile.memory(train_step, STATE, jnp.ones((256, 64)), donate_argnums=0).predicted_peak_bytes
    assert f"'train_step' ran as plain jit, which is predicted to need {predicted / 1024:.4g} KiB: " in note
    assert "activations " in note and "small_functions.py:" in note and "budget='60%'" in note
