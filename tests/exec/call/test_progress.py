"""A first call says what it does, on a terminal and to a user's function, and Ctrl-C ends it."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tensile_jax as tensile
from tensile_jax.exec.call import cache_hint
from tensile_jax.exec.call.cache_hint import CacheHint
from tensile_jax.progress import display
from tensile_jax.progress.display import DISPLAY
from tests.builders import batch, fresh, low_budget, sgd_step, weights
from tests.progress.terminals import terminal, visible

PHASES = {"tracing", "compiling plain jit", "planning", "compiling segments"}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is shown from its beginning on."""
    monkeypatch.setattr(display, "DELAY_S", 0.0)


@pytest.fixture
def own_handler() -> Iterator[None]:
    """Python's own handler, and nothing that Python calls during a garbage collection: it ignores a `KeyboardInterrupt` there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    yield
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGINT, before)


def test_a_first_call_on_a_terminal_shows_its_phases_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    def step(state: Any, images: Any) -> Any:
        print("traced")
        return sgd_step(state, images)

    function = tensile.jit(step, budget="70%", donate_argnums=0, progress=True)
    state, before = fresh(weights()), (sys.stdout, sys.stderr)
    with terminal(monkeypatch) as there:
        state, _ = function(state, batch())
        seen = there.read()
        print("printed after it")
        state, _ = function(state, batch())
        later = there.read()
    assert set(visible(seen)) == {"traced", ""}
    assert all(
        f"tensile: step: {words}" in seen for words in ("tracing", "compiling plain jit's step", "planning", "compiling 1 of")
    )
    assert later == "printed after it\n"
    assert (sys.stdout, sys.stderr) == before


def test_without_a_terminal_each_phase_is_a_line_if_that_is_wanted(capsys: pytest.CaptureFixture[str], at_once: None) -> None:
    tensile.jit(sgd_step, budget="70%", donate_argnums=0, progress=True)(fresh(weights()), batch())
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["tensile: sgd_step: tracing", "tensile: sgd_step: compiling plain jit's step, to know its peak"]
    assert "tensile: sgd_step: planning" in lines and any("compiling" in line and "segments" in line for line in lines)


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_shown_in_tests_nor_if_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, at_once: None, progress: bool | None
) -> None:
    with terminal(monkeypatch) as there:
        tensile.jit(sgd_step, budget="70%", donate_argnums=0, progress=progress)(fresh(weights()), batch())
        assert there.read() == ""


def test_a_function_is_told_all_phases(capsys: pytest.CaptureFixture[str], at_once: None) -> None:
    told: list[tuple[str, int, int]] = []
    function = tensile.jit(sgd_step, budget="70%", donate_argnums=0, progress=lambda *phase: told.append(phase))
    function(fresh(weights()), batch())
    assert {what for what, _, _ in told} == PHASES
    assert all(0 <= done <= of for _, done, of in told)
    assert ("tracing", 0, 1) == told[0] and ("tracing", 1, 1) in told
    assert capsys.readouterr().err == ""


def test_the_plan_of_shapes_is_shown_too(capsys: pytest.CaptureFixture[str], at_once: None) -> None:
    budget = low_budget(sgd_step, weights(), batch(), donate_argnums=0)
    tensile.jit(sgd_step, budget=budget, donate_argnums=0, progress=True).plan(weights(), batch())
    assert capsys.readouterr().err.splitlines() == ["tensile: sgd_step: tracing", "tensile: sgd_step: planning"]


def test_a_step_on_nnx_objects_is_shown_by_its_own_name(capsys: pytest.CaptureFixture[str], at_once: None) -> None:
    @tensile.nnx.jit(progress=True)
    def double(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(2 * x)

    double(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
    assert capsys.readouterr().err.splitlines()[0] == "tensile: double: tracing"


@pytest.mark.parametrize("progress", ["yes", 1, 0.5, ["tracing"]])
@pytest.mark.parametrize("jit", [tensile.jit, tensile.nnx.jit])
def test_another_value_is_refused_in_a_sentence(jit: Any, progress: object) -> None:
    with pytest.raises(TypeError, match=r"^progress must be True, False, None .* or a function progress\(what, done, of\), got "):
        jit(lambda x: x, progress=progress)


def test_an_error_of_the_step_removes_the_line(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    def step(x: Any) -> Any:
        DISPLAY.look()
        raise ZeroDivisionError

    with terminal(monkeypatch) as there:
        with pytest.raises(ZeroDivisionError):
            tensile.jit(step, progress=True)(jnp.ones(2))
        seen = there.read()
    assert "tensile: step: tracing" in seen and visible(seen) == [""]


def test_ctrl_c_ends_planning_at_once_and_the_next_call_plans_anew(
    monkeypatch: pytest.MonkeyPatch, at_once: None, own_handler: None
) -> None:
    """The interrupt comes while the planner computes, as from a terminal."""
    state = fresh(weights(layers=40))
    pressed: list[float] = []
    plans = display.Display.tell

    def tell(self: display.Display, what: str, done: int, of: int) -> None:
        plans(self, what, done, of)
        if what == "planning" and not pressed:
            pressed.append(0.0)
            threading.Timer(0.05, press).start()

    def press() -> None:
        pressed[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DISPLAY, "tell", tell.__get__(DISPLAY))
    function = tensile.jit(sgd_step, budget="40%", donate_argnums=0, progress=True)
    with terminal(monkeypatch) as there:
        with pytest.raises(KeyboardInterrupt):
            function(state, batch())
        assert time.perf_counter() - pressed[0] < 1.0
        assert visible(there.read()) == [""]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, _ = function(state, batch())
    assert function.plan(state, batch()).workspaces == "compiled"


# -- the hint -------------------------------------------------------------------------------------------------------------------


def test_the_cache_is_hinted_at_once_after_a_long_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_hint, "_keeps_executables", lambda: False)
    hint = CacheHint()
    hint.give("train_step", 9.0)
    assert capsys.readouterr().err == ""
    hint.give("train_step", 38.2)
    hint.give("eval_step", 50.0)
    assert capsys.readouterr().err == (
        "tensile: the first call of 'train_step' took 38 s. With JAX's compilation cache, the next process starts in a fraction "
        'of that:\n    jax.config.update("jax_compilation_cache_dir", "/a/folder/of/yours")\n'
    )


def test_no_hint_is_given_where_jax_keeps_executables(capsys: pytest.CaptureFixture[str]) -> None:
    assert jax.config.values["jax_compilation_cache_dir"]  # tests/conftest.py
    CacheHint().give("train_step", 38.2)
    assert capsys.readouterr().err == ""
