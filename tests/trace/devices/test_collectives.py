"""What devices exchange for one product or reduction, on small cases that can be computed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tensile_jax.trace.avals import shard_of
from tensile_jax.trace.devices.collectives import Exchange, exchange_of
from tensile_jax.trace.program import Nested, Program
from tensile_jax.trace.reading.flatten import flatten

MESH = AbstractMesh((4, 2), ("data", "model"))
FLOAT = 4  # bytes


def _exchange(function: Any, shapes: list[tuple[int, ...]], specs: list[tuple[Any, ...]]) -> Exchange:
    """The exchange of the only equation of the function; the last spec is that of its result."""
    program = flatten(Nested(jax.make_jaxpr(function)(*[jnp.zeros(shape, int if shape[-1] == 1 else float) for shape in shapes])))
    (equation,) = program.equations
    values = [*(v for v in equation.inputs if isinstance(v, int)), *equation.outputs]
    shardings = {v: NamedSharding(MESH, PartitionSpec(*spec)) for v, spec in zip(values, specs, strict=True)}
    avals = tuple(shard_of(aval, shardings[v]) if v in shardings else aval for v, aval in enumerate(program.avals))
    local = Program(program.equations, avals, program.inputs, program.constants, program.outputs)
    return exchange_of(local, equation, shardings)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot(x, w)


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        # data parallel, forward: nothing
        ([("data",), (), ("data",)], Exchange(0, 0)),
        # both operands divided along what is summed: an all-reduce of the 8 x 32 result, 2 (n - 1) / n of it
        ([(None, "data"), ("data",), ()], Exchange(2 * 8 * 32 * FLOAT * 3 // 4, 0)),
        # FSDP: the weight is divided by the axis that divides the batch, so its 16 x 32 numbers are gathered
        ([("data",), ("data",), ("data",)], Exchange(16 * 32 * FLOAT * 3 // 4, 16 * 32 * FLOAT)),
        # tensor parallel: columns of the weight, and of the result
        ([("data",), (None, "model"), ("data", "model")], Exchange(0, 0)),
        # tensor parallel, second product: partial sums of the 2 x 32 result of each device, over 2 devices
        ([("data", "model"), ("model",), ("data",)], Exchange(2 * 2 * 32 * FLOAT // 2, 0)),
        # the gradient of a weight under FSDP: each device computes its part of the sum for all 8 rows, and keeps 2 of them
        ([(None, "data"), ("data",), ("data",)], Exchange(3 * 2 * 32 * FLOAT, 0, 4)),
        # the weight on the left: its 16 columns are gathered, and multiplied by each device's columns of the other
        ([(None, "data"), (None, "data"), (None, "data")], Exchange(8 * 16 * FLOAT * 3 // 4, 8 * 16 * FLOAT, 4)),
    ],
)
def test_a_product_exchanges_partial_sums_or_gathers_an_operand(specs: list[tuple[Any, ...]], wanted: Exchange) -> None:
    assert _exchange(_product, [(8, 16), (16, 32)], specs) == wanted


def test_a_reduction_over_a_divided_dimension_adds_partial_sums() -> None:
    exchanged = _exchange(lambda x: jnp.sum(x, axis=0), [(8, 16)], [("data",), ()])
    assert exchanged == Exchange(2 * 16 * FLOAT * 3 // 4, 0)


def test_a_reduction_over_another_dimension_exchanges_nothing() -> None:
    assert _exchange(lambda x: jnp.sum(x, axis=1), [(8, 16)], [("data",), ("data",)]) == Exchange(0, 0)


def _looked_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(table, rows, numbers, (1, 32), mode="promise_in_bounds")


def _scattered(table: jax.Array, rows: jax.Array, updates: jax.Array) -> jax.Array:
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return jax.lax.scatter_add(table, rows, updates, numbers, mode="promise_in_bounds")


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        # data parallel: every device looks its own rows up
        ([(), ("data",), ("data",)], Exchange(0, 0)),
        # a table that is divided along its rows: the 8 x 6 x 32 result is the sum of what each of two devices has
        ([("model",), (), ()], Exchange(2 * 8 * 6 * 32 * FLOAT // 2, 0)),
        # the same with a batch that another axis divides
        ([("model",), ("data",), ("data",)], Exchange(2 * 2 * 6 * 32 * FLOAT // 2, 0)),
        # a table that is divided along what is not looked up, as is the result
        ([(None, "model"), (), (None, None, "model")], Exchange(0, 0)),
        # FSDP: the axis that divides the batch divides the table, too, of which all 16 x 32 numbers are gathered
        ([("data",), ("data",), ("data",)], Exchange(16 * 32 * FLOAT * 3 // 4, 16 * 32 * FLOAT)),
        ([(None, "data"), ("data",), ("data",)], Exchange(16 * 32 * FLOAT * 3 // 4, 16 * 32 * FLOAT)),
    ],
)
def test_a_look_up_in_a_divided_table_adds_what_the_devices_have_of_it(specs: list[tuple[Any, ...]], wanted: Exchange) -> None:
    assert _exchange(_looked_up, [(16, 32), (8, 6, 1)], specs) == wanted


def test_a_look_up_in_one_table_for_each_sequence_exchanges_nothing_if_both_are_divided_alike() -> None:
    def looked_up(tables: jax.Array, rows: jax.Array) -> jax.Array:
        numbers = jax.lax.GatherDimensionNumbers(
            offset_dims=(2,), collapsed_slice_dims=(1,), start_index_map=(1,),
            operand_batching_dims=(0,), start_indices_batching_dims=(0,),
        )  # fmt: skip
        return jax.lax.gather(tables, rows, numbers, (1, 1, 32), mode="promise_in_bounds")

    assert _exchange(looked_up, [(8, 16, 32), (8, 6, 1)], [("data",), ("data",), ("data",)]) == Exchange(0, 0)


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        # data parallel: the 16 x 32 gradients of the table are added up
        ([(), ("data",), ("data",), ()], Exchange(2 * 16 * 32 * FLOAT * 3 // 4, 0)),
        # each device keeps the gradients of its 4 rows
        ([("data",), ("data",), ("data",), ("data",)], Exchange(3 * 4 * 32 * FLOAT, 0)),
        # each device has all updates, and takes those of its rows
        ([("model",), (), (), ("model",)], Exchange(0, 0)),
        # tensor parallel, along what is not looked up
        ([(None, "model"), (), (None, None, "model"), (None, "model")], Exchange(0, 0)),
    ],
)
def test_scattered_updates_that_are_divided_are_added_up(specs: list[tuple[Any, ...]], wanted: Exchange) -> None:
    assert _exchange(_scattered, [(16, 32), (8, 6, 1), (8, 6, 32)], specs) == wanted


def test_an_elementwise_operation_exchanges_nothing() -> None:
    assert _exchange(jnp.tanh, [(8, 16)], [("data",), ("data",)]) == Exchange(0, 0)
