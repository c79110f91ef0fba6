"""Estimates what the body of a loop, or a branch of a conditional, holds in device memory beside its inputs and outputs.

XLA compiles a body as it compiles a step. *Heavy* operators run as kernels of their own, and *light* ones are fused into their
neighbours (`fusion_kinds.py`). XLA writes to memory what heavy operators and reductions make, what heavy operators read, and the
results of expensive light operators that several kernels read. Every other value is computed where it is used, so its operands
are held until then. The inputs and outputs of a body differ from those of a step:

    carried value   The next value goes to the buffer in which the value came. XLA updates this buffer at the end of the body. If
                    light operators compute the next value, their operands are held until then, for example the gradients in a
                    training loop.
    element         An element of a stacked array is in memory from its first use to its last one, if a heavy operator reads it.
    update          An update of a part of an array (`dynamic_update_slice`, a scatter) is in place if nothing needs the old array
                    afterwards.
    branch          The results of a branch are in the memory of the conditional's results.

The estimate was compared with XLA for recurrent networks, training loops, sampling and L-BFGS. It is 0.8 to 1.1 times what
XLA:CPU needs, and 0.7 to 1.3 times what XLA for an H200 needs, except for small bodies on the H200, whose memory is mostly the 4
MB that XLA may use for products.
"""

from collections.abc import Collection

from tensile_jax.ir import EXPENSIVE, UPDATES
from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.cost.ragged_products import RAGGED_PRODUCT, ragged_bytes
from tensile_jax.trace.program import Equation, Nested, Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.scans import scan_of


def inner_bytes(program: Program, equation: Equation) -> int:
    """The most bytes that the body of a loop, or a branch of a `cond`, holds of what its own equations write to memory.

    For a product of ragged groups, the bytes that it writes beside its operands and its result.
    """
    params = equation.params
    name = equation.primitive.name
    if name == "scan":
        body = flatten(Nested(params["jaxpr"]))
        results = equation.outputs[: len(body.outputs)]  # without what mutable references hold afterwards
        loop = scan_of(params, list(map(program.aval, equation.inputs)), [program.avals[v] for v in results])
        first, last = loop.constants, loop.constants + loop.carried
        return _most_held(body, elsewhere=body.inputs[first:last], elements=body.inputs[last:])
    if name == "while":
        body = flatten(Nested(params["body_jaxpr"]))
        return _most_held(body, elsewhere=body.inputs[params["body_nconsts"] :])
    if name == "cond":
        branches = [flatten(Nested(branch)) for branch in params["branches"]]
        return max(_most_held(branch, elsewhere=branch.outputs) for branch in branches)
    return ragged_bytes(program, equation) if name == RAGGED_PRODUCT else 0


def _most_held(body: Program, *, elsewhere: Collection[int], elements: Collection[int] = ()) -> int:
    """The most that a body holds at once.

    Args:
        elsewhere: the variables whose memory does not count: inputs in whose memory the body may write, and results that count as
            the operator's own.
        elements: the inputs that are elements of stacked arrays.
    """
    equations = body.equations
    written = _written(body, elements)
    last = _last_uses(body, written)
    costs = {v: nbytes_of(body.avals[v]) for v in written & last.keys()} | dict.fromkeys(elsewhere, 0)
    ends: dict[int, list[int]] = {}
    for v in costs:
        if v in last:
            ends.setdefault(last[v], []).append(v)
    begins: dict[int, list[int]] = {}
    for v in written & set(elements):
        begins.setdefault(next(place for place, e in enumerate(equations) if v in e.inputs), []).append(v)

    held = most = 0
    for place, e in enumerate(equations):
        held += sum(costs[v] for v in begins.get(place, ()))
        ending = ends.get(place, [])
        updated = e.inputs[0] if e.primitive.name in UPDATES else None
        if isinstance(updated, int) and updated in ending:
            ending.remove(updated)
            held -= costs[updated]
            costs[e.outputs[0]] = costs[updated]
        made, ended = (sum(costs.get(v, 0) for v in several) for several in (e.outputs, ending))
        in_place = kind_of(e) == "light"
        most = max(most, held + made + inner_bytes(body, e) - (ended if in_place else 0))
        held += made - ended
    return most


def _written(body: Program, elements: Collection[int]) -> set[int]:
    """What XLA writes to memory, of what the body's equations make and of the elements of stacked arrays."""
    written: set[int] = set()
    given = (set(body.inputs) | set(body.constants)) - set(elements)
    for e in body.equations:
        kind = kind_of(e)
        if kind != "light":
            written.update(e.outputs)
        if kind == "heavy":
            written.update(v for v in e.inputs if isinstance(v, int) and v not in given)
    kernels: dict[int, frozenset[int]] = {}  # by variable, some of the equations whose kernels evaluate it
    for place in reversed(range(len(body.equations))):
        e = body.equations[place]
        readers = frozenset[int]().union(*(kernels.get(v, frozenset()) for v in e.outputs))
        if e.primitive.name in EXPENSIVE and len(readers) > 1:
            written.update(e.outputs)
        own_kernel = kind_of(e) != "light" or not written.isdisjoint(e.outputs)
        for v in e.inputs:
            if isinstance(v, int) and (own_kernel or len(kernels.get(v, ())) < 2):
                kernels[v] = kernels.get(v, frozenset()) | (frozenset((place,)) if own_kernel else readers)
    return written


def _last_uses(body: Program, written: Collection[int]) -> dict[int, int]:
    """By variable, the place of the last equation that needs it; a place after all equations, if the result needs it."""
    last = {v: len(body.equations) for v in body.outputs}
    for place in reversed(range(len(body.equations))):
        e = body.equations[place]
        on_the_fly = kind_of(e) == "light" and not any(v in written for v in e.outputs)
        until = max((last.get(v, place) for v in e.outputs), default=place) if on_the_fly else place
        for v in e.inputs:
            if isinstance(v, int):
                last[v] = max(last.get(v, place), until)
    return last
