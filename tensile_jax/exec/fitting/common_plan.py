"""Makes one plan for all processes that run a step together: one process plans, and sends *orders* to the other processes.

An order says what a process must compile now, or which plan all processes run from now on (`exec/processes/orders.py`). In the
end, all processes have compiled the same plan. Before a plan runs, each process checks it as it would check a plan from a file:
the check steps through the launches and copies, and refuses the plan if a tensor is missing when it is needed, or if the plan
needs more memory than it states (`plan/result/check.py`). If a process cannot compile the plan or refuses it, all processes raise
an error.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import msgspec

from tensile_jax.exec.compiling.step import CompiledPlan, Step
from tensile_jax.exec.compiling.whole_executable import whole_executable
from tensile_jax.exec.fitting.find_plan import begin
from tensile_jax.exec.processes.agreement import compare
from tensile_jax.exec.processes.orders import CompilePrograms, CompileSegments, CompileWhole, Order, Run
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.joined import graph_of_programs
from tensile_jax.plan_format import Plan


def planned_for_all(step: Step, make: Callable[[], CompiledPlan]) -> CompiledPlan:
    """The plan that `make` makes in the process that plans, compiled in this process.

    All processes of the step call this at the same point, in a session (`exec/processes/agreement.py`).

    Args:
        step: the step in this process.
        make: called in the process that plans only.

    Raises:
        TensileError: planning has failed, in whichever process.
    """
    agreement = step.agreement
    if len(agreement.processes) == 1:
        return make()
    if agreement.leads:
        made = make()
        found = replace(made, plan=_as_decoded(made.plan), launched=_as_decoded(made.launched))  # all then have equal plans
        agreement.tell(Run(found.plan, None if made.launched is made.plan else found.launched))
    else:
        found = _follow(step)
    compare(agreement, {"the plan": digest_of(found.plan), "its form": digest_of(found.launched)}, "plan")
    return found


def _follow(step: Step) -> CompiledPlan:
    """The plan that the process that plans orders to run, after everything that it orders to compile before that."""
    fitting = begin(step, None)
    while True:
        match step.agreement.hear(Order):
            case CompileWhole(to_run=to_run):
                step.plain_jit.follow(to_run=to_run)
            case CompileSegments(plan=plan, to_run=to_run):
                sizes = [e.sizes for e in fitting.compile_segments(plan)] if to_run else fitting.segment_sizes(plan)
                fitting.workspaces(plan, sizes)
            case CompilePrograms(plan=plan):
                fitting.compile_programs(plan, None)
            case Run(plan=plan, joined=joined):
                launched = joined or plan
                if not plan.whole:
                    check(launched, graph_of_programs(plan, step.graph))
                if plan.whole:
                    executables = [whole_executable(step, plan.peak_bytes)]
                else:
                    executables = fitting.compile_segments(plan) if joined is None else fitting.program_executables(plan)
                return CompiledPlan(step, None, plan, launched, executables, fitting.spent)
            case other:
                raise AssertionError(f"{other!r} is no order")


def _as_decoded(plan: Plan) -> Plan:
    """The plan as read from a file, in which a time may be a whole number."""
    return msgspec.json.decode(msgspec.json.encode(plan), type=Plan)


def digest_of(plan: Plan | None) -> str:
    """A short text that differs for different plans."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:16]
