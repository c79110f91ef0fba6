"""Defines the decorator `tensile_jax.jit` (`jax.jit` with a memory budget) and the function that the decorator returns."""

import functools
import math
import types
from collections.abc import Callable
from os import PathLike
from typing import Any, Literal, Unpack, overload

import jax

from tensile_jax.arguments import read_number, shown
from tensile_jax.exec.call.interrupts import InterruptsHeld
from tensile_jax.exec.call.options import GivenOptions, JitOptions, PlanOptions, read_options
from tensile_jax.exec.call.planned_calls import PlannedCalls
from tensile_jax.exec.call.report import Report
from tensile_jax.exec.fitting.find_plan import jit_peak_bytes
from tensile_jax.exec.fitting.forms import bound_us, compare_forms
from tensile_jax.memory_report.out_of_memory import explain
from tensile_jax.plan import Comparison, PolicyName
from tensile_jax.plan_format import Plan
from tensile_jax.progress.phases import Progress
from tensile_jax.tracebacks import hides_frames, methods_hide_frames

__all__ = ["PlannedFunction", "Report", "jit"]


@methods_hide_frames
class PlannedFunction:
    """A step under a memory budget. Call it as the function that it wraps. It keeps one plan for each signature of a call.

    `tensile_jax.jit` returns it. It has the methods and attributes that the result of `jax.jit` has: `lower`, `trace`,
    `eval_shape`, `clear_cache`, `__wrapped__`. It can be used as a method, and it can be pickled. Inside another transformation
    (`jax.jit`, `jax.grad`, `jax.vmap`, ...) and under `jax.disable_jit` it acts as the plain jitted function, because a plan is
    made at the outermost call only.
    """

    def __init__(self, function: Callable[..., Any], plan_options: PlanOptions, jit_options: JitOptions) -> None:
        request = read_options(plan_options)
        jitted = jax.jit(function, **jit_options)  # raises jit's own error if the function cannot be jitted
        functools.update_wrapper(self, function)  # before the attributes below, which the function may have too
        self._function = function
        self._jitted: Any = jitted
        self._options: GivenOptions = {**plan_options, **jit_options}
        self._calls = PlannedCalls(function, jitted, request, jit_options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.read(args, kwargs)
        if call is None:
            return self._jitted(*args, **kwargs)
        step = self._calls.planned(call, args, kwargs)
        try:
            with InterruptsHeld():  # from here on, donated arguments may be deleted
                return self._calls.run(step, call, args, kwargs)
        except Exception as error:
            explain(error, step.traced.step if step.plan.whole else None)
            raise

    # -- as of the result of jax.jit ------------------------------------------------------------------------------------

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        try:
            return f"<PlannedFunction of {self._function!r}>"
        except Exception:  # as jax.jit does, for an object whose own repr fails
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
        self._calls.forget()

    # -- plans and reports ----------------------------------------------------------------------------------------------

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s). Runs nothing, and compiles no segment.

        If the function has been called with such arguments, the result is the plan in use. Before the first call, the result is a
        plan with estimated workspaces. If the function has a saved plan for these arguments, the result is the saved plan. Before
        a budget is refused, plain `jax.jit` is compiled, if that may need less, or so much more that a share of it suffices.

        Raises:
            PlanFileError: the function has a saved plan for other arguments or another program.
            BudgetTooSmall: no plan keeps the budget.
            TraceError: the step cannot be planned.
        """
        return self._calls.plan(args, kwargs)

    def plans(self, /, *args: Any, **kwargs: Any) -> tuple[Plan, ...]:
        """All plans under which calls with these arguments have run, in their order; the last one is in use.

        There are several if a better one was found (`improve`), if latencies have drifted (`renew_above`), or if the device has
        run out of memory.
        """
        return self._calls.plans(args, kwargs)

    def bound_us(self, /, *args: Any, **kwargs: Any) -> float:
        """A lower bound, in microseconds, on the time of a step under any plan that keeps the budget; infinite without a plan.

        The bound holds in the planner's model of the device, so compare it with a plan's `step_us`. Plans that evaluate a part of
        the step in chunks may be below it. Finding the bound takes about as long as planning. See
        `tensile_jax/plan/search/bounds/time_bound.py`.
        """
        with self._calls.showing():
            return bound_us(self._calls.step(args, kwargs), self._calls.budget)

    def compare(self, /, *args: Any, **kwargs: Any) -> Comparison:
        """The plans of every policy for these arguments, under many budgets. Runs and compiles nothing.

        The budgets, the policy and the `state_memory` of this function do not matter; every plan may keep state in host memory
        between two iterations, which the paper's policy needs. The result has the paper's metrics (MSR, EOR, CBR), predicted for
        the device profile.
        """
        with self._calls.showing():
            return compare_forms(self._calls.step(args, kwargs))

    def jit_peak_bytes(self, /, *args: Any, **kwargs: Any) -> int:
        """The peak of plain `jax.jit` for these arguments, in bytes. The first call compiles the plain function.

        A budget such as `"60%"` is then a share of this compiled peak, and no longer of a predicted one.
        """
        with self._calls.showing():
            return jit_peak_bytes(self._calls.step(args, kwargs))

    def report(self, *, jit_step_us: float | None = None) -> Report:
        """The measurements of the plan of the latest call.

        Args:
            jit_step_us: the time of a step of plain `jax.jit` in microseconds, if you have measured it. The report then compares
                the measured times, and otherwise the predicted ones.

        Raises:
            RuntimeError: the function has not been called.
            ValueError: `jit_step_us` is no positive number.
        """
        us = None if jit_step_us is None else read_number(jit_step_us)
        if jit_step_us is not None and (us is None or not 0 < us < math.inf):
            raise ValueError(f"jit_step_us must be a positive number of microseconds: got {shown(jit_step_us)}.")
        return self._calls.report(us)


def made_of(function: PlannedFunction) -> tuple[Callable[..., Any], GivenOptions]:
    """The function that a planned function wraps, and the options with which `jit` was called."""
    return function._function, function._options


class _NotGiven:
    """The default of `function`: `jit` is used as a decorator with arguments."""


@overload
def jit(function: Callable[..., Any], /, **options: Unpack[GivenOptions]) -> PlannedFunction: ...
@overload
def jit(**options: Unpack[GivenOptions]) -> Callable[[Callable[..., Any]], PlannedFunction]: ...
@hides_frames
def jit(
    function: Callable[..., Any] | type[_NotGiven] = _NotGiven,
    /,
    *,
    budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    policy: PolicyName = "auto",
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] = "device",
    launch: Literal["auto", "segments", "program", "one_program"] = "auto",
    state_layout: Literal["row_major", "auto"] = "row_major",
    open_loops: bool | None = None,
    respect_checkpoint: bool = False,
    plan: Plan | None = None,
    renew_above: float | None = None,
    improve: Literal["background"] | None = None,
    keep_plans: str | PathLike[str] | None = None,
    progress: bool | Progress | None = None,
    **jit_options: Unpack[JitOptions],
) -> PlannedFunction | Callable[[Callable[..., Any]], PlannedFunction]:
    """`jax.jit` under a budget of device memory. Use it as a decorator, with or without arguments, or call it.

    Args:
        function: the step; for training, the whole of it: loss, gradient and optimizer, `(state, batch) -> (state, metrics)`.
        budget: bytes, a size such as `"1.2GiB"`, or a share of plain jit's peak such as `"60%"`, for which the first call
            compiles plain jit. If the step runs on several devices, the budget is that of each. None: the memory that is free
            on the device; on a CPU no limit.
        host_budget: the pinned host memory that a plan may use for each device: bytes, or a size such as `"8GiB"`. What would
            exceed it is not swapped. None: what is free for the process when the step is planned, less a reserve (the limits of
            its control groups and XLA's pool of pinned memory count). If a launch runs out of device memory, the executor copies
            to the host whatever it can, even beyond this budget.
        max_slowdown: a limit on time, instead of a budget. The plan uses as little memory as possible, while its predicted time
            is at most `max_slowdown` times that of plain jit (`1.1`: ten per cent longer).
        policy: `"auto"` is the planner. For comparison: `"tensile"`, the paper's algorithms; its baselines `"vdnn"` and
            `"capuchin"`; `"checkpoint"`, what `jax.checkpoint` of every block does; `"none"`, segments without swaps and
            recomputation.
        device_profile: name of a profile, or path of a TOML file. Default: the profile of the device of the arguments.
        state_memory: `"device"`: results are in device memory, as with `jax.jit`. `"any"`: state may be returned in pinned host
            memory, so that it can stay there between its uses; `tensile_jax.to_device` copies it to the device.
        launch: `"segments"`: every segment of the plan is an executable of its own. `"program"`: all segments between two
            copies that the host starts are one executable, with optimization barriers between them, as long as that keeps the
            budget; a plan that copies nothing is then one launch a step. `"one_program"`: all segments are one executable, which
            also makes the copies, so a step is one launch; segments are launched where that exceeds the budget, or where XLA lets
            kernels wait for copies; it has not run on a GPU yet. `"auto"`: `"program"` on several GPUs, and on one GPU on which
            launches take much of a step, unless a loop of more than 8 iterations is opened or another policy than `"auto"` plans;
            otherwise, and with `renew_above`, `"segments"` (XLA for CPUs drops the barriers, and would keep few budgets).
        state_layout: `"row_major"`: state has the memory layout that `jax.jit` gives it. `"auto"`: in a step that is one program
            on one device, XLA chooses the layouts of donated state of four and more dimensions, such as kernels of convolutions,
            so that it need not transpose them in every step. The choice is made when the program is compiled. The first call
            copies the state into these layouts. Results have them, too, so later calls copy nothing. Other functions take such
            arrays as any others. It needs `launch="one_program"` or `"program"`, and has not run on a GPU yet.
        open_loops: whether the iterations of a loop (`lax.scan`, `nn.scan`, `nnx.scan`, `fori_loop` with constant bounds) are
            planned one by one, so that what each of them keeps can be dropped or swapped. True: of every such loop. False: of
            none. None: where it is worth it; then a long loop may also be split into shorter ones
            (`tensile_jax/trace/loops/rules.py`). Unless it is False, a long loop that does not fit under the budget may run
            under a plan of its body (`tensile_jax/trace/plannable_loops.py`).
        respect_checkpoint: whether nothing is kept that `jax.checkpoint` (`nn.remat`) in the step says to compute again. By
            default the planner decides for itself what is computed again.
        plan: a saved plan to run, instead of making one (`tensile_jax.Plan.load`). Its segments are compiled, and its sizes are
            corrected by XLA's own figures. If it then needs more than its budget, the step is planned again under that budget,
            and the `notes` of the new plan say so. Policy, `state_memory` and `state_layout` are those of the plan. If a `budget`
            is given too, a plan above that budget is refused. `max_slowdown` cannot be given together with a plan.
        renew_above: the drift above which a plan is replaced while training goes on, such as 0.3: segments take 30 % longer, or
            less long, than the plan was made for. The new plan is made from measured latencies, mostly in another process, and
            holds from some later call on. Where it cuts or recomputes the step in another way, results are rounded in another
            way from then on, so two equal trainings may differ by rounding. None: a plan is never replaced because of its times.
        improve: `"background"`: the first call runs under a plan that is found in a short search, so that it comes sooner. The
            whole search is made while training goes on, mostly in another process, and its plan holds from some later call on.
            Both keep the budget. Until then, steps may be slower; on a CPU they are, since the first plan is compiled with fewer
            optimizations. From then on, results may be rounded in another way, so two equal trainings may differ by rounding.
            None: the first call makes the whole search.
        keep_plans: a folder into which every plan that is used is written: `plan-000.json`, `plan-001.json`, and so on.
        progress: what a call shows while it traces, plans and compiles. None: once that has taken three seconds, a line on
            standard error that is rewritten and removed at the end, or a bar in a notebook; nothing where standard error is no
            terminal, and nothing under pytest. True: the same everywhere; where there is no terminal, a line for each phase.
            False: nothing. A function: nothing is shown, and the function is called as `progress(what, done, of)`, as in
            `progress("compiling segments", 3, 12)`; the number of plans (`"planning"`) is only about known.
        **jit_options: as in `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`, `keep_unused`,
            `inline`, `compiler_options`, `in_shardings`, `out_shardings`, `device` and `backend`.

    Returns:
        A `PlannedFunction`. Its results are those of `jax.jit`, up to rounding where the step was cut or recomputed.

    Raises:
        BudgetError: the budget cannot be read.
        BudgetTooSmall: (on the first call) no plan keeps the budget, with as much host memory as there is.
        TraceError: (on the first call) the step cannot be planned.
        PlanFileError: the saved plan contradicts itself or is above the budget; (on the first call) it is for another program.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda w, x: w - 0.1 * (x.T @ (x @ w)), budget="1GiB", donate_argnums=0)
    >>> step(jnp.ones(3), jnp.eye(3)).tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """

    plan_options = PlanOptions(
        budget=budget, host_budget=host_budget, max_slowdown=max_slowdown, policy=policy, device_profile=device_profile,
        state_memory=state_memory, launch=launch, state_layout=state_layout, open_loops=open_loops,
        respect_checkpoint=respect_checkpoint, plan=plan, renew_above=renew_above, improve=improve, keep_plans=keep_plans,
        progress=progress,
    )  # fmt: skip

    def wrap(step: Callable[..., Any]) -> PlannedFunction:
        return PlannedFunction(step, plan_options, jit_options)

    return wrap if function is _NotGiven else wrap(function)
