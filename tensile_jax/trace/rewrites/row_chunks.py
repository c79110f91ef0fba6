"""Rewrites a program so that a large product, and all that is computed from it, are evaluated in chunks of rows.

The largest tensors of a decoder are often its logits and their gradient; those of a network for images are the results of its
first convolutions. Each row (or image) is computed independently: its softmax, its loss, its gradient. So the rows can be divided
into chunks that are evaluated one after another. The rewritten part of the program is a loop over the chunks, written out (left:
before, right: after):

    logits = x @ W                for each chunk c:    logits_c = x[c] @ W
    loss   = f(logits, labels)                         loss_c   = f(logits_c, labels[c])
    dlogits = g(logits, labels)                        dlogits_c = g(logits_c, labels[c])
    dx, dW = dlogits @ W^T, x^T @ dlogits              dx_c = dlogits_c @ W^T,  dW = dW + x[c]^T @ dlogits_c
                                  loss, dx = concatenated

The part that is rewritten is called the *region*. It grows from a product (or convolution) that has one of the three largest
results. If an equation of the region makes or reads a large tensor, all equations that make or read this tensor belong to the
region. The region also has all *light* equations (which XLA fuses) on paths of light equations from one of its equations to
another. A tensor is large here if an equation makes it, and if it has at least a quarter as many numbers as the product's
result (or half as many, if a quarter gives no region that can be rewritten). Each equation of the region must treat rows
independently, or add over rows (`row_rules.py`). A sum over rows becomes a sum of the chunks' sums, so results agree to
rounding.

Between the forward and the backward pass of a convolution, the rest of the network runs. So the region of a convolution has
several *stretches*, each of which goes through all chunks. A later stretch takes the values of an earlier one chunk by chunk, and
a plan can keep or recompute each chunk.

                                                       for each chunk c:    h_c = f(x[c]),  y_c = g(h_c)
    y = concatenated,  dy = the rest of the network    for each chunk c:    dW = dW + (what h_c and dy[c] give)

Rows are the positions along one axis. For a product, this axis is the first one of both the left operand and the result. For a
convolution, it is the batch axis. Dividing tensors where a schedule needs it is the idea of Nie et al., "TSPLIT: Fine-grained
GPU Memory Management for Efficient DNN Training via Tensor Splitting" (ICDE 2022).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.program import Equation, Immediate, Program
from tensile_jax.trace.rewrites.rewrite import Part, Rewrite
from tensile_jax.trace.rewrites.row_rules import ADDED, LIGHT, Followed, follow, scaled

# Not tuned.
_LARGE = (0.25, 0.5)  # of the numbers of the product: tensors with so many belong to the region; the first share that gives one
_MOST_EQUATIONS = 600  # of a region; the losses of decoders have about 30, two stages of a U-Net with group normalization 400
_MOST_PRODUCTS = 3  # of whose regions the first is taken that can be rewritten


def in_row_chunks(program: Program, chunks: int) -> Program | None:
    """The program with its region in so many chunks; None if there is no region, or if its rows cannot be divided evenly."""
    region = find_region(program)
    return None if region is None or chunks < 2 or region.rows % chunks else _rewritten(program, region, chunks)


def _part(program: Program) -> Part | None:
    region = find_region(program)
    return None if region is None else Part(len(region.places), region.nbytes)


ROWS_IN_CHUNKS = tuple(
    Rewrite(
        name=f"rows in {chunks} chunks",
        note=f"The largest product or convolution, and what is computed from it, is evaluated in {chunks} chunks of rows.",
        apply=partial(in_row_chunks, chunks=chunks),
        part=_part,
        series="rows in chunks",
    )
    for chunks in (2, 4, 8)
)


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
    followed: dict[int, Followed]
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
    """The region of the product at place `seed`; None if it cannot be divided. `axis_of_rows` is the axis of rows of its result.

    The region includes every connected tensor with at least this share of the numbers of that result.
    """
    equations = program.equations
    product = equations[seed].outputs[0]
    large = share * _count(program, product)
    places = _connected(program, seed, large)
    if len(places) > _MOST_EQUATIONS:
        return None
    axes: dict[int, int] = {product: axis_of_rows}
    followed: dict[int, Followed] = {}
    waiting = places
    while waiting:
        unknown: list[int] = []
        for place in waiting:
            e = equations[place]
            rule = follow(program, e, axes)
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
    """The axis of rows in the result of a product or a convolution; None for other equations, or if there is only one row.

    A product has rows only if the first axis of its result is the first axis of its left operand.
    """
    axis: int | None = None
    if e.primitive.name == "dot_general":
        (contracted, _), (batch, _) = e.params["dimension_numbers"]
        free = [d for d in range(len(program.shape(e.inputs[0]))) if d not in contracted]
        axis = 0 if not batch and free and free[0] == 0 else None
    elif e.primitive.name == "conv_general_dilated" and e.params["batch_group_count"] == 1:
        axis = int(e.params["dimension_numbers"].out_spec[0])
    return axis if axis is not None and program.shape(e.outputs[0])[axis] > 1 else None


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
    """These equations, and all light equations on paths between them that pass only light ones."""
    light = [e.primitive.name in LIGHT for e in program.equations]
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


# -- the rewritten program --------------------------------------------------------------------------------------------------


class _Chunked:
    """The rewritten program under construction; `chunk` is the iteration to which new equations belong, if any.

    The chunks become iterations of a loop only if there is one stretch. With several loops, plans that treat all iterations alike
    would have to cut each loop at the same places.
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
        """Add the equations of a small jaxpr, and return the variable of its result: `output`, or a new one."""
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
    """The stretch of each equation, and the number of stretches.

    An equation outside the region belongs to the last stretch that it depends on, or to -1 if there is none. An equation of the
    region must not depend, through equations outside the region, on its own stretch.
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
    new: _Chunked, program: Program, e: Equation, rule: Followed, mine: dict[int, int], index: int, chunk: int, chunks: int
) -> None:
    """Add an equation for a chunk, and those that take its rows from tensors not in chunks; `index` holds the chunk's number."""
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
        shape = aval.shape if rule.result == ADDED else scaled(aval.shape, rule.result, 1 / chunks)
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
        return jax.lax.dynamic_slice(x, starts, scaled(x.shape, axis, 1 / chunks), allow_negative_indices=False)

    return jax.make_jaxpr(take)(_struct(aval), jax.ShapeDtypeStruct((), np.int32))


def _sum(aval: Any) -> Any:
    return jax.make_jaxpr(jax.lax.add)(_struct(aval), _struct(aval))


def _join(avals: Iterable[Any], axis: int) -> Any:
    several = [_struct(aval) for aval in avals]
    return jax.make_jaxpr(lambda *parts: jax.lax.concatenate(parts, axis))(*several)
