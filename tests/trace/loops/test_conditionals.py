"""A conditional without heavy operators is opened: its branches are computed, and results selected. If the step itself says which
branch is taken, that takes its place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tensile_jax as tensile
from tensile_jax.trace.program import Program
from tests.builders import fresh, numbers, slow_but
from tests.test_loops import run, treated

LAYERS, WIDTH = 4, 256


def weights(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    matrices = {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)}
    return matrices | {f"b{i}": jax.random.normal(key, (WIDTH,)) for i, key in enumerate(keys)}


def opened(function: Any, *args: Any) -> Program:
    return treated(jax.make_jaxpr(function)(*args))


def conditionals(program: Program) -> list[Any]:
    return [e for e in program.equations if e.primitive.name == "cond"]


def assert_equal(function: Any, *args: Any) -> None:
    """The opened program gives what the function gives, but for rounding."""
    found, expected = run(opened(function, *args), *jax.tree.leaves(args)), jax.tree.leaves(jax.jit(function)(*args))
    assert [a.dtype for a in found] == [b.dtype for b in expected]
    for a, b in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


RULES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam after clipping by the norm of all gradients": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "adam": lambda: optax.adam(1e-2),
    "a norm for each weight": lambda: optax.lamb(1e-2),
    "factored moments": lambda: optax.adafactor(1e-2),
    "sgd after adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2, momentum=0.9)),
    "all parameters as one": lambda: optax.flatten(optax.adam(1e-2)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", slow_but(RULES, "adam after clipping by the norm of all gradients"))
@pytest.mark.parametrize("finite", [True, False])
def test_an_update_that_may_be_refused_is_opened(name: str, finite: bool) -> None:
    optimizer = optax.apply_if_finite(RULES[name](), 3)
    params, gradients = weights(), weights(1)
    if not finite:
        gradients["b1"] = gradients["b1"].at[3].set(jnp.inf)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        return optimizer.update(gradients, state, params)

    state = optimizer.init(params)
    program = opened(update, gradients, state, params)
    assert program.opened == 1 and not conditionals(program)
    assert_equal(update, gradients, state, params)


def test_the_branch_of_an_index_is_selected_and_what_all_give_is_not() -> None:
    def step(index: Any, x: Any, y: Any) -> Any:
        def brighter(x: Any, y: Any) -> Any:
            return jnp.log1p(jnp.exp(x)), y, jnp.sum(x)

        return lax.switch(index, [lambda x, y: (x, y, 0.0), brighter, lambda x, y: (x + 1, y, 1.0)], x, y)

    x = jnp.linspace(-2, 2, 50)
    program = opened(step, 0, x, x + 1)
    assert not conditionals(program)
    assert sum(e.primitive.name == "select_n" and len(e.inputs) == 4 for e in program.equations) == 2
    for index in (-1, 0, 1, 2, 5):
        assert_equal(step, jnp.int32(index), x, x + 1)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_are_selected(implementation: str) -> None:
    def step(ok: Any, key: Any, other: Any, x: Any) -> Any:
        return lax.cond(ok, lambda key, other, x: (key, x), lambda key, other, x: (other, -x), key, other, x)

    keys = jax.random.key(3, impl=implementation), jax.random.key(4, impl=implementation)
    assert not conditionals(opened(step, True, *keys, jnp.ones(5)))
    for ok in (True, False):
        assert_equal(step, ok, *keys, jnp.ones(5))


def test_a_conditional_in_a_branch_is_opened_with_it() -> None:
    def step(ok: Any, small: Any, x: Any) -> Any:
        return lax.cond(ok, lambda x: lax.cond(small, jnp.sin, jnp.cos, x), lambda x: x * 2, x)

    x = jnp.arange(6.0)
    program = opened(step, True, True, x)
    assert program.opened == 2 and not conditionals(program)
    for ok in (True, False):
        for small in (True, False):
            assert_equal(step, ok, small, x)


def test_a_conditional_in_an_opened_loop_is_opened() -> None:
    def step(x: Any, matrices: Any) -> Any:
        def body(x: Any, matrix: Any) -> Any:
            x = jnp.tanh(x @ matrix)
            return lax.cond(jnp.sum(x) > 0, lambda x: x * 1.5, lambda x: x - 1, x), None

        return lax.scan(body, x, matrices)[0]

    x, matrices = jax.random.normal(jax.random.key(0), (256, 64)), jax.random.normal(jax.random.key(1), (4, 64, 64))
    program = opened(step, x, matrices)
    assert program.opened == 5 and not conditionals(program)
    assert len({e.position for e in program.equations if e.primitive.name == "select_n"}) == 1
    assert_equal(step, x, matrices)


def printing(x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return x


STAYS: dict[str, Callable[[Any, Any], Any]] = {
    "a branch multiplies matrices": lambda ok, x: lax.cond(ok, lambda x: x @ x, lambda x: x, x),
    "a branch prints": lambda ok, x: lax.cond(ok, printing, lambda x: x, x),
    "much is read for a small result": lambda ok, x: lax.cond(ok, lambda x: jnp.sum(x * x), lambda x: jnp.float32(0), x),
    "of many branches one is computed": lambda ok, x: lax.switch(
        ok.astype(jnp.int32), [lambda x, i=i: jnp.sin(x * i) for i in range(5)], x
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_conditional_stays_whole_where(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    step, x = STAYS[name], jax.random.normal(jax.random.key(0), (64, 64))
    program = opened(step, jnp.array(True), x)
    assert program.opened == 0 and len(conditionals(program)) == 1
    function = tensile.jit(step, budget=2**40)
    for ok in (True, False):
        np.testing.assert_array_equal(function(jnp.array(ok), x), jax.jit(step)(jnp.array(ok), x))
    capfd.readouterr()


CAPTURED = jax.device_put(np.array(True))
KNOWN: dict[str, Callable[[], Any]] = {
    "a number": lambda: True,
    "an array": lambda: jnp.array(True),
    "a captured array": lambda: CAPTURED,
    "what is compared with one": lambda: (CAPTURED.astype(jnp.int32) > 0) & ~jnp.array(False),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", KNOWN)
def test_a_branch_that_is_known_to_be_taken_takes_the_place_of_the_conditional(name: str) -> None:
    def step(x: Any) -> Any:
        return lax.cond(KNOWN[name](), lambda x: x @ x, lambda x: jnp.linalg.inv(x), x)

    x = jax.random.normal(jax.random.key(0), (8, 8))
    program = opened(jax.jit(step), x)
    assert [e.primitive.name for e in program.equations if e.primitive.name in ("cond", "lu", "dot_general")] == ["dot_general"]
    assert_equal(step, x)


def test_a_condition_of_many_arrays_is_not_followed_through_all_of_them() -> None:
    def step(arrays: Any, x: Any) -> Any:
        ok = jnp.array(True)
        for array in arrays:
            ok = ok & jnp.all(jnp.isfinite(array))
        return lax.cond(ok, jnp.sin, jnp.cos, x)

    x = jnp.arange(8.0)
    assert_equal(step, [x + i for i in range(600)], x)


@pytest.mark.parametrize("index, taken", [(-1, 0), (1, 1), (9, 2)])
def test_an_index_beyond_the_branches_takes_the_nearest(index: int, taken: int) -> None:
    def step(x: Any) -> Any:
        return lax.switch(jnp.int32(index), [lambda x: x + 1, lambda x: x * 5, lambda x: x - 7], x)

    x = jnp.arange(4.0)
    program = opened(jax.jit(step), x)
    assert [e.primitive.name for e in program.equations] == [["add", "mul", "sub"][taken]]
    np.testing.assert_array_equal(run(program, x)[0], [x + 1, x * 5, x - 7][taken])


TRAININGS = ["every second step, if finite", "if finite", "every second step"]


@pytest.mark.parametrize("name", slow_but(TRAININGS, TRAININGS[0]))
def test_a_training_whose_updates_may_be_refused_needs_little_memory(name: str) -> None:
    rule: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    if "second" in name:
        optimizer: Any = optax.MultiSteps(rule, 2, should_skip_update_fn=optax.skip_not_finite if "finite" in name else None)
    else:
        optimizer = optax.apply_if_finite(rule, 2)

    def loss_of(params: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = jnp.tanh(x @ params[f"w{i}"] / 16 + params[f"b{i}"])
        return jnp.mean(x**2)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    state = weights(), optimizer.init(weights())
    batches = [jax.random.normal(jax.random.key(i), (1024, WIDTH)) for i in range(5)]
    if "finite" in name:
        batches[2] = batches[2].at[0, 0].set(jnp.nan)
    function = tensile.jit(step, budget="50%", donate_argnums=0)
    found, expected = fresh(state), state
    for batch in batches:
        found, loss = function(found, batch)
        expected, other = jax.jit(step)(expected, batch)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
    for a, b in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    plan = function.plan(found, batches[0])
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
