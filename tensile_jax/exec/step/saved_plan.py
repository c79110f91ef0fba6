"""Prepares a saved plan to run: compiles its segments, corrects its sizes, and plans the step again if it exceeds its budget.

The sizes in a saved plan may be estimates, since `tensile plan` compiles nothing, or may come from another machine. So the
segments are compiled here, and XLA's figures for their workspaces replace those in the file. If the plan then needs more than the
budget, the step is planned again within the budget, by the policy that made the saved plan. Segments that are compiled already
are not compiled again.

A saved plan is never trusted: before anything is compiled, the plan is replayed on the step's graph, as every plan is.
"""

from collections.abc import Sequence
from dataclasses import replace

from tensile_jax.budget import Budget
from tensile_jax.errors import InvalidPlan, PlanFileError
from tensile_jax.exec.step.compile import Executable
from tensile_jax.exec.step.fitting_plan import prepare, untried_whole_bytes
from tensile_jax.exec.step.prepared_step import PreparedStep, RunningPlan
from tensile_jax.ir import Graph
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.memory_curve import host_bytes, resident_bytes, with_ends
from tensile_jax.plan_format import Plan, Segment
from tensile_jax.units import format_bytes


def load(prepared: PreparedStep, plan: Plan) -> RunningPlan:
    """The saved plan, ready to run under the lower of its own budget and that of `prepared`.

    Raises:
        PlanFileError: the plan is for another program, its replay refuses it, or its peak is above the budget.
        BudgetTooSmall: compiled here, the plan needs more than its budget, and no other plan keeps it.
    """
    refuse_saved(prepared, plan)
    if prepared.budget is not None and prepared.budget.share is not None and untried_whole_bytes(prepared) is not None:
        prepared.whole_executable()
    own = None if plan.budget_bytes is None else Budget(plan.budget_bytes, None, plan.budget_basis)
    budgets = [budget for budget in (own, prepared.budget_in_bytes()) if budget is not None]
    prepared.budget = min(budgets, key=lambda budget: budget.resolve(0), default=None)
    budget_bytes = None if prepared.budget is None else prepared.budget.nbytes
    joined: Plan | None = None
    programs = prepared.compile_programs(plan) if plan.launch == "program" else None
    if programs is not None:
        executables, joined = programs.executables, programs.joined
        segments, peak, needed = plan.segments, plan.peak_segment, joined.peak_bytes
    else:
        plan = replace(plan, launch="segments", launches=None, barriers=None)
        executables, segments = _compiled(prepared, plan)
        peak = max(range(len(segments)), key=lambda i: (segments[i].device_bytes, -i))
        needed = segments[peak].device_bytes
    on_host, host_limit = _host_peak(prepared, plan), prepared.origin.planner.step.host_limit
    above_host = on_host > host_limit
    if above_host or (budget_bytes is not None and needed > budget_bytes):
        running = prepare(prepared)
        note = (
            f"The saved plan needs {on_host} bytes of host memory, above the host budget of {int(host_limit)}"
            if above_host
            else f"Compiled here, the saved plan needs {needed} bytes at its peak, above its budget of {budget_bytes}"
        ) + ": the step was planned again within the budget."
        running.plan = replace(running.plan, notes=(*running.plan.notes, note))
        return running
    notes = plan.notes
    if needed != plan.peak_bytes:
        notes += (f"Compiled here, the saved plan needs {needed} bytes at its peak; the file says {plan.peak_bytes}.",)
    corrected = replace(
        plan,
        segments=tuple(segments),
        peak_segment=peak,
        peak_bytes=needed,
        workspaces="compiled",
        host_peak_bytes=on_host,
        host_budget_bytes=None if host_limit == float("inf") else int(host_limit),
        budget_bytes=budget_bytes,
        budget_basis="" if prepared.budget is None else prepared.budget.basis,
        jit_peak_bytes=plan.jit_peak_bytes if prepared.measured.whole is None else prepared.measured.whole,
        notes=notes,
    )
    return RunningPlan(prepared, corrected, executables, joined_plan=joined)


def _host_peak(prepared: PreparedStep, plan: Plan) -> int:
    """The bytes of host memory that the saved plan needs, which earlier versions did not say, with those of its loops' bodies."""
    if plan.host_peak_bytes is not None:
        return plan.host_peak_bytes
    inner = max((loop.plan.swapped_out_bytes for loop in plan.loops), default=0)
    return max(host_bytes(prepared.graph, plan.segments, plan.events)) + inner


def _compiled(prepared: PreparedStep, plan: Plan) -> tuple[list[Executable] | None, Sequence[Segment]]:
    """The executables of the plan's segments, None if the step runs whole, and the segments with XLA's sizes."""
    if plan.whole:
        held = min(sum(prepared.graph.tensors[t].nbytes for t in prepared.graph.inputs), prepared.jit_peak_bytes)
        at_begin, resident, at_end, workspaces, executables = 0, [held], 0, [prepared.jit_peak_bytes - held], None
    else:
        executables = prepared.compile(plan)
        at_begin, *resident, at_end = resident_bytes(prepared.graph, plan.segments, plan.events)
        workspaces = prepared.workspaces(plan, executables)
    sized = (_corrected(s, *sizes) for s, *sizes in zip(plan.segments, resident, workspaces, strict=True))
    return executables, with_ends(sized, at_begin, at_end)


def _corrected(segment: Segment, resident: int, workspace: int) -> Segment:
    """The segment with these sizes. If the file says the same, the segment is unchanged: its `device_bytes` may then be more."""
    same = (segment.resident_bytes, segment.workspace_bytes) == (resident, workspace)
    if same and segment.device_bytes >= resident + workspace:
        return segment
    return replace(segment, resident_bytes=resident, workspace_bytes=workspace, device_bytes=resident + workspace)


def refuse_saved(prepared: PreparedStep, plan: Plan) -> None:
    """Check that a saved plan is for this step and within the budget of `prepared`.

    Raises:
        PlanFileError: it is for another program, its replay refuses it, or its peak is above the budget.
    """
    graph = prepared.graph
    if plan.fingerprint != graph.fingerprint:
        raise PlanFileError(
            f"plan= was made for another program: it is of {plan.program!r} with fingerprint {plan.fingerprint}, this step is "
            f"{graph.name!r} with {graph.fingerprint}. {_difference(plan, graph)} Make a new one with step.plan(...)."
        )
    try:
        check(plan, graph)
    except InvalidPlan as fault:
        raise PlanFileError(
            f"plan= does not do what the step does, so it cannot be run: {fault}. Make a new one with step.plan(...)."
        ) from fault
    if prepared.budget is not None and plan.peak_bytes > prepared.limit():
        raise above_budget(plan, int(prepared.limit()))


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


def _difference(plan: Plan, graph: Graph) -> str:
    """A sentence that says how the arguments of the step differ from those of the plan."""
    planned = {t.id: t for t in plan.tensors}
    found: list[str] = []
    for t in graph.inputs:
        mine, theirs = graph.tensors[t], planned.get(t)
        if theirs is None:
            found.append(f"{mine.name} is not in the plan")
        elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            found.append(f"{mine.name} is {mine.dtype}{list(mine.shape)} here and {theirs.dtype}{list(theirs.shape)} in the plan")
    if not found:
        return "The arguments are alike; what the step computes, what is donated, or the version of jax differs."
    return f"The arguments differ: {'; '.join(found[:3])}{', ...' if len(found) > 3 else ''}."
