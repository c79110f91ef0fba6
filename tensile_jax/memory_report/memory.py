"""Makes the report on a function's memory under plain `jax.jit`, without running the function: `tensile_jax.memory`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from jax.tree_util import tree_flatten_with_path

from tensile_jax.arguments import shown
from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.exec.compiling.compiler import memory_of
from tensile_jax.exec.compiling.step import Step, package_version
from tensile_jax.exec.fitting.find_plan import jit_peak_bytes
from tensile_jax.exec.fitting.forms import predict_fastest
from tensile_jax.memory_report.calls import calls_with
from tensile_jax.memory_report.donations import Argument, missed_donations, unused_arguments
from tensile_jax.memory_report.lives import find_lives
from tensile_jax.memory_report.records import AtBudget
from tensile_jax.memory_report.report import REPORT_VERSION, MemoryReport
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.comparison import SHARES
from tensile_jax.progress.display import told_by
from tensile_jax.progress.phases import BUDGETS, Progress
from tensile_jax.trace.step import KeyPath
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

__all__ = ["memory"]

_LIBRARY_KERNEL = "ynn_fusion"
_IN_LIBRARY = (
    "XLA for CPUs runs some operators of this function inside kernels of a library, which allocate memory for themselves. XLA "
    "leaves that memory out of its own peak of {}, so the function needs more than that."
)


@hides_frames
def memory(
    function: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    compile: bool = False,
    budgets: bool = False,
    open_loops: bool | None = None,
    device_profile: str | None = None,
    progress: bool | Progress | None = None,
    **jit_options: Unpack[JitOptions],
) -> MemoryReport:
    """What `function` needs on the device under plain `jax.jit`, for these arguments. Nothing runs.

    Args:
        function: any function that `jax.jit` takes: a training step, a forward pass, or a part of either. What `jax.jit` or
            `tensile_jax.jit` returns is taken as well, with the donation and the shardings that it has; only
            `static_argnums`, `static_argnames` and `keep_unused` must be given again. A step on Flax NNX objects is taken, too:
            what `flax.nnx.jit` or `tensile_jax.nnx.jit` returns, or a function that is given NNX objects, as it is under
            `flax.nnx.jit`.
        *args: its arguments: arrays, or a `jax.ShapeDtypeStruct` for each array, also sharded ones. NNX objects may be abstract,
            as `flax.nnx.eval_shape` makes them. They are not changed.
        kwargs: its keyword arguments.
        compile: whether XLA compiles the function, so that the report has XLA's own peak beside the predicted one.
        budgets: whether plans are made under some budgets, so that the report says what less memory costs. That takes about as
            long as six calls of `tensile_jax.jit(...).plan`.
        open_loops: for the plans of `budgets=True`, as in `tensile_jax.jit`.
        device_profile: name of a device profile, or path of a TOML file. Default: the profile of the device of the arguments.
        progress: what is shown of a report that takes long, as in `tensile_jax.jit`.
        **jit_options: as in `jax.jit`, such as `donate_argnums=0`. With a step on NNX objects, as in `flax.nnx.jit`.

    Returns:
        A `MemoryReport`. `print(report)` shows the peak, where it is reached and what lives there. `report.save("memory.html")`
        writes it as a page.

    Raises:
        TraceError: the function cannot be traced as a step, for example since it captures a mutable reference.
        TypeError: an option is none of `jax.jit`, or it would change nothing because the function is jitted already.
        ValueError: an option has a value that is not allowed.

    >>> import jax.numpy as jnp
    >>> report = memory(lambda w, x: w - 0.1 * x.T @ (x @ w), jnp.ones((256, 8)), jnp.ones((64, 256)), donate_argnums=0)
    >>> report.predicted_peak_bytes == sum(part.nbytes for part in report.at_peak)
    True
    """
    if open_loops is not None and not budgets:
        raise ValueError(
            f"open_loops={shown(open_loops)} is for plans, and plain jax.jit runs a loop as it is. Pass budgets=True too, to see "
            "what such plans cost."
        )
    named = dict(kwargs or {})
    plan_options = PlanOptions(device_profile=device_profile, open_loops=open_loops, progress=progress)
    calls = calls_with(function, args, named, plan_options, jit_options)
    with calls.showing():
        step = calls.step(args, named)
        compiled = jit_peak_bytes(step) if compile else None
        costs, smallest = _costs(step, told_by(progress)) if budgets else ((), None)
        hides = compile and _in_library_kernels(step)
    report = report_of(
        step,
        how_to_donate=lambda path: calls.how_to_donate(path, len(args)),
        compiled_peak_bytes=compiled,
        budgets=costs,
        smallest_budget_bytes=smallest,
    )
    return replace(report, notes=(*report.notes, _IN_LIBRARY.format(format_bytes(report.peak_bytes)))) if hides else report


def report_of(
    step: Step,
    *,
    how_to_donate: Callable[[KeyPath], str] | None = None,
    compiled_peak_bytes: int | None = None,
    budgets: Sequence[AtBudget] = (),
    smallest_budget_bytes: int | None = None,
) -> MemoryReport:
    """The report on a step that was traced.

    Args:
        how_to_donate: from the path of an argument in `(args, kwargs)`, without static ones, to the option that donates it; None
            if donations are not of interest.
    """
    planner, traced = step.planner, step.traced
    model = planner.model.whole
    peak_bytes = planner.whole_peak_bytes(CompiledSizes())
    lives = find_lives(model, peak_bytes, lambda op, result: traced.whole_origin_of(op.id, result))
    limit = memory_of(step.compiler.device) if step.compiles_for_profile else float("inf")
    arguments = _arguments(step, how_to_donate)
    return MemoryReport(
        report_version=REPORT_VERSION,
        tensile_version=package_version(),
        program=model.graph.name,
        fingerprint=model.graph.fingerprint,
        devices=traced.devices,
        device=step.compiler.device.device_kind,
        device_bytes=None if limit == float("inf") else int(limit),
        device_profile=planner.profile.name,
        predicted_peak_bytes=peak_bytes,
        compiled_peak_bytes=compiled_peak_bytes,
        peak=lives.peak,
        held=lives.held,
        tensors=lives.tensors,
        small_bytes=lives.small_bytes,
        operators=tuple(operator.name for operator in model.graph.operators),
        curves=lives.curves,
        begin_us=lives.begin_us,
        step_us=round(model.whole_us, 3),
        missed_donations=missed_donations(model.graph, arguments),
        unused_arguments=unused_arguments(model.graph, arguments),
        budgets=tuple(budgets),
        smallest_budget_bytes=smallest_budget_bytes,
        notes=traced.loop_notes,
    )


def _arguments(step: Step, how_to_donate: Callable[[KeyPath], str] | None) -> list[Argument]:
    """What is known of each flat argument."""
    program = step.traced.whole_program
    leaves, _ = tree_flatten_with_path(step.traced.traced.args_info)
    return [
        Argument("" if how_to_donate is None else how_to_donate(path), bool(info.donated), used, taken)
        for (path, info), used, taken in zip(leaves, program.used, program.taken, strict=True)
    ]


def _in_library_kernels(step: Step) -> bool:
    """Whether XLA for CPUs runs stretches of the function in kernels of a library, which allocate for themselves."""
    return step.compiler.device.platform == "cpu" and _LIBRARY_KERNEL in step.plain_jit.sized().executable.as_text()


def _costs(step: Step, progress: Progress) -> tuple[tuple[AtBudget, ...], int | None]:
    """What plans cost under shares of plain jit's peak, predicted, and the smallest budget that has a plan."""
    peak_bytes = step.planner.whole_peak_bytes(CompiledSizes())
    plain_us = step.planner.model.whole_us
    found: list[AtBudget] = []
    for share in SHARES:
        progress(BUDGETS, len(found), len(SHARES) + 1)
        nbytes = max(int(share * peak_bytes), 1)
        try:
            plan = predict_fastest(step, Budget(nbytes, None)).plan
        except BudgetTooSmall as refusal:
            progress(BUDGETS, len(SHARES) + 1, len(SHARES) + 1)
            return tuple(found), refusal.floor_bytes
        found.append(AtBudget(share, nbytes, plan.peak_bytes, round(plan.step_us / plain_us, 4)))
    progress(BUDGETS, len(SHARES), len(SHARES) + 1)
    smallest = _smallest(step)
    progress(BUDGETS, len(SHARES) + 1, len(SHARES) + 1)
    return tuple(found), smallest


def _smallest(step: Step) -> int:
    """The smallest budget that has a plan, as the error for a budget of one byte names it."""
    try:
        return predict_fastest(step, Budget(1, None)).plan.peak_bytes
    except BudgetTooSmall as refusal:
        return refusal.floor_bytes
