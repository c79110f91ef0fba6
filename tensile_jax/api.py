"""The decorator: `tensile_jax.jit` is `jax.jit` under a memory budget."""

import functools
import statistics
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, cast, get_args, overload

import jax
from jax.tree_util import tree_unflatten

from tensile_jax.arguments import MOST, read_number, shown
from tensile_jax.budget import Budget, parse_budget
from tensile_jax.errors import PlanFileError, TraceError
from tensile_jax.exec.call.donation import refuse_unusable
from tensile_jax.exec.call.interrupts import InterruptsHeld
from tensile_jax.exec.call.placement import Placement, placement_of
from tensile_jax.exec.call.results import Handover
from tensile_jax.exec.call.signature import Call, Signature, SignatureReader, debugs_numbers
from tensile_jax.exec.step.compare import compare
from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.executor import Executor, Observation
from tensile_jax.exec.step.prepared_step import Options, PreparedStep, Progress, RunningPlan
from tensile_jax.exec.step.saved_plan import above_budget, load, refuse_saved
from tensile_jax.exec.step.transfer import Device, Transfer, in_device_memory, to_device
from tensile_jax.plan.result.comparison import Comparison
from tensile_jax.plan_format import Plan, PolicyName, contradictions
from tensile_jax.profiles import load_profile, profile_for
from tensile_jax.trace import trace_step

