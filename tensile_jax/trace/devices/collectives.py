"""Estimates what devices exchange for one equation of a sharded step, from the shardings of its operands and of its result.

A sharding divides dimensions of an array among the devices along the axes of a mesh. Here each mesh axis is considered alone. A
product needs an exchange in three cases:

    - The axis divides a dimension that is summed over (both operands have it, and the result does not), in both operands. Then
      every device computes a part of the sum, and all parts are added (all-reduce).
    - The same holds, and the axis also divides a dimension of the result, as in the gradient of a weight under FSDP. Then each
      device adds only the parts of its own shard (reduce-scatter).
    - Neither holds, and the axis divides a dimension of an operand along which it does not divide the result: the result has
      this dimension undivided, or does not have it because it is summed over. Then this operand is collected first
      (all-gather), as FSDP does with weights.

For n devices along the axis and m bytes on each device after the exchange, a device sends this many bytes:

    all-reduce      2 (n - 1) / n * m
    reduce-scatter      (n - 1)     * m
    all-gather          (n - 1) / n * m

If the body of a `shard_map` is written out in the program (`reading/shard_maps.py`), its devices exchange only what its
collective operations name.

A reduction counts as a product with one operand. So does a look-up in a table whose rows are divided: each device looks up its
own rows, and gives zeros for the others. So does a scatter whose updates are divided: each device adds up its own updates. A
sharding constraint that gathers its operand is an all-gather. No exchange is counted for any other equation.

XLA may choose other exchanges, so these figures serve to compare plans, and are not a measurement. A gathered operand also lies
in device memory while the equation runs (`gathered`).

A product takes 2 * (numbers in the result) * (terms of each sum) operations. They are counted from the shapes of two shards:
the result's shard gives the numbers, and the left operand's shard gives the terms. In two cases, a device does n times as many
operations as these shapes say (`work`). Before a reduce-scatter, the device computes its part of the sum for the whole result,
not only for its own shard. If the left operand is gathered along the dimension that is summed over, each sum has n times as
many terms as the left operand's shard says. Sizes are in bytes per device.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.program import Equation, Program
from tensile_jax.trace.reading.shard_maps import Mapped


class Exchange(NamedTuple):
    """What a device sends for an equation, and what it holds and computes meanwhile.

    Attributes:
        nbytes: what it sends.
        gathered: bytes of gathered operands.
        work: times the floating-point operations that the shapes of its shards say.
    """

    nbytes: int
    gathered: int
    work: int = 1


_Labels = tuple[object, ...]
"""A name for each dimension of a value; dimensions with equal names have equal indices in an equation."""

NOTHING = Exchange(0, 0)


def exchange_of(program: Program, equation: Equation, shardings: Mapping[int, NamedSharding]) -> Exchange:
    """What the devices exchange for the equation. `program` has the shapes that a device sees."""
    name = equation.primitive.name
    if isinstance(equation.primitive, Mapped):
        return _collective(program, equation, equation.primitive.map.mesh.shape)
    values = equation.inputs
    if name == "dot_general":
        operands, result = _product_labels(program, equation)
    elif name == "gather":
        operands, result = _look_up_labels(program, equation)
    elif name.startswith("scatter"):
        operands, result = _scatter_labels(program, equation)
        values = equation.inputs[2:]  # the updates
    elif name.startswith("reduce_") and "axes" in equation.params:
        labels = tuple(range(len(program.shape(equation.inputs[0]))))
        operands, result = [labels], tuple(d for d in labels if d not in set(equation.params["axes"]))
    elif name == "sharding_constraint":
        labels = tuple(range(len(program.shape(equation.inputs[0]))))
        operands, result = [labels], labels
    else:
        return NOTHING
    values = values[: len(operands)]
    placed = [_axes_by_label(v, labels, shardings) for v, labels in zip(values, operands, strict=True)]
    there = _axes_by_label(equation.outputs[0], result, shardings)
    mesh = next((shardings[v].mesh.shape for v in equation.outputs if v in shardings), {})
    made = nbytes_of(program.avals[equation.outputs[0]])
    table = values[0] if name == "gather" else None
    small_table = isinstance(table, int) and nbytes_of(program.avals[table]) < made  # each device looks up in the whole table
    sent = gathered = 0
    work = 1
    for axis in sorted({axis for of in placed for axis in of}):
        count = mesh.get(axis, 1)
        labels = [of.get(axis) for of in placed]
        summed = [label for label in labels if label is not None and label not in result]
        if summed and len(summed) == len(labels) and len(set(summed)) == 1 and not (axis in there and small_table):
            if axis in there:
                sent += made * (count - 1)
                work *= count
            else:
                sent += 2 * made * (count - 1) // count
            continue
        for v, label in zip(values, labels, strict=True):
            if label is not None and there.get(axis) != label and isinstance(v, int):
                whole = nbytes_of(program.avals[v]) * count
                sent += whole * (count - 1) // count
                gathered += whole
        if labels[0] in summed:  # the operations of a product are counted from the sizes of the left operand
            work *= count
    return Exchange(int(sent), int(gathered), work if name == "dot_general" else 1)


_SUMS = ("psum", "psum_invariant", "pmax", "pmin")
_GATHERS = ("all_gather", "all_gather_invariant")
_SCATTERS = ("reduce_scatter", "all_to_all", "psum_scatter")


def _collective(program: Program, equation: Equation, sizes: Mapping[str, int]) -> Exchange:
    """What a collective operation of a `shard_map` exchanges; nothing for every other operation."""
    name, params = equation.primitive.name, equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    count = prod(sizes.get(axis, 1) for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))
    read = sum(nbytes_of(program.avals[v]) for v in equation.inputs if isinstance(v, int))
    made = sum(nbytes_of(program.avals[v]) for v in equation.outputs)
    if name in _SUMS:
        return Exchange(2 * made * (count - 1) // count, 0)
    if name in _GATHERS:
        return Exchange(made * (count - 1) // count, 0)
    if name in _SCATTERS:
        return Exchange(read * (count - 1) // count, 0)
    return Exchange(read, 0) if name == "ppermute" else NOTHING


def _product_labels(program: Program, equation: Equation) -> tuple[list[_Labels], _Labels]:
    """The names of the dimensions of both operands and of the result."""
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left: list[object] = [("left", d) for d in range(len(program.shape(equation.inputs[0])))]
    right: list[object] = [("right", d) for d in range(len(program.shape(equation.inputs[1])))]
    for number, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        left[a] = right[b] = ("batch", number)
    for number, (a, b) in enumerate(zip(left_summed, right_summed, strict=True)):
        left[a] = right[b] = ("summed", number)
    free = [x for d, x in enumerate(left) if d not in {*left_batch, *left_summed}]
    free += [x for d, x in enumerate(right) if d not in {*right_batch, *right_summed}]
    return [tuple(left), tuple(right)], (*(left[d] for d in left_batch), *free)


def _look_up_labels(program: Program, equation: Equation) -> tuple[list[_Labels], _Labels]:
    """The names of the dimensions of a table, and of what is looked up in it."""
    n = equation.params["dimension_numbers"]
    batches = zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True)
    ranks = len(program.shape(equation.inputs[0])), len(program.shape(equation.outputs[0]))
    table, found = _indexed_labels(ranks, n.collapsed_slice_dims, n.start_index_map, n.offset_dims, list(batches))
    return [table], found


def _scatter_labels(program: Program, equation: Equation) -> tuple[list[_Labels], _Labels]:
    """The names of the dimensions of the updates, and of the array to which they are scattered."""
    n = equation.params["dimension_numbers"]
    batches = zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True)
    ranks = len(program.shape(equation.inputs[0])), len(program.shape(equation.inputs[2]))
    array, updates = _indexed_labels(
        ranks, n.inserted_window_dims, n.scatter_dims_to_operand_dims, n.update_window_dims, list(batches)
    )
    return [updates], array


def _indexed_labels(
    ranks: tuple[int, int],
    single: Sequence[int],
    indexed: Sequence[int],
    windows: Sequence[int],
    batches: Sequence[tuple[int, int]],
) -> tuple[_Labels, _Labels]:
    """The names of the dimensions of an array into which indices point, and of the windows that are read or written there.

    The windows have the dimensions of the indices before or between their own.

    Args:
        ranks: of the array, and of the windows.
        single: the dimensions of the array that the windows do not have.
        indexed: those in which indices say where a window begins.
        windows: the windows' own dimensions, for each other dimension of the array.
        batches: dimensions that the array and the indices share.
    """
    array: list[object] = [("indexed", d) for d in range(ranks[0])]
    found: list[object] = [("row", d) for d in range(ranks[1])]
    apart = {*single, *(d for d, _ in batches)}
    for d, at in zip((d for d in range(ranks[0]) if d not in apart), windows, strict=True):
        if d not in indexed:
            found[at] = array[d]
    rows = [d for d in range(ranks[1]) if d not in set(windows)]
    for d, at in batches:
        found[rows[at]] = array[d]
    return tuple(array), tuple(found)


def _axes_by_label(v: Any, labels: _Labels, shardings: Mapping[int, NamedSharding]) -> dict[str, object]:
    """The name of the dimension that each mesh axis divides."""
    if not isinstance(v, int) or v not in shardings:
        return {}
    found: dict[str, object] = {}
    for label, axes in zip(labels, shardings[v].spec, strict=False):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            if isinstance(axis, str):
                found[axis] = label
    return found
