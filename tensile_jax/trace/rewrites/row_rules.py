"""Follows rows through the equations of a program: which axes hold them, and what becomes of an equation in a chunk of rows.

Rows are the positions along one axis of each tensor, such as the images of a batch. A *chunk* is a part of the rows; a program
that computes one chunk after another needs less memory (`row_chunks.py`). An equation treats rows independently if each row of
its results comes from the same row of its operands. Such an equation can be evaluated for one chunk. Some other equations add
over rows (`ADDED`): their result is the sum of the results of all chunks. Each primitive that can do either has a rule here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensile_jax.trace.cost.fusion_kinds import ELEMENTWISE
from tensile_jax.trace.program import Equation, Program

ADDED = -1
"""Stands for the axis of a result that is a sum over rows."""

Axes = Mapping[Any, int]


@dataclass(frozen=True, slots=True)
class Followed:
    """What an equation does with rows: the rows' axis of each operand (None: it has no rows), and of the results.

    `params` takes the share of the rows that a chunk has, and gives the parameters of the equation for a chunk.
    """

    operands: tuple[int | None, ...]
    result: int
    params: Callable[[float], dict[str, Any]]


def follow(program: Program, e: Equation, axes: Axes) -> Followed | str | None:
    """What an equation does with rows; None if that is not known yet, a reason if it does not treat rows independently."""
    known = [axes.get(a) if isinstance(a, int) else None for a in e.inputs]
    result = next((axes[v] for v in e.outputs if v in axes), None)
    name = e.primitive.name
    rule = _RULES.get(name)
    if rule is None:
        return f"{name} is not known to treat rows independently"
    if all(axis is None for axis in known) and result is None:
        return None
    if ADDED in known:
        return "a sum over rows is used"
    return rule(program, e, known, result)


def scaled(values: Sequence[int], axis: int, part: float) -> tuple[int, ...]:
    """The values, of which that of the axis is multiplied by `part`."""
    return tuple(round(n * part) if i == axis else n for i, n in enumerate(values))


def _first(known: Sequence[int | None], result: int | None) -> int:
    """The rows' axis, where operands and result have the same one: it is known of at least one of them."""
    return next(axis for axis in (*known, result) if axis is not None)