_WATCHED_FIRST = 3  # iterations watched after a plan is made
_WATCHED_EVERY = 50


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, of the latest plan; bytes and microseconds per iteration, seconds for compiling.

    Attributes:
        peak_bytes: live device bytes held for the step plus the running segment's workspace, the most at any launch. For a step
            that runs whole, XLA's own figure.
        step_us: median over the watched iterations. None before the second iteration.
        swapped_bytes: over the link, both directions.
        stall_us: waiting for copies.
        passive_swap_ins: tensors that were not there when their segment came, since the plan was made.
        recomputed_us: measured latency of the segments, times the share that the plan gives to recomputation.
        out_of_memory: times the device refused an allocation.
    """

    peak_bytes: int
    step_us: float | None
    swapped_bytes: int
    stall_us: float
    passive_swap_ins: int
    recomputed_us: float
    segments: int
    distinct_segments: int
    out_of_memory: int
    trace_s: float
    plan_s: float
    compile_s: float
    iterations: int


class PlannedFunction:
    """A step under a memory budget. Call it as the function that it wraps; it keeps one plan for each signature of a call.

    It is what `tensile_jax.jit` returns, and it has what the result of `jax.jit` has: `lower`, `trace`, `eval_shape`,
    `clear_cache`, `__wrapped__`; it can be a method and it can be pickled. Inside another transformation (`jax.jit`, `jax.grad`,
    `jax.vmap`, ...) and under `jax.disable_jit` it is the plain jitted function: a plan is made at the outermost call only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        budget: int | float | str | None,
        max_slowdown: float | None,
        policy: PolicyName,
        device_profile: str | None,
        state_memory: Literal["device", "any"],
        plan: Plan | None,
        progress: Progress | None,
        jit_options: dict[str, Any],
    ) -> None:
        if state_memory not in ("device", "any"):
            raise ValueError(f'state_memory must be "device" or "any", got {state_memory!r}.')
        if policy not in get_args(PolicyName):
            raise ValueError(f"policy={policy!r} is not known. Known: {', '.join(get_args(PolicyName))}.")
        jitted = jax.jit(function, **jit_options)  # refuses in jit's own words what cannot be jitted
        functools.update_wrapper(self, function)  # first, for a wrapped function may have attributes of these names
        self._jitted: Any = jitted
        self._options = {
            "budget": budget,
            "max_slowdown": max_slowdown,
            "policy": policy,
            "device_profile": device_profile,
            "state_memory": state_memory,
            "plan": plan,
            "progress": progress,
            **jit_options,
        }
        self._function = function
        self._budget = None if budget is None else parse_budget(budget)
        self._max_slowdown = _read_slowdown(max_slowdown, budget)
        self._policy: PolicyName = policy
        self._profile = device_profile
        self._state_memory: Literal["device", "any"] = state_memory
        self._saved = None if plan is None else _read_plan(plan, self._budget, max_slowdown)
        self._progress = progress
        self._jit_options = jit_options
        numbers, names = jit_options.get("static_argnums"), jit_options.get("static_argnames")
        self._signatures = SignatureReader(
            function,
            None if numbers is None else _as_tuple(numbers),
            None if names is None else _as_tuple(names),
        )
        self._steps: dict[Signature, _Step] = {}
        self._running: dict[Signature, RunningPlan] = {}
        self._latest: Signature | None = None
        self._preparing = threading.RLock()
        if device_profile is not None:
            load_profile(device_profile)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._read(args, kwargs)
        if call is None:
            return self._jitted(*args, **kwargs)
        signature = call.signature
        running = self._running.get(signature)
        if running is None:
            with self._preparing:
                running = self._running.get(signature) or self._start(call, args, kwargs)
        self._latest = signature
        step = self._steps[signature]
        if running.executor is not None:
            refuse_unusable(call, step.prepared.graph)
        with InterruptsHeld():  # from here on, donated arguments may be gone
            step.iterations += 1
            if running.executor is None:
                return self._call_whole(running, step.iterations, call.any_on_host, args, kwargs)
            leaves = call.leaves if call.devices <= {step.placement.device} else _brought(call.leaves, step.placement.device)
            return self._call_segments(signature, step, running, running.executor, leaves)

    def _call_segments(
        self, signature: Signature, step: "_Step", running: RunningPlan, executor: Executor, leaves: list[Any]
    ) -> Any:
        watched = step.iterations <= _WATCHED_FIRST or step.iterations % _WATCHED_EVERY == 0
        watch = Observation() if watched else None
        began = time.perf_counter()
        results = step.handover(executor.run(leaves, watch))
        if watch is not None:
            watch.step_us = (time.perf_counter() - began) * 1e6
            running.observations.append(watch)
        if executor.needs_lower_budget:
            executor.needs_lower_budget = False
            lower = step.prepared.prepare_for_less(running)
            if lower is not running:
                lower.observations.append(watch or Observation(running.plan.peak_bytes))
                self._running[signature] = lower
        return tree_unflatten(step.prepared.step.out_tree, results)

    def _call_whole(
        self, running: RunningPlan, count: int, any_on_host: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        began = time.perf_counter()
        if any_on_host:
            args, kwargs = self._signatures.map_dynamic(to_device, args, kwargs)
        result = self._jitted(*args, **kwargs)
        if count <= _WATCHED_FIRST:
            jax.block_until_ready(result)
            step_us = (time.perf_counter() - began) * 1e6
            running.observations.append(Observation(peak_bytes=running.plan.peak_bytes, step_us=step_us))
        return result

    # -- what the result of jax.jit has ---------------------------------------------------------------------------------

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        try:
            return f"<PlannedFunction of {self._function!r}>"
        except Exception:  # as jit does it, for an object whose own repr fails
            return "<PlannedFunction>"

    def __reduce__(self) -> Any:
        return functools.partial(jit, **self._options), (self._function,)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """The whole step lowered by plain `jax.jit`, without a plan."""
        return self._jitted.lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """The whole step traced by plain `jax.jit`."""
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The shapes and types of the results, as plain `jax.jit` gives them."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget every trace, plan and executable; the next call makes them anew."""
        self._jitted.clear_cache()
        self._signatures.forget()
        with self._preparing:
            self._steps.clear()
            self._running.clear()
            self._latest = None

    # -- plans and reports ----------------------------------------------------------------------------------------------

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s). Runs nothing, and compiles no segment.

        The plan in use is returned once the function has been called with such arguments; before that, workspaces are estimates.
        Of a function with a saved plan, it is that plan, if it is for these arguments.

        Raises:
            PlanFileError: the function has a saved plan, which is for other arguments or another program.
            BudgetTooSmall: no plan keeps the budget.
            TraceError: the step cannot be planned.
        """
        call = self._read_outermost(args, kwargs)
        running = self._running.get(call.signature) or next(
            (plan for signature, plan in self._running.items() if signature.shapes == call.signature.shapes), None
        )
        if running is not None:
            return running.plan
        prepared = self._prepare(call, args, kwargs).prepared
        if self._saved is None:
            return prepared.predict()
        refuse_saved(prepared, self._saved)
        return self._saved

    def bound_us(self, /, *args: Any, **kwargs: Any) -> float:
        """A lower bound on the time of a step under the budget, in microseconds, whatever the plan; infinite if there is none.

        It holds in the planner's own model of the device, so compare it with a plan's `step_us`. It takes about as long
        as planning. See `tensile_jax/plan/search/lower_bound.py`.
        """
        return self._prepare(self._read_outermost(args, kwargs), args, kwargs).prepared.bound_us()

    def compare(self, /, *args: Any, **kwargs: Any) -> Comparison:
        """What every policy would make of the step for these arguments, at many budgets. Runs and compiles nothing.

        The budget and the policy of this function are left aside. In it are the paper's metrics (MSR, EOR, CBR), predicted
        for the device profile.
        """
        prepared = self._prepare(self._read_outermost(args, kwargs), args, kwargs).prepared
        return compare(prepared.step, prepared.options, prepared.compiler)

    def jit_peak_bytes(self, /, *args: Any, **kwargs: Any) -> int:
        """Peak of plain `jax.jit` for these arguments, in bytes. Compiles it, once."""
        return self._prepare(self._read_outermost(args, kwargs), args, kwargs).prepared.jit_peak_bytes

    def report(self) -> Report:
        """What was measured of the latest call's plan.

        Raises:
            RuntimeError: the function has not been called.
        """
        running = None if self._latest is None else self._running.get(self._latest)
        if running is None or self._latest is None or not running.observations:
            raise RuntimeError("There is nothing to report before the first call.")
        plan, seen = running.plan, running.observations
        step = self._steps[self._latest]
        prepared = step.prepared
        settled = seen[1:] or seen
        executor = running.executor
        segment_us = [statistics.median(us) for us in zip(*(o.segment_us for o in settled), strict=False)]
        shares = [s.recomputed_us / s.latency_us if s.latency_us else 0.0 for s in plan.segments]
        return Report(
            peak_bytes=max(o.peak_bytes for o in seen),
            step_us=statistics.median(o.step_us for o in settled) if len(seen) > 1 else None,
            swapped_bytes=plan.swapped_out_bytes + plan.swapped_in_bytes,
            stall_us=statistics.median(o.stall_us for o in settled),
            passive_swap_ins=executor.passive_swap_ins if executor else 0,
            recomputed_us=sum(us * share for us, share in zip(segment_us, shares, strict=False)),
            segments=len(plan.segments),
            distinct_segments=len(prepared.compiler) if executor else 1,
            out_of_memory=prepared.out_of_memory + (executor.out_of_memory if executor else 0),
            trace_s=step.trace_s,
            plan_s=prepared.plan_s,
            compile_s=prepared.compiler.compile_s if executor else prepared.jit_compile_s,
            iterations=step.iterations,
        )

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        try:
            return self._signatures.read(args, kwargs)
        except (TypeError, ValueError):
            self._jitted.trace(*args, **kwargs)  # says in jit's own words what cannot be
            raise

    def _read_outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._read(args, kwargs)
        if call is None:
            raise TraceError(
                f"{getattr(self._function, '__name__', 'The step')!r} has a plan only where it is called outermost: not inside "
                "jit, grad, vmap and the like, and not under jax.disable_jit."
            )
        return call

    def _start(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningPlan:
        step = self._prepare(call, args, kwargs)
        prepared = step.prepared
        running = prepared.prepare() if self._saved is None else load(prepared, self._saved)
        if running.executor is not None:
            graph = prepared.graph
            passed_on = [place for place, tensor in enumerate(graph.outputs) if graph.tensors[tensor].producer is None]
            jit_shardings = None if step.placement.plain else prepared.whole_executable().output_shardings
            step.handover = Handover(
                prepared.compiler, passed_on, None if jit_shardings is None else jax.tree.leaves(jit_shardings)
            )
        self._running[call.signature] = running
        return running

    def _prepare(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Step":
        with self._preparing:
            if call.signature not in self._steps:
                began = time.perf_counter()
                shapes, named_shapes = self._signatures.map_dynamic(_shape_of, args, kwargs)
                step = trace_step(
                    self._jitted,
                    self._function,
                    shapes,
                    named_shapes,
                    static=self._signatures.static_positions(len(args)),
                    keep_unused=bool(self._jit_options.get("keep_unused")),
                )
                trace_s = time.perf_counter() - began
                used = [leaf for leaf, is_used in zip(call.leaves, step.program.used, strict=True) if is_used]
                placement = placement_of(used, self._jit_options, step.shardings)
                device = placement.device
                profile = profile_for(device.platform, self._profile)
                options = Options(self._policy, profile, self._state_memory, self._progress, self._max_slowdown)
                if self._saved is not None:  # if it has to be planned again, then as it was
                    policy = cast(PolicyName, self._saved.policy)  # `_read_plan` has looked
                    options = replace(options, policy=policy, state_memory=self._saved.state_memory)
                compiler = Compiler(
                    device,
                    committed=placement.committed,
                    compiler_options=self._jit_options.get("compiler_options"),
                    debugs_numbers=debugs_numbers(),
                )
                prepared = PreparedStep(step, self._budget, options, compiler)
                self._steps[call.signature] = _Step(prepared, placement, trace_s)
            return self._steps[call.signature]


@dataclass(slots=True, eq=False)
class _Step:
    """The function for one signature of its calls."""

    prepared: PreparedStep
    placement: Placement
    trace_s: float
    handover: Callable[[list[Any]], list[Any]] = list
    iterations: int = 0


def _read_slowdown(max_slowdown: Any, budget: Any) -> float | None:
    if max_slowdown is None:
        return None
    number = read_number(max_slowdown)
    if number is None or not 1 <= number < float("inf"):
        raise ValueError(
            f"max_slowdown must be a number of at least 1, times plain jit's step: got {shown(max_slowdown)}. "
            "Pass 1.1 for steps that may take ten per cent longer."
        )
    if budget is not None:
        raise ValueError(
            f"budget={budget!r} and max_slowdown={max_slowdown!r} ask for two things: the fastest step in so much memory, and "
            "the least memory for a step so fast. Pass one of them."
        )
    return float(min(number, MOST))


def _read_plan(plan: Any, budget: Budget | None, max_slowdown: Any) -> Plan:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a Plan, got {shown(plan)} of type {type(plan).__name__}. Read a saved one with "
            "tensile_jax.Plan.load(path)."
        )
    story = next(contradictions(plan), None)
    if story is not None:
        raise PlanFileError(f"plan= cannot be run: {story}. Make a new one with step.plan(...).")
    if max_slowdown is not None:
        raise ValueError(f"max_slowdown={max_slowdown!r} asks for a new plan, and plan= is one that was made. Pass one of them.")
    if budget is not None and budget.nbytes is not None and plan.peak_bytes > budget.nbytes:
        raise above_budget(plan, budget.nbytes)
    return plan


def _brought(leaves: Sequence[Any], device: Device) -> list[Any]:
    """The arguments with copies of those that lie on another device, to which they are not committed; these stay the caller's."""
    into = Transfer(device).into
    return [into(leaf) if isinstance(leaf, jax.Array) and leaf.sharding.device_set != {device} else leaf for leaf in leaves]


