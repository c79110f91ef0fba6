"""Prepares a saved plan to run: compiles its segments, corrects its sizes, and plans the step again if the budget is exceeded.

A *segment* is a stretch of operators that is compiled as one executable; its *workspace* is the memory that it needs beside
inputs and outputs. The sizes in a saved plan may be estimates, since `tensile plan` compiles nothing. They may also come from
another machine. So the segments are compiled here, and XLA's figures for their workspaces replace those in the file. If the plan
then needs more than the budget, the step is planned again within the budget, by the policy (the planning method) that made the
saved plan. Segments that are compiled already are not compiled again.

Before anything is compiled, the plan is checked, as every plan is: the check steps through its launches and copies, and refuses
the plan if a tensor is missing when it is needed, or if the plan needs more memory than it states (`plan/result/check.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import jax

from tensile_jax.budget import Budget
from tensile_jax.errors import InvalidPlan, PlanFileError
from tensile_jax.exec.compiling.compiler import Executable
from tensile_jax.exec.compiling.step import CompiledPlan, Step
from tensile_jax.exec.compiling.whole_executable import whole_executable
from tensile_jax.exec.fitting.find_plan import begin, budget_of, fit, learn, untried_whole_bytes
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.result.build import build_whole_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.instructions import decode
from tensile_jax.plan.result.memory_curve import waiting_bytes
from tensile_jax.plan.result.segment_sizes import with_sizes
from tensile_jax.plan_format import MEMORIES, Memory, Plan, peaks_of, with_budgets, with_peaks
from tensile_jax.units import format_bytes


def load(step: Step, budget: Budget | None, plan: Plan) -> CompiledPlan:
    """The saved plan, compiled, under the lower of its own budget and `budget`.

    Raises:
        PlanFileError: the plan is for another program, the check of plans refuses it, or its peak is above the budget.
        BudgetTooSmall: compiled here, the plan needs more than its budget, and no other plan keeps it.
    """
    refuse_saved(step, budget, plan)
    given = begin(step, budget)
    if budget is not None and budget.share is not None and untried_whole_bytes(given) is not None:
        given.compile_plain_jit(to_run=plan.whole)
    lower = lower_budget(given, plan)
    budget_bytes = None if lower is None else lower.nbytes
    fitting = given.under(lower)
    stated = plan.peak_bytes
    as_programs = fitting.compile_programs(plan, None) if plan.launch == "program" else None
    if as_programs is not None:
        plan = replace(plan, launches=as_programs.plan.launches, layouts=as_programs.plan.layouts)
        executables, launched = as_programs.executables, as_programs.launched
        plan = replace(plan, peak_bytes=launched.peak_bytes, allocator_bytes=launched.allocator_bytes)
    else:
        plan = replace(plan, launch="segments", launches=None, barriers=None, state_layout="row_major", layouts=None)
        executables, plan = _compiled(fitting, plan)
        launched = None
    needed = plan.peak_bytes
    peaks, budgets = _peaks(step, plan), step.origin.planner.model.budgets
    above: Memory | None = next((m for m in MEMORIES if (most := budgets[m]) is not None and peaks[m] > most), None)
    if above is not None or (budget_bytes is not None and needed > budget_bytes):
        note = (
            f"The saved plan needs {peaks[above]} bytes of {above} memory, above the {above} budget of {budgets[above]}"
            if above is not None
            else f"Compiled here, the saved plan needs {needed} bytes at its peak, above its budget of {budget_bytes}"
        ) + ": the step was planned again within the budget."
        return fit(fitting).noted(note)
    learn(fitting)
    notes = plan.notes
    if needed != stated:
        notes += (f"Compiled here, the saved plan needs {needed} bytes at its peak; the file says {stated}.",)
    corrected = replace(
        with_budgets(with_peaks(plan, peaks), budgets),
        workspaces="compiled",
        budget_bytes=budget_bytes,
        budget_basis="" if lower is None else lower.basis,
        jit_peak_bytes=plan.jit_peak_bytes if fitting.measured.whole is None else fitting.measured.whole,
        notes=notes,
    )
    return CompiledPlan(step, None, corrected, launched or corrected, executables, fitting.spent)


def lower_budget(given: Fitting, plan: Plan) -> Budget | None:
    """The lower of the budget that was given and the one of a saved plan; None if there is none."""
    budgets = [one for one in (budget_of(plan), given.budget_in_bytes()) if one is not None]
    return min(budgets, key=lambda one: one.resolve(0), default=None)


def _peaks(step: Step, plan: Plan) -> dict[Memory, int]:
    """What the saved plan needs in each memory where tensors wait, which earlier versions did not say, with its loops' bodies."""
    inner, code = max((loop.plan.swapped_out_bytes for loop in plan.loops), default=0), decode(plan, step.graph)
    return {
        memory: max(waiting_bytes(code, step.graph, memory)) + inner if stated is None else stated
        for memory, stated in peaks_of(plan).items()
    }


