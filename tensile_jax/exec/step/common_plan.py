"""Makes one plan for all processes of a step: one of them plans, and the others do what it orders (`orders.py`).

All processes then hold the same plan, compiled. The other processes never trust it: before it runs, it is replayed on the step's
graph, as a saved plan is. A process that cannot compile it, or has another graph, fails, and all of them raise an error.
"""

import hashlib
from collections.abc import Callable

import msgspec

from tensile_jax.exec.step.agreement import compare
from tensile_jax.exec.step.orders import CompilePrograms, CompileSegments, CompileWhole, Order, Run
from tensile_jax.exec.step.prepared_step import PreparedStep, RunningPlan
from tensile_jax.plan.result.check import check
from tensile_jax.plan_format import Plan


def planned_for_all(prepared: PreparedStep, make: Callable[[], RunningPlan]) -> RunningPlan:
    """The plan that `make` makes in the process that plans, ready to run in this process. Called in a session.

    Args:
        prepared: the step in this process.
        make: called in the process that plans only.

    Raises:
        TensileError: planning has failed, in whichever process.
    """
    agreement = prepared.agreement
    if len(agreement.processes) == 1:
        return make()
    if agreement.leads:
        running = make()
        running.plan = _as_decoded(running.plan)  # so that all have equal plans, also where a time is a whole number
        running.joined = None if running.joined is None else _as_decoded(running.joined)
        agreement.tell(Run(running.plan, running.joined))
    else:
        running = _follow(prepared)
    compare(agreement, {"the plan": digest_of(running.plan), "its form": digest_of(running.joined)}, "plan")
    return running


def _follow(prepared: PreparedStep) -> RunningPlan:
    """The plan that the process that plans orders to run, after everything that it orders to compile before that."""
    while True:
        match prepared.agreement.hear(Order):
            case CompileWhole():
                prepared.compile_whole()
            case CompileSegments(plan=plan):
                prepared.workspaces(plan, prepared.compile(plan))
            case CompilePrograms(plan=plan):
                prepared.compile_programs(plan)
            case Run(plan=plan, joined=joined):
                if plan.whole:
                    return RunningPlan(prepared, plan, None)
                launched = joined or plan
                check(launched, prepared.graph)
                executables = prepared.compile(plan) if joined is None else prepared.program_executables(plan)
                return RunningPlan(prepared, plan, executables, joined_plan=joined)
            case other:
                raise AssertionError(f"{other!r} is no order")


def _as_decoded(plan: Plan) -> Plan:
    return msgspec.json.decode(msgspec.json.encode(plan), type=Plan)


def digest_of(plan: Plan | None) -> str:
    """A short text that differs for different plans."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:16]
