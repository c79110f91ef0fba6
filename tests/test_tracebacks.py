"""Tracebacks: the user's frames, without those of this package, in a terminal, in IPython, and as JAX's setting says."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tests.notebook import run_cells, traceback_of

PACKAGE = Path(tensile.__file__).parent
ARGUMENTS = jnp.ones((64, 64)), jnp.ones((64, 64))


def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w - 0.1 * (x.T @ (x @ w)), jnp.sum(w)


def broken_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w) @ jnp.ones(7)


def broken_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w, jax.grad(broken_loss)(w, x)


@contextmanager
def filtering(mode: str) -> Iterator[None]:
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def error_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises((Exception, KeyboardInterrupt)) as caught:
        call()
    return caught.value


def frames_of(error: BaseException) -> list[tuple[str, str]]:
    """The file and the function of each frame of the traceback, from the outermost."""
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def own_frames(error: BaseException) -> int:
    return sum(Path(file).is_relative_to(PACKAGE) for file, _ in frames_of(error))


@pytest.mark.parametrize("method", [None, "plan", "bound_us", "compare"])
def test_the_traceback_of_a_budget_that_is_too_small_ends_at_the_users_call(method: str | None) -> None:
    step = tensile.jit(train_step, budget=100)
    if method in ("bound_us", "compare"):
        step = tensile.jit(broken_step)
    error = error_of(lambda: (step if method is None else getattr(step, method))(*ARGUMENTS))
    assert own_frames(error) == 0
    if method in (None, "plan"):
        assert [name for _, name in frames_of(error)][-1] == "<lambda>"


def test_an_uncaught_budget_error_is_a_screen_of_short_lines() -> None:
    error = error_of(lambda: tensile.jit(train_step, budget=100)(*ARGUMENTS))
    printed = "".join(traceback.format_exception(error))
    text = printed[printed.index("tensile_jax.errors.BudgetTooSmall: ") :]
    lines = text.splitlines()
    assert "too small for 'train_step': the smallest that works is" in lines[0]
    assert [line for line in lines if not line.startswith("    ")][1:] == [
        "What needs it:",
        "What to do:",
        "How to read this, and what helps: tensile errors BudgetTooSmall",
    ]
    assert len(lines) < 15 and "tensile_jax/" not in printed


def test_the_frames_of_the_users_functions_stay() -> None:
    error = error_of(lambda: tensile.jit(broken_step)(*ARGUMENTS))
    names = [name for file, name in frames_of(error) if file == __file__]
    assert names[-2:] == ["broken_step", "broken_loss"] and own_frames(error) == 0


def test_errors_of_arguments_and_of_jobs_and_of_files_hide_frames(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{")
    with tensile.Runtime(budget="1GiB") as runtime:
        job = runtime.submit(broken_step, ARGUMENTS[0], [ARGUMENTS[1]], steps=1)
        failed = error_of(job.result)
        refused = error_of(lambda: runtime.submit(train_step, ARGUMENTS[0], [], steps=0))
    for error in (
        failed,
        refused,
        error_of(lambda: tensile.jit(train_step, budget="much")),
        error_of(lambda: tensile.Plan.load(file)),
        error_of(lambda: tensile.Runtime(budget="much")),
    ):
        assert own_frames(error) == 0, error
        assert error.__cause__ is None or own_frames(error.__cause__) == 0


def test_errors_of_reports_and_of_files_that_cannot_be_written_hide_frames(tmp_path: Path) -> None:
    report, plan = tensile.memory(train_step, *ARGUMENTS), tensile.jit(train_step, budget="1GiB").plan(*ARGUMENTS)
    nowhere = tmp_path / "no folder" / "file"
    for error in (
        error_of(lambda: tensile.memory(broken_step, *ARGUMENTS)),
        error_of(lambda: tensile.assert_peak(train_step, *ARGUMENTS, at_most=100)),
        error_of(lambda: tensile.max_batch(broken_step, *ARGUMENTS, batch_axis={1: 0}, budget="1GiB")),
        error_of(lambda: plan.save(nowhere)),
        error_of(lambda: plan.save_html(nowhere)),
        error_of(lambda: report.save(nowhere)),
        error_of(lambda: tensile.MemoryReport.from_json("{}")),
    ):
        assert own_frames(error) == 0, error


def test_ctrl_c_while_a_step_is_traced_or_events_are_followed_shows_the_users_frames_and_no_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(*_: Any) -> Any:
        raise KeyboardInterrupt

    traced = error_of(lambda: tensile.jit(pressed)(*ARGUMENTS))
    with tensile.Runtime(budget="1GiB") as runtime:
        job = runtime.submit(train_step, jnp.ones((64, 64)), [ARGUMENTS[1]], steps=1)
        with monkeypatch.context() as patched:
            patched.setattr(runtime._store.changed, "wait_for", pressed)
            followed = error_of(lambda: next(runtime.events()))
        job.wait()
    for error in (traced, followed):
        assert isinstance(error, KeyboardInterrupt) and own_frames(error) == 0
        assert not any("tensile_jax" in note for note in getattr(error, "__notes__", ()))


def test_where_jax_leaves_its_frames_in_this_package_does_so_too() -> None:
    with filtering("off"):
        error = error_of(lambda: tensile.jit(train_step, budget=100)(*ARGUMENTS))
    assert own_frames(error) > 5


def test_with_remove_frames_the_cause_has_all_frames() -> None:
    with filtering("remove_frames"):
        error = error_of(lambda: tensile.jit(train_step, budget=100)(*ARGUMENTS))
    assert own_frames(error) == 0
    assert error.__cause__ is not None and own_frames(error.__cause__) > 5
    assert "too small" in str(error.__cause__)


def test_in_ipython_frames_are_marked_and_the_last_one_is_the_users() -> None:
    with filtering("tracebackhide"):
        error = error_of(lambda: tensile.jit(broken_step)(*ARGUMENTS))
        refusal = error_of(lambda: tensile.jit(train_step, budget=100)(*ARGUMENTS))
    marked = [
        frame.f_code.co_filename
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_locals.get("__tracebackhide__") and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
    ]
    assert len(marked) == own_frames(error) > 5
    assert frames_of(refusal)[-1][0] == __file__


def test_a_note_says_that_frames_were_left_out_once_and_not_below_an_error_of_this_package() -> None:
    def fails(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    error = error_of(lambda: tensile.jit(fails)(jnp.ones(3)))
    assert isinstance(error, KeyError) and len(error.__notes__) == 1 and "JAX_TRACEBACK_FILTERING=off" in error.__notes__[0]
    wrong = error_of(lambda: tensile.jit(train_step, policy="fast"))  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert "tensile_jax has left its own frames out" in wrong.__notes__[0]
    assert not hasattr(error_of(lambda: tensile.jit(train_step, budget=100)(*ARGUMENTS)), "__notes__")


@pytest.mark.slow
def test_a_notebook_shows_the_users_cells_and_the_message() -> None:
    (shown,) = run_cells(NOTEBOOK)[0]
    text = traceback_of(shown)
    assert shown.ename == "BudgetTooSmall" and "tensile_jax/" not in text
    assert "----> 5 step(jnp.ones((64, 64)), 0.5)" in text
    assert "The operator 'dot_general' at Cell In[1], line 4 alone needs" in text


NOTEBOOK = """import jax.numpy as jnp
import tensile_jax as tensile

step = tensile.jit(lambda w, x: w - x * (w @ w), budget=1000)
step(jnp.ones((64, 64)), 0.5)"""
