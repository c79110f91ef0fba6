"""The decorator `tensile_jax.jit`, which is `jax.jit` under a budget of device memory, and the function that it returns."""

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax

from tensile_jax.exec.call.interrupts import InterruptsHeld
from tensile_jax.exec.call.options import GivenOptions, JitOptions, PlanOptions, read_options
from tensile_jax.exec.call.planned_calls import PlannedCalls
from tensile_jax.exec.call.report import Report
from tensile_jax.exec.step.prepared_step import Progress
from tensile_jax.plan import Comparison, compare_policies
from tensile_jax.plan_format import Plan, PolicyName

__all__ = ["PlannedFunction", "Report", "jit"]


class PlannedFunction:
    """A step under a memory budget. Call it as the function that it wraps; it keeps one plan for each signature of a call.

    It is what `tensile_jax.jit` returns, and it has what the result of `jax.jit` has: `lower`, `trace`, `eval_shape`,
    `clear_cache`, `__wrapped__`; it can be a method and it can be pickled. Inside another transformation (`jax.jit`, `jax.grad`,
    `jax.vmap`, ...) and under `jax.disable_jit` it is the plain jitted function: a plan is made at the outermost call only.
    """

    def __init__(self, function: Callable[..., Any], plan_options: PlanOptions, jit_options: JitOptions) -> None:
        request = read_options(plan_options)
        jitted = jax.jit(function, **jit_options)  # refuses in jit's own words what cannot be jitted
        functools.update_wrapper(self, function)  # first, for a wrapped function may have attributes of these names
        self._function = function
        self._jitted: Any = jitted
        self._options: GivenOptions = {**plan_options, **jit_options}
        self._calls = PlannedCalls(function, jitted, request, jit_options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.read(args, kwargs)
        if call is None:
            return self._jitted(*args, **kwargs)
        step = self._calls.planned(call, args, kwargs)
        with InterruptsHeld():  # from here on, donated arguments may be gone
            return self._calls.run(step, call, args, kwargs)

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
        self._calls.forget()

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
        return self._calls.plan(args, kwargs)

    def bound_us(self, /, *args: Any, **kwargs: Any) -> float:
        """A lower bound on the time of a step under the budget, in microseconds, whatever the plan; infinite if there is none.

        It holds in the planner's own model of the device, so compare it with a plan's `step_us`. It takes about as long
        as planning. See `tensile_jax/plan/search/lower_bound.py`.
        """
        return self._calls.prepared(args, kwargs).bound_us()

    def compare(self, /, *args: Any, **kwargs: Any) -> Comparison:
        """What every policy would make of the step for these arguments, at many budgets. Runs and compiles nothing.

        The budget and the policy of this function are left aside. In it are the paper's metrics (MSR, EOR, CBR), predicted
        for the device profile.
        """
        prepared = self._calls.prepared(args, kwargs)
        return compare_policies(prepared.planner, progress=prepared.options.progress)

    def jit_peak_bytes(self, /, *args: Any, **kwargs: Any) -> int:
        """Peak of plain `jax.jit` for these arguments, in bytes. Compiles it, once."""
        return self._calls.prepared(args, kwargs).jit_peak_bytes

    def report(self) -> Report:
        """What was measured of the latest call's plan.

        Raises:
            RuntimeError: the function has not been called.
        """
        return self._calls.report()


class _NotGiven:
    """The function is not given: `jit` is used as a decorator with arguments."""


@overload
def jit(function: Callable[..., Any], /, **options: Unpack[GivenOptions]) -> PlannedFunction: ...
@overload
def jit(**options: Unpack[GivenOptions]) -> Callable[[Callable[..., Any]], PlannedFunction]: ...
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

    plan_options = PlanOptions(
        budget=budget, max_slowdown=max_slowdown, policy=policy, device_profile=device_profile, state_memory=state_memory,
        plan=plan, progress=progress,
    )  # fmt: skip

    def wrap(step: Callable[..., Any]) -> PlannedFunction:
        return PlannedFunction(step, plan_options, jit_options)

    return wrap if function is _NotGiven else wrap(function)
