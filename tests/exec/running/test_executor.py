"""The executor when all goes well and when it does not: interrupts, failures, and a device that is out of memory."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.running.instructions import Launch
from tests.builders import (
    batch,
    fresh,
    kinds_of,
    numbers,
    optimizer_state,
    optimizer_step,
    planned,
    running,
    sgd_step,
    something_happened,
    weights,
    wrap_launches,
)

Wrap = Callable[[int, Callable[..., Any]], Callable[..., Any]]


def fail_once(at: int, error: BaseException) -> Wrap:
    """Raise `error` at the first launch of segment `at`."""
    left = [error]

    def wrap(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if index == at and left:
                raise left.pop()
            return call(*values)

        return launch

    return wrap


def swapping(fast_link: str, **options: Any) -> tensile.PlannedFunction:
    function = planned(sgd_step, (weights(), batch()), part=0.5, device_profile=fast_link, **options)
    assert {"swap_out", "swap_in"} <= kinds_of(function.plan(weights(), batch()))
    return function


def expect(got: Any, step: Any, *args: Any) -> None:
    for a, b in zip(numbers(got), numbers(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


# -- failures ---------------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_middle_leaves_state_that_is_not_donated_usable(fast_link: str) -> None:
    function = swapping(fast_link)
    state, x = weights(), batch()
    middle = len(function.plan(state, x).segments) // 2
    wrap_launches(function, fail_once(middle, ZeroDivisionError("a broken device")))
    with pytest.raises(ZeroDivisionError, match="a broken device"):
        function(state, x)
    assert not any(a.is_deleted() for a in (*state, x))
    expect(function(state, x), sgd_step, state, x)


def test_after_an_exception_in_the_middle_donated_state_is_gone_and_says_so(fast_link: str) -> None:
    function = swapping(fast_link, donate_argnums=0)
    state, x = fresh(weights()), batch()
    last = len(function.plan(state, x).segments) - 1
    wrap_launches(function, fail_once(last, ZeroDivisionError("a broken device")))
    with pytest.raises(ZeroDivisionError):
        function(state, x)
    assert any(a.is_deleted() for a in state)
    assert not x.is_deleted()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        function(state, x)
    expect(function(fresh(weights()), x), sgd_step, weights(), x)


# -- out of memory ----------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first segment", "middle", "last segment"])
@pytest.mark.parametrize("donate", [(0,), ()], ids=["donated", "not donated"])
def test_out_of_memory_is_survived_and_the_next_plan_needs_less(where: float, donate: tuple[int, ...]) -> None:
    optimizer = optax.sgd(0.05, momentum=0.9)
    step, state, x = optimizer_step(optimizer), optimizer_state(optimizer), batch()
    function = planned(step, (state, x), part=0.8, donate_argnums=donate)
    before = function.plan(state, x)
    assert something_happened(before)
    at = round(where * (len(before.segments) - 1))
    wrap_launches(function, fail_once(at, jax.errors.JaxRuntimeError(OUT_OF_MEMORY)))
    given = fresh(state)
    results = function(given, x)
    expect(results, step, state, x)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(results)} == {"device"}
    assert donate or not any(a.is_deleted() for a in jax.tree.leaves((given, x)))
    assert function.report().out_of_memory == 1
    again = function(results[0], x)
    expect(again, step, jax.jit(step)(state, x)[0], x)
    after = function.plan(state, x)
    assert before.budget_bytes is not None and after.budget_bytes is not None
    assert after.budget_bytes < before.peak_bytes <= before.budget_bytes
    assert after.peak_bytes <= after.budget_bytes
    assert function.report().out_of_memory == 1


@pytest.mark.slow
def test_out_of_memory_at_the_floor_is_survived_with_the_same_plan() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=1000, donate_argnums=0)(fresh(weights()), batch())
    function = tensile.jit(sgd_step, budget=caught.value.floor_bytes, donate_argnums=0)
    state, _ = function(fresh(weights()), batch())
    before = function.plan(state, batch())
    for count in (1, 2):
        wrap_launches(function, fail_once(2, jax.errors.JaxRuntimeError(OUT_OF_MEMORY)))
        expected = jax.jit(sgd_step)(state, batch())
        state, loss = function(state, batch())
        for a, b in zip(numbers((state, loss)), numbers(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
        assert function.report().out_of_memory == count
    assert function.plan(state, batch()) == before


def test_when_even_one_segment_does_not_fit_the_error_says_what_to_do(fast_link: str) -> None:
    function = swapping(fast_link)
    state, x = weights(), batch()

    def wrap(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if index == 2:
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            return call(*values)

        return launch

    wrap_launches(function, wrap)
    with pytest.raises(tensile.OutOfMemory, match="out of memory with nothing on it but what one segment reads.*lower budget="):
        function(state, x)
    assert not any(a.is_deleted() for a in (*state, x))


def test_out_of_memory_under_a_saved_plan_is_survived_too() -> None:
    function = planned(sgd_step, (weights(), batch()), part=0.8, donate_argnums=0)
    loaded = tensile.jit(sgd_step, plan=function.plan(weights(), batch()), donate_argnums=0)
    state, _ = loaded(fresh(weights()), batch())
    wrap_launches(loaded, fail_once(1, jax.errors.JaxRuntimeError(OUT_OF_MEMORY)))
    before = loaded.plan(state, batch())
    state, _ = loaded(state, batch())
    expected = weights()
    for _ in range(2):
        expected, _ = jax.jit(sgd_step)(expected, batch())
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    loaded(state, batch())
    assert loaded.plan(state, batch()).peak_bytes < before.peak_bytes


# -- passive swap-in --------------------------------------------------------------------------------------------------------


def test_what_is_not_there_when_its_segment_comes_is_fetched_and_counted(fast_link: str) -> None:
    function = swapping(fast_link, donate_argnums=0)
    state, x = fresh(weights()), batch()
    host = jax.device_put(state[0], jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    got = function([host, *state[1:]], x)
    expect(got, sgd_step, weights(), x)
    assert function.report().passive_swap_ins == 1
    assert {w.sharding.memory_kind for w in got[0]} == {"device"}


@pytest.mark.slow
def test_a_segment_whose_executable_compiles_once_runs_wherever_its_content_stands() -> None:
    function = planned(sgd_step, (weights(12), batch()), part=0.1, donate_argnums=0)
    executor = running(function).executor
    calls = [instruction.call for instruction in executor.code if isinstance(instruction, Launch)]
    assert len(set(map(id, calls))) < len(calls)
    expect(function(fresh(weights(12)), batch()), sgd_step, weights(12), batch())


def test_a_state_that_is_updated_takes_the_place_of_its_own_old_value() -> None:
    """JAX donates by shape: moments and weights have the same, and a wrong pairing makes XLA copy all of them."""
    state = optimizer_state(optax.adam(1e-3), weights(2, 512))
    step = optimizer_step(optax.adam(1e-3))
    function = tensile.jit(step, policy="none", donate_argnums=0)
    function(fresh(state), batch(rows=8, width=512))
    plan = running(function).plan
    assert len(plan.segments) > 1
    name = {t.id: t.name.removeprefix("state").removeprefix("result[0]") for t in plan.tensors}
    assert any(segment.donated for segment in plan.segments)
    for segment in plan.segments:
        assert [name[t] for t in segment.outputs[: len(segment.donated)]] == [name[t] for t in segment.donated]
    executor = running(function).executor
    for instruction in executor.code:
        if isinstance(instruction, Launch):
            compiled: Any = instruction.call
            copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and "f32[512,512]" in line]
            assert not copies
