"""Turn a segment of a flat program into a function that `jax.jit` can compile.

A segment is a list of equations, its inputs and its outputs. The *content* of a segment is a hashable value. Two segments have
equal contents exactly if their equations, shapes, connections and donations are the same. They then share one executable, so
the repeated blocks of a network compile once.

A segment with effects returns one number after its outputs. The segment is over when that number is there, so it can be waited
for even if there are no outputs. It is returned beside a single output too, because XLA:CPU fails to compile some programs in
which a callback reads the only result (jax 0.10.2 and 0.12: "instruction->IsDead() ... is live and cannot be removed").
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tensile_jax.ir import OperatorId, TensorId
from tensile_jax.trace import Program, atom_key, params_key, shape_struct, variable_ids


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCode:
    """What to compile for a segment.

    Attributes:
        function: takes the inputs and returns the tuple of outputs; with effects, one number more.
        avals: for each input a `jax.ShapeDtypeStruct`, or a token.
        donated: positions of inputs.
        content: equal for segments that can share an executable.
    """

    function: Callable[..., tuple[Any, ...]]
    avals: tuple[Any, ...]
    donated: tuple[int, ...]
    content: Hashable


class SegmentBuilder:
    """Builds the code of the segments of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._variables = tuple(variable_ids(program))
        self._params = [params_key(e.params) for e in program.equations]

    def code(
        self,
        operators: Sequence[OperatorId],
        inputs: Sequence[TensorId],
        outputs: Sequence[TensorId],
        donated: Sequence[TensorId],
    ) -> SegmentCode:
        """The code of the segment that runs `operators` (in order) on `inputs` and gives `outputs`."""
        program = self._program
        reads = tuple(self._variables[t] for t in inputs)
        writes = tuple(self._variables[t] for t in outputs)
        equations = tuple(program.equations[o] for o in operators)
        effectful = any(e.effectful for e in equations)
        positions = tuple(i for i, t in enumerate(inputs) if t in set(donated))

        def segment(*values: Any) -> tuple[Any, ...]:
            environment: dict[int, Any] = dict(zip(reads, values, strict=True))
            for e in equations:
                arguments = [environment[a] if isinstance(a, int) else a.value for a in e.inputs]
                environment.update(zip(e.outputs, e.run(arguments), strict=True))
            at_the_end = (jnp.zeros((), bool),) if effectful else ()
            return (*(environment[v] for v in writes), *at_the_end)

        number: dict[int, int] = {v: i for i, v in enumerate(reads)}
        body: list[Hashable] = []
        for o, e in zip(operators, equations, strict=True):
            arguments = tuple(number[a] if isinstance(a, int) else atom_key(a) for a in e.inputs)
            for v in e.outputs:
                number[v] = len(number)
            body.append((e.primitive, self._params[o], arguments, len(e.outputs), e.context))
        avals = tuple(map(_struct, (program.avals[v] for v in reads)))
        shapes = tuple((a.shape, a.dtype, a.weak_type) if isinstance(a, jax.ShapeDtypeStruct) else type(a) for a in avals)
        content = (shapes, tuple(body), tuple(number[v] for v in writes), positions)
        return SegmentCode(segment, avals, positions, content)


def _struct(aval: Any) -> Any:
    """What to lower for in the place of a value: its shape, or a token for a token, which has no shape."""
    return shape_struct(aval) if hasattr(aval, "shape") else jax.jit(jax.lax.create_token)()
