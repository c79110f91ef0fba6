"""Rewrites a program so that a large product and all that is computed from it are evaluated in chunks of rows.

The logits of a decoder with a large vocabulary, and their gradient, are often its largest tensors; so are the results of the
first convolutions of a network for images. What is computed from them is independent row by row, or image by image: the softmax
of a row, its loss, its gradient. So the rows can be divided into chunks that are evaluated one after another. The rewritten part
of the program is an opened loop (`reading/scans.py`) whose iterations are the chunks:

    logits = x @ W                for each chunk c:    logits_c = x[c] @ W
    loss   = f(logits, labels)                         loss_c   = f(logits_c, labels[c])
    dlogits = g(logits, labels)                        dlogits_c = g(logits_c, labels[c])
    dx, dW = dlogits @ W^T, x^T @ dlogits              dx_c = dlogits_c @ W^T,  dW = dW + x[c]^T @ dlogits_c
                                  loss, dx = concatenated

The *region* that is rewritten consists of the product (or convolution) with the largest result, of every equation that is
connected to it by tensors of at least a quarter (or else a half) as many numbers, and of all light equations between these. It is
rewritten only if each of its equations treats rows independently, or adds over them. Such a sum is then one of sums over chunks:
results agree to rounding.

The forward and the backward pass of a convolution have the rest of the network between them. The region then has several
*stretches*, each of which goes through all chunks. A later stretch takes from an earlier one what it needs chunk by chunk, so a
plan may keep that, or compute it again: one chunk at a time.

                                                       for each chunk c:    h_c = f(x[c]),  y_c = g(h_c)
    y = concatenated,  dy = the rest of the network    for each chunk c:    dW = dW + (what h_c and dy[c] give)

Rows are the positions along one axis: for a product that axis of its result that comes from the first free axis of its left
operand, for a convolution the batch. Every rule below follows that axis through an equation. Dividing tensors where a schedule
needs it is the idea of Nie et al., "TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor Splitting"
(ICDE 2022).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.cost.kinds import ELEMENTWISE
from tensile_jax.trace.program import Equation, Immediate, Program

# Not tuned.
_LARGE = (0.25, 0.5)  # of the numbers of the product: tensors with so many belong to the region; the first share that gives one
_MOST_EQUATIONS = 600  # of a region; the losses of decoders have about 30, two stages of a U-Net with group normalization 400
_MOST_PRODUCTS = 3  # of whose regions the first is taken that can be rewritten
ADDED = -1
"""In the place of an axis: the equation adds over rows."""

Axes = Mapping[Any, int]


@dataclass(frozen=True, slots=True)
class _Followed:
    """An equation of the region: the rows' axis of each operand (None: it has no rows), of its results, and its parameters.

    `params` takes the number of rows of a chunk, over all rows, and gives the parameters of the equation for a chunk.
    """

    operands: tuple[int | None, ...]
    result: int
    params: Callable[[float], dict[str, Any]]


def in_row_chunks(program: Program, chunks: int) -> Program | None:
    """The program with its largest product in so many chunks; None if it has no such region, or its rows cannot be divided so."""
    region = find_region(program)
    return None if region is None or chunks < 2 or region.rows % chunks else _rewritten(program, region, chunks)


# -- the region -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The part of a program that can be evaluated in chunks of rows.

    Attributes:
        places: of its equations, ascending.
        followed: what each of them does with rows, by place.
        axes: the rows' axis of each tensor that has rows.
        rows: how many there are.
        nbytes: the size of the largest tensor that its equations make.
    """

    places: list[int]
    followed: dict[int, "_Followed"]
    axes: dict[int, int]
    rows: int
    nbytes: int


def find_region(program: Program) -> Region | None:
    """The region of one of the largest products of the program; None if it has none."""
    equations = program.equations
    if any(e.effectful for e in equations):
        return None
    seeds = [(place, axis) for place, e in enumerate(equations) if (axis := _axis_of_rows(program, e)) is not None]
    seeds.sort(key=lambda seed: -_count(program, equations[seed[0]].outputs[0]))
    for place, axis in seeds[:_MOST_PRODUCTS]:
        for share in _LARGE:
            region = _region_of(program, place, axis, share)
            if region is not None:
                return region
    return None


