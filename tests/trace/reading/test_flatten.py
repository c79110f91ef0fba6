"""Flattening: calls are opened, what repeats or is dead goes, and not one bit of the result changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensile_jax.trace import Nested, Program, atom_key, params_key
from tensile_jax.trace.program import Immediate
from tensile_jax.trace.reading.flatten import flatten


def flat(step: Callable[..., Any], *args: Any) -> Program:
    return flatten(Nested(jax.make_jaxpr(step)(*args)))


def names(program: Program) -> list[str]:
    return [e.primitive.name for e in program.equations]


def run(program: Program, *args: Any) -> list[Any]:
    environment: dict[int, Any] = dict(zip(program.inputs, args, strict=True)) | dict(program.constants)

    def read(atom: Any) -> Any:
        return environment[atom] if isinstance(atom, int) else atom.value

    for e in program.equations:
        environment.update(zip(e.outputs, e.run([read(a) for a in e.inputs]), strict=True))
    return [read(atom) for atom in program.outputs]


X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: jax.jit(jnp.sin)(x),
        lambda x: jax.jit(jax.jit(lambda y: jnp.sin(y)))(x),
        lambda x: jax.checkpoint(jnp.sin)(x),
        lambda x: jax.nn.relu(x),  # custom_jvp around jit
        lambda x: jax.jit(lambda y: jax.nn.silu(y), inline=True)(x),
        lambda x: jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sum(jnp.sin(z) ** 2))(y))(x),
        lambda x: jax.vmap(jax.jit(jnp.cumsum))(x),
    ],
)
def test_calls_are_opened_and_results_stay_the_same(step: Callable[..., Any]) -> None:
    program = flat(step, X)
    opened = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2", "closed_call"}
    assert opened.isdisjoint(names(program))
    np.testing.assert_allclose(run(program, X)[0], step(X), rtol=1e-6)


def test_a_custom_gradient_is_opened_after_it_was_applied() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 100,))
    program = flat(jax.grad(lambda x: f(x).sum()), X)
    np.testing.assert_array_equal(run(program, X)[0], np.full((3, 4), 100.0))
    np.testing.assert_array_equal(run(flat(f, X), X)[0], 2 * X)


def test_loops_and_branches_stay_whole() -> None:
    def step(x: Any) -> Any:
        x = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
        x = jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    program = flat(step, X)
    assert {"scan", "while", "cond"} <= set(names(program))
    np.testing.assert_array_equal(run(program, X)[0], step(X))


def test_repeated_equations_are_merged_with_the_first() -> None:
    program = flat(lambda x: jnp.sin(x) + jnp.sin(x) * jnp.sin(x), X)
    assert names(program) == ["sin", "mul", "add"]


def test_equations_that_differ_in_a_parameter_or_a_number_are_not_merged() -> None:
    program = flat(lambda x: (x.sum(axis=0), x.sum(axis=1), x + 1.0, x + 2.0, x + 0.0, x + -0.0), X)
    assert len(names(program)) == 6


def test_random_draws_from_different_keys_are_not_merged() -> None:
    def step(key: Any) -> Any:
        a, b = jax.random.split(key)
        return jax.random.normal(a, (8,)), jax.random.normal(b, (8,)), jax.random.normal(a, (8,))

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        first, second, again = run(flat(step, key), key)
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, second)


def test_what_a_checkpoint_would_compute_again_is_merged_with_the_original() -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x)))

    plain = flat(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))), X)
    assert names(flat(jax.grad(loss), X)).count("sin") == names(plain).count("sin")


def test_dead_equations_are_removed() -> None:
    def step(x: Any) -> Any:
        unused = jnp.exp(jnp.sin(x))
        del unused
        return x + 1

    assert names(flat(step, X)) == ["add"]


def test_constants_that_only_dead_equations_read_are_removed() -> None:
    big = jnp.arange(100.0)

    def step(x: Any) -> Any:
        unused = big * 2
        del unused
        return x + 1

    assert len(flat(step, X).constants) == 0


def test_an_array_captured_twice_is_one_constant() -> None:
    captured = jnp.arange(12.0).reshape(3, 4)
    program = flat(lambda x: jax.jit(lambda y: y + captured)(x) * captured, X)
    assert len(program.constants) == 1
    np.testing.assert_array_equal(run(program, X)[0], (X + captured) * captured)


SPECIAL = jnp.array([jnp.nan, -jnp.nan, 0.0, -0.0, 1.0, -1.0, jnp.inf, -jnp.inf, 1e-45, -1e-45, 3.0, -3.0])


def test_the_mask_of_a_rectifier_is_made_from_its_result_with_the_same_bits() -> None:
    def step(x: Any) -> Any:
        y = jnp.maximum(x, 0)
        return y, jnp.where(x > 0, 2.0, 5.0)

    program = flat(step, SPECIAL)
    (maximum,) = (e for e in program.equations if e.primitive.name == "max")
    (greater,) = (e for e in program.equations if e.primitive.name == "gt")
    assert greater.inputs[0] == maximum.outputs[0]
    for got, wanted in zip(run(program, SPECIAL), step(SPECIAL), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.int32), np.asarray(wanted).view(np.int32))


def test_the_gradient_of_a_rectifier_needs_nothing_but_its_result() -> None:
    program = flat(jax.grad(lambda x: jnp.sum(jax.nn.relu(jnp.sin(x)) ** 2)), X)
    sine = next(e.outputs[0] for e in program.equations if e.primitive.name == "sin")
    assert [e.primitive.name for e in program.equations if sine in e.inputs] == ["max"]


def test_a_mask_made_before_its_rectifier_keeps_its_own_input() -> None:
    def step(x: Any) -> Any:
        mask = x > 0
        return mask, jnp.maximum(jnp.where(mask, x, x * 2), 0), jnp.maximum(x, 0)

    program = flat(step, SPECIAL)
    for got, wanted in zip(run(program, SPECIAL), step(SPECIAL), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("compare", [lambda x: x >= 0, lambda x: x > 1, lambda x: 0 < -x, lambda x: 0 > x])
def test_other_comparisons_are_left_alone(compare: Callable[[Any], Any]) -> None:
    def step(x: Any) -> Any:
        return jnp.maximum(x, 0), compare(x)

    for got, wanted in zip(run(flat(step, SPECIAL), SPECIAL), step(SPECIAL), strict=True):
        np.testing.assert_array_equal(got, wanted)


def picked(x: Any) -> Any:
    return jnp.take_along_axis(x, jnp.array([[2], [0], [1]]), 1)


def sum_of_picked(x: Any) -> Any:
    return jnp.sum(picked(x)) + jnp.sum(jnp.exp(x))


def test_a_gradient_to_which_a_scatter_is_added_is_changed_in_place() -> None:
    program = flat(jax.grad(sum_of_picked), X)
    (scatter,) = (e for e in program.equations if e.primitive.name == "scatter-add")
    assert "add_any" not in names(program)
    assert next(e for e in program.equations if scatter.inputs[0] in e.outputs).primitive.name == "mul"  # the gradient of exp
    np.testing.assert_array_equal(run(program, X)[0], jax.jit(jax.grad(sum_of_picked))(X))


def test_a_scatter_that_is_read_twice_or_made_before_what_is_added_stays() -> None:
    def twice(x: Any) -> Any:
        taken, back = jax.vjp(picked, x)
        (scattered,) = back(taken)
        return scattered, jax.grad(lambda y: jnp.sum(picked(y) * taken) + jnp.sum(jnp.exp(y)))(x)

    def later(x: Any) -> Any:
        _, back = jax.vjp(lambda y: (picked(y), jnp.exp(y)), x)
        (scattered,) = back((jnp.ones((3, 1)), jnp.zeros((3, 4))))
        (other,) = back((jnp.zeros((3, 1)), jnp.cos(scattered)))
        return scattered, other

    for step in (twice, later):
        for got, wanted in zip(run(flat(step, X), X), step(X), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_every_output_is_a_variable_of_its_own() -> None:
    captured = jnp.arange(3.0)
    program = flat(lambda x: (x, x, jnp.sin(x), jnp.sin(x), 4.0, captured, captured), X)
    assert all(isinstance(atom, int) for atom in program.outputs)
    assert len(set(program.outputs)) == 7
    assert not set(program.outputs) & set(program.constants)
    for got, wanted in zip(run(program, X), (X, X, jnp.sin(X), jnp.sin(X), 4.0, captured, captured), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_scopes_of_the_user_reach_the_equations() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("outer"):
            return jax.jit(inner)(x)

    def inner(x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (sine,) = flat(step, X).equations
    assert [part for part in sine.scope.split("/") if part in ("outer", "inner")] == ["outer", "inner"]


# -- keys -------------------------------------------------------------------------------------------------------------------


def test_immediates_are_equal_by_bits_and_type() -> None:
    def key(value: Any) -> Any:
        return atom_key(Immediate(value, jax.typeof(value)))

    assert key(np.float32(1)) == key(np.float32(1))
    distinct = [key(v) for v in (np.float32(0.0), np.float32(-0.0), np.float32(1), np.int32(1), 1.0, True, np.float16(1))]
    assert len(set(distinct)) == len(distinct)
    assert key(np.float32("nan")) == key(np.float32("nan"))


def test_parameters_are_equal_by_value_where_they_have_one() -> None:
    assert params_key({"a": (1, [2]), "b": np.arange(3)}) == params_key({"b": np.arange(3), "a": (1, [2])})
    assert params_key({"a": 1}) != params_key({"a": True})
    assert params_key({"a": np.arange(3)}) != params_key({"a": np.arange(3.0)})
    assert params_key((1,)) != params_key([1])


def test_bodies_of_loops_are_equal_by_content() -> None:
    def body(scale: float) -> Any:
        def step(x: Any) -> Any:
            return jax.lax.scan(lambda c, _: (jnp.sin(c) * scale, None), x, None, length=3)[0]

        (scan,) = (e for e in flat(step, X).equations if e.primitive.name == "scan")
        return params_key(scan.params["jaxpr"])

    assert body(2.0) == body(2.0)
    assert body(2.0) != body(3.0)
