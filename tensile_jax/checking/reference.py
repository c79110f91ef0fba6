"""Finds what a plan is compared with: plain `jax.jit` or, where that does not fit on the device, another plan.

The other plan fits into the free memory. It differs from the checked plan in where it cuts the step, or in what it computes
again. Several policies are tried in turn until one gives such a plan.

Every reference can also run under another rounding, which shows by how much its results depend on rounding alone:

    excess precision off       XLA may keep more digits between operators than the types of their results have. Without these
                               digits, XLA rounds more often. On a CPU, that alone changes the results of few steps, so XLA also
                               compiles the reference with fewer optimizations there.
    arguments moved            Every argument is moved by one unit in the last place. That changes results by about as much as
                               another order of sums does, on every device. Nothing is compiled for it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from tensile_jax.checking.ways import Allocated, Arguments, Run, plain_run, plan_first, planned_run
from tensile_jax.errors import BudgetTooSmall, OutOfMemory
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.exec.call.planned_calls import PlannedCalls
from tensile_jax.exec.compiling.compiler import memory_of
from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.memory_report.calls import calls_of
from tensile_jax.plan import PolicyName
from tensile_jax.plan_format import Plan
from tensile_jax.units import format_bytes

_POLICIES: tuple[PolicyName, ...] = ("auto", "checkpoint", "capuchin")
_ROUNDS_MORE = {"xla_allow_excess_precision": False}
_LESS_OPTIMIZED = {"xla_backend_optimization_level": 1}
"""With 0, outputs differ more, but a step of convolutions takes 20 times as long (`tensile check cnn --batch-size 16`)."""
MOVED = "from arguments moved by one unit in the last place"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The jitted step, the options of its plan, and the options of `jax.jit` that were given."""

    jitted: Any
    plan_options: PlanOptions
    jit_options: JitOptions

    def calls(self, compiler_options: dict[str, Any] | None = None) -> PlannedCalls:
        """The calls of the step under a plan, perhaps compiled with more options of XLA."""
        given = self.jit_options
        if compiler_options is not None:
            given = JitOptions(**{**given, "compiler_options": {**(given.get("compiler_options") or {}), **compiler_options}})
        return calls_of(self.jitted, self.plan_options, given)

    def within(self, nbytes: int, policy: PolicyName) -> "Asked":
        """The same step under another plan."""
        kept = {k: v for k, v in self.plan_options.items() if k in ("host_budget", "device_profile", "state_memory", "progress")}
        return replace(self, plan_options=cast(PlanOptions, {**kept, "budget": nbytes, "policy": policy}))

    def with_plan(self, plan: Plan) -> "Asked":
        """The same step under this plan."""
        kept = {k: v for k, v in self.plan_options.items() if k in ("host_budget", "device_profile", "progress")}
        return replace(self, plan_options=cast(PlanOptions, {**kept, "plan": plan}))


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A way in which the step runs.

    Attributes:
        name: what it is called for people.
        asked: the options under which it runs.
        run: runs the step.
        prepared_s: what tracing, planning and compiling have taken.
        calls: the calls under the plan; None for plain jit.
        plain_peak_bytes: plain jit's peak by XLA's account; 0 for a plan.
    """

    name: str
    asked: Asked
    run: Run
    prepared_s: float
    calls: PlannedCalls | None = None
    plain_peak_bytes: int = 0


def plain_jit(asked: Asked, step: Step, arguments: Arguments, traced_s: float) -> Way | str:
    """Plain jit, compiled; or why it does not fit, in a sentence."""
    try:
        found = step.plain_jit.compiled(step.options.progress or _tell_nobody)
    except Exception as error:
        if not is_out_of_memory(error, effectful=False):
            raise
        return "Plain jit does not fit on the device: compiling it took more memory than there is."
    device = step.compiler.device
    limit, counted = memory_of(device), Allocated.on(device)
    others = 0 if counted is None else max(counted.in_use - arguments.uncopied_bytes, 0)
    if found.peak_bytes + others > limit:
        return (
            f"Plain jit does not fit on the device: it needs {format_bytes(found.peak_bytes)}, and the device has "
            f"{format_bytes(max(limit - others, 0))} beside what is in use."
        )
    return Way("plain jit", asked, plain_run(step, found.executable), traced_s + found.seconds, plain_peak_bytes=found.peak_bytes)


def other_plan(asked: Asked, step: Step, arguments: Arguments, checked: Plan, why: str) -> Way:
    """Another plan, which cuts the step otherwise than `checked`.

    Args:
        why: why it is needed, in a sentence.

    Raises:
        OutOfMemory: there is none within the memory of the device.
    """
    device = step.compiler.device
    limit, counted = memory_of(device), Allocated.on(device)
    others = 0 if counted is None else max(counted.in_use - arguments.uncopied_bytes, 0)
    # on a device of unknown size, plain jit has just run out of memory: it needs more than there is
    room = step.plain_jit.sized().peak_bytes - 1 if limit == float("inf") else int(limit) - others
    for policy in _POLICIES:
        other = asked.within(max(room, 1), policy)
        began = time.perf_counter()
        calls = other.calls()
        try:
            plan = plan_first(calls, arguments).plan
        except BudgetTooSmall:
            continue
        if not plan.whole and _cut(plan) != _cut(checked):
            name = f"a plan within {format_bytes(plan.peak_bytes)}, policy {policy}"
            prepared_s = time.perf_counter() - began
            return Way(name, other.with_plan(plan), planned_run(calls, arguments), prepared_s, calls)
    raise OutOfMemory(
        f"{why} No other plan for {step.graph.name!r} fits either, so there is nothing to compare the plan with. Check the step "
        "with a smaller batch, on a device with more memory, or on a CPU."
    )


def other_roundings(way: Way, step: Step, arguments: Arguments) -> Iterator[tuple[str, Run, Arguments] | str]:
    """How the same way runs under other roundings: what is different, in words, and with which arguments. A sentence: that one
    cannot be had.
    """
    on_cpu = step.compiler.device.platform == "cpu"
    options = {**_ROUNDS_MORE, **(_LESS_OPTIMIZED if on_cpu else {})}
    what = "with excess precision off" + (" and code that is optimized less" if on_cpu else "")
    try:
        if way.calls is None:
            yield what, plain_run(step, step.traced.traced.lower().compile(dict(options))), arguments
        else:
            calls = way.asked.calls(options)
            plan_first(calls, arguments)
            yield what, planned_run(calls, arguments), arguments
    except jax.errors.JaxRuntimeError as error:
        yield f"The reference could not run {what}: {str(error).splitlines()[0]}"
    yield MOVED, way.run, arguments.nudged()


def _cut(plan: Plan) -> Sequence[object]:
    """Where the plan cuts the step, and what it computes again."""
    return [(segment.operators, segment.recomputes) for segment in plan.segments]


def _tell_nobody(what: str, done: int, of: int) -> None:
    pass
