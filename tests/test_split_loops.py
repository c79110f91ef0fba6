"""Long loops are split into shorter ones: the same results, and what some iterations leave can be dropped under a budget."""

from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tensile_jax as tensile
from tensile_jax.exec.fitting import forms
from tensile_jax.trace.loops.treatments import Rule, find_treatments
from tensile_jax.trace.program import Nested, Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.treatment import Opened, Split, Treatment, Whole
from tests.builders import fresh, numbers, within_budget
from tests.test_loops import FORMS, STACK, WIDTH, X, descent, treated
from tests.trace.reading.test_flatten import names, run

ROWS = 64


def treated_by(rule: Rule, jaxpr: Any) -> Program:
    """The program of a jaxpr, whose loops are treated by this rule."""
    return flatten(Nested(jaxpr), find_treatments(Nested(jaxpr), rule))


@pytest.mark.smoke
@pytest.mark.parametrize("first", [2, 3, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_split_loop_gives_what_the_loop_gives(form: str, first: int) -> None:
    step = descent(FORMS[form])
    traced = jax.make_jaxpr(step)(STACK, X)

    def rule(equation: Any, may_split: bool) -> Treatment:
        length = equation.params.get("length", 0)
        return Split(((0, first), (first, length))) if may_split and first < length else Whole()

    program = treated_by(rule, traced)
    assert program.opened or (form, first) in (("nested", 2), ("nested", 3))  # two iterations of loops
    for found, expected in zip(run(program, STACK, X), jax.tree.leaves(step(STACK, X)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


def test_an_opened_loop_reads_the_stack_of_a_split_one() -> None:
    def step(w: Any, x: Any) -> Any:
        _, several = lax.scan(lambda y, _: (jnp.tanh(y @ w), y), x, None, length=6)

        def body(y: Any, part: Any) -> Any:
            jax.debug.callback(lambda v: None, y[0, 0])  # so it is not split
            return y * part, y.sum()

        return lax.scan(body, x, several, reverse=True)

    def rule(scan: Any, may_split: bool) -> Treatment:
        return Opened() if scan.params["reverse"] else Split(((0, 4), (4, 6)))

    program = treated_by(rule, jax.make_jaxpr(step)(STACK[0], X))
    assert names(program).count("scan") == 2 and program.opened == 2
    for found, expected in zip(run(program, STACK[0], X), jax.tree.leaves(step(STACK[0], X)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_backward_loop_that_could_be_opened_is_split_as_the_forward_loop() -> None:
    """The backward pass of actions by chance is no recurrence, since no gradient flows from a place to the one before."""

    def loss(w: Any, x: Any) -> Any:
        def act(place: Any, _: None) -> Any:
            chances = jax.nn.log_softmax(place @ w)
            return jnp.tanh(place + jnp.argmax(chances, -1)[:, None]), chances.max(-1)

        return jnp.mean(lax.scan(act, x, None, length=64)[1])

    step, arguments = descent(loss), weights_and_rows(4096)
    assert names(treated(jax.make_jaxpr(step)(*arguments))).count("scan") == 1
    assert lengths(step, *arguments) == [4] * 32


def repeated(w: Any, x: Any, length: int) -> Any:
    return lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=length)[0]


def recurrent(length: int) -> Any:
    """Descent on a recurrence of so many steps."""
    return descent(lambda w, x: jnp.mean(repeated(w, x, length) ** 2))


def weights_and_rows(rows: int = ROWS) -> tuple[Any, Any]:
    draw = np.random.default_rng(rows)
    return jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / 6, jnp.float32), jnp.asarray(
        draw.normal(size=(rows, WIDTH)), jnp.float32
    )


def lengths(step: Any, *arguments: Any, open_loops: bool | None = None) -> list[int]:
    """How many iterations each scan of the split step has."""
    program = treated(jax.make_jaxpr(step)(*arguments), open_loops=open_loops, splits=True)
    return [e.params["length"] for e in program.equations if e.primitive.name == "scan"]


def test_the_loops_of_both_passes_are_split_at_the_same_places_and_nothing_is_joined() -> None:
    step = recurrent(200)
    assert lengths(step, *weights_and_rows(512)) == [20] * 10 + [20] * 10
    program = treated(jax.make_jaxpr(step)(*weights_and_rows(512)), splits=True)
    assert "concatenate" not in names(program)


@pytest.mark.parametrize(("length", "expected"), [(64, [4] * 16), (97, [7] * 13 + [6]), (40, [4] * 10), (33, [3] * 11)])
def test_loops_are_split_into_equal_parts_where_that_is_possible(length: int, expected: list[int]) -> None:
    forward_and_backward = lengths(recurrent(length), *weights_and_rows(4096))
    assert forward_and_backward == expected + expected[::-1]


def lengthy(equations: int) -> Any:
    """Descent on a recurrence of 64 steps, each of so many equations."""

    def body(y: Any, _: None) -> Any:
        return reduce(lambda z, _: jnp.sin(z), range(equations), y), None

    return descent(lambda w, x: jnp.mean(lax.scan(lambda y, _: body(jnp.tanh(y @ w), None), x, None, length=64)[0] ** 2))


@pytest.mark.parametrize(("equations", "expected"), [(100, 4), (1500, 8)])
def test_a_loop_of_many_equations_is_split_into_fewer_parts_since_each_is_compiled(equations: int, expected: int) -> None:
    assert lengths(lengthy(equations), *weights_and_rows()) == [expected] * (128 // expected)


def test_a_loop_that_leaves_little_stays_whole() -> None:
    assert lengths(recurrent(200), *weights_and_rows(8)) == [200, 200]
    assert lengths(lambda w, x: repeated(w, x, 200), *weights_and_rows(512)) == [200]


def test_a_training_written_as_one_loop_stays_whole() -> None:
    def training(w: Any, batches: Any) -> Any:
        return lax.scan(lambda w, x: recurrent(4)(w, x), w, batches)

    w, x = weights_and_rows(512)
    assert 200 in lengths(training, w, jnp.stack([x] * 200))


@pytest.mark.parametrize("open_loops", [True, False])
def test_with_a_choice_of_the_user_no_loop_is_split(open_loops: bool) -> None:
    assert lengths(recurrent(40), *weights_and_rows(4096), open_loops=open_loops) == ([] if open_loops else [40, 40])


def test_a_loop_with_an_effect_stays_whole() -> None:
    def loss(w: Any, x: Any) -> Any:
        def body(y: Any, _: None) -> Any:
            jax.debug.callback(lambda v: None, y[0, 0])
            return jnp.tanh(y @ w), None

        return jnp.mean(lax.scan(body, x, None, length=64)[0] ** 2)

    assert 4 not in lengths(descent(loss), *weights_and_rows(4096))


@pytest.mark.smoke
@pytest.mark.parametrize("budget", ["50%", "20%"])
def test_a_long_recurrence_trains_in_a_part_of_its_memory(budget: str) -> None:
    step, (w, x) = recurrent(96), weights_and_rows(512 if budget == "50%" else 528)
    function, plain = tensile.jit(step, budget=budget, donate_argnums=0), jax.jit(step, donate_argnums=0)
    mine, theirs = fresh(w), fresh(w)
    for _ in range(3):
        mine, loss = function(mine, x)
        theirs, expected = plain(theirs, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(numbers(mine), numbers(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    plan = function.plan(w, x)
    assert within_budget(plan) and function.report().peak_bytes == plan.peak_bytes
    assert any("shorter ones" in note for note in plan.notes) and any(s.recomputes for s in plan.segments)
    assert not any("one operator" in note for note in plan.notes)


def test_a_loop_is_not_split_where_a_plan_without_that_is_fast() -> None:
    step, arguments = recurrent(96), weights_and_rows(544)
    plan = tensile.jit(step, budget="99%", donate_argnums=0).plan(*arguments)
    assert not any("shorter ones" in note for note in plan.notes)


def test_no_loop_is_planned_alone_whose_stacks_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("its body is planned for nothing")

    monkeypatch.setattr(forms, "_driven", fail)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda y, _: (jnp.tanh(jnp.tanh(y @ w) @ w), None), x, None, length=40)[0] ** 2)

    plan = tensile.jit(descent(loss), budget="30%", donate_argnums=0).plan(*weights_and_rows(576))
    assert any("shorter ones" in note for note in plan.notes)


def test_a_saved_plan_with_split_loops_runs_again(tmp_path: Path) -> None:
    step, (w, x) = recurrent(96), weights_and_rows(560)
    plan = tensile.jit(step, budget="40%", donate_argnums=0).plan(w, x)
    plan.save(tmp_path / "plan.json")
    function = tensile.jit(step, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    _, loss = function(fresh(w), x)
    np.testing.assert_allclose(loss, jax.jit(step)(w, x)[1], rtol=1e-6)
    assert function.plan(w, x).fingerprint == plan.fingerprint and any(s.recomputes for s in function.plan(w, x).segments)
