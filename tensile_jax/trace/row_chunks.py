"""Rewrites a program so that a large product and all that is computed from it are evaluated in chunks of rows.

The logits of a decoder with a large vocabulary, and their gradient, are often its largest tensors. What is computed from them is
independent row by row: the softmax of a row, its loss, its gradient. So the rows can be divided into chunks that are evaluated
one after another. The rewritten part of the program is an opened loop (`loops.py`) whose iterations are the chunks:

    logits = x @ W                for each chunk c:    logits_c = x[c] @ W
    loss   = f(logits, labels)                         loss_c   = f(logits_c, labels[c])
    dlogits = g(logits, labels)                        dlogits_c = g(logits_c, labels[c])
    dx, dW = dlogits @ W^T, x^T @ dlogits              dx_c = dlogits_c @ W^T,  dW = dW + x[c]^T @ dlogits_c
                                  loss, dx = concatenated

The *region* that is rewritten consists of the product with the largest result, of every equation that is connected to it by
tensors of at least half as many numbers, and of all equations between these. It is rewritten only if each of its equations treats
rows independently, or adds over them. Such a sum is then one of sums over chunks: results agree to rounding.

Rows are the positions along one axis, at first that axis of the product's result that comes from the first free axis of its left
operand. Every rule below follows that axis through an equation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.flatten import Equation, Immediate, Program

# Not tuned.
_LARGE = 0.5  # of the numbers of the product: tensors with so many belong to the region
_MOST_EQUATIONS = 200  # of a region; the losses of decoders have about 30
_MOST_PRODUCTS = 3  # of whose regions the first is taken that can be rewritten
ADDED = -1
"""In the place of an axis: the equation adds over rows."""

Axes = Mapping[Any, int]


@dataclass(frozen=True, slots=True)
class _Followed:
    """An equation of the region: the rows' axis of each operand (None: it has no rows), of its result, and its parameters.

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
    products = [place for place, e in enumerate(equations) if e.primitive.name == "dot_general" and _has_rows(program, e)]
    products.sort(key=lambda place: -_count(program, equations[place].outputs[0]))
    for seed in products[:_MOST_PRODUCTS]:
        region = _region_of(program, seed)
        if region is not None:
            return region
    return None


def _region_of(program: Program, seed: int) -> Region | None:
    """The region of the product at place `seed`."""
    equations = program.equations
    product = equations[seed].outputs[0]
    places = _between(program, _core(program, seed, _LARGE * _count(program, product)))
    if len(places) > _MOST_EQUATIONS:
        return None
    axes: dict[int, int] = {product: 0}
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
            for atom, axis in (*zip(e.inputs, rule.operands, strict=True), (e.outputs[0], rule.result)):
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
    nbytes = max(nbytes_of(program.avals[v]) for place in places for v in equations[place].outputs)
    return Region(places, followed, axes, shape_of(program.avals[product])[0], nbytes)


def _has_rows(program: Program, product: Equation) -> bool:
    """Whether the first axis of a product's result is the first one of its left operand, and has more than one row."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    left = product.inputs[0]
    rank = len(shape_of(program.avals[left])) if isinstance(left, int) else 0
    free = [d for d in range(rank) if d not in contracted]
    return not batch and bool(free) and free[0] == 0 and shape_of(program.avals[product.outputs[0]])[0] > 1


def _count(program: Program, atom: Any) -> int:
    return math.prod(shape_of(program.avals[atom])) if isinstance(atom, int) else 0


def _core(program: Program, seed: int, large: float) -> set[int]:
    """The equations that are connected to the product through large tensors that equations make."""
    made = {v for e in program.equations for v in e.outputs if _count(program, v) >= large}
    touching: dict[int, list[int]] = {}
    for place, e in enumerate(program.equations):
        for v in {*_variables(e.inputs), *e.outputs} & made:
            touching.setdefault(v, []).append(place)
    found, waiting = {seed}, [program.equations[seed].outputs[0]]
    seen = set(waiting)
    while waiting:
        for place in touching.get(waiting.pop(), ()):
            found.add(place)
            e = program.equations[place]
            new = ({*_variables(e.inputs), *e.outputs} & made) - seen
            seen |= new
            waiting += new
    return found


def _variables(atoms: Iterable[Any]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


def _between(program: Program, core: set[int]) -> list[int]:
    """The core, and all equations that depend on one of it and on which one of it depends, in order."""
    after, depends = set[int](), set[int]()
    for place, e in enumerate(program.equations):
        if place in core or not depends.isdisjoint(_variables(e.inputs)):
            after.add(place)
            depends.update(e.outputs)
    before, needed = set[int](), set[int]()
    for place in range(len(program.equations) - 1, -1, -1):
        e = program.equations[place]
        if place in core or not needed.isdisjoint(e.outputs):
            before.add(place)
            needed.update(_variables(e.inputs))
    return sorted(after & before)


# -- rules ------------------------------------------------------------------------------------------------------------------


def _follow(program: Program, e: Equation, axes: Axes) -> _Followed | str | None:
    """What an equation does with rows; None if that is not known yet, a reason if it does not treat rows independently."""
    if len(e.outputs) != 1:
        return f"{e.primitive.name} has several results"
    known = [axes.get(a) if isinstance(a, int) else None for a in e.inputs]
    result = axes.get(e.outputs[0])
    name = e.primitive.name
    rule = _RULES.get(name)
    if rule is None and name in _ELEMENTWISE:
        rule = _elementwise
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


def _elementwise(program: Program, e: Equation, known: Sequence[int | None], result: int | None) -> _Followed | str:
    axis = next((a for a in (*known, result) if a is not None), None)
    assert axis is not None
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


_ELEMENTWISE = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg not or pow real rem round rsqrt select_n sign sin sqrt square
    stop_gradient sub tanh xor
    """.split()
)
_RULES: dict[str, Callable[[Program, Equation, Sequence[int | None], int | None], _Followed | str | None]] = {
    "argmax": _reduction,
    "argmin": _reduction,
    "broadcast_in_dim": _broadcast,
    "dot_general": _product,
    "gather": _gather,
    "reduce_and": _reduction,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "reduce_or": _reduction,
    "reduce_sum": _reduction,
    "reshape": _reshape,
    "scatter-add": _scatter,
    "squeeze": _squeeze,
    "transpose": _transpose,
}


