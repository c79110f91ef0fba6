"""Finds the treatment of every loop and conditional of a step, before the step becomes one list of equations.

A *treatment* says whether a loop or a conditional is kept whole (as one operator), opened (replaced by its iterations or
branches) or split into shorter loops (`reading/treatment.py`). Rules choose it, mostly by the size of the loop (`rules.py`). What
is possible for a loop also depends on what is around it. So this module walks over the nested jaxpr and asks the rules about
each loop and conditional that it meets:

    call, opened loop   the walk goes on inside
    whole, split loop   nothing inside is treated, since the loop stays one operator or becomes several
    conditional         the walk goes on in all branches, even if the conditional stays whole: if one branch turns out to be
                        taken always, that branch replaces the conditional (`reading/flatten.py`)
    `shard_map`         nothing inside is treated

A forward loop leaves values for the backward loop, in stacked arrays. If the forward loop is split, the backward loop is split at
the same places, whatever the rules say: each part then reads the stacks of its own iterations. To find such loops, the walk
follows the stacks of opened and split loops through the jaxpr.

Some loops and conditionals always stay whole: those on mutable references, a conditional on values in host memory, and a loop
over stacked arrays in host memory (JAX cannot take an element of such an array by an index on the device). Some loops are not
split: a loop inside of an opened loop, a loop with effects, and a loop on values in host memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from tensile_jax.trace.avals import in_host_memory
from tensile_jax.trace.program import Nested
from tensile_jax.trace.reading.jaxprs import closed, inner_jaxpr
from tensile_jax.trace.reading.mutable_references import is_reference
from tensile_jax.trace.reading.scans import Loop, loop_of
from tensile_jax.trace.reading.treatment import Opened, Place, Split, Treatment, Treatments, Whole

Rule = Callable[[Any, bool], Treatment]
"""Takes a scan or a conditional, as an equation of a jaxpr, and whether it may be split."""

_Stack = Opened | Split | None
"""How the loop was treated whose stack a variable is; None if the variable is no stack of such a loop."""


def find_treatments(nested: Nested, rule: Rule) -> Treatments:
    """The treatments of the loops and conditionals of a jaxpr, by this rule where the rule has a choice."""
    finder = _Finder(rule, respects_checkpoint=nested.respect_checkpoint)
    jaxpr = closed(nested.jaxpr).jaxpr
    finder.walk(jaxpr, [None] * len(jaxpr.invars), (), in_loop=False)
    return finder.found


class _Finder:
    def __init__(self, rule: Rule, *, respects_checkpoint: bool) -> None:
        self.found: dict[Place, Treatment] = {}
        self._rule = rule
        self._respects_checkpoint = respects_checkpoint

    def walk(self, jaxpr: Any, inputs: Sequence[_Stack], place: Place, *, in_loop: bool) -> list[_Stack]:
        """Treat what is in a jaxpr at this place, and say of which loops its outputs are stacks."""
        stacks: dict[Any, _Stack] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Stack:
            return None if isinstance(atom, Literal) else stacks.get(atom)

        for index, equation in enumerate(jaxpr.eqns):
            results = self._results(equation, [read(atom) for atom in equation.invars], (*place, index), in_loop=in_loop)
            stacks.update(zip(equation.outvars, results, strict=False))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, inputs: Sequence[_Stack], place: Place, *, in_loop: bool) -> Sequence[_Stack]:
        """Treat an equation, and say of which loops its results are stacks; nothing if none is."""
        inner = inner_jaxpr(equation)
        if inner is not None and len(inner.jaxpr.invars) == len(inputs):
            return self.walk(inner.jaxpr, inputs, place, in_loop=in_loop)
        name = equation.primitive.name
        if name == "optimization_barrier" and not self._respects_checkpoint:
            return inputs
        on_references = any(is_reference(v.aval) for v in equation.invars)
        if name == "cond":
            if not on_references and not _uses_host_memory(equation):
                self.found[place] = self._rule(equation, False)
            for number, branch in enumerate(equation.params["branches"]):
                self.walk(closed(branch).jaxpr, [None] * (len(inputs) - 1), (*place, number), in_loop=in_loop)
        loop = None if on_references else loop_of(equation)
        return () if loop is None else self._loop(loop, equation, inputs, place, in_loop=in_loop)

    def _loop(self, loop: Loop, scan: Any, inputs: Sequence[_Stack], place: Place, *, in_loop: bool) -> list[_Stack]:
        may_split = not (in_loop or scan.effects or _uses_host_memory(scan))
        read = next((s for s in inputs if isinstance(s, Split) and s.bounds[-1][1] == loop.length), None)
        if may_split and read is not None:
            treatment: Treatment = read
        else:
            treatment = self._rule(scan, may_split) if _can_be_opened(loop, scan, inputs) else Whole()
        self.found[place] = treatment
        carried: list[_Stack] = [None] * loop.carried
        if isinstance(treatment, Opened):
            of_body = [*inputs[: loop.constants], *[None] * (len(inputs) - loop.constants)]
            carried = self.walk(loop.body, of_body, place, in_loop=True)[: loop.carried]
        stack = treatment if isinstance(treatment, Opened | Split) else None
        return [*carried, *[stack] * (len(scan.outvars) - loop.carried)]


def _uses_host_memory(equation: Any) -> bool:
    """Whether the equation reads or makes values in host memory."""
    return any(in_host_memory(v.aval) for v in (*equation.invars, *equation.outvars))


def _can_be_opened(loop: Loop, scan: Any, inputs: Sequence[_Stack]) -> bool:
    """Whether the iterations of a scan can take what they need from its stacks, and leave what they make on its own."""
    first = loop.constants + loop.carried
    arrays = [v for v, stack in zip(scan.invars[first:], inputs[first:], strict=True) if not isinstance(stack, Opened)]
    made = scan.outvars if loop.length == 0 else ()
    return not any(in_host_memory(v.aval) for v in (*arrays, *made))
