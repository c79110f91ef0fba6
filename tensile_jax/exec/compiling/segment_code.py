"""Turns a segment of a traced step into a function that `jax.jit` can compile.

A segment is a list of equations with inputs and outputs. Its *content* is a hashable value. Two segments have equal contents
exactly if their equations, shapes, connections and donations are the same. They then share one executable, so the repeated blocks
of a network compile once.

A segment with effects (callbacks, debug prints) returns one number after its outputs, so that the caller can wait for its end
even if it has no outputs. The number also avoids a fault of XLA:CPU, which fails to compile some programs in which a callback
reads the only result (jax 0.10.2 and 0.12: "instruction->IsDead() ... is live and cannot be removed").
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import NamedSharding, PartitionSpec

from tensile_jax.exec.transfer import HOST
from tensile_jax.ir import OperatorId, TensorId
from tensile_jax.trace import (
    OwnZeros,
    Program,
    StepShardings,
    array_type,
    atom_key,
    in_host_memory,
    params_key,
    run_all,
    shape_struct,
    variable_ids,
    with_own_zeros,
)


class LaidOut(NamedTuple):
    """An argument and a result, by their positions, that have one memory layout. None: XLA chooses it."""

    argument: int
    result: int
    major_to_minor: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCode:
    """The code of a segment, to be compiled.

    Attributes:
        function: takes the inputs and returns the tuple of outputs, and with effects one number more. Within other code it also
            takes `zero`, from which it makes zeros (`trace/own_zeros.py`).
        avals: for each input a `jax.ShapeDtypeStruct`, or an abstract value in host memory, or a token.
        donated: the positions of the inputs that are donated.
        content: equal for segments that can share an executable.
        out_shardings: for each result its sharding, if the step runs on several devices; `avals` then have shardings, too.
        on_host: for each result whether it is in host memory, if any input or result is, and the step runs on one device; also
            if any are laid out.
        laid_out: the donated inputs that are not row-major, and the results in their memory; only on one device.
        operators: how many operators it runs. Code of many operators takes long to compile.
        copies: whether it copies tensors to and from the host beside its operators.
        saves_memory: whether XLA orders its operators so that they need little memory, and not so that they run soon.
    """

    function: Callable[..., tuple[Any, ...]]
    avals: tuple[Any, ...]
    donated: tuple[int, ...]
    content: Hashable
    out_shardings: tuple[Any, ...] | None = None
    on_host: tuple[bool, ...] | None = None
    operators: int = 0
    copies: bool = False
    laid_out: tuple[LaidOut, ...] = ()
    saves_memory: bool = False

    def saving_memory(self) -> "SegmentCode":
        """The same code, to be compiled so that it needs little memory."""
        return replace(self, saves_memory=True, content=("saves memory", self.content))


class SegmentBuilder:
    """Builds the code of the segments of one program, whose values may be divided among several devices."""

    def __init__(self, program: Program, divided: StepShardings | None = None) -> None:
        self._program = program
        self._divided = divided
        self._variables = tuple(variable_ids(program))
        self._params = [params_key(e.params) for e in program.equations]

    def code(
        self,
        operators: Sequence[OperatorId],
        inputs: Sequence[TensorId],
        outputs: Sequence[TensorId],
        donated: Sequence[TensorId],
        *,
        rests: Collection[TensorId] = (),
    ) -> SegmentCode:
        """The code of the segment that runs `operators` (in order) on `inputs` and returns `outputs`.

        Args:
            rests: the tensors that a plan has in host memory when the segment begins, or when it ends.
        """
        program = self._program
        reads = tuple(self._variables[t] for t in inputs)
        writes = tuple(self._variables[t] for t in outputs)
        equations = tuple(program.equations[o] for o in operators)
        effectful = any(e.effectful for e in equations)
        positions = tuple(i for i, t in enumerate(inputs) if t in set(donated))

        def segment(*values: Any, zero: Any | None = None) -> tuple[Any, ...]:
            own = with_own_zeros(equations) if self._divided is None else OwnZeros(equations, 0)
            environment: dict[int, Any] = dict(zip(reads, values, strict=True)) | own.numbers(zero)
            run_all(own.equations, environment, writes)
            at_the_end = (jnp.zeros((), bool),) if effectful else ()
            return (*(_typed(environment[v], weak=v in program.weak) for v in writes), *at_the_end)

        number: dict[int, int] = {v: i for i, v in enumerate(reads)}
        body: list[Hashable] = []
        for o, e in zip(operators, equations, strict=True):
            arguments = tuple(number[a] if isinstance(a, int) else atom_key(a) for a in e.inputs)
            for v in e.outputs:
                number[v] = len(number)
            body.append((e.primitive, self._params[o], arguments, len(e.outputs), e.context))
        placed = {} if self._divided is None else self._divided.of
        avals = tuple(
            _struct(program.avals[v], placed.get(v), on_host=t in rests) for v, t in zip(reads, inputs, strict=True)
        )  # fmt: skip
        shapes = tuple(
            (a.shape, a.dtype, a.weak_type, a.sharding, in_host_memory(a)) if hasattr(a, "shape") else type(a) for a in avals
        )
        out_shardings = self.out_shardings(outputs, effectful=effectful, rests=rests)
        results = tuple((number[v], v in program.weak) for v in writes)
        content = (shapes, tuple(body), results, positions, out_shardings)
        on_host = self.on_host(inputs, outputs, effectful=effectful, rests=rests)
        return SegmentCode(segment, avals, positions, content, out_shardings, on_host, len(operators))

    def out_shardings(
        self, outputs: Sequence[TensorId], *, effectful: bool, rests: Collection[TensorId] = ()
    ) -> tuple[Any, ...] | None:
        """The shardings of the results of a segment with these outputs; None if the step runs on one device."""
        if self._divided is None:
            return None
        at_the_end = (NamedSharding(self._divided.mesh, PartitionSpec()),) if effectful else ()
        found = [_placed(self._divided.of.get(self._variables[t]), on_host=t in rests) for t in outputs]
        return (*found, *at_the_end)

    def on_host(
        self, inputs: Sequence[TensorId], outputs: Sequence[TensorId], *, effectful: bool, rests: Collection[TensorId] = ()
    ) -> tuple[bool, ...] | None:
        """`SegmentCode.on_host` of a segment with these inputs and outputs."""
        there = [t in rests or in_host_memory(self._program.avals[self._variables[t]]) for t in (*inputs, *outputs)]
        if self._divided is not None or not any(there):
            return None
        return (*there[len(inputs) :], *((False,) if effectful else ()))


def _typed(value: Any, *, weak: bool) -> Any:
    """The value with or without a weak type, as the step returns it; what passes between segments is strongly typed."""
    if getattr(jax.typeof(value), "weak_type", weak) == weak:
        return value
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=weak, sharding=None)


def _struct(aval: Any, sharding: Any, *, on_host: bool) -> Any:
    """What stands for a value when a segment is lowered: its shape; in host memory, its type; for a token, a token."""
    if not hasattr(aval, "shape"):
        return jax.jit(jax.lax.create_token)()
    if sharding is None and (on_host or in_host_memory(aval)):
        return array_type(aval.update(memory_space=jax.memory.Space.Host))
    return shape_struct(aval, _placed(sharding, on_host=on_host))


def _placed(sharding: Any, *, on_host: bool) -> Any:
    """The sharding, in host memory if the value is there."""
    return sharding.with_memory_kind(HOST) if on_host and sharding is not None else sharding
