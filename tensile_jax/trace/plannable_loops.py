"""Traces the body of a long loop as a step of its own, so that the body can have a plan.

A loop with too many iterations to be written out (`loops/rules.py`) is one operator of the *outer step*, the step that contains
the loop. If its body trains a network, the body needs the memory of a whole train step, and no plan of the outer step can lower
that. Such a loop is *plannable*: its body can be traced as an inner step. The state of the inner step is what the loop carries.
Its batch is what all iterations share, and the elements of stacked arrays.

A plannable loop is *driven* if its iterations run one after another under a plan of the inner step
(`exec/running/driven_loop.py`). In the graph of the outer step, a driven loop is an operator that is `alone`: it shares no
executable with other operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from tensile_jax.ir import OperatorId, TensorId
from tensile_jax.trace.avals import in_host_memory, shape_struct
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.graph import variable_ids
from tensile_jax.trace.program import Equation, Immediate, Nested
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.scans import Loop, scan_of
from tensile_jax.trace.reading.treatment import Driven
from tensile_jax.trace.step import Boundary, TracedStep, trace_step


@dataclass(frozen=True, slots=True, eq=False)
class PlannableLoop:
    """A loop of a step, as an operator of its graph, whose body can have a plan.

    `inputs` are the scan's inputs: constants, then carried values, then stacked arrays. Each is a tensor of the step, or a value
    that is written into its program. `outputs` are the scan's outputs: carried values, then stacked arrays. `names` are those of
    the inputs.
    """

    operator: OperatorId
    name: str
    loop: Loop
    inputs: tuple[TensorId | Immediate, ...]
    outputs: tuple[TensorId, ...]
    names: tuple[str, ...]

    def driven(self, nbytes: int, us: float) -> Driven:
        """This loop, driven: it needs so many bytes beside its inputs and outputs, and takes so many microseconds."""
        return Driven(self.operator, self.name, self.loop.length, nbytes, us)

    def traced_body(self, step: TracedStep) -> TracedStep:
        """The body of this loop of `step`, as a step `(constants, carried, elements) -> (carried, parts)`.

        The carried values are donated.
        """
        iteration = _Body(self)
        shapes = [shape_struct(v.aval) for v in self.loop.body.invars]
        first, last = self.loop.constants, self.loop.constants + self.loop.carried
        return trace_step(
            jax.jit(iteration, donate_argnums=1),
            iteration,
            (shapes[:first], shapes[first:last], shapes[last:]),
            {},
            open_loops=step.program.made_from.open_loops,
            respect_checkpoint=step.program.made_from.respect_checkpoint,
        )


class _Body:
    """A loop's body as a function, which names its arguments as the step around it does."""

    def __init__(self, driven: PlannableLoop) -> None:
        loop = driven.loop
        self.__name__ = driven.name
        self._driven = driven
        self._run = jaxpr_as_fun(ClosedJaxpr(loop.body, list(loop.body_consts)))

    def __call__(self, constants: Sequence[Any], carried: Sequence[Any], elements: Sequence[Any]) -> Any:
        results = self._run(*constants, *carried, *elements)
        count = self._driven.loop.carried
        return list(results[:count]), list(results[count:])

    def boundary(self, args_info: Any, out_info: Any, static: Any) -> Boundary:
        """The names of the body's arguments and results, and the pairs of positions of carried values."""
        loop, names = self._driven.loop, self._driven.names
        first, last = loop.constants, loop.constants + loop.carried
        elements = [f"{name}[i]" for name in names[last:]]
        parts = [f"part {i} of the results" for i in range(len(loop.body.outvars) - loop.carried)]
        results = [f"{name} (next)" for name in names[first:last]]
        return Boundary([*names[:last], *elements], [*results, *parts], [(first + i, i) for i in range(loop.carried)])


def plannable_loops(step: TracedStep) -> list[PlannableLoop]:
    """The loops of a step that stay whole and whose bodies can have plans: scans with heavy operators.

    Loops on mutable references or on values in host memory are not among them. There are none if the step was traced with
    `open_loops=False`, or if it runs on several devices.
    """
    if step.program.made_from.open_loops is False or step.divided is not None:
        return []
    ids = variable_ids(step.program)
    return [
        _plannable(step, OperatorId(o), equation, ids)
        for o, equation in enumerate(step.program.equations)
        if isinstance(equation.primitive, Primitive)
        and equation.primitive.name == "scan"
        and _is_heavy(equation)
        and not any(in_host_memory(step.program.aval(atom)) for atom in (*equation.inputs, *equation.outputs))
    ]


def _is_heavy(scan: Equation) -> bool:
    return any(kind_of(e) == "heavy" for e in flatten(Nested(scan.params["jaxpr"])).equations)


def _plannable(step: TracedStep, o: OperatorId, equation: Equation, ids: Mapping[int, TensorId]) -> PlannableLoop:
    program = step.program
    loop = scan_of(equation.params, list(map(program.aval, equation.inputs)), [program.avals[v] for v in equation.outputs])
    inputs = tuple(ids[atom] if isinstance(atom, int) else atom for atom in equation.inputs)
    tensors = step.graph.tensors
    names = tuple(
        f"value {i} of the loop" if isinstance(given, Immediate) else tensors[given].name for i, given in enumerate(inputs)
    )
    return PlannableLoop(o, step.graph.operators[o].name, loop, inputs, tuple(ids[v] for v in equation.outputs), names)


def with_driven(step: TracedStep, driven: Sequence[Driven]) -> TracedStep:
    """The same step, in which these loops are driven."""
    graph, loops = step.graph, {loop.operator: loop for loop in driven}
    operators = tuple(
        replace(op, alone=True, effectful=True, inner=loops[op.id].nbytes, least_us=loops[op.id].us) if op.id in loops else op
        for op in graph.operators
    )
    fingerprint = sha256(repr((graph.fingerprint, "driven", sorted(loops))).encode()).hexdigest()[:32]
    return replace(step, graph=replace(graph, operators=operators, fingerprint=fingerprint), driven=tuple(driven))
