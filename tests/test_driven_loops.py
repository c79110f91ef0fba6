"""Steps with long loops: their iterations run one after another under a plan of its body, with the results of `jax.jit`."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tensile_jax as tensile
from tensile_jax.errors import PlanFileError
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.running.driven_loop import _DrivenLoop
from tensile_jax.exec.running.instructions import Launch
from tensile_jax.plan_format import Plan
from tests.builders import device_bytes, fresh, numbers, running, slow_but, weights

ITERATIONS, ROWS = 150, 1024  # more iterations than are opened
LAYERS = 5
OPTIMIZER = optax.adam(1e-3)


def loss(params: Any, x: Any) -> Any:
    y = x
    for w in params:
        y = jnp.tanh(y @ w)
    return jnp.mean((y - 0.1 * x[:, ::-1]) ** 2)


def update(state: Any, x: Any) -> Any:
    params, opt_state = state
    value, gradient = jax.value_and_grad(loss)(params, x)
    changes, opt_state = OPTIMIZER.update(gradient, opt_state)
    return (optax.apply_updates(params, changes), opt_state), value


def samples(key: Any) -> Any:
    return jnp.sin(6 * jax.random.uniform(key, (ROWS, 1)) * jnp.arange(32.0))


def on_random_batches(state: Any, key: Any) -> Any:
    """A whole training, as one step: nothing is stacked."""

    def body(carry: Any, _: Any) -> Any:
        state, key = carry
        key, own = jax.random.split(key)
        state, value = update(state, samples(own))
        return (state, key), value

    (state, _), values = lax.scan(body, (state, key), None, ITERATIONS)
    return state, values


def on_given_batches(state: Any, key: Any) -> Any:
    """The batches are stacked, the loop runs backwards, and something happens before and after it."""
    offsets = 0.1 * jax.random.normal(key, (ITERATIONS, 32))
    x = samples(key)
    state, values = lax.scan(lambda state, offset: update(state, x + offset), state, offsets, reverse=True)
    return state, (values, sum(jnp.sum(w**2) for w in state[0]))


def with_keys_and_numbers(state: Any, key: Any) -> Any:
    """Elements are keys and integers, what is carried begins as a number of Python, and parts are keys, too."""

    def body(carry: Any, given: Any) -> Any:
        (state, count), (own, i) = carry, given
        state, value = update(state, samples(own) * jnp.where(i % 2, 1.0, 0.5))
        return (state, count + 1), (value, own, i * count)

    keys = jax.random.split(key, ITERATIONS)
    (state, count), results = lax.scan(body, (state, 0), (keys, jnp.arange(ITERATIONS)))
    return state, (count, results)


def loops_in_a_loop(state: Any, key: Any) -> Any:
    """Epochs over shuffled parts of a batch: the inner loop is opened."""

    def body(carry: Any, _: Any) -> Any:
        state, key = carry
        key, own, order = jax.random.split(key, 3)
        shuffled = jax.random.permutation(order, samples(own)).reshape(2, ROWS // 2, 32)
        state, values = lax.scan(update, state, shuffled)
        return (state, key), values.mean()

    (state, _), values = lax.scan(body, (state, key), None, ITERATIONS)
    return state, values


def from_nothing(key: Any) -> Any:
    """The step makes its own state, and the last state is not returned."""
    params = weights(LAYERS)
    (params, _), values = on_random_batches((params, OPTIMIZER.init(params)), key)
    return values, params[0]


STEPS: dict[str, Callable[..., Any]] = {
    "random batches": on_random_batches,
    "given batches": on_given_batches,
    "keys and numbers": with_keys_and_numbers,
    "loops in a loop": loops_in_a_loop,
}


def beginning() -> tuple[Any, Any]:
    params = weights(LAYERS)
    return (params, OPTIMIZER.init(params)), jax.random.key(0)


def driven(step: Callable[..., Any], args: Sequence[Any], *, part: float = 1.25, **options: Any) -> tensile.PlannedFunction:
    """The step under a budget of this part of the least one that is predicted to have a plan, called once."""
    known = step, *sorted(options.items())
    if known not in _FLOORS:
        with pytest.raises(tensile.BudgetTooSmall) as refusal:
            tensile.jit(step, budget=1, **options).plan(*args)
        _FLOORS[known] = refusal.value.floor_bytes
    function = tensile.jit(step, budget=int(part * _FLOORS[known]), **options)
    function(*fresh(list(args)))
    return function


_FLOORS: dict[Any, int] = {}  # by step and options, which all tests call with arguments of the same shapes


@functools.cache
def driven_step(name: str) -> tensile.PlannedFunction:
    return driven(STEPS[name], beginning(), part=1.15 if name == "loops in a loop" else 1.25, donate_argnums=0)


def body_of(function: tensile.PlannedFunction) -> _DrivenLoop:
    executor = running(function).executor
    (found,) = [i.call for i in executor.code if isinstance(i, Launch) and isinstance(i.call, _DrivenLoop)]
    return found


@pytest.mark.parametrize("name", slow_but(STEPS, "given batches"))
def test_a_long_loop_runs_under_a_plan_of_its_body_with_the_results_of_jit(name: str) -> None:
    step, args, function = STEPS[name], beginning(), driven_step(name)
    plan = running(function).plan
    (loop,) = plan.loops
    assert loop.iterations == ITERATIONS and len(loop.plan.segments) > 1 and plan.peak_bytes <= (plan.budget_bytes or 0)
    jitted = jax.jit(step, donate_argnums=0)
    plain = peak_of(jitted.lower(*args).compile())
    assert plan.peak_bytes < 0.8 * plain
    expected, own = jitted(*fresh(args)), function(*fresh(args))
    assert jax.tree.structure(expected) == jax.tree.structure(own)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        assert a.aval == b.aval and a.sharding == b.sharding
    for a, b in zip(numbers(own), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=3e-4)


@pytest.mark.parametrize("name", slow_but(STEPS, "given batches"))
def test_what_is_live_in_every_iteration_is_what_the_plan_says(name: str) -> None:
    args, function = beginning(), driven_step(name)
    plan, body = running(function).plan, body_of(function)
    executor = body._runner.executor
    args = fresh(args)
    gc.collect()
    held = device_bytes() - sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    seen: list[int] = []
    code: list[Any] = []
    before = executor._program
    for instruction in executor.code:
        if isinstance(instruction, Launch):

            def call(*values: Any, own: Launch = instruction) -> Any:
                made = jax.block_until_ready(own.call(*values))
                seen.append(device_bytes() - held + own.workspace_bytes)
                return made

            code.append(dataclasses.replace(instruction, call=call))
        else:
            code.append(instruction)
    executor._program = dataclasses.replace(executor._program, code=tuple(code))
    function(*args)
    executor._program = before
    assert len(seen) == ITERATIONS * len(body._runner.plan.segments)
    (segment,) = [s for s in plan.segments if s.operators[0][0] == plan.loops[0].operator]
    assert max(seen) <= segment.device_bytes * 1.01
    assert max(seen) == pytest.approx(segment.device_bytes, rel=0.01)


@pytest.mark.slow
def test_what_the_caller_keeps_is_not_overwritten() -> None:
    state, key = beginning()
    function = driven(on_random_batches, (state, key))
    before = numbers(state)
    first, second = function(state, key), function(state, key)
    for a, b in zip(numbers(state), before, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(numbers(first), numbers(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_training_that_makes_its_own_state() -> None:
    key = jax.random.key(0)
    function = driven(from_nothing, (key,))
    assert running(function).plan.loops
    for a, b in zip(numbers(function(key)), numbers(jax.jit(from_nothing)(key)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=3e-4)


@pytest.mark.slow
def test_one_array_may_be_carried_twice() -> None:
    def step(w: Any, key: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            first, second, key = carry
            key, own = jax.random.split(key)
            gradient = jax.grad(loss)([first] * LAYERS, samples(own))
            return (first - 0.1 * sum(gradient), second * 0.5, key), None

        (first, second, _), _ = lax.scan(body, (w, w, key), None, ITERATIONS)
        return first, second

    args = weights(1)[0], jax.random.key(0)
    function = driven(step, args, donate_argnums=0)
    assert running(function).plan.loops
    for a, b in zip(numbers(function(*fresh(args))), numbers(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_effects_happen_once_in_each_iteration(ordered: bool) -> None:
    said: list[int] = []

    def step(state: Any, key: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            state, key = carry
            key, own = jax.random.split(key)
            state, value = update(state, samples(own))
            jax.debug.callback(lambda i: said.append(int(i)), i, ordered=ordered)
            return (state, key), value

        return lax.scan(body, (state, key), jnp.arange(ITERATIONS))

    function = driven(step, beginning(), donate_argnums=0)
    assert running(function).plan.loops
    jax.effects_barrier()
    said.clear()
    function(*fresh(beginning()))
    jax.effects_barrier()
    assert said == list(range(ITERATIONS)) if ordered else sorted(said) == list(range(ITERATIONS))


def test_a_loop_is_left_whole_if_it_fits_or_if_no_loop_is_to_be_opened() -> None:
    args = beginning()
    assert not tensile.jit(on_random_batches, budget="100%").plan(*args).loops
    with pytest.raises(tensile.BudgetTooSmall) as refusal:
        tensile.jit(on_random_batches, budget=1, open_loops=False).plan(*args)
    with pytest.raises(tensile.BudgetTooSmall) as lower:
        tensile.jit(on_random_batches, budget=1).plan(*args)
    assert lower.value.floor_bytes < 0.8 * refusal.value.floor_bytes


@pytest.mark.slow
def test_a_plan_shows_the_loop_and_can_be_saved_and_run_again(tmp_path: Path) -> None:
    args = beginning()
    function = driven(on_given_batches, args)
    plan = running(function).plan
    assert f"{ITERATIONS} iterations of" in str(plan)
    assert any("one after another" in note for note in plan.notes) and not any("one operator" in n for n in plan.notes)
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert saved == plan
    again = tensile.jit(on_given_batches, plan=saved)
    for a, b in zip(numbers(again(*args)), numbers(function(*args)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.plan(*args).peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_a_saved_plan_with_another_loop_is_refused(tmp_path: Path) -> None:
    args = beginning()
    plan = running(driven(on_random_batches, args)).plan
    (loop,) = plan.loops
    for wrong, story in [
        (dataclasses.replace(loop, iterations=0), "has 0 iterations"),
        (dataclasses.replace(loop, operator=loop.operator + 1), "not a segment by itself"),
        (dataclasses.replace(loop, plan=dataclasses.replace(loop.plan, segments=())), "has no segments"),
    ]:
        dataclasses.replace(plan, loops=(wrong,)).save(tmp_path / "plan.json")
        with pytest.raises(PlanFileError, match=story):
            Plan.load(tmp_path / "plan.json")
    other = dataclasses.replace(loop, plan=dataclasses.replace(loop.plan, fingerprint="another"))
    with pytest.raises(PlanFileError, match="another program"):
        tensile.jit(on_random_batches, plan=dataclasses.replace(plan, loops=(other,)))(*args)
    fewer = dataclasses.replace(loop, iterations=ITERATIONS - 1)
    with pytest.raises(PlanFileError, match="iterations"):
        tensile.jit(on_random_batches, plan=dataclasses.replace(plan, loops=(fewer,)))(*args)


@pytest.mark.slow
def test_state_may_rest_in_host_memory_between_iterations() -> None:
    args = beginning()
    function = driven(on_random_batches, args, donate_argnums=0, state_memory="any")
    (loop,) = running(function).plan.loops
    own, expected = function(*fresh(args)), jax.jit(on_random_batches)(*args)
    for a, b in zip(numbers(own), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=3e-4)
    assert all(leaf.sharding.memory_kind == "device" for leaf in jax.tree.leaves(own))


def test_out_of_memory_in_an_iteration_gives_the_next_ones_a_lower_plan() -> None:
    args, function = beginning(), driven_step("random batches")
    roomy = tensile.jit(on_random_batches, budget=int(1.6 * running(function).plan.peak_bytes), donate_argnums=0)
    expected = numbers(roomy(*fresh(args)))
    body = body_of(roomy)
    before, failed = body._runner.plan, []
    executor = body._runner.executor

    def once(call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if not failed:
                failed.append(True)
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes.")
            return call(*values)

        return launch

    code = [dataclasses.replace(i, call=once(i.call)) if isinstance(i, Launch) else i for i in executor.code]
    executor._program = dataclasses.replace(executor._program, code=tuple(code))
    for a, b in zip(numbers(roomy(*fresh(args))), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=3e-4)
    assert failed and body._runner.plan.peak_bytes < before.peak_bytes


def test_a_loop_that_has_no_memory_at_all_says_so() -> None:
    args = beginning()
    function = driven(on_random_batches, args, donate_argnums=0)
    body = body_of(function)

    def fails(*values: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes.")

    executor = body._runner.executor
    code = [dataclasses.replace(i, call=fails) if isinstance(i, Launch) else i for i in executor.code]
    executor._program = dataclasses.replace(executor._program, code=tuple(code))
    with pytest.raises(tensile.OutOfMemory, match="out of memory"):
        function(*fresh(args))


@pytest.mark.slow
def test_loops_in_opened_iterations_are_driven_too() -> None:
    def step(state: Any, keys: Any) -> Any:
        def epoch(state: Any, key: Any) -> Any:
            return on_random_batches(state, key)

        return lax.scan(epoch, state, keys)

    args = beginning()[0], jax.random.split(jax.random.key(1), 2)
    function = driven(step, args, donate_argnums=0, open_loops=None)
    plan = running(function).plan
    assert plan.loops
    own, expected = function(*fresh(args)), jax.jit(step)(*args)
    for a, b in zip(numbers(own), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-3)