def _region_of(program: Program, seed: int, axis_of_rows: int, share: float) -> Region | None:
    """The region of the product at place `seed`, the rows of whose result are along the axis; or None.

    It has the tensors with at least this share of the numbers of that result.
    """
    equations = program.equations
    product = equations[seed].outputs[0]
    large = share * _count(program, product)
    places = _connected(program, seed, large)
    if len(places) > _MOST_EQUATIONS:
        return None
    axes: dict[int, int] = {product: axis_of_rows}
    followed: dict[int, _Followed] = {}
    waiting = places
    while waiting:
        unknown: list[int] = []
        for place in waiting:
            e = equations[place]
            rule = _follow(program, e, axes)
            if rule is None:
                unknown.append(place)
                continue
            if isinstance(rule, str):
                return None
            for atom, axis in (*zip(e.inputs, rule.operands, strict=True), *((v, rule.result) for v in e.outputs)):
                if isinstance(atom, int) and axis is not None and axes.setdefault(atom, axis) != axis:
                    return None
            followed[place] = rule
        if len(unknown) == len(waiting):
            return None
        waiting = unknown
    for place in places:  # rows that were found late must have been followed everywhere, and sums are not read
        for atom, axis in zip(equations[place].inputs, followed[place].operands, strict=True):
            if isinstance(atom, int) and axes.get(atom) != axis:
                return None
    made = {v for place in places for v in equations[place].outputs}
    if any(axis != ADDED and v not in made and _count(program, v) >= large for v, axis in axes.items()):
        return None  # it would read slices of a tensor that is as large, such as the moments of a weight
    nbytes = max(nbytes_of(program.avals[v]) for v in made)
    return Region(places, followed, axes, shape_of(program.avals[product])[axis_of_rows], nbytes)


def _axis_of_rows(program: Program, e: Equation) -> int | None:
    """The axis of rows of a product's or a convolution's result; None for other equations, and if there is but one row.

    A product has rows only if the first axis of its result is the first one of its left operand.
    """
    axis: int | None = None
    if e.primitive.name == "dot_general":
        (contracted, _), (batch, _) = e.params["dimension_numbers"]
        free = [d for d in range(len(_shape(program, e.inputs[0]))) if d not in contracted]
        axis = 0 if not batch and free and free[0] == 0 else None
    elif e.primitive.name == "conv_general_dilated" and e.params["batch_group_count"] == 1:
        axis = int(e.params["dimension_numbers"].out_spec[0])
    return axis if axis is not None and _shape(program, e.outputs[0])[axis] > 1 else None


def _count(program: Program, atom: Any) -> int:
    return math.prod(shape_of(program.avals[atom])) if isinstance(atom, int) else 0


def _connected(program: Program, seed: int, large: float) -> list[int]:
    """The equations connected to the product through large tensors that equations make, and light ones between, in order."""
    made = {v for e in program.equations for v in e.outputs if _count(program, v) >= large}
    touching: dict[int, set[int]] = {}
    for place in range(len(program.equations)):
        for v in _large(program, place, made):
            touching.setdefault(v, set()).add(place)
    found, new, seen = set[int](), {seed}, set[int]()
    while new and len(found) <= _MOST_EQUATIONS:
        found |= new
        tensors = {v for place in new for v in _large(program, place, made)} - seen
        seen |= tensors
        touched = {place for v in tensors for place in touching[v]}
        new = touched - found or _light_between(program, found) - found
    return sorted(found)


def _large(program: Program, place: int, made: set[int]) -> set[int]:
    """The large tensors that an equation makes or reads."""
    e = program.equations[place]
    return {*_variables(e.inputs), *e.outputs} & made


