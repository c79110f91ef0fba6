"""Operators that write into zeros have zeros of their own, and give the same bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core.primitives import select_and_scatter_add_p

from tensile_jax.trace import OwnZeros, Program, run_all, with_own_zeros
from tensile_jax.trace.program import Nested
from tensile_jax.trace.reading.flatten import flatten

IMAGES = jax.random.normal(jax.random.key(0), (2, 7, 8, 3))
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse,cse_barrier_expander"}  # which XLA for CPUs would drop


def pooled(x: jax.Array) -> jax.Array:
    """Rectified and pooled in padded windows that overlap, as in ResNet; all numbers of some windows are negative or equal."""
    return nn.max_pool(nn.relu(x) - 1.0, (3, 3), (2, 2), "SAME").sum(axis=(1, 2, 3))


def pooled_by_minimum(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "SAME").sum(axis=(1, 2, 3))


def gathered(x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, 3)
    several = jnp.array([0, 5, 5, 7, 0])
    return (rows[several] * rows[several + 1]).sum() * jnp.ones(len(x))


def weighted(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    """The gradient of a function of images, with its value."""
    return jax.value_and_grad(lambda x: (function(x) * jnp.arange(1.0, len(x) + 1)).sum().astype(jnp.float32))


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    return flatten(Nested(jax.make_jaxpr(function)(*args)))


def run(own: OwnZeros, program: Program, *args: Any, zero: Any | None = None) -> list[Any]:
    environment = {**program.constants, **dict(zip(program.inputs, args, strict=True)), **own.numbers(zero)}
    run_all(own.equations, environment, program.outputs)
    return [environment[v] for v in program.outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("function", "writers"),
    [(pooled, 1), (pooled_by_minimum, 1), (gathered, 1)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_results_have_the_same_bits(function: Callable[[jax.Array], jax.Array], writers: int, dtype: str) -> None:
    images = IMAGES.astype(dtype)
    program = program_of(weighted(function), images)
    own = with_own_zeros(program.equations)
    assert own.writers >= writers
    as_written = OwnZeros(tuple(program.equations), 0)
    expected = jax.jit(lambda x: run(as_written, program, x), compiler_options=KEEP_BARRIERS)(images)
    found = jax.jit(lambda x: run(own, program, x), compiler_options=KEEP_BARRIERS)(images)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def two_pools(x: jax.Array) -> jax.Array:
    return pooled(x) + pooled(2 * x)


def test_each_writer_has_a_number_that_xla_does_not_know() -> None:
    program = program_of(weighted(two_pools), IMAGES)
    own = with_own_zeros(program.equations)
    assert own.writers == 2
    barriers = [
        e for e in jax.make_jaxpr(lambda x: run(own, program, x))(IMAGES).eqns if e.primitive.name == "optimization_barrier"
    ]
    assert len(barriers) == 2
    assert barriers[1].invars == barriers[0].outvars  # so XLA does not merge them


def test_a_zero_that_has_passed_a_barrier_needs_no_other_for_the_first_writer() -> None:
    program = program_of(weighted(two_pools), IMAGES)
    own = with_own_zeros(program.equations)
    jaxpr = jax.make_jaxpr(lambda x, zero: run(own, program, x, zero=zero))(IMAGES, jnp.zeros(()))
    assert sum(e.primitive.name == "optimization_barrier" for e in jaxpr.eqns) == 1


def test_zeros_that_another_segment_makes_stay() -> None:
    program = program_of(weighted(gathered), IMAGES)
    writer = next(e for e in program.equations if e.primitive.name == "scatter-add")
    assert with_own_zeros([writer]) == OwnZeros((writer,), 0)


def test_other_numbers_than_zero_stay() -> None:
    program = program_of(lambda x: jnp.full((5, 3), 2.0).at[jnp.array([1, 1])].add(x), IMAGES[0, 0, :2])
    assert with_own_zeros(program.equations).writers == 0


def test_whether_something_is_true_is_pooled_as_jax_does() -> None:
    flags = IMAGES > 0
    gradient = jax.lax.reduce_window(IMAGES, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") > 0

    def select(source: jax.Array, operand: jax.Array) -> jax.Array:
        return select_and_scatter_add_p.bind(
            source, operand, select_prim=jax.lax.ge_p, window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1),
            padding=((0, 0),) * 4,
        )  # fmt: skip

    program = program_of(select, gradient, flags)
    own = with_own_zeros(program.equations)
    np.testing.assert_array_equal(run(own, program, gradient, flags)[0], select(gradient, flags))
