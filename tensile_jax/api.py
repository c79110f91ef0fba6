"""The decorator: `tensile_jax.jit` is `jax.jit` under a memory budget."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from tensile_jax.errors import TraceError
from tensile_jax.exec.budget import parse_budget
from tensile_jax.exec.compile import Compiler
from tensile_jax.exec.executor import Observation
from tensile_jax.exec.prepare import Options, PreparedStep, Progress, RunningPlan, by_name
from tensile_jax.exec.transfer import Device, on_host, to_device
from tensile_jax.plan import POLICIES
from tensile_jax.profiles import load_profile
from tensile_jax.schedule import Plan
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
    """A step under a memory budget. Call it like the function it wraps; it keeps one plan for each set of shapes.

    Made by `tensile_jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        budget: int | float | str | None,
        policy: str,
        device_profile: str | None,
        state_memory: Literal["device", "any"],
        plan: Plan | None,
        progress: Progress | None,
        jit_options: dict[str, Any],
    ) -> None:
        if not callable(function):
            raise TypeError(f"tensile_jax.jit needs a function, got {function!r}.")
        if state_memory not in ("device", "any"):
            raise ValueError(f'state_memory must be "device" or "any", got {state_memory!r}.')
        by_name(POLICIES, policy, "policy")
        functools.update_wrapper(self, function)
        self._function = function
        self._budget = None if budget is None else parse_budget(budget)
        self._policy = policy
        self._profile = device_profile
        self._state_memory: Literal["device", "any"] = state_memory
        self._saved = plan
        self._progress = progress
        self._jitted = jax.jit(function, **jit_options)
        self._static = _StaticArguments(function, jit_options)
        self._prepared: dict[Hashable, tuple[PreparedStep, float]] = {}
        self._running: dict[Hashable, RunningPlan] = {}
        self._latest: Hashable = None
        self._iterations: dict[Hashable, int] = {}
        if device_profile is not None:
            load_profile(device_profile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key, leaves = self._static.key(args, kwargs)
        running = self._running.get(key)
        if running is None:
            running = self._start(key, args, kwargs)
        self._latest = key
        count = self._iterations[key] = self._iterations.get(key, 0) + 1
        if running.executor is None:
            return self._call_whole(running, count, args, kwargs)
        prepared = running.prepared
        _refuse_unusable(prepared, leaves)
        watched = count <= _WATCHED_FIRST or count % _WATCHED_EVERY == 0
        watch = Observation() if watched else None
        began = time.perf_counter()
        results = running.executor.run(leaves, watch)
        if watch is not None:
            watch.step_us = (time.perf_counter() - began) * 1e6
            running.observations.append(watch)
        if running.executor.needs_lower_budget:
            running.executor.needs_lower_budget = False
            lower = prepared.prepare_for_less(running)
            if lower is not running:
                lower.observations.append(watch or Observation(running.plan.peak_bytes))
                self._running[key] = lower
        return tree_unflatten(prepared.step.out_tree, results)

    def _call_whole(self, running: RunningPlan, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watched = count <= _WATCHED_FIRST
        began = time.perf_counter()
        result = self._jitted(*to_device(args), **to_device(kwargs))
        if watched:
            jax.block_until_ready(result)
            step_us = (time.perf_counter() - began) * 1e6
            running.observations.append(Observation(peak_bytes=running.plan.peak_bytes, step_us=step_us))
        return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s). Runs nothing, and compiles no segment.

        The plan in use is returned once the function has been called with such arguments; before that, workspaces are estimates.

        Raises:
            BudgetTooSmall: no plan keeps the budget.
            TraceError: the step cannot be planned.
        """
        key, _ = self._static.key(args, kwargs)
        if key in self._running:
            return self._running[key].plan
        if self._saved is not None:
            return self._saved
        return self._prepare(key, args, kwargs).predict()

    def bound_us(self, *args: Any, **kwargs: Any) -> float:
        """A lower bound on the time of a step under the budget, in microseconds, whatever the plan; infinite if there is none.

        It holds in the planner's own model of the device, so compare it with a plan's `step_us`. It takes about as long
        as planning. See `tensile_jax/plan/bounds.py`.
        """
        key, _ = self._static.key(args, kwargs)
        return self._prepare(key, args, kwargs).bound_us()

    def jit_peak_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Peak of plain `jax.jit` for these arguments, in bytes. Compiles it, once."""
        key, _ = self._static.key(args, kwargs)
        return self._prepare(key, args, kwargs).jit_peak_bytes

    def report(self) -> Report:
        """What was measured of the latest call's plan.

        Raises:
            RuntimeError: the function has not been called.
        """
        running = self._running.get(self._latest)
        if running is None or not running.observations:
            raise RuntimeError("There is nothing to report before the first call.")
        plan, seen = running.plan, running.observations
        prepared, trace_s = self._prepared[self._latest]
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
            trace_s=trace_s,
            plan_s=prepared.plan_s,
            compile_s=prepared.compiler.compile_s if executor else prepared.jit_compile_s,
            iterations=self._iterations[self._latest],
        )

    def _start(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningPlan:
        prepared = self._prepare(key, args, kwargs)
        running = prepared.prepare() if self._saved is None else prepared.load(self._saved)
        self._running[key] = running
        return running

    def _prepare(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedStep:
        if key not in self._prepared:
            began = time.perf_counter()
            shapes, named_shapes = jax.tree.map(_wherever_it_lies, (args, kwargs))
            step = trace_step(self._jitted, self._function, shapes, named_shapes, static=self._static.numbers)
            trace_s = time.perf_counter() - began
            device = _device_of(tree_leaves((args, kwargs)))
            profile = load_profile(self._profile or ("cpu" if device.platform == "cpu" else "h200"))
            options = Options(self._policy, profile, self._state_memory, self._progress)
            self._prepared[key] = PreparedStep(step, self._budget, options, Compiler(device)), trace_s
        return self._prepared[key][0]


_TRACED_SETTINGS = (
    "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable",
)  # fmt: skip
"""What a trace depends on beside its arguments; `jax.jit` traces again when one of them changes, and so does this."""


class _StaticArguments:
    """Tells static arguments from others as `jax.jit` does, and makes the key under which plans are kept."""

    def __init__(self, function: Callable[..., Any], jit_options: dict[str, Any]) -> None:
        numbers = _as_tuple(jit_options.get("static_argnums"))
        names = _as_tuple(jit_options.get("static_argnames"))
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        total = len(positional)
        self.numbers = {n % total if n < 0 and total else n for n in numbers}
        self.names = set(names)
        if not numbers:
            self.numbers |= {positional.index(n) for n in names if n in positional}
        if not names:
            self.names |= {positional[n] for n in self.numbers if n < total}

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[Any]]:
        """(key, flat dynamic arguments); equal keys share a plan."""
        static: list[tuple[int | str, Any]] = []
        if self.numbers or self.names:
            static += [(i, a) for i, a in enumerate(args) if i in self.numbers]
            static += sorted(((k, v) for k, v in kwargs.items() if k in self.names), key=lambda pair: pair[0])
            for _, value in static:
                _refuse_unhashable(value)
            args = tuple(a for i, a in enumerate(args) if i not in self.numbers)
            kwargs = {k: v for k, v in kwargs.items() if k not in self.names}
        leaves, tree = tree_flatten((args, kwargs))
        settings = tuple(getattr(jax.config, name) for name in _TRACED_SETTINGS)
        return (tree, tuple(map(_aval_key, leaves)), tuple(static), settings), leaves


def _wherever_it_lies(leaf: Any) -> Any:
    """What to trace in the place of an array: state may lie in host memory, which a program for the device cannot read."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) if on_host(leaf) else leaf


def _refuse_unhashable(value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"Non-hashable static arguments are not supported: got {value!r} of type {type(value)} ({error}). Pass a value "
            "that can be a key of a dict (a tuple in the place of a list), or do not name it static."
        ) from error


def _aval_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        aval = leaf.aval
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def _refuse_unusable(prepared: PreparedStep, leaves: Sequence[Any]) -> None:
    """What jit refuses before it runs: arrays that are gone, and one array given away twice."""
    seen: dict[int, bool] = {}
    donated = prepared.graph.donated
    for leaf, tensor in zip(leaves, prepared.graph.inputs, strict=True):
        if not isinstance(leaf, jax.Array):
            continue
        if leaf.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={leaf.aval.str_short()}.")
        gives = tensor in donated
        if seen.get(id(leaf), False) or (gives and id(leaf) in seen):
            raise ValueError(
                f"Attempt to donate the same buffer twice: {prepared.graph.tensors[tensor].name} is the same array as "
                "another argument, and one of the two is donated. Copy one of them first."
            )
        seen[id(leaf)] = gives


def _device_of(leaves: Sequence[Any]) -> Device:
    """The one device on which the step runs: that of committed arguments, or the default."""
    found: dict[Device, None] = {}
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.Array) and sharding is not None and leaf.committed:
            found.update(dict.fromkeys(sharding.device_set))
    if len(found) > 1:
        raise TraceError(
            f"The arguments lie on {len(found)} devices ({', '.join(map(str, found))}); a plan is for one device. "
            "Put them on one with jax.device_put."
        )
    default = getattr(jax.config, "jax_default_device", None)
    return next(iter(found)) if found else default if isinstance(default, jax.Device) else jax.devices()[0]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


@overload
def jit(
    function: Callable[..., Any],
    *,
    budget: int | float | str | None = ...,
    policy: str = ...,
    device_profile: str | None = ...,
    state_memory: Literal["device", "any"] = ...,
    plan: Plan | None = ...,
    progress: Progress | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
) -> PlannedFunction: ...
@overload
def jit(
    *,
    budget: int | float | str | None = ...,
    policy: str = ...,
    device_profile: str | None = ...,
    state_memory: Literal["device", "any"] = ...,
    plan: Plan | None = ...,
    progress: Progress | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
) -> Callable[[Callable[..., Any]], PlannedFunction]: ...
def jit(
    function: Callable[..., Any] | None = None,
    *,
    budget: int | float | str | None = None,
    policy: str = "auto",
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] = "device",
    plan: Plan | None = None,
    progress: Progress | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
) -> PlannedFunction | Callable[[Callable[..., Any]], PlannedFunction]:
    """`jax.jit` under a budget of device memory. Use it as a decorator, with or without arguments, or call it.

    Args:
        function: the step; for training, the whole of it: loss, gradient and optimizer, `(state, batch) -> (state, metrics)`.
        budget: bytes, a size such as `"1.2GiB"`, or a share of plain jit's peak such as `"60%"`. None: no limit.
        policy: `"auto"` plans. For comparison: `"none"` runs the same segments without any event; `"vdnn"`, `"capuchin"` and
            `"checkpoint"` do what those would.
        device_profile: name of a profile, or path of a TOML file; by default that of the device the arguments lie on.
        state_memory: `"device"`: results lie in device memory, as from jit. `"any"`: state may come back in pinned host
            memory, which lets it stay out between its uses; `tensile_jax.to_device` brings it in.
        plan: a saved plan to run, instead of making one.
        progress: called as `progress(what, done, of)` while compiling.
        static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused: as in `jax.jit`.

    Returns:
        A `PlannedFunction`: the same results as `jax.jit`, to rounding where the step was cut or recomputed.

    Raises:
        BudgetError: the budget cannot be read. On the first call: BudgetTooSmall, if it cannot be kept; TraceError, if the
            step cannot be planned.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda w, x: w - 0.1 * (x.T @ (x @ w)), budget="1GiB", donate_argnums=0)
    >>> step(jnp.ones(3), jnp.eye(3)).tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
    }
    given = {name: value for name, value in options.items() if value is not None}

    def wrap(step: Callable[..., Any]) -> PlannedFunction:
        return PlannedFunction(
            step,
            budget=budget,
            policy=policy,
            device_profile=device_profile,
            state_memory=state_memory,
            plan=plan,
            progress=progress,
            jit_options=given,
        )

    return wrap if function is None else wrap(function)
