"""The errors for budgets that are too small: they name what needs the memory, its line in the user's code, and what helps."""

import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import Compiler

WEIGHT = np.ones((256, 256), np.float32)


def _while(w: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.tanh(c @ c), w)


def _cond(w: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.sum(w) > 0, lambda: jnp.tanh(w @ w) @ w, lambda: w)


def _callback(w: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda a: np.asarray(a) * 2, w, w)


def _ordered(w: jax.Array) -> jax.Array:
    return io_callback(lambda a: np.asarray(a) * 2, w, w, ordered=True)


def _product(w: jax.Array) -> jax.Array:
    return w @ w


def _loop(w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), w, length=200)[0]


def refusal_of(call: Callable[[], Any]) -> str:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        call()
    first, *lines, last = str(caught.value).splitlines()
    assert f"({caught.value.floor_bytes} bytes)." in first
    assert all(line == line.strip() and line.endswith(":") or line.startswith("    ") and line.endswith(".") for line in lines)
    assert [line for line in lines if line.endswith(":")] == ["What needs it:", "What to do:"]
    assert last == "How to read this, and what helps: tensile errors BudgetTooSmall"
    return caught.value.message


def test_a_budget_of_few_bytes_is_named_once() -> None:
    assert refusal_of(lambda: tensile.jit(_product, budget=1000)(jnp.asarray(WEIGHT))).startswith("budget 1000 B is too small")


@pytest.mark.parametrize("budget", ["50%", 300_000])
@pytest.mark.parametrize(
    ("inner", "operator", "remedy"),
    [
        (_while, "while", "use jax.lax.scan"),
        (_cond, "cond", "jax.numpy.where"),
        (_callback, "pure_callback", "It calls Python"),
        (_ordered, "io_callback", "It calls Python"),
        (_product, "dot_general", "smaller arrays"),
        (_loop, "scan", "open_loops=True"),
    ],
)
def test_the_operator_that_needs_most_is_named_with_its_line_and_what_would_help(
    inner: Callable[[jax.Array], jax.Array], operator: str, remedy: str, budget: Any
) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - x * inner(w), jnp.sum(w)

    line = inspect.getsourcelines(inner)[1] + 1
    function = tensile.jit(step, budget=budget, donate_argnums=0)
    for call in (function.plan, function):  # predicted, and compiled
        message = refusal_of(lambda call=call: call(jnp.asarray(WEIGHT), 0.1))
        assert f"The operator '{operator}' at test_budget.py:{line} alone needs " in message
        assert remedy in message
        assert "Arguments of the step hold 256 KiB, the largest being w (256 KiB)" in message
        assert "state_memory" not in message  # the operator reads the state, so it would not help


def test_where_plain_jit_needs_least_the_error_says_so() -> None:
    message = refusal_of(lambda: tensile.jit(_while, budget="50%", donate_argnums=0)(jnp.asarray(WEIGHT)))
    assert "    This is the peak of plain jit, and no plan needs less.\n    The operator 'while' at " in message


def test_where_arguments_and_results_need_most_the_error_says_so() -> None:
    def step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [w * 0.9 + jnp.sum(x) for w in state], jnp.sum(x)

    state, x = [jnp.asarray(WEIGHT) for _ in range(4)], jnp.ones((64, 1024))
    function = tensile.jit(step, budget=500_000, donate_argnums=0)
    message = refusal_of(lambda: function(state, x))
    assert "(1310724 bytes).\nWhat needs it:\n    This is what its arguments or its results hold when an" in message


def many_leaves(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return [jnp.tanh(x @ w) * 0.1 + jnp.sum(w) for w in state], jnp.sum(x)


@pytest.mark.parametrize("budget", [100_000, "20%"])
def test_a_large_step_whose_arguments_alone_exceed_the_budget_is_refused_without_compiling(
    budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*given: Any) -> Any:
        raise AssertionError("nothing is compiled")

    monkeypatch.setattr(Compiler, "compile", compiles)
    monkeypatch.setattr(Compiler, "begin_whole", compiles)
    state = [jnp.ones((16, 16)) for _ in range(260)]
    function = tensile.jit(many_leaves, budget=budget, donate_argnums=0)
    message = refusal_of(lambda: function(state, jnp.ones((16, 16))))
    smallest = re.search(r"the smallest that works is about .* \((\d+) bytes\)", message)
    assert smallest is not None and 261 * 1024 <= int(smallest[1]) < 600 * 1024


@pytest.mark.slow
def test_a_budget_below_the_arguments_of_thousands_of_leaves_is_refused_quickly() -> None:
    def adam(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        weights, mean, square = state
        loss, gradients = jax.value_and_grad(lambda ws: sum(jnp.sum(w * w) for w in ws) * jnp.sum(x))(weights)
        mean = [0.9 * m + 0.1 * g for m, g in zip(mean, gradients, strict=True)]
        square = [0.99 * s + 0.01 * g * g for s, g in zip(square, gradients, strict=True)]
        weights = [w - m / (jnp.sqrt(s) + 1e-8) for w, m, s in zip(weights, mean, square, strict=True)]
        return (weights, mean, square), loss

    for step, state in (
        (many_leaves, [jnp.ones((16, 16)) for _ in range(2000)]),
        (adam, tuple([jnp.ones((16, 16)) for _ in range(2000)] for _ in range(3))),
    ):
        function = tensile.jit(step, budget=1_500_000, donate_argnums=0)
        began = time.process_time()
        refusal_of(lambda function=function, state=state: function(state, jnp.ones((16, 16))))
        assert time.process_time() - began < 15  # tracing takes most of it; it was 50 before


def test_a_job_that_fits_nowhere_says_why() -> None:
    def train(w: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * _while(w), jnp.sum(w)

    with tensile.Runtime(budget=300_000) as run:
        job = run.submit(train, jnp.asarray(WEIGHT), [0.1] * 2, steps=2, name="looped")
    error = job.exception()
    assert isinstance(error, tensile.BudgetTooSmall)
    assert "The operator 'while' at test_budget.py:" in str(error) and "use jax.lax.scan" in str(error)
