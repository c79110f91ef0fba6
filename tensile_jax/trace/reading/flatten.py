"""Flattens a jaxpr into a program: one list of equations, without calls, dead equations and repeated equations.

Jaxprs are nested: an equation such as `jit`, `custom_jvp_call`, `custom_vjp_call`, `closed_call` or `checkpoint` holds another
jaxpr. In the program, the equations of the inner jaxpr replace that equation. Each loop and conditional has a *treatment*, chosen
before (`treatment.py`), which says what replaces it:

    opened `scan`   by its iterations
    split `scan`    by several shorter scans
    opened `cond`   by all of its branches, and a selection of their results
    `cond`          by one branch, if constants in the step's code decide which one is taken, as in `optax.MultiSteps`

Every other `scan`, `while` and `cond` stays one equation.

`jax.checkpoint` makes JAX repeat equations in the backward pass, and its policies may copy values to host memory and back. By
default, repeated equations are merged with their originals and such copies are removed, so that the planner decides what to
recompute and what to swap. If the user asks to keep what `jax.checkpoint` does, the repeated equations and the copies stay.

An equation with an effect (a callback, a debug print, or a loop that contains either) is never merged and never removed, and such
equations keep their order. If `jax.checkpoint` repeats an equation with an effect, the program repeats the equation too, because
plain jit runs the effect twice. Mutable references that the step makes become the values that they hold
(`mutable_references.py`).

Every variable of the program is strongly typed. (A number is *weakly typed* if its type gives way to that of another operand, as
with Python's numbers.) State that begins as a Python number often becomes strongly typed in the first iterations of a training
loop, and JAX then traces the step again. Without weak types, both traces give equal programs, which share one plan.
`Program.weak` says which results of the step are weakly typed.

`simplify.py` lists the other changes. At the end, `separate` copies outputs where needed, so that no output shares memory with
another output, a constant, or an input that the caller keeps.

The walk over a jaxpr is that of JAX's tutorial "autodidax". An environment maps the variables of the jaxpr to variables of the
program. For each equation, inputs are read from the environment, and outputs are written to it.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.core
import numpy as np
from jax.extend.core import Literal, primitives

from tensile_jax.errors import TraceError
from tensile_jax.trace.avals import array_type, in_host_memory, is_extended, is_weak, shape_of, strong
from tensile_jax.trace.program import Atom, Equation, Immediate, Nested, Program, TooLong
from tensile_jax.trace.reading.donated_inputs import taken_inputs
from tensile_jax.trace.reading.jaxprs import (
    closed,
    converts_nothing,
    copy_of,
    inner_jaxpr,
    move_of,
    read_from_references,
    selection_of,
)
from tensile_jax.trace.reading.known_values import known_scalar
from tensile_jax.trace.reading.mutable_references import Discharged, Reference, is_reference, touches_all, writes
from tensile_jax.trace.reading.named_places import names_memory
from tensile_jax.trace.reading.scans import Loop, Stack, joined, layer, loop_of, part_of
from tensile_jax.trace.reading.shard_maps import Map, Mapped, Placed, map_of
from tensile_jax.trace.reading.simplify import (
    with_rectified_conditions,
    with_sums_in_scatters,
    without_dead,
    without_offloading,
    without_repeated,
)
from tensile_jax.trace.reading.treatment import Opened, Place, Split, Treatments, Whole

_INNER_EFFECTS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect", "NamedAxisEffect"})
"""Effects that nobody outside of a step can see: what happens to a reference made in it, and the use of an axis's name.

