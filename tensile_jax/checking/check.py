"""Compares a step under a plan with plain `jax.jit` on the same arguments: `tensile_jax.check`.

    plan the step and compile it        nothing runs yet; a budget that cannot be kept raises an error here
    compile plain jit                   does it fit?
    run the plan                        `steps` steps in a row, whose results are copied to the host
    run the reference                   plain jit or, where that does not fit, another plan
    run the reference in other ways     the same steps with other rounding: how much does rounding alone change the results?
    time both                           calls in turn, all with the same arguments

The plan runs first, because plain jit mostly uses more memory, and the allocator only knows the most bytes ever in use.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, cast

import jax
import numpy as np
from jax.tree_util import tree_leaves

from tensile_jax.api import PlannedFunction, made_of
from tensile_jax.arguments import read_count, shown
from tensile_jax.checking.differences import Difference, difference_of, judge, widest
from tensile_jax.checking.reference import Asked, Way, other_plan, other_roundings, plain_jit
from tensile_jax.checking.report import CHECK_VERSION, CheckReport, OutputCheck, Side
from tensile_jax.checking.ways import (
    Allocated,
    Arguments,
    allocator_peak,
    call_us,
    is_comparable,
    plan_first,
    planned_run,
    steps_of,
    timed_in_turn,
    values_of,
)
from tensile_jax.errors import OutOfMemory
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.exec.call.planned_calls import PlannedCalls
from tensile_jax.exec.call.signature import SignatureReader
from tensile_jax.exec.compiling.step import LaunchName, Step, package_version
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.memory_report.calls import (
    SAID_AGAIN,
    ask,
    is_jitted,
    leaves_with_path,
    nnx_step_of,
    refuse_unknown,
    refuse_without_effect,
)
from tensile_jax.plan import PolicyName
from tensile_jax.plan.drift import WATCHED_FIRST
from tensile_jax.plan_format import Plan, StateLayoutName
from tensile_jax.progress.display import told_by
from tensile_jax.progress.phases import Progress
from tensile_jax.trace.step import name_of, parameter_names
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

__all__ = ["CheckReport", "check"]

_SAID_AGAIN = {*SAID_AGAIN, "compiler_options"}  # the segments of a plan are compiled with these


@hides_frames
def check(
    function: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    steps: int = 4,
    timed_calls: int = 5,
    budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    policy: PolicyName | None = None,
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] | None = None,
    launch: LaunchName | None = None,
    state_layout: StateLayoutName | None = None,
    open_loops: bool | None = None,
    respect_checkpoint: bool | None = None,
    plan: Plan | None = None,
    progress: bool | Progress | None = None,
    **jit_options: Unpack[JitOptions],
) -> CheckReport:
    """Whether `function` returns under a plan what plain `jax.jit` returns, and what both cost. Both run on these arguments.

    An output differs if it is further from plain jit's than plain jit is from itself under another rounding. Integers, booleans
    and keys must be equal. Where plain jit does not fit on the device, another plan takes its place, and the report says so.

    The arguments are never donated or changed: the calls get copies of those that the step donates. The copies lie on the device
    beside the arguments; give the arguments as NumPy arrays where there is no room for both. Callbacks and prints of the step
    happen in each of the runs.

    Args:
        function: any function that `jax.jit` takes, or what `jax.jit` has returned (give `static_argnums` and `static_argnames`
            again). What `tensile_jax.jit` has returned is checked with the options that it was made with. A step on Flax NNX
            objects is taken, too, as in `tensile_jax.memory`.
        *args: its arguments: arrays, not shapes. NNX objects are not changed.
        kwargs: its keyword arguments.
        steps: how many steps to compare. Results that have the structure of an argument, as a state has, take its place in the
            next step. The default is one more than the steps that a plan measures at its beginning.
        timed_calls: how many calls of each side to time, after the steps, all with the same arguments.
        budget, host_budget, max_slowdown, policy, device_profile, state_memory, launch, state_layout, open_loops,
            respect_checkpoint, plan, progress: as in `tensile_jax.jit`.
        **jit_options: as in `tensile_jax.memory`, such as `donate_argnums=0`.

    Returns:
        A `CheckReport`. `print(report)` shows it, and `report.assert_ok()` fails a test if an output differs.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
        TraceError: the step cannot be planned.
        OutOfMemory: neither plain jit nor another plan fits on the device, so that there is nothing to compare with.
        ValueError: an argument is a shape, or was deleted, or an option has a value that is not allowed.
        TypeError: an option is none of `jax.jit`, or it would change nothing because the function is jitted already.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(loss)(w, x)
    >>> report = check(step, jnp.eye(32), jnp.ones((512, 32)), budget="80%", donate_argnums=0)
    >>> report.verdict
    'agrees'
    """
    for name, value in (("steps", steps), ("timed_calls", timed_calls)):
        if read_count(value) is None:
            raise ValueError(f"{name} must be a whole number of at least 1: got {shown(value)}.")
    given = {
        "budget": budget, "host_budget": host_budget, "max_slowdown": max_slowdown, "policy": policy,
        "device_profile": device_profile, "state_memory": state_memory, "launch": launch, "state_layout": state_layout,
        "open_loops": open_loops, "respect_checkpoint": respect_checkpoint, "plan": plan, "progress": progress,
    }  # fmt: skip
    refuse_unknown(jit_options)
    named = dict(sorted((kwargs or {}).items()))
    nnx_step = nnx_step_of(function, args, named, jit_options)
    step = function if nnx_step is None else nnx_step.function
    asked = _asked(step, {name: value for name, value in given.items() if value is not None}, jit_options)
    calls = asked.calls()  # refuses wrong options
    refuse_unrunnable(function, args, named)

    def report_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
        return _report_on(_case_of(asked, calls, args, kwargs, steps=int(steps), timed_calls=int(timed_calls)))

    return ask(nnx_step, report_on, args, named)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """What is checked.

    Attributes:
        asked: the step and its options.
        step: the step, traced.
        arguments: its arguments.
        outputs: the name, and the shape and type, of each of its flat results.
        steps, timed_calls: as given to `check`.
        tell: is told how far the check is.
        jax_trace_s: what tracing has taken JAX.
        checked, plan: the step under its plan.
    """

    asked: Asked
    step: Step
    arguments: Arguments
    outputs: Sequence[tuple[str, Any]]
    steps: int
    timed_calls: int
    tell: Progress
    jax_trace_s: float
    checked: Way
    plan: Plan

    def compared_after(self, number: int) -> list[int]:
        """The outputs that are compared after this step: those that are fed back only after the first and after the last."""
        fed = {result for _, result in self.arguments.fed_back} if 1 < number < self.steps else set()
        return [place for place, (_, info) in enumerate(self.outputs) if place not in fed and is_comparable(info)]


@dataclass(frozen=True, slots=True, eq=False)
class _Ran:
    """What the steps of one way have shown: their compared values, step by step, and the peak by the allocator."""

    values: Sequence[Mapping[int, np.ndarray]]
    first_s: float
    allocated: tuple[int | None, bool]


def _asked(function: Callable[..., Any], given: Mapping[str, Any], jit_options: JitOptions) -> Asked:
    """The step as it was given, with all of its options.

    Raises:
        TypeError: an option would change nothing because the step is jitted already.
    """
    made_here = isinstance(function, PlannedFunction)  # so that every option takes effect
    refuse_without_effect(function, jit_options, said_again=set(JitOptions.__annotations__) if made_here else _SAID_AGAIN)
    options: dict[str, Any] = {**given, **jit_options}
    if made_here:
        function, made_with = made_of(function)
        options = {**made_with, **options, "keep_plans": None}  # the folder is for the plans of the user's own calls
    for_jit = {name: value for name, value in options.items() if name in JitOptions.__annotations__}
    for_plan = {name: value for name, value in options.items() if name not in for_jit}
    jitted = function if is_jitted(function) else jax.jit(function, **for_jit)
    return Asked(jitted, cast(PlanOptions, for_plan), cast(JitOptions, for_jit))


def _case_of(
    asked: Asked, calls: PlannedCalls, args: tuple[Any, ...], kwargs: dict[str, Any], *, steps: int, timed_calls: int
) -> _Case:
    """Trace the step, plan it and compile it. Nothing runs."""
    jitted = asked.jitted
    began = time.perf_counter()
    jitted.trace(*args, **kwargs)  # JAX keeps the trace, and the plan uses it again
    jax_trace_s = time.perf_counter() - began
    with calls.showing():
        step = calls.step(args, kwargs)
    if len(step.agreement.processes) > 1:
        raise ValueError(
            "check compares results in one process, and this step runs on devices of several. Check it on devices of one process."
        )
    arguments = _arguments_of(step, asked, args, kwargs)
    plan = plan_first(calls, arguments).plan
    checked = Way("the plan", asked, planned_run(calls, arguments), time.perf_counter() - began, calls)
    return _Case(
        asked=asked,
        step=step,
        arguments=arguments,
        outputs=list(zip(step.traced.results, tree_leaves(step.traced.traced.out_info), strict=True)),
        steps=steps,
        timed_calls=timed_calls,
        tell=told_by(asked.plan_options.get("progress")),
        jax_trace_s=jax_trace_s,
        checked=checked,
        plan=plan,
    )


def refuse_unrunnable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: ValueError: an argument is a shape, or was deleted."""
    for path, leaf in leaves_with_path(args, kwargs):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            name = name_of(parameter_names(function, ()), path)
            raise ValueError(
                f"Argument {name} is a shape, {leaf.dtype}{list(leaf.shape)}, and check runs the step. Give arrays, such as "
                "those of the first step of a training. tensile_jax.memory and .plan of a step take shapes."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            name = name_of(parameter_names(function, ()), path)
            raise ValueError(
                f"Argument {name} has been deleted: it was donated to an earlier call. Give what that call has returned, or "
                "make the argument again."
            )


def _arguments_of(step: Step, asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    options, graph = asked.jit_options, step.graph
    reader = SignatureReader(asked.jitted.__wrapped__, options.get("static_argnums"), options.get("static_argnames"))
    call = reader.read(args, kwargs)
    assert call is not None  # the step was traced for such a call
    produced = [graph.tensors[tensor].producer is not None for tensor in graph.outputs]
    return Arguments(
        reader=reader,
        args=args,
        kwargs=kwargs,
        leaves=call.leaves,
        donated=frozenset(place for place, info in enumerate(jax.tree.leaves(step.traced.traced.args_info)) if info.donated),
        fed_back=tuple((graph.inputs.index(pair.input), graph.outputs.index(pair.output)) for pair in graph.carried),
        passed_on=frozenset(place for place, is_produced in enumerate(produced) if not is_produced),
    )


def _report_on(case: _Case) -> CheckReport:
    """Run both sides, and compare them."""
    checked, step, tell = case.checked, case.step, case.tell
    assert checked.calls is not None  # it has a plan
    notes = _notes_on(case)
    with checked.calls.showing():
        plain = plain_jit(case.asked, step, case.arguments, case.jax_trace_s)
        ours = _ran(case, checked)
        reference, theirs, why = _referred(case, plain)
        differences = [
            {place: difference_of(here[place], value) for place, value in there.items()}
            for here, there in zip(ours.values, theirs.values, strict=True)
        ]
        ours = replace(ours, values=())  # no longer needed
        own, roundings, more = _own_differences(case, reference, theirs)
        warm_up = [call_us(checked.run, case.arguments) for _ in range(case.steps, WATCHED_FIRST)]  # these are measured inside
        times = timed_in_turn(
            (checked.run, reference.run), case.arguments, case.timed_calls, lambda done: tell("timing", done, case.timed_calls)
        )
    del warm_up
    refused = checked.calls.report().out_of_memory
    if refused:
        notes.append(f"The device refused memory {refused} times. A plan for less memory may have replaced the first one.")
    outputs = _judged(case, differences, own)
    return CheckReport(
        check_version=CHECK_VERSION,
        tensile_version=package_version(),
        jax_version=jax.__version__,
        verdict="agrees" if all(output.agrees for output in outputs) else "differs",
        program=step.graph.name,
        fingerprint=step.graph.fingerprint,
        devices=step.traced.devices,
        device=step.compiler.device.device_kind,
        policy=case.plan.policy,
        budget_bytes=case.plan.budget_bytes,
        budget_basis=case.plan.budget_basis,
        whole=case.plan.whole,
        steps=case.steps,
        fed_back=tuple(step.graph.tensors[step.graph.inputs[place]].name for place, _ in case.arguments.fed_back),
        timed_calls=case.timed_calls,
        copied_bytes=case.arguments.copied_bytes,
        checked=_side(checked, ours, times[0]),
        reference=_side(reference, theirs, times[1]),
        outputs=outputs,
        roundings=roundings,
        notes=(*why, *notes, *more),
    )


def _ran(case: _Case, way: Way) -> _Ran:
    """Run the steps in one way."""
    device, what = case.step.compiler.device, f"running {way.name}"
    before = Allocated.on(device)
    values: list[Mapping[int, np.ndarray]] = []
    began = time.perf_counter()
    first_s = 0.0
    case.tell(what, 0, case.steps)
    try:
        for number, results in enumerate(steps_of(way.run, case.arguments, case.steps), start=1):
            first_s = first_s or time.perf_counter() - began
            values.append(values_of(results, case.compared_after(number)))
            case.tell(what, number, case.steps)
    except Exception as error:
        if is_out_of_memory(error, effectful=False) or isinstance(error, OutOfMemory):
            _explain_copies(error, case.arguments)
        raise
    return _Ran(values, way.prepared_s + first_s, allocator_peak(before, Allocated.on(device), case.arguments))


def _explain_copies(error: Exception, arguments: Arguments) -> None:
    """Say in a note that the copies of donated arguments take memory, too, if they do."""
    if arguments.copied_bytes:
        error.add_note(
            f"check keeps your arguments, so copies of those that are donated lay on the device beside them: "
            f"{format_bytes(arguments.copied_bytes)}. Give these arguments as NumPy arrays (jax.device_get), and delete your own."
        )


def _referred(case: _Case, plain: Way | str) -> tuple[Way, _Ran, tuple[str, ...]]:
    """What the plan is compared with, what that has shown, and, in a sentence, why it is not plain jit."""
    why = plain if isinstance(plain, str) else ""
    if isinstance(plain, Way):
        try:
            return plain, _ran(case, plain), ()
        except Exception as error:
            if not is_out_of_memory(error, effectful=False):
                raise
            why = f"Plain jit ran out of memory on the device: {str(error).splitlines()[0]}"
    other = other_plan(case.asked, case.step, case.arguments, case.plan, why)
    return other, _ran(case, other), (f"{why} So the plan is compared with {other.name}, which cuts the step in other places.",)


def _own_differences(
    case: _Case, reference: Way, theirs: _Ran
) -> tuple[list[dict[int, Difference]], tuple[str, ...], tuple[str, ...]]:
    """Three things: how much each output of the reference differs from itself, step by step; the other roundings under which it
    ran; and notes.
    """
    own = [dict.fromkeys(values, Difference()) for values in theirs.values]
    named: list[str] = []
    notes: list[str] = []
    for one in other_roundings(reference, case.step, case.arguments):
        if isinstance(one, str):
            notes.append(one)
            continue
        what, run, arguments = one
        told = f"running {reference.name} {what}"
        case.tell(told, 0, case.steps)
        for number, results in enumerate(steps_of(run, arguments, case.steps)):
            expected = theirs.values[number]
            for place, value in values_of(results, list(expected)).items():
                own[number][place] = widest((own[number][place], difference_of(value, expected[place])))
            case.tell(told, number + 1, case.steps)
        named.append(what)
    return own, tuple(named), tuple(notes)


def _judged(
    case: _Case, differences: Sequence[Mapping[int, Difference]], own: Sequence[Mapping[int, Difference]]
) -> tuple[OutputCheck, ...]:
    """The judgements on all outputs: those that differ, the earliest first, and then the furthest from the reference first."""
    found = [
        judge(
            name,
            info.dtype,
            tuple(info.shape),
            [(n + 1, differences[n][place], own[n][place]) for n in range(case.steps) if place in differences[n]],
        )
        for place, (name, info) in enumerate(case.outputs)
        if place in differences[0]
    ]
    return tuple(
        sorted(found, key=lambda one: (one.agrees, 0 if one.agrees else one.step, -(one.relative or 0.0), -one.differing))
    )


def _side(way: Way, ran: _Ran, step_us: float) -> Side:
    allocator_bytes, is_limit = ran.allocated
    report = None if way.calls is None else way.calls.report()
    return Side(
        name=way.name,
        peak_bytes=way.plain_peak_bytes if report is None else report.peak_bytes,
        allocator_peak_bytes=allocator_bytes,
        allocator_is_limit=is_limit,
        step_us=step_us,
        first_call_s=ran.first_s,
        launches=1 if report is None else report.launches,
        tries=0 if report is None else report.tries,
    )


def _notes_on(case: _Case) -> list[str]:
    notes: list[str] = []
    if case.plan.whole:
        notes.append("The plan runs the step as one executable, as plain jit does. A lower budget makes a plan that cuts it.")
    if any(operator.effectful for operator in case.step.graph.operators):
        notes.append("The step has effects, such as callbacks and prints. They have happened in each of the runs of this check.")
    if not case.outputs:
        notes.append("The step returns nothing, so nothing is compared.")
    return notes