def _compiled(fitting: Fitting, plan: Plan) -> tuple[Sequence[Executable], Plan]:
    """The executables of the plan's segments, or plain jit's if the step runs whole, and the plan with XLA's sizes."""
    step, profile = fitting.step, fitting.planner.model.profile
    if plan.whole:
        fitting.compile_plain_jit(to_run=True)
        needed = fitting.jit_peak_bytes
        again = build_whole_plan(step.graph, plan, profile, needed_bytes=needed, latency_us=plan.segments[0].latency_us)
        return [whole_executable(step, needed)], again
    executables = fitting.compile_segments(plan)
    workspaces = fitting.workspaces(plan, [e.sizes for e in executables])
    return executables, with_sizes(plan, decode(plan, step.graph), step.graph, workspaces, profile)


def refuse_saved(step: Step, budget: Budget | None, plan: Plan) -> None:
    """Check that a saved plan is for this step and within the budget.

    Raises:
        PlanFileError: it is for another program, the check of plans refuses it, or its peak is above the budget.
    """
    graph = step.graph
    if plan.fingerprint != graph.fingerprint:
        raise PlanFileError(
            f"plan= was made for another program: it is of {plan.program!r} with fingerprint {plan.fingerprint}, this step is "
            f"{graph.name!r} with {graph.fingerprint}. {_difference(plan, step)} Make a new one with step.plan(...)."
        )
    try:
        check(plan, graph)
    except InvalidPlan as fault:
        raise PlanFileError(
            f"plan= does not do what the step does, so it cannot be run: {fault}. Make a new one with step.plan(...)."
        ) from fault
    limit = None if budget is None else begin(step, budget).limit()
    if limit is not None and plan.peak_bytes > limit:
        raise above_budget(plan, int(limit))


def above_budget(plan: Plan, budget_bytes: int) -> PlanFileError:
    """The error for a saved plan whose peak is above the budget that was given with it."""
    return PlanFileError(
        f"plan= needs {plan.peak_bytes} bytes at its peak ({format_bytes(plan.peak_bytes)}), above budget={budget_bytes} "
        f"({format_bytes(budget_bytes)}). Make a new one under that budget with step.plan(...), or leave budget out: a plan has "
        "its own."
    )


def above_host_budget(plan: Plan, host_budget_bytes: int) -> PlanFileError:
    """The error for a saved plan that needs more host memory than the host budget that was given with it."""
    needed = plan.host_peak_bytes or 0
    return PlanFileError(
        f"plan= needs {needed} bytes of host memory ({format_bytes(needed)}), above host_budget={host_budget_bytes} "
        f"({format_bytes(host_budget_bytes)}). Make a new one under that budget with step.plan(...), or raise host_budget."
    )


def _difference(plan: Plan, step: Step) -> str:
    """A sentence that says how the step differs from the one that the plan was made for."""
    graph = step.graph
    planned = {t.id: t for t in plan.tensors}
    found: list[str] = []
    for t in graph.inputs:
        mine, theirs = graph.tensors[t], planned.get(t)
        if theirs is None:
            found.append(f"{mine.name} is not in the plan")
        elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            found.append(f"{mine.name} is {mine.dtype}{list(mine.shape)} here and {theirs.dtype}{list(theirs.shape)} in the plan")
    if found:
        return f"The arguments differ: {'; '.join(found[:3])}{', ...' if len(found) > 3 else ''}."
    if plan.donated is None:
        return "The arguments are alike; what the step computes, what is donated, or the version of jax differs."
    if _donating(plan.donated, step).fingerprint == plan.fingerprint:
        return (
            f"Only what is donated differs: this step donates {_names(graph.donated, graph)}, and the plan's donates "
            f"{_names(plan.donated, graph)}. Donate the same (donate_argnums)."
        )
    if plan.jax_version != jax.__version__:
        return f"The arguments are alike, but the step was traced by jax {plan.jax_version}, and this is {jax.__version__}."
    return (
        "The arguments are alike, but what the step computes differs; or an argument is weakly typed in one of the two, as "
        "arrays made from Python numbers are (give such an argument a dtype: jnp.asarray(2.0, jnp.float32))."
    )


def _donating(donated: Collection[TensorId], step: Step) -> Graph:
    """The graph of the step if it donated these arguments."""
    traced, inputs = step.traced, step.graph.inputs
    return traced.graph_of(replace(traced.program, taken=tuple(tensor in donated for tensor in inputs)))


def _names(donated: Collection[TensorId], graph: Graph) -> str:
    names = [graph.tensors[tensor].name for tensor in graph.inputs if tensor in donated]
    return f"{', '.join(names[:3]) or 'nothing'}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