def _elementwise(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str:
    axis = _first(known, result)
    shape = program.shape(e.outputs[0])
    shapes = [program.shape(a) for a in e.inputs]
    if any(len(own) not in (0, len(shape)) for own in shapes):
        return "operands of several ranks"
    operands = tuple(axis if own and own[axis] == shape[axis] else None for own in shapes)  # an axis of length 1 is stretched
    return Followed(operands, axis, lambda part: e.params)


def _reduction(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    axis, axes = known[0], e.params["axes"]
    if axis is None:
        return None
    if axis in axes:
        return Followed((axis,), ADDED, lambda part: e.params) if e.primitive.name == "reduce_sum" else "a reduction of rows"
    return Followed((axis,), axis - sum(a < axis for a in axes), lambda part: e.params)


def _broadcast(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    places = [int(d) for d in e.params["broadcast_dimensions"]]
    if known[0] is not None:
        result = places[known[0]]
    if result is None:
        return None
    operand = places.index(result) if result in places else None
    shape = program.shape(e.inputs[0])
    if operand is not None and shape[operand] == 1:
        operand = None
    return Followed((operand,), result, lambda part: {**e.params, "shape": scaled(e.params["shape"], result, part)})


def _reshape(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    old, new = program.shape(e.inputs[0]), program.shape(e.outputs[0])
    if e.params.get("dimensions") is not None or not old or not new:
        return "a reshape that moves axes"
    axis = known[0] if known[0] is not None else result
    if axis is None:
        return None
    if axis != 0 or (old[0] % new[0] and new[0] % old[0]):
        return "a reshape of rows"
    return Followed((0,), 0, lambda part: {**e.params, "new_sizes": scaled(e.params["new_sizes"], 0, part)})


def _squeeze(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    gone = {int(d) for d in e.params["dimensions"]}
    left = [d for d in range(len(program.shape(e.inputs[0]))) if d not in gone]
    axis = known[0] if known[0] is not None else None if result is None else left[result]
    if axis is None:
        return None
    if axis in gone:
        return "rows are squeezed"
    return Followed((axis,), left.index(axis), lambda part: e.params)


def _transpose(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    permutation = [int(d) for d in e.params["permutation"]]
    axis = known[0] if known[0] is not None else None if result is None else permutation[result]
    return None if axis is None else Followed((axis,), permutation.index(axis), lambda part: e.params)


def _product(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    contracted, batch = e.params["dimension_numbers"]
    ranks = [len(program.shape(a)) for a in e.inputs]
    free = [[d for d in range(rank) if d not in (*c, *b)] for rank, c, b in zip(ranks, contracted, batch, strict=True)]
    count = len(batch[0])
    for side in (0, 1):
        axis = known[side]
        if axis is None:
            continue
        other: list[int | None] = [None, None]
        other[side] = axis
        for kind in (contracted, batch):
            if axis in kind[side]:
                other[1 - side] = int(kind[1 - side][list(kind[side]).index(axis)])
        if axis in contracted[side]:
            out = ADDED
        elif axis in batch[side]:
            out = list(batch[side]).index(axis)
        else:
            out = count + (len(free[0]) if side else 0) + free[side].index(axis)
        return Followed((other[0], other[1]), out, lambda part: e.params)
    if result is not None and result >= count:  # the product that the region begins with: rows are those of its left operand
        place = result - count
        if place < len(free[0]):
            return Followed((free[0][place], None), result, lambda part: e.params)
        return Followed((None, free[1][place - len(free[0])]), result, lambda part: e.params)
    return None


def _convolution(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    numbers = e.params["dimension_numbers"]
    images, features = int(numbers.lhs_spec[0]), int(numbers.lhs_spec[1])
    of_kernel, out = int(numbers.rhs_spec[1]), int(numbers.out_spec[0])
    if known[0] == features or known[1] == of_kernel:  # the gradient of a kernel: a sum over images
        added = e.params["feature_group_count"] == 1
        return Followed((features, of_kernel), ADDED, lambda part: e.params) if added else "rows in groups of features"
    if known[0] is None and known[1] is None and result != out:
        return None
    if known[0] not in (None, images) or known[1] is not None or e.params["batch_group_count"] != 1:
        return "a convolution across rows"
    return Followed((images, None), out, lambda part: e.params)


def _window(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    axis = _first(known, result)
    alone = e.params["window_dimensions"][axis] == 1 and e.params["window_strides"][axis] == 1
    spread = [e.params[name][axis] for name in ("base_dilation", "window_dilation") if name in e.params]
    if not alone or any(by != 1 for by in spread) or tuple(e.params["padding"][axis]) != (0, 0):
        return "a window across rows"
    return Followed((axis,) * len(e.inputs), axis, lambda part: e.params)


def _padding(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    axis = _first(known, result)
    if tuple(e.params["padding_config"][axis]) != (0, 0, 0):
        return "padded rows"
    return Followed((axis, None), axis, lambda part: e.params)


def _pieces(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    axis = _first(known, result)
    if axis == e.params["dimension" if e.primitive.name == "concatenate" else "axis"]:
        return "rows are joined or split"
    return Followed((axis,) * len(e.inputs), axis, lambda part: e.params)


def _part(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    axis = _first(known, result)
    if program.shape(e.inputs[0])[axis] != program.shape(e.outputs[0])[axis]:
        return "a slice of rows"
    return Followed((axis,), axis, lambda part: {**e.params, "limit_indices": scaled(e.params["limit_indices"], axis, part)})


def _gather(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    numbers = e.params["dimension_numbers"]
    batches = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    axis = next((pair for pair in batches if pair[0] == known[0] or pair[1] == known[1]), None)
    if known[0] is None and known[1] is None:
        return None
    if axis is None:
        return "a gather across rows"
    rank = len(program.shape(e.outputs[0]))
    of_indices = [d for d in range(rank) if d not in numbers.offset_dims]  # the result's axes that are those of the indices
    return Followed((int(axis[0]), int(axis[1])), of_indices[axis[1]], lambda part: e.params)


def _scatter(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> Followed | str | None:
    numbers = e.params["dimension_numbers"]
    operand = known[0] if known[0] is not None else result
    batches = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    axis = next((pair for pair in batches if pair[0] == operand or pair[1] == known[1]), None)
    if operand is None and known[1] is None:
        return None
    if axis is None:
        return "a scatter across rows"
    rank = len(program.shape(e.inputs[2]))
    of_indices = [d for d in range(rank) if d not in numbers.update_window_dims]
    return Followed((int(axis[0]), int(axis[1]), of_indices[axis[1]]), int(axis[0]), lambda part: e.params)


_RULES: dict[str, Callable[[Program, Equation, Sequence[int | None], int | None], Followed | str | None]] = {
    **dict.fromkeys(ELEMENTWISE - {"optimization_barrier", "sharding_constraint"}, _elementwise),
    "argmax": _reduction,
    "argmin": _reduction,
    "broadcast_in_dim": _broadcast,
    "concatenate": _pieces,
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "gather": _gather,
    "pad": _padding,
    "reduce_and": _reduction,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "reduce_or": _reduction,
    "reduce_prod": _reduction,
    "reduce_sum": _reduction,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "reshape": _reshape,
    "scatter-add": _scatter,
    "select_and_scatter_add": _window,
    "slice": _part,
    "split": _pieces,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
LIGHT = _RULES.keys() - {"conv_general_dilated", "dot_general"}
