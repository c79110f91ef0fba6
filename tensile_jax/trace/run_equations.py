"""Runs equations of a flat program (one list of equations, without calls) on values, which may be JAX's tracers.

A flat program contains the equations inside the user's `shard_map`s one by one. Neighbouring equations of the same `shard_map`
run together in one `shard_map` again (`reading/shard_maps.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensile_jax.trace.program import Equation
from tensile_jax.trace.reading.shard_maps import Mapped, Placed


def run_all(equations: Sequence[Equation], environment: dict[int, Any], wanted: Collection[int]) -> None:
    """Run the equations in order: read variables from the environment, and write to it what they make.

    Of equations in a `shard_map`, only what is `wanted` or read by equations outside of it is written.
    """
    last_read = {v: place for place, e in enumerate(equations) for v in e.inputs if isinstance(v, int)}
    begin = 0
    while begin < len(equations):
        first = equations[begin]
        end = begin + 1
        if not isinstance(first.primitive, Mapped):
            arguments = [environment[a] if isinstance(a, int) else a.value for a in first.inputs]
            environment.update(zip(first.outputs, first.run(arguments), strict=True))
        else:
            while end < len(equations) and _belong_together(first, equations[end]):
                end += 1
            _run_mapped(equations[begin:end], environment, lambda v, end=end: v in wanted or last_read.get(v, -1) >= end)
        begin = end


def _belong_together(a: Equation, b: Equation) -> bool:
    return isinstance(b.primitive, Mapped) and b.primitive.map == a.primitive.map and b.context == a.context


def _run_mapped(equations: Sequence[Equation], environment: dict[int, Any], is_wanted: Callable[[int], bool]) -> None:
    """Run neighbouring equations of one body in one `shard_map`."""
    made: dict[int, Placed] = {v: p for e in equations for v, p in zip(e.outputs, e.primitive.outputs, strict=True)}
    reads: dict[tuple[int, Placed], None] = {}
    for e in equations:
        for v, place in zip(e.inputs, e.primitive.inputs, strict=True):
            if isinstance(v, int) and v not in made:
                reads[v, place] = None
    outputs = [v for v in made if is_wanted(v)]

    def body(*shards: Any) -> list[Any]:
        given: Mapping[Any, Any] = dict(zip(reads, shards, strict=True))
        inside: dict[int, Any] = {}
        for e in equations:
            operands = [
                a.value if not isinstance(a, int) else inside[a] if a in inside else given[a, place]
                for a, place in zip(e.inputs, e.primitive.inputs, strict=True)
            ]
            inside.update(zip(e.outputs, e.primitive.on_shards(operands, e.params), strict=True))
        return [inside[v] for v in outputs]

    first = equations[0]
    with first.context.manager:
        results = first.primitive.map.run(
            body, [environment[v] for v, _ in reads], [place for _, place in reads], [made[v] for v in outputs]
        )
    environment.update(zip(outputs, results, strict=True))