# -- the rewritten program --------------------------------------------------------------------------------------------------


class _Chunked:
    """The rewritten program under construction; `chunk` is the iteration to which new equations belong, if any."""

    def __init__(self, program: Program, loop: int) -> None:
        self.equations: list[Equation] = []
        self.avals = list(program.avals)
        self.chunk: int | None = None
        self._loop = loop
        self._count = 0

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
    equations, chosen = program.equations, set(region.places)
    before, after = list[Equation](), list[Equation]()
    depends = {v for place in region.places for v in equations[place].outputs}
    for place, e in enumerate(equations):
        if place not in chosen:
            late = not depends.isdisjoint(_variables(e.inputs))
            (after if late else before).append(e)
            depends.update(e.outputs if late else ())
    read = {v for e in after for v in _variables(e.inputs)} | set(program.outputs)
    new = _Chunked(program, loop=len(equations))
    constants = dict(program.constants)
    parts: dict[int, list[int]] = {}  # of results with rows
    sums: dict[int, int] = {}  # over the chunks so far
    for chunk in range(chunks):
        new.begin(chunk)
        index = new.variable(jax.typeof(np.int32(chunk)))
        constants[index] = np.asarray(chunk, np.int32)
        mine: dict[int, int] = {}  # what a tensor is in this chunk
        for place in region.places:
            e, rule = equations[place], region.followed[place]
            scope = f"{e.scope}/chunk_{chunk}" if e.scope else f"chunk_{chunk}"
            for atom, axis in zip(e.inputs, rule.operands, strict=True):
                if isinstance(atom, int) and axis is not None and atom not in mine:
                    mine[atom] = new.compute(_slice(program.avals[atom], axis, chunks), (atom, index), scope)
            inputs = tuple(
                mine[atom] if isinstance(atom, int) and axis is not None else atom
                for atom, axis in zip(e.inputs, rule.operands, strict=True)
            )
            (whole,) = e.outputs
            aval = program.avals[whole]
            shape = aval.shape if rule.result == ADDED else _scaled(aval.shape, rule.result, 1 / chunks)
            mine[whole] = result = new.variable(aval.update(shape=shape))
            new.append(replace(e, params=rule.params(1 / chunks), inputs=inputs, outputs=(result,), scope=scope))
            if whole not in read:
                continue
            if rule.result != ADDED:
                parts.setdefault(whole, []).append(result)
            elif chunk == 0:
                sums[whole] = result
            else:
                sums[whole] = new.compute(_sum(aval), (sums[whole], result), scope, whole if chunk == chunks - 1 else None)
    new.begin(None)
    for whole, several in parts.items():
        new.compute(_join([new.avals[part] for part in several], region.axes[whole]), several, "chunks", whole)
    return replace(
        program,
        equations=(*before, *new.equations, *after),
        avals=tuple(new.avals),
        constants=constants,
        opened=program.opened + 1,
    )


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