JAX has no public names for the classes of effects. What is not in this list counts as seen from outside.
"""


_NOTHING: Mapping[str, Any] = MappingProxyType({})

Value = Atom | Reference | Stack
"""What a variable of a jaxpr stands for while the program is built."""


class _Builder:
    """The program under construction.

    `treatments` says what is done with each loop and each conditional, and `respects_checkpoints` whether what a checkpoint
    repeats stays. With `one_memory`, everything is in device memory.
    """

    def __init__(self, treatments: Treatments, *, respects_checkpoints: bool, one_memory: bool) -> None:
        self.equations: list[Equation] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.opened = 0
        self._treatments = treatments
        self._place: Place = ()  # of the jaxpr's equation that is being added
        self._respects_checkpoints = respects_checkpoints
        self._one_memory = one_memory
        self._repeats = self._repeat = 0  # how many checkpoints so far, and the number of the one inside of which we are
        self._counts = [0]  # of equations so far: outside of loops, in this iteration of the outermost loop, and so on
        self._iterations: tuple[int, ...] = ()
        self._tracebacks: tuple[Any, ...] = ()  # of the jaxpr's equation that is being added, and of those around it
        self._constant_ids: dict[int, int] = {}
        self._indices: dict[int, int] = {}
        self._helpers: dict[Any, Any] = {}  # jaxprs that take parts of stacks, under the settings of this trace
        self._map: Map | None = None  # the `shard_map` inside of which we are, and its own context
        self._map_context: Any = None
        self._placed: dict[int, Placed] = {}  # how shards lie in the variables that are read in it

    def variable(self, aval: Any) -> int:
        if self._one_memory and in_host_memory(aval):
            aval = aval.update(memory_space=jax.memory.Space.Device)
        self.avals.append(strong(aval))
        return len(self.avals) - 1

    def constant(self, value: Any) -> Atom:
        """A captured array becomes a variable; the same array met twice is one variable. Scalars are written in."""
        if np.ndim(value) == 0 and isinstance(value, (bool, int, float, complex, np.generic)):
            return Immediate(value, strong(jax.typeof(value)))
        if id(value) not in self._constant_ids:
            variable = self.variable(jax.typeof(value))
            self.constants[variable] = value
            self._constant_ids[id(value)] = variable
        return self._constant_ids[id(value)]

    def walk(self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value], scope: str) -> list[Value]:
        """Add the equations of `jaxpr` for these inputs, and return its outputs."""
        environment: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                if np.ndim(atom.val) == 0:
                    return Immediate(atom.val, strong(atom.aval))
                return self.constant(atom.val)
            return environment[atom]

        environment.update(zip(jaxpr.constvars, constants, strict=True))
        environment.update(zip(jaxpr.invars, inputs, strict=True))
        outside, tracebacks = self._place, self._tracebacks
        for index, equation in enumerate(jaxpr.eqns):
            self._place = (*outside, index)
            self._tracebacks = (equation.source_info.traceback, *tracebacks)
            values = [read(atom) for atom in equation.invars]
            results = self._results(equation, values, _inside(scope, str(equation.source_info.name_stack)))
            environment.update(zip(equation.outvars, results, strict=True))
        self._place, self._tracebacks = outside, tracebacks
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, values: list[Value], scope: str) -> Sequence[Value]:
        """Add the equations for one equation of a jaxpr, with these values as inputs, and return its results."""
        inner = inner_jaxpr(equation)
        if inner is not None and len(inner.jaxpr.invars) == len(values):
            outside = self._repeat
            if self._respects_checkpoints and equation.params.get("differentiated"):
                self._repeats += 1
                self._repeat = self._repeats
            results = self.walk(inner.jaxpr, [self.constant(c) for c in inner.consts], values, scope)
            self._repeat = outside
            return results
        mapped = map_of(equation) if self._map is None else None
        if mapped is not None:
            return self._open_map(mapped, equation, [self.whole(value) for value in values], scope)
        if equation.primitive.name == "optimization_barrier" and not self._respects_checkpoints:
            return values
        treatment = self._treatments.get(self._place, Whole())
        loop = loop_of(equation)
        if loop is not None and isinstance(treatment, Opened | Split):
            return self._divide(loop, treatment, equation, values, scope)
        whole = [self.whole(value) for value in values]
        if equation.primitive.name == "cond":
            number = self._taken_branch(equation, whole[0])
            if number is not None:
                return self._branch(equation, number, whole[1:], scope)
            if isinstance(treatment, Opened):
                return self._select(equation, whole, scope)
        if any(is_reference(v.aval) for v in equation.outvars):
            return [self._new_reference(equation, whole, scope)]
        if any(isinstance(value, Reference) for value in whole):
            return self._on_references(equation, whole, scope)
        if converts_nothing(equation):
            return whole
        if self._map is not None:
            return self._add_mapped(self._map, equation, whole, [self._map.placed(v.aval) for v in equation.outvars], scope)
        outputs = tuple(self.variable(v.aval) for v in equation.outvars)
        copies = _copies(equation)
        if copies:
            for value, output, params in zip(whole, outputs, copies, strict=True):
                self._add(equation, equation.primitive, [value], (output,), scope, changed=params)
            return outputs
        too_long = treatment.too_long if isinstance(treatment, Whole) else None
        self._add(equation, equation.primitive, whole, outputs, scope, too_long=too_long)
        return outputs

    def _open_map(self, mapped: Map, equation: Any, values: Sequence[Any], scope: str) -> list[Value]:
        """Add the equations of the body of a `shard_map` (`shard_maps.py`), and return its results."""
        body = equation.params["jaxpr"]
        self._map, self._map_context, self._placed = mapped, equation.ctx, {}
        given: list[Value] = []
        for value, spec, variable in zip(values, equation.params["in_specs"], body.invars, strict=True):
            if not isinstance(value, int):
                given.append(value)
            elif self._placed.setdefault(value, Placed(spec)) == Placed(spec):
                given.append(value)
            else:  # the same array, divided in two ways
                given += self._copied(mapped, equation, (value, Placed(spec)), variable.aval, mapped.placed(variable.aval), scope)
        results = self.walk(body, (), given, scope)
        returned: list[Value] = []
        for value, spec, variable in zip(results, equation.params["out_specs"], equation.outvars, strict=True):
            if not isinstance(value, int) or self._placed[value] == Placed(spec):
                returned.append(value)
            else:
                source = value, self._placed[value]
                returned += self._copied(mapped, equation, source, variable.aval, Placed(spec), scope, whole=True)
        self._map, self._map_context, self._placed = None, None, {}
        return returned

    def _copied(
        self, mapped: Map, around: Any, source: tuple[int, Placed], aval: Any, place: Placed, scope: str, *, whole: bool = False
    ) -> list[Value]:
        """A copy of the shards of a variable, which lies as `place` says; `aval` is that of a shard, or of the `whole` array."""
        value, lies = source
        copy = copy_of(aval)
        result = self.variable(aval if whole else mapped.whole(aval, place))
        inner = around.params["jaxpr"].eqns
        primitive = Mapped(copy.primitive, mapped, (lies,), (place,), inner[0].ctx if inner else around.ctx)
        self._counts[-1] += 1
        self.equations.append(Equation(primitive, dict(copy.params), (value,), (result,), scope, around.ctx))
        self._placed[result] = place
        return [result]

    def _add_mapped(
        self, mapped: Map, equation: Any, values: Sequence[Any], places: Sequence[Placed], scope: str
    ) -> tuple[int, ...]:
        inputs = tuple(self._placed.get(value) if isinstance(value, int) else None for value in values)
        outputs = tuple(self.variable(mapped.whole(v.aval, p)) for v, p in zip(equation.outvars, places, strict=True))
        primitive = Mapped(equation.primitive, mapped, inputs, tuple(places), equation.ctx)
        self._add(equation, primitive, values, outputs, scope)
        self._placed.update(zip(outputs, places, strict=True))
        return outputs

    def _divide(self, loop: Loop, treatment: Opened | Split, equation: Any, values: Sequence[Value], scope: str) -> list[Value]:
        """Add the parts of a scan one after another, and return the scan's results.

        Each part of a split scan is a shorter scan. Each part of an opened one is an iteration, whose body is added instead.
        """
        self.opened += 1
        outside = self._iterations
        inlined = isinstance(treatment, Opened)
        bounds = tuple((i, i + 1) for i in range(loop.length)) if isinstance(treatment, Opened) else treatment.bounds
        first, last = loop.constants, loop.constants + loop.carried
        if inlined:
            self._counts[-1] += 1
            constants, captured = values[:first], [self.constant(c) for c in loop.body_consts]
            carry: Sequence[Value] = self._as_constants(values[first:last])
        else:
            constants, captured = [self.whole(value) for value in values[:first]], []
            carry = [self.whole(value) for value in self._as_constants(values[first:last])]
        made = [  # at positions that no equation has
            Stack(v.aval, dict.fromkeys(bounds), inlined, scope, (*self._counts, -1 - i), outside)
            for i, v in enumerate(equation.outvars[loop.carried :])
        ]
        for begin, end in reversed(bounds) if loop.reverse else bounds:
            if inlined:
                self._counts.append(0)
                self._iterations = (*outside, begin)
            stacked = [self._part(value, begin, end, inlined=inlined, scope=scope) for value in values[last:]]
            given = [*constants, *carry, *stacked]
            if inlined:
                results = self.walk(loop.body, captured, given, _inside(scope, f"iteration_{begin}"))
            else:
                results = self._shorter(loop, equation, given, begin, end, scope)
            carry = results[: loop.carried]
            for stack, result in zip(made, results[loop.carried :], strict=True):
                stack.parts[begin, end] = self.whole(result)
            if inlined:
                self._counts.pop()
        self._iterations = outside
        return [*carry, *made]

    def _shorter(self, loop: Loop, scan: Any, given: Sequence[Value], begin: int, end: int, scope: str) -> list[Value]:
        """Add a scan for some of the iterations, and return its results."""
        avals = [v.aval for v in scan.outvars]
        stacks = [aval.update(shape=(end - begin, *shape_of(aval)[1:])) for aval in avals[loop.carried :]]
        results: list[Value] = [self.variable(aval) for aval in (*avals[: loop.carried], *stacks)]
        inside = _inside(scope, f"iterations_{begin}_{end}")
        self._add(scan, scan.primitive, given, results, inside, changed={"length": end - begin})
        return results

    def _part(self, value: Value, begin: int, end: int, *, inlined: bool, scope: str) -> Value:
        """What the iterations from `begin` to `end` read of a stacked value."""
        if isinstance(value, Stack) and value.inlined == inlined and (begin, end) in value.parts:
            if inlined or value.whole is None:  # otherwise the part would be kept beside the stack
                return value.parts[begin, end]
        stacked = self.whole(value)
        assert isinstance(stacked, int), "what has an axis is no number"
        key = shape_of(self.avals[stacked]), self.avals[stacked].dtype, None if inlined else end - begin
        if key not in self._helpers:
            self._helpers[key] = part_of(*key)
        return self.walk(self._helpers[key].jaxpr, (), [stacked, self._index(begin)], scope)[0]

    def _as_constants(self, values: Sequence[Value]) -> list[Value]:
        """Numbers as constants, so that the first iterations are a piece of code like the others."""
        return [
            self.constant(np.asarray(v.value, v.aval.dtype)) if isinstance(v, Immediate) and not is_extended(v.aval.dtype) else v
            for v in values
        ]

    def _taken_branch(self, cond: Any, index: Any) -> int | None:
        """The number of the branch that a conditional takes; None if the step does not say which it is."""
        known = known_scalar(index, self.equations, self.avals, self.constants)
        return None if known is None else min(max(int(known), 0), len(cond.params["branches"]) - 1)

    def _branch(self, cond: Any, number: int, operands: Sequence[Any], scope: str) -> list[Value]:
        """Add a branch of a conditional, and return its results."""
        outside = self._place
        self._place = (*outside, number)
        branch = closed(cond.params["branches"][number])
        results = self.walk(branch.jaxpr, [self.constant(c) for c in branch.consts], operands, scope)
        self._place = outside
        return results

    def _select(self, cond: Any, values: Sequence[Any], scope: str) -> list[Value]:
        """Add the branches of a conditional one after another, and return for each result that of the branch that is taken."""
        self.opened += 1
        index, operands = values[0], values[1:]
        made = [self._branch(cond, number, operands, scope) for number in range(len(cond.params["branches"]))]
        results: list[Value] = []
        for cases, variable in zip(zip(*made, strict=True), cond.outvars, strict=True):
            if all(isinstance(case, int) and case == cases[0] for case in cases):
                results.append(cases[0])
                continue
            select, result = selection_of(variable.aval, len(cases)), self.variable(variable.aval)
            self._add(select, select.primitive, [index, *map(self.whole, cases)], (result,), scope)
            results.append(result)
        return results

    def _index(self, index: int) -> int:
        """A variable that holds this index."""
        if index not in self._indices:
            self._indices[index] = self.variable(jax.typeof(np.int32(index)))
            self.constants[self._indices[index]] = np.asarray(index, np.int32)
        return self._indices[index]

    def whole(self, value: Value) -> Atom | Reference:
        """The value; for a result of an opened or a split scan, the array that stacks its parts."""
        if not isinstance(value, Stack):
            return value
        if value.whole is None:
            iterations, counts = self._iterations, self._counts  # of whoever needs the stack first
            join = joined(value.aval, list(value.parts))
            parts = self._layers(value) if value.inlined else list(value.parts.values())
            self._iterations, self._counts = (), [0]
            value.stack_as(self.walk(join.jaxpr, [self.constant(c) for c in join.consts], parts, value.scope)[0])
            self._iterations, self._counts = iterations, counts
        return cast("Atom | Reference", value.whole)

    def _layers(self, stack: Stack) -> list[Value]:
        """The elements of an opened scan's stack, each with the axis of the stack, which is added in the element's iteration."""
        one = layer(array_type(stack.aval, shape_of(stack.aval)[1:]))
        layers: list[Value] = []
        for (i, _), part in stack.parts.items():
            self._iterations, self._counts = (*stack.outside, i), [*stack.position[:-1], stack.position[-1] - 1]
            layers += self.walk(one.jaxpr, (), [part], _inside(stack.scope, f"iteration_{i}"))
        return layers

    def _add(
        self,
        equation: Any,
        primitive: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        scope: str,
        *,
        changed: Mapping[str, Any] = _NOTHING,
        too_long: TooLong | None = None,
    ) -> None:
        """Add a jaxpr's equation to the program, with `primitive` instead of its own, and with these parameters changed."""
        acts = any(type(effect).__name__ not in _INNER_EFFECTS for effect in equation.effects)
        params = {**equation.params, **changed}
        if equation.primitive is primitives.convert_element_type_p:
            params["weak_type"] = False
        self._counts[-1] += 1
        self.equations.append(
            Equation(
                primitive,
                params,
                tuple(inputs),
                tuple(outputs),
                scope,
                equation.ctx if self._map is None else self._map_context,
                effectful=acts,
                position=tuple(self._counts) if self._iterations else (),
                iterations=self._iterations,
                repeat=self._repeat,
                tracebacks=self._tracebacks,
                too_long=too_long,
            )
        )

    def moved(self, atom: Any, to_host: bool | None) -> Any:
        """The value in the memory in which it is wanted."""
        aval = self.avals[atom] if isinstance(atom, int) else atom.aval
        if to_host is None or not hasattr(aval, "shape") or in_host_memory(aval) == to_host:
            return atom
        move = move_of(aval, to_host=to_host)
        result = self.variable(move.outvars[0].aval)
        self._add(move, move.primitive, [atom], (result,), "output")
        return result

    def separate(self, outputs: Sequence[Atom], kept: Collection[int]) -> list[int]:
        """Copy each output that is returned twice, is an immediate, a constant, or an input that the caller keeps."""
        separate: dict[int, None] = {}  # in order
        for atom in outputs:
            if not isinstance(atom, int) or atom in self.constants or atom in separate or atom in kept:
                aval = atom.aval if isinstance(atom, Immediate) else self.avals[atom]
                copy = copy_of(aval)
                result = self.variable(aval)
                self.equations.append(Equation(copy.primitive, dict(copy.params), (atom,), (result,), "output", copy.ctx))
                atom = result
            separate[atom] = None
        return list(separate)

    def _new_reference(self, equation: Any, values: Sequence[Any], scope: str) -> Reference:
        """The reference that the equation makes."""
        aval, name = equation.outvars[0].aval.inner_aval, equation.primitive.name
        if len(equation.outvars) != 1 or equation.params.get("memory_space") is not None or name not in ("new_ref", "empty_ref"):
            raise TraceError(
                f"The step makes a mutable reference by {name!r} with {equation.params!r}, which cannot be planned. Make it with "
                "jax.new_ref(value) in the default memory space, or run this step with jax.jit."
            )
        if name == "new_ref":
            return Reference(aval, values[0])
        made = jax.make_jaxpr(lambda: jax.numpy.zeros(aval.shape, aval.dtype))()  # what it holds is undefined
        return Reference(aval, self.walk(made.jaxpr, [self.constant(c) for c in made.consts], (), scope)[0])

    def _on_references(self, equation: Any, values: Sequence[Any], scope: str) -> list[Atom]:
        """The results of an equation that reads or writes references; `holds` of each written reference is updated."""
        operands = [value.holds if isinstance(value, Reference) else value for value in values]
        first = values[0]
        if isinstance(first, Reference) and (touches_all(equation) or equation.primitive.name == "freeze"):
            if equation.primitive.name == "swap":
                first.write(operands[1])
            return [operands[0]]
        cells: dict[int, Reference] = {id(value): value for value in values if isinstance(value, Reference)}
        if equation.primitive.name == "free_ref":
            return []
        number = {cell: place for place, cell in enumerate(cells)}
        discharged = Discharged(
            equation.primitive,
            tuple(number[id(value)] if isinstance(value, Reference) else -1 for value in values),
            writes(equation.effects),
        )
        outputs = [self.variable(v.aval) for v in equation.outvars]
        held = [self.variable(cell.aval) for cell in cells.values()] if discharged.writes else []
        self._add(equation, discharged, operands, (*outputs, *held), scope)
        for cell, variable in zip(cells.values(), held, strict=False):
            cell.write(variable)
        return list(outputs)


