"""The line of the user's code that an operator comes from."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tensile_jax.trace import TracedStep, trace_step


def traced(step: Callable[..., Any], *args: Any) -> TracedStep:
    return trace_step(jax.jit(step), step, args, {})


def lines_of(step: TracedStep, primitive: str) -> set[str]:
    return {step.source_of(op.id) for op in step.graph.operators if op.primitive == primitive}


def here(above: int) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"test_source_lines.py:{frame.f_back.f_lineno - above}"


@pytest.mark.smoke
def test_an_operator_stands_at_the_line_of_the_user_that_made_it() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(w @ x))

    where = here(2)
    step = traced(jax.grad(loss), jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert lines_of(step, "dot_general") == {where}  # that of the backward pass, too
    assert lines_of(step, "exp") == {where}


def _sorted(x: jax.Array) -> jax.Array:
    return jnp.sort(x) + jnp.sin(x)


def test_an_operator_in_a_function_that_jax_has_traced_before_stands_where_it_is_called() -> None:
    jnp.sort(jnp.ones(4))
    step = traced(lambda x: jnp.sort(x), jnp.ones(4))
    assert lines_of(step, "sort") == {here(1)}
    own = jax.jit(_sorted)
    own(jnp.ones(4))
    step = traced(lambda x: own(x) * 2, jnp.ones(4))
    line = _sorted.__code__.co_firstlineno + 1
    assert lines_of(step, "sort") == {f"test_source_lines.py:{line}"} == lines_of(step, "sin")


def test_operators_of_a_library_stand_where_the_user_calls_it() -> None:
    optimizer = optax.adam(0.1)
    w = jnp.ones(4)
    state = optimizer.init(w)
    step = traced(lambda g, s: optimizer.update(g, s), w, state)
    assert lines_of(step, "sqrt") == {here(1)}


def test_operators_in_opened_and_in_split_loops_have_lines() -> None:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ x), None

    def loss(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(body, jnp.ones((128, 128)), xs)[0].sum()

    step = traced(loss, jnp.ones((3, 128, 128)))
    assert step.program.opened == 1
    assert lines_of(step, "dot_general") == {here(7)}
    step = traced(loss, jnp.ones((200, 128, 128)))
    assert lines_of(step, "scan") == {here(6)}


def test_the_line_is_no_part_of_the_fingerprint() -> None:
    first = traced(lambda x: jnp.sin(x), jnp.ones(4))
    second = traced(lambda x: jnp.sin(x), jnp.ones(4))
    assert lines_of(first, "sin") != lines_of(second, "sin")
    assert first.graph.fingerprint == second.graph.fingerprint
    assert first.graph == second.graph


def test_what_this_package_adds_to_a_step_has_no_line() -> None:
    step = traced(lambda x: (x, x), jnp.ones(4))
    assert {step.source_of(op.id) for op in step.graph.operators} == {""}