def _variables(atoms: Iterable[Any]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


def _light_between(program: Program, found: set[int]) -> set[int]:
    """These equations, and all light ones on a way from one of them to another that passes only light ones."""
    light = [e.primitive.name in _LIGHT for e in program.equations]
    after, depends = set[int](), set[int]()
    for place, e in enumerate(program.equations):
        if place in found or (light[place] and not depends.isdisjoint(_variables(e.inputs))):
            after.add(place)
            depends.update(e.outputs)
    before, needed = set[int](), set[int]()
    for place in range(len(program.equations) - 1, -1, -1):
        e = program.equations[place]
        if place in found or (light[place] and not needed.isdisjoint(e.outputs)):
            before.add(place)
            needed.update(_variables(e.inputs))
    return after & before


# -- rules ------------------------------------------------------------------------------------------------------------------


def _follow(program: Program, e: Equation, axes: Axes) -> _Followed | str | None:
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


def _shape(program: Program, atom: Any) -> tuple[int, ...]:
    return shape_of(program.avals[atom]) if isinstance(atom, int) else ()


def _scaled(values: Sequence[int], axis: int, part: float) -> tuple[int, ...]:
    return tuple(round(n * part) if i == axis else n for i, n in enumerate(values))


def _first(known: Sequence[int | None], result: int | None) -> int:
    """The rows' axis, where operands and result have the same one: it is known of at least one of them."""
    return next(axis for axis in (*known, result) if axis is not None)


def _elementwise(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str:
    axis = _first(known, result)
    shape = _shape(program, e.outputs[0])
    shapes = [_shape(program, a) for a in e.inputs]
    if any(len(own) not in (0, len(shape)) for own in shapes):
        return "operands of several ranks"
    operands = tuple(axis if own and own[axis] == shape[axis] else None for own in shapes)  # an axis of length 1 is stretched
    return _Followed(operands, axis, lambda part: e.params)


def _reduction(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    axis, axes = known[0], e.params["axes"]
    if axis is None:
        return None
    if axis in axes:
        return _Followed((axis,), ADDED, lambda part: e.params) if e.primitive.name == "reduce_sum" else "a reduction of rows"
    return _Followed((axis,), axis - sum(a < axis for a in axes), lambda part: e.params)


def _broadcast(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    places = [int(d) for d in e.params["broadcast_dimensions"]]
    if known[0] is not None:
        result = places[known[0]]
    if result is None:
        return None
    operand = places.index(result) if result in places else None
    shape = _shape(program, e.inputs[0])
    if operand is not None and shape[operand] == 1:
        operand = None
    return _Followed((operand,), result, lambda part: {**e.params, "shape": _scaled(e.params["shape"], result, part)})


def _reshape(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    old, new = _shape(program, e.inputs[0]), _shape(program, e.outputs[0])
    if e.params.get("dimensions") is not None or not old or not new:
        return "a reshape that moves axes"
    axis = known[0] if known[0] is not None else result
    if axis is None:
        return None
    if axis != 0 or (old[0] % new[0] and new[0] % old[0]):
        return "a reshape of rows"
    return _Followed((0,), 0, lambda part: {**e.params, "new_sizes": _scaled(e.params["new_sizes"], 0, part)})


def _squeeze(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    gone = {int(d) for d in e.params["dimensions"]}
    left = [d for d in range(len(_shape(program, e.inputs[0]))) if d not in gone]
    axis = known[0] if known[0] is not None else None if result is None else left[result]
    if axis is None:
        return None
    if axis in gone:
        return "rows are squeezed"
    return _Followed((axis,), left.index(axis), lambda part: e.params)


def _transpose(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    permutation = [int(d) for d in e.params["permutation"]]
    axis = known[0] if known[0] is not None else None if result is None else permutation[result]
    return None if axis is None else _Followed((axis,), permutation.index(axis), lambda part: e.params)


def _product(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    contracted, batch = e.params["dimension_numbers"]
    ranks = [len(_shape(program, a)) for a in e.inputs]
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
        return _Followed((other[0], other[1]), out, lambda part: e.params)
    if result is not None and result >= count:  # the product that the region begins with: rows are those of its left operand
        place = result - count
        if place < len(free[0]):
            return _Followed((free[0][place], None), result, lambda part: e.params)
        return _Followed((None, free[1][place - len(free[0])]), result, lambda part: e.params)
    return None


def _convolution(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    numbers = e.params["dimension_numbers"]
    images, features = int(numbers.lhs_spec[0]), int(numbers.lhs_spec[1])
    of_kernel, out = int(numbers.rhs_spec[1]), int(numbers.out_spec[0])
    if known[0] == features or known[1] == of_kernel:  # the gradient of a kernel: a sum over images
        added = e.params["feature_group_count"] == 1
        return _Followed((features, of_kernel), ADDED, lambda part: e.params) if added else "rows in groups of features"
    if known[0] is None and known[1] is None and result != out:
        return None
    if known[0] not in (None, images) or known[1] is not None or e.params["batch_group_count"] != 1:
        return "a convolution across rows"
    return _Followed((images, None), out, lambda part: e.params)


def _window(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    axis = _first(known, result)
    alone = e.params["window_dimensions"][axis] == 1 and e.params["window_strides"][axis] == 1
    spread = [e.params[name][axis] for name in ("base_dilation", "window_dilation") if name in e.params]
    if not alone or any(by != 1 for by in spread) or tuple(e.params["padding"][axis]) != (0, 0):
        return "a window across rows"
    return _Followed((axis,) * len(e.inputs), axis, lambda part: e.params)


def _padding(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    axis = _first(known, result)
    if tuple(e.params["padding_config"][axis]) != (0, 0, 0):
        return "padded rows"
    return _Followed((axis, None), axis, lambda part: e.params)


def _pieces(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    axis = _first(known, result)
    if axis == e.params["dimension" if e.primitive.name == "concatenate" else "axis"]:
        return "rows are joined or split"
    return _Followed((axis,) * len(e.inputs), axis, lambda part: e.params)


def _part(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    axis = _first(known, result)
    if _shape(program, e.inputs[0])[axis] != _shape(program, e.outputs[0])[axis]:
        return "a slice of rows"
    return _Followed((axis,), axis, lambda part: {**e.params, "limit_indices": _scaled(e.params["limit_indices"], axis, part)})


def _gather(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    numbers = e.params["dimension_numbers"]
    batches = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    axis = next((pair for pair in batches if pair[0] == known[0] or pair[1] == known[1]), None)
    if known[0] is None and known[1] is None:
        return None
    if axis is None:
        return "a gather across rows"
    rank = len(_shape(program, e.outputs[0]))
    of_indices = [d for d in range(rank) if d not in numbers.offset_dims]  # the result's axes that are those of the indices
    return _Followed((int(axis[0]), int(axis[1])), of_indices[axis[1]], lambda part: e.params)


def _scatter(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str | None:
    numbers = e.params["dimension_numbers"]
    operand = known[0] if known[0] is not None else result
    batches = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    axis = next((pair for pair in batches if pair[0] == operand or pair[1] == known[1]), None)
    if operand is None and known[1] is None:
        return None
    if axis is None:
        return "a scatter across rows"
    rank = len(_shape(program, e.inputs[2]))
    of_indices = [d for d in range(rank) if d not in numbers.update_window_dims]
    return _Followed((int(axis[0]), int(axis[1]), of_indices[axis[1]]), int(axis[0]), lambda part: e.params)


_RULES: dict[str, Callable[[Program, Equation, Sequence[int | None], int | None], _Followed | str | None]] = {
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
_LIGHT = _RULES.keys() - {"conv_general_dilated", "dot_general"}


# -- the rewritten program --------------------------------------------------------------------------------------------------


class _Chunked:
    """The rewritten program under construction; `chunk` is the iteration to which new equations belong, if any.

    Only a single stretch becomes a loop. Plans that treat all iterations alike would cut each of several at the same places.
    """

    def __init__(self, program: Program, loop: int) -> None:
        self.equations: list[Equation] = []
        self.avals = list(program.avals)
        self._loop = loop
        self.begin(None)

    def begin(self, chunk: int | None) -> None:
        self.chunk, self._count = chunk, 0

    def variable(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def append(self, equation: Equation) -> None:
        self._count += 1
        where = ((self._loop, self._count), (self.chunk,)) if self.chunk is not None else ((), ())
        self.equations.append(replace(equation, position=where[0], iterations=where[1]))

    def compute(self, closed: Any, inputs: Sequence[int], scope: str, output: int | None = None) -> int:
        """Add the equations of a small jaxpr; its result is `output`, or a new variable, which is returned."""
        environment: dict[Any, Any] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        *first, last = closed.jaxpr.eqns
        for e in (*first, last):
            given = tuple(Immediate(a.val, a.aval) if isinstance(a, Literal) else environment[a] for a in e.invars)
            made = output if e is last and output is not None else self.variable(e.outvars[0].aval)
            environment[e.outvars[0]] = made
            self.append(Equation(e.primitive, dict(e.params), given, (made,), scope, e.ctx))
        return environment[last.outvars[0]]


def _rewritten(program: Program, region: Region, chunks: int) -> Program:
    equations = program.equations
    level, stretches = _levels(program, region)
    outside = [place for place in range(len(equations)) if place not in region.followed]
    read = {v for place in outside for v in _variables(equations[place].inputs)} | set(program.outputs)
    new = _Chunked(program, loop=len(equations))
    constants = dict(program.constants)
    indices = [new.variable(jax.typeof(np.int32(chunk))) for chunk in range(chunks)]
    constants |= {index: np.asarray(chunk, np.int32) for chunk, index in enumerate(indices)}
    mine: list[dict[int, int]] = [{} for _ in indices]  # what a tensor is in each chunk
    sums: dict[int, int] = {}  # over the chunks so far
    new.equations += [equations[place] for place in outside if level[place] < 0]
    for stretch in range(stretches):
        places = [place for place in region.places if level[place] == stretch]
        for chunk in range(chunks):
            new.begin(chunk if stretches == 1 else None)
            for place in places:
                e, rule = equations[place], region.followed[place]
                _add_chunk(new, program, e, rule, mine[chunk], indices[chunk], chunk, chunks)
                for whole in read.intersection(e.outputs) if rule.result == ADDED else ():
                    own, before = mine[chunk][whole], sums.get(whole)
                    if before is not None:
                        last = whole if chunk == chunks - 1 else None
                        own = new.compute(_sum(program.avals[whole]), (before, own), _scope(e, chunk), last)
                    sums[whole] = own
        new.begin(None)
        for whole in (v for place in places if region.followed[place].result != ADDED for v in equations[place].outputs):
            if whole in read:
                parts = [own[whole] for own in mine]
                new.compute(_join([new.avals[part] for part in parts], region.axes[whole]), parts, "chunks", whole)
        new.equations += [equations[place] for place in outside if level[place] == stretch]
    return replace(
        program,
        equations=tuple(new.equations),
        avals=tuple(new.avals),
        constants=constants,
        opened=program.opened + (stretches == 1),
    )


def _levels(program: Program, region: Region) -> tuple[list[int], int]:
    """The stretch of each equation of the region, and how many there are; of others the last stretch that they need, or -1.

    What an equation of the region needs of others must not depend on its own stretch.
    """
    level_of: dict[int, int] = {}
    inside: set[int] = set()
    levels: list[int] = []
    for place, e in enumerate(program.equations):
        given = _variables(e.inputs)
        if place in region.followed:
            level = max((level_of.get(v, -1) + (v not in inside) for v in given), default=0)
            inside.update(e.outputs)
        else:
            level = max((level_of.get(v, -1) for v in given), default=-1)
        level_of |= dict.fromkeys(e.outputs, level)
        levels.append(level)
    return levels, 1 + max(levels[place] for place in region.places)


def _add_chunk(
    new: _Chunked, program: Program, e: Equation, rule: _Followed, mine: dict[int, int], index: int, chunk: int, chunks: int
) -> None:
    """Add an equation for a chunk, whose number is the variable `index`, and the rows that it needs of tensors not in chunks."""
    scope = _scope(e, chunk)
    inputs: list[Any] = []
    for atom, axis in zip(e.inputs, rule.operands, strict=True):
        if isinstance(atom, int) and axis is not None:
            if atom not in mine:
                mine[atom] = new.compute(_slice(program.avals[atom], axis, chunks), (atom, index), scope)
            inputs.append(mine[atom])
        else:
            inputs.append(atom)
    results: list[int] = []
    for whole in e.outputs:
        aval = program.avals[whole]
        shape = aval.shape if rule.result == ADDED else _scaled(aval.shape, rule.result, 1 / chunks)
        mine[whole] = new.variable(aval.update(shape=shape))
        results.append(mine[whole])
    new.append(replace(e, params=rule.params(1 / chunks), inputs=tuple(inputs), outputs=tuple(results), scope=scope))


def _scope(e: Equation, chunk: int) -> str:
    return f"{e.scope}/chunk_{chunk}" if e.scope else f"chunk_{chunk}"


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _slice(aval: Any, axis: int, chunks: int) -> Any:
    """A jaxpr that takes a tensor and the index of a chunk (int32), and gives the chunk's rows."""
    size = aval.shape[axis] // chunks

    def take(x: Any, chunk: Any) -> Any:
        starts = [chunk * size if d == axis else np.int32(0) for d in range(x.ndim)]
        return jax.lax.dynamic_slice(x, starts, _scaled(x.shape, axis, 1 / chunks), allow_negative_indices=False)

    return jax.make_jaxpr(take)(_struct(aval), jax.ShapeDtypeStruct((), np.int32))


def _sum(aval: Any) -> Any:
    return jax.make_jaxpr(jax.lax.add)(_struct(aval), _struct(aval))


def _join(avals: Iterable[Any], axis: int) -> Any:
    several = [_struct(aval) for aval in avals]
    return jax.make_jaxpr(lambda *parts: jax.lax.concatenate(parts, axis))(*several)
