"""Runs a step on NNX objects within a budget of device memory: `tensile_jax.nnx.jit` is `flax.nnx.jit` with a plan.

    objects --Flax--> pytrees --PlannedFunction--> pytrees --Flax--> the same objects, updated

`flax.nnx.jit` makes a pure function of a step, gives the function to `jax.jit`, and writes the results into the user's objects.
This module leaves all of that to Flax, so options, shared references, changes of the graph and errors are Flax's own. Flax's
wrapper keeps the function that `jax.jit` returned in the attribute `jitted_fn`. This module replaces only that attribute: its new
value is a `PlannedFunction` of the same pure function. A method that asks about the step without running it, such as `plan` or
`compare`, has `nnx_steps/pure_step.py` make the pytrees. (For a job of a `Runtime`, `nnx/job.py` makes the pure function itself.)
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from os import PathLike
from typing import Any, Literal, Unpack, cast

import jax
from flax import nnx

from tensile_jax.api import PlannedFunction, Report
from tensile_jax.exec.actor.pure_job import PureJob
from tensile_jax.exec.call.interrupts import InterruptsHeldUnless
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.exec.compiling.step import LaunchName
from tensile_jax.nnx.job import job_of
from tensile_jax.nnx_steps.paths import leaves_in
from tensile_jax.nnx_steps.pure_step import NnxStep, placed_by_arguments, pure_function_of
from tensile_jax.plan import PolicyName
from tensile_jax.plan.comparison import Comparison
from tensile_jax.plan_format import Plan, StateLayoutName
from tensile_jax.progress.phases import Progress
from tensile_jax.tracebacks import hides_frames, methods_hide_frames


@methods_hide_frames
class NnxFunction:
    """A step on NNX objects under a memory budget. Call it like the function it wraps; it changes the objects in place.

    `tensile_jax.nnx.jit` returns it. All of its methods take the step's own arguments: NNX objects, arrays, static values. If a
    call raises an error, the objects hold the same arrays as before the call, but donated arrays are deleted if the iteration
    had begun.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        plan_options: PlanOptions,
        jit_options: JitOptions,
        *,
        graph: bool | None,
        graph_updates: bool | None,
    ) -> None:
        self._flax: Any = nnx.jit(step, graph=graph, graph_updates=graph_updates, **cast(dict[str, Any], jit_options))
        self._planned = PlannedFunction(pure_function_of(self._flax), plan_options, jit_options)
        self._flax.jitted_fn = _JitReplacement(self._planned)
        functools.update_wrapper(self, step)
        self.__wrapped__ = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ran = _ran.set(False)
        try:
            with InterruptsHeldUnless(lambda: not _ran.get() and not _some_deleted((args, kwargs))):
                return self._flax(*args, **kwargs)
        finally:
            _ran.reset(ran)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind the step to an instance, so that it can be used as a method, as with `flax.nnx.jit`."""
        return self if instance is None else functools.partial(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """See `PlannedFunction.plan`. The objects may be abstract, as `flax.nnx.eval_shape` makes them."""
        return self._ask(self._planned.plan, args, kwargs)

    def plans(self, *args: Any, **kwargs: Any) -> tuple[Plan, ...]:
        """See `PlannedFunction.plans`."""
        return self._ask(self._planned.plans, args, kwargs)

    def bound_us(self, *args: Any, **kwargs: Any) -> float:
        """See `PlannedFunction.bound_us`."""
        return self._ask(self._planned.bound_us, args, kwargs)

    def compare(self, *args: Any, **kwargs: Any) -> Comparison:
        """See `PlannedFunction.compare`."""
        return self._ask(self._planned.compare, args, kwargs)

    def jit_peak_bytes(self, *args: Any, **kwargs: Any) -> int:
        """The peak of plain `flax.nnx.jit` for these arguments, in bytes. Compiles it, once."""
        return self._ask(self._planned.jit_peak_bytes, args, kwargs)

    def report(self, *, jit_step_us: float | None = None) -> Report:
        """See `PlannedFunction.report`."""
        return self._planned.report(jit_step_us=jit_step_us)

    @property
    def nnx_step(self) -> NnxStep:
        """For what takes any step on NNX objects, such as `tensile_jax.memory`."""
        return NnxStep(self._flax, self._planned)

    def as_job(self, objects: Any) -> PureJob:
        """The job for `Runtime.submit(step, objects, batches, ...)`; the step takes the objects, and then a batch.

        The runtime has a budget of its own, and ignores the options of this function.
        """
        return job_of(self.__wrapped__, objects)

    def clear_cache(self) -> None:
        """Forget every trace, plan and executable."""
        self._planned.clear_cache()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The same as of `flax.nnx.jit`."""
        return self._flax.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The same as of `flax.nnx.jit`: the plain program, without a plan."""
        return self._flax.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The same as of `flax.nnx.jit`."""
        return self._flax.eval_shape(*args, **kwargs)

    def _ask(self, question: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `question`, a method of the planned function, for the pytrees that Flax makes of the arguments."""
        return self.nnx_step.ask(lambda args, kwargs: question(*args, **kwargs), args, kwargs)


_ran: ContextVar[bool] = ContextVar("ran")
"""Whether the planned function of the running call has returned, so that the objects are being updated."""


class _JitReplacement:
    """Replaces, in Flax's wrapper, the function that `jax.jit` returned."""

    def __init__(self, planned: PlannedFunction) -> None:
        self._planned = planned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._planned(*args, **kwargs)
        _ran.set(True)
        return results

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned.eval_shape(*args, **kwargs)


def _some_deleted(objects: Any) -> bool:
    """Whether an array of `objects` has been donated."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for _, leaf in leaves_in(objects))


@hides_frames
def jit(
    step: Callable[..., Any] | None = None,
    *,
    budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    policy: PolicyName = "auto",
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] = "device",
    launch: LaunchName = "auto",
    state_layout: StateLayoutName = "row_major",
    open_loops: bool | None = None,
    respect_checkpoint: bool = False,
    plan: Plan | None = None,
    renew_above: float | None = None,
    improve: Literal["background"] | None = None,
    keep_plans: str | PathLike[str] | None = None,
    progress: bool | Progress | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **jit_options: Unpack[JitOptions],
) -> Any:
    """`flax.nnx.jit` under a budget of device memory. Use it as a decorator, with or without arguments, or call it.

    The step changes its NNX objects (model, optimizer, metrics, rngs) in place, as under `flax.nnx.jit`. Their old arrays stay
    alive while the step runs, and count towards its peak, unless they are donated. Use `donate_argnames=("model", "optimizer")`
    for a tight budget. A donated array is deleted, also for other objects that hold it.

    Args:
        step: the step; for training, the whole of it: loss, gradient and optimizer.
        budget, host_budget, max_slowdown, policy, device_profile, state_memory, launch, state_layout, open_loops,
            respect_checkpoint, plan, renew_above, improve, keep_plans, progress: as in `tensile_jax.jit`.
        graph, graph_updates: as in `flax.nnx.jit`.
        **jit_options: as in `flax.nnx.jit`: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`,
            `keep_unused`, `inline`. Those that say where arrays lie are refused: the step runs where its arrays lie.

    Returns:
        An `NnxFunction`, or, without `step`, a decorator that gives one. It has the same results as `flax.nnx.jit`, and makes the
        same changes to the objects, to rounding where the step was cut or recomputed.

    Raises:
        ValueError: the step is a bound method; an option says where arrays lie.
        BudgetError: the budget cannot be read. On the first call: BudgetTooSmall, if it cannot be kept; the objects are then as
            they were.

    >>> import jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> @jit(budget="1GiB", donate_argnames=("model", "optimizer"))
    ... def train_step(model, optimizer, x, y):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> losses = [train_step(model, optimizer, jnp.ones((4, 1)), jnp.ones((4, 1))) for _ in range(5)]
    >>> bool(losses[4] < losses[0])
    True
    """
    plan_options = PlanOptions(
        budget=budget, host_budget=host_budget, max_slowdown=max_slowdown, policy=policy, device_profile=device_profile,
        state_memory=state_memory, launch=launch, state_layout=state_layout, open_loops=open_loops,
        respect_checkpoint=respect_checkpoint, plan=plan, renew_above=renew_above, improve=improve, keep_plans=keep_plans,
        progress=progress,
    )  # fmt: skip
    given = cast(JitOptions, placed_by_arguments(jit_options))

    def wrap(step: Callable[..., Any]) -> NnxFunction:
        return NnxFunction(step, plan_options, given, graph=graph, graph_updates=graph_updates)

    return wrap if step is None else wrap(step)