def _copies(equation: Any) -> list[dict[str, Any]]:
    """Of a `device_put` of several arrays the parameters of one of each, so that each is planned by itself; else nothing.

    The offloading policies of `jax.checkpoint` name one place for all results of an operator. Such a copy stays as it is.
    """
    if equation.primitive.name != "device_put" or len(equation.outvars) == 1:
        return []
    places, sources, ways = (equation.params[name] for name in ("devices", "srcs", "copy_semantics"))
    if not len(places) == len(sources) == len(ways) == len(equation.outvars):
        return []
    return [
        {"devices": (place,), "srcs": (source,), "copy_semantics": (way,)}
        for place, source, way in zip(places, sources, ways, strict=True)
    ]


def _inside(scope: str, own: str) -> str:
    return f"{scope}/{own}" if scope and own else scope or own


def flatten(nested: Nested, treatments: Treatments = MappingProxyType({})) -> Program:
    """The flat program of a jaxpr, without dead or repeated equations, in which loops and conditionals are treated like this.

    Every output of the program is either the output of an equation, or a donated input that is taken, and no two outputs are
    the same variable. So an output that is a constant or any other input, or that is returned twice, gets a copy: the caller may
    donate or delete each array that a step returns by itself.
    """
    closed_jaxpr, results_on_host = closed(nested.jaxpr), nested.results_on_host
    jaxpr, respect_checkpoint = closed_jaxpr.jaxpr, nested.respect_checkpoint
    one_memory = not (names_memory(jaxpr) or any(results_on_host or ()))
    builder = _Builder(treatments, respects_checkpoints=respect_checkpoint, one_memory=one_memory)
    inputs = [builder.variable(v.aval) for v in jaxpr.invars]
    results = builder.walk(jaxpr, [builder.constant(c) for c in closed_jaxpr.consts], inputs, "")
    wanted = results_on_host or [None] * len(results)
    returned: list[Any] = [builder.moved(builder.whole(v), to_host) for v, to_host in zip(results, wanted, strict=True)]
    equations, returned = without_repeated(builder.equations, returned)
    if not respect_checkpoint:
        equations, returned = without_offloading(equations, returned)
    equations = with_sums_in_scatters(with_rectified_conditions(equations), returned)
    builder.equations = without_dead(equations, returned)
    read = {v for e in builder.equations for v in e.inputs if isinstance(v, int)} | {v for v in returned if isinstance(v, int)}
    used = [nested.keep_unused or v in read for v in inputs]
    usable = [u and d for u, d in zip(used, nested.donated or [False] * len(inputs), strict=True)]
    taken = taken_inputs(builder.avals, inputs, returned, usable, by_memory=nested.all_placed)
    from_references = read_from_references(jaxpr)
    weak_result = [is_weak(atom.aval) and id(atom) not in from_references for atom in jaxpr.outvars]
    weak_inputs = {v for v, given in zip(inputs, jaxpr.invars, strict=True) if is_weak(given.aval)}
    retyped = {v for v, weak in zip(returned, weak_result, strict=True) if isinstance(v, int) and weak != (v in weak_inputs)}
    kept = {v for v, is_taken in zip(inputs, taken.inputs, strict=True) if not is_taken or v in retyped}
    outputs = builder.separate(returned, kept)
    read = {v for e in builder.equations for v in e.inputs if isinstance(v, int)}
    return Program(
        equations=tuple(builder.equations),
        avals=tuple(builder.avals),
        inputs=tuple(inputs),
        constants={v: c for v, c in builder.constants.items() if v in read},
        outputs=tuple(outputs),
        used=tuple(used),
        taken=tuple(taken.inputs),
        crossed=tuple(taken.crossed),
        weak=frozenset(v for v, weak in zip(outputs, weak_result, strict=True) if weak),
        opened=builder.opened,
        made_from=nested,
    )