def _shape_of(leaf: Any) -> Any:
    """What to trace in the place of an array, so that a trace holds no array of the caller's.

    State may lie in host memory, which a program for the device cannot read: it is traced as if it were on the device.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed else None
    sharding = None if sharding is None else in_device_memory(sharding)
    weak_type = bool(getattr(getattr(leaf, "aval", leaf), "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


class JitOptions(TypedDict, total=False):
    """The options of `jax.jit`, with its meanings and its defaults."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None
    in_shardings: Any
    out_shardings: Any
    device: Any
    backend: str | None


class _NotGiven:
    """The function is not given: `jit` is used as a decorator with arguments."""


@overload
def jit(
    function: Callable[..., Any],
    /,
    *,
    budget: int | float | str | None = ...,
    max_slowdown: float | None = ...,
    policy: PolicyName = ...,
    device_profile: str | None = ...,
    state_memory: Literal["device", "any"] = ...,
    plan: Plan | None = ...,
    progress: Progress | None = ...,
    **jit_options: Unpack[JitOptions],
) -> PlannedFunction: ...
@overload
def jit(
    *,
    budget: int | float | str | None = ...,
    max_slowdown: float | None = ...,
    policy: PolicyName = ...,
    device_profile: str | None = ...,
    state_memory: Literal["device", "any"] = ...,
    plan: Plan | None = ...,
    progress: Progress | None = ...,
    **jit_options: Unpack[JitOptions],
) -> Callable[[Callable[..., Any]], PlannedFunction]: ...
def jit(
    function: Callable[..., Any] | type[_NotGiven] = _NotGiven,
    /,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    policy: PolicyName = "auto",
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] = "device",
    plan: Plan | None = None,
    progress: Progress | None = None,
    **jit_options: Unpack[JitOptions],
) -> PlannedFunction | Callable[[Callable[..., Any]], PlannedFunction]:
    """`jax.jit` under a budget of device memory. Use it as a decorator, with or without arguments, or call it.

    Args:
        function: the step; for training, the whole of it: loss, gradient and optimizer, `(state, batch) -> (state, metrics)`.
        budget: bytes, a size such as `"1.2GiB"`, or a share of plain jit's peak such as `"60%"`. None: no limit.
        max_slowdown: in the place of a budget: as little memory as can be had while a step is predicted to take at most so
            many times as long as plain jit's (`1.1`: ten per cent longer).
        policy: `"auto"` is the planner. For comparison: `"tensile"`, the paper's algorithms; its baselines `"vdnn"` and
            `"capuchin"`; `"checkpoint"`, what `jax.checkpoint` of every block does; `"none"`, the same segments without events.
        device_profile: name of a profile, or path of a TOML file; by default that of the device the arguments lie on.
        state_memory: `"device"`: results lie in device memory, as from jit. `"any"`: state may come back in pinned host
            memory, which lets it stay out between its uses; `tensile_jax.to_device` brings it in.
        plan: a saved plan to run, instead of making one (`tensile_jax.Plan.load`). It is compiled and its sizes are corrected; if
            it then needs more than its budget, the step is planned again within that, as the plan's `notes` say. Policy and
            `state_memory` are the plan's. With a `budget` beside it, a plan above that is refused; `max_slowdown` cannot be.
        progress: called as `progress(what, done, of)` while compiling.
        **jit_options: as in `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`, `keep_unused`,
            `inline`, `compiler_options`, and on one device `in_shardings`, `out_shardings`, `device` and `backend`.

    Returns:
        A `PlannedFunction`: the same results as `jax.jit`, to rounding where the step was cut or recomputed.

    Raises:
        BudgetError: the budget cannot be read. On the first call: BudgetTooSmall, if it cannot be kept; TraceError, if the
            step cannot be planned.
        PlanFileError: the saved plan contradicts itself or is above the budget. On the first call, if it is for another program.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda w, x: w - 0.1 * (x.T @ (x @ w)), budget="1GiB", donate_argnums=0)
    >>> step(jnp.ones(3), jnp.eye(3)).tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """

    def wrap(step: Callable[..., Any]) -> PlannedFunction:
        return PlannedFunction(
            step,
            budget=budget,
            max_slowdown=max_slowdown,
            policy=policy,
            device_profile=device_profile,
            state_memory=state_memory,
            plan=plan,
            progress=progress,
            jit_options=dict(jit_options),
        )

    return wrap if function is _NotGiven else wrap(function)
