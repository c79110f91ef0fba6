"""Ctrl-C in a training loop: the state is never lost, and the loop ends."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tests.builders import batch, fresh, kinds_of, numbers, planned, sgd_step, weights, wrap_launches


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def step(fast_link: str) -> tensile.PlannedFunction:
    function = planned(sgd_step, (weights(), batch()), part=0.5, device_profile=fast_link, donate_argnums=0)
    assert {"swap_out", "swap_in"} <= kinds_of(function.plan(weights(), batch()))
    return function


def interrupt(step: tensile.PlannedFunction, launches: dict[int, int]) -> None:
    """Send SIGINT `launches[n]` times right before the n-th launch from now on."""
    reached = [0]

    def wrap(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            for _ in range(launches.get(reached[0], 0)):
                signal.raise_signal(signal.SIGINT)
            reached[0] += 1
            return call(*values)

        return launch

    wrap_launches(step, wrap)


def train_until_interrupted(step: tensile.PlannedFunction) -> tuple[Any, int]:
    """The state that a training loop held when the interrupt ended it, and how many steps it had done."""
    state, done = fresh(weights()), 0
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            state, _ = step(state, batch())
            done += 1
    assert alive(state)
    return state, done


def wait_for_the_interrupt() -> None:
    for _ in range(1000):
        signal.sigtimedwait([], 0.05)  # sleeps, in pieces; the interrupt ends it


def alive(tree: Any) -> bool:
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def expect_steps(state: Any, count: int) -> None:
    """`state` is that of `count` steps with plain jit."""
    wanted = weights()
    for _ in range(count):
        wanted, _ = jax.jit(sgd_step)(wanted, batch())
    for a, b in zip(numbers(state), numbers(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_one_interrupt_ends_a_loop_after_the_running_step_wherever_it_comes(step: tensile.PlannedFunction) -> None:
    launches = len(step.plan(weights(), batch()).segments)
    for at in range(launches, 2 * launches):  # in the second step
        interrupt(step, {at: 1})
        state, done = train_until_interrupted(step)
        assert done in (2, 3)  # the third only if it took more than ten milliseconds to begin
        expect_steps(state, done)


def test_an_interrupt_in_the_last_step_comes_after_it(step: tensile.PlannedFunction) -> None:
    interrupt(step, {1: 1})
    results = None
    with pytest.raises(KeyboardInterrupt):
        results = step(fresh(weights()), batch())
        wait_for_the_interrupt()
    assert results is not None, "the state was lost: it was donated, and the new one never returned"
    expect_steps(results[0], 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    state, _ = step(results[0], batch())
    assert alive(state)


def test_two_interrupts_within_a_step_lose_nothing_and_count_as_one(step: tensile.PlannedFunction) -> None:
    interrupt(step, {0: 1, 1: 1})
    state, done = train_until_interrupted(step)
    expect_steps(state, done)
    state, _ = step(state, batch())  # no second interrupt is left
    expect_steps(state, done + 1)


def test_the_third_interrupt_within_a_step_does_not_wait(step: tensile.PlannedFunction) -> None:
    interrupt(step, {0: 2, 1: 1})
    results = None
    with pytest.raises(KeyboardInterrupt):
        results = step(fresh(weights()), batch())
    assert results is None


def test_a_step_that_runs_whole_is_protected_too() -> None:
    asked: list[int] = []

    def interrupted(x: Any) -> Any:
        asked.append(1)
        signal.raise_signal(signal.SIGINT)
        return x

    @tensile.jit(donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        return state + jax.pure_callback(interrupted, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert step.plan(jax.numpy.zeros(4), np.ones(4, np.float32)).whole
    state = jax.numpy.zeros(4)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            state = step(state, np.ones(4, np.float32))
            jax.block_until_ready(state)
    assert alive(state)
    assert np.asarray(state).tolist() == [len(asked)] * 4


def test_a_handler_of_the_users_own_is_called_once_the_results_are_there(step: tensile.PlannedFunction) -> None:
    heard: list[bool] = []
    returned: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(bool(returned)))
    interrupt(step, {1: 1})
    returned.append(step(fresh(weights()), batch()))
    step(returned[0][0], batch())
    assert heard == [True]


def test_an_interrupt_while_a_plan_is_made_comes_at_once() -> None:
    def tell(what: str, done: int, of: int) -> None:
        signal.raise_signal(signal.SIGINT)

    function = tensile.jit(sgd_step, budget="80%", donate_argnums=0, progress=tell)
    state = fresh(weights())
    with pytest.raises(KeyboardInterrupt):
        function(state, batch())
    assert alive(state)
