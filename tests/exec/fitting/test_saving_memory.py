"""On a CPU, segments that exceed the budget are compiled again in an order of operators that needs less memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import Compiler, Executable
from tensile_jax.exec.compiling.segment_code import SegmentCode

ROWS, WIDTH, BRANCHES = 512, 64, 16


def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """A loss of many branches, which XLA for CPUs runs at the same time."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        return sum((jnp.linalg.norm(jax.nn.softmax(x @ w) @ w.T) for w in weights), jnp.zeros(()))

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 1e-3 * g for w, g in zip(weights, gradients, strict=True)], value


def arguments() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), BRANCHES + 1)
    return [jax.random.normal(key, (WIDTH, 4 * WIDTH)) for key in keys[1:]], jax.random.normal(keys[0], (ROWS, WIDTH))


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each segment that is compiled to run: whether it saves memory."""
    seen: list[bool] = []
    compile_ = Compiler.compile

    def watched(self: Compiler, codes: Sequence[SegmentCode], *more: Any, **named: Any) -> list[Executable]:
        seen.extend(code.saves_memory for code in codes)
        return compile_(self, codes, *more, **named)

    monkeypatch.setattr(Compiler, "compile", watched)
    return seen


def test_a_plan_is_kept_whose_segments_fit_in_that_order(saving: list[bool]) -> None:
    function = tensile.jit(step, budget="60%", donate_argnums=0)
    weights, x = arguments()
    theirs, plain = arguments()[0], jax.jit(step, donate_argnums=0)
    for _ in range(4):
        weights, value = function(weights, x)
        theirs, expected = plain(theirs, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    report = function.report()
    assert report.budget_bytes is not None
    assert report.tries == 1 and report.peak_bytes <= report.budget_bytes
    assert any(saving) and not all(saving)


def test_where_the_user_chooses_the_order_no_segment_is_compiled_in_another_one(saving: list[bool]) -> None:
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"}
    function = tensile.jit(step, budget="60%", donate_argnums=0, compiler_options=options)
    function(*arguments())
    report = function.report()
    assert report.budget_bytes is not None and report.peak_bytes <= report.budget_bytes
    assert saving and not any(saving)
