"""Experiments 4, 5 and 7, simulated: several jobs on one device. The controller of the product decides what runs when.

Jobs are planned in two ways:

    each for itself    every job has a plan of its own, which does not know of the others (vDNN, Capuchin, checkpointing, as in
                       the paper); they may need as much memory together as they do
    together           the swaps of TENSILE's Algorithm 2 are chosen for all jobs on one link; `auto` plans all jobs for one
                       budget, and may keep state of a job in host memory while others run

Time counts from the first launch on. The vanilla time is that of the same iterations with plain jit, one after another, and the
vanilla peak is the sum of plain jit's peaks, as of processes that do not know of each other.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.device_simulation import Run, Simulation, Work
from benchmarks.paper.metrics import metrics
from benchmarks.paper.published import MODELS
from benchmarks.paper.steps import NOTHING, Figures, ModelStep, model_step
from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.actor.plan_memory import memory_profile_of, metrics_bytes
from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.fitting.find_plan import begin_to_predict
from tensile_jax.exec.fitting.forms import fastest_form
from tensile_jax.exec.running.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Instructions,
    Launch,
    StartSwapIn,
    StartSwapOut,
    instructions_of,
)
from tensile_jax.ir import TensorId
from tensile_jax.plan import PolicyName
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.multi_job.joint_plan import PlannableJob, offload_states, plan_jobs, smallest_budget
from tensile_jax.plan.multi_job.joint_swaps import agreed_swaps
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan.planner import Goal, Planned, Planner
from tensile_jax.plan.policies.capuchin.passive_mode import passive_iteration
from tensile_jax.plan_format import Plan

_STEPS = 20  # iterations of the slowest job; the others do as many as plain jit does in the same time
REPETITIONS = 3
MOST_JOBS = 4
_DEPTH = 3  # runs in flight, as on a GPU
_EACH_FOR_ITSELF: tuple[PolicyName, ...] = ("vdnn", "capuchin", "checkpoint")
_MIXED_BUDGET = 0.55  # of the sum of plain jit's peaks: MSR 0.45


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedProgram:
    """A job's plan and its memory profile, in the form in which `tensile_jax.plan.multi_job` plans jobs together."""

    planner: Planner
    planned: Planned
    memory: MemoryProfile
    instructions: Instructions | None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.planned.plan

    def offload_state(self, tensors: frozenset[TensorId]) -> "SimulatedProgram":
        """The same segments with these state tensors on the host between their uses."""
        if not tensors:
            return self
        choice = self.planner.offload_state(self.planned.choice, tensors)
        plan = self.planner.plan_of(choice, Goal(math.inf), NOTHING)
        return self if plan is None else program_of(self.planner, Planned(plan, choice))

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """The state tensors that could still be kept on the host, and their bytes."""
        return self.planner.may_be_offloaded(self.planned.choice)


def program_of(planner: Planner, planned: Planned) -> SimulatedProgram:
    """The program of a plan that is not compiled."""
    plan, graph = planned.plan, planner.graph
    instructions = None if plan.whole else instructions_of(plan, graph, [None] * len(plan.segments))
    return SimulatedProgram(planner, planned, memory_profile_of(plan, graph, planner.profile), instructions)


def _under(step: Step, budget_bytes: int) -> SimulatedProgram:
    """The program under a budget, which includes the memory of the metrics. Raises: BudgetTooSmall."""
    beside = metrics_bytes(step.graph)
    limit = max(budget_bytes - beside, 1)
    planner = fastest_form(begin_to_predict(step, Budget(limit, None)), drive_loops=False).planner
    planned = planner.plan(Goal(limit), NOTHING)
    if planned is None:
        floor = planner.floor_bytes(NOTHING) + beside
        raise BudgetTooSmall("the budget is too small", budget_bytes=budget_bytes, floor_bytes=floor)
    return program_of(planner, planned)


def work_of(program: SimulatedProgram, *, arrives_us: float = 0.0, steps: int) -> Work:
    """The program as a job of the simulation."""
    plan, profile = program.plan, program.planner.profile
    moves = len(program.memory.kinds)
    us, lanes, waits = [0.0] * moves, [""] * moves, [()] * moves
    if program.instructions is None:
        us[1] = plan.step_us
        return Work(program.memory, tuple(us), tuple(lanes), tuple(waits), arrives_us=arrives_us, steps=steps)
    begun: dict[int, int] = {}  # by slot, the move that began its latest copy
    size = program.instructions.nbytes
    for move, instruction in enumerate(program.instructions.code, start=1):
        match instruction:
            case Launch(index=index):
                us[move] = plan.segments[index].latency_us + plan.launch_us
            case StartSwapOut(slots):
                us[move], lanes[move] = sum(copy_out_us(size[slot], profile) for slot in slots), "out"
                begun |= dict.fromkeys(slots, move)
            case StartSwapIn(slots):
                us[move], lanes[move] = sum(copy_in_us(size[slot], profile) for slot in slots), "into"
                begun |= dict.fromkeys(slots, move)
            case FinishSwapOut(slots) | FinishSwapIn(slots):
                waits[move] = tuple(sorted({begun[slot] for slot in slots if slot in begun}))
            case _:
                pass
    return Work(program.memory, tuple(us), tuple(lanes), tuple(waits), arrives_us=arrives_us, steps=steps)


# -- jobs that are planned together, and each for itself ------------------------------------------------------------------------


def each_for_itself(steps: Sequence[ModelStep], policy: PolicyName, msr: float | None = None) -> list[SimulatedProgram]:
    """Every job with as little memory as the policy can do with, or with the budget that saves `msr`."""
    programs: list[SimulatedProgram] = []
    for step in steps:
        planner = step.planner.with_policy(policy)
        planned = None if msr is None else planner.plan(Goal((1 - msr) * step.jit_peak), NOTHING)
        if planned is None:
            choice = planner.least_choice(NOTHING)
            plan = planner.plan_of(choice, Goal(math.inf), NOTHING)
            assert plan is not None  # every policy has a plan of the least memory
            planned = Planned(plan, choice)
        programs.append(program_of(planner, planned))
    return programs


def tensile_together(steps: Sequence[ModelStep]) -> list[SimulatedProgram]:
    """Every job with as little memory as TENSILE can do with, after the jobs have agreed on their swaps."""
    planners = [step.planner.with_policy("tensile") for step in steps]
    profile = planners[0].profile
    agreed = agreed_swaps([p.swapping_accesses() for p in planners], [1.0] * len(steps), profile)
    programs: list[SimulatedProgram] = []
    for planner, swaps in zip(planners, agreed, strict=True):
        joint = Planner(
            planner.graph, profile, policy="tensile", state_memory="any", model=planner.model, agreed_swaps=swaps
        )  # fmt: skip
        choice = joint.least_choice(NOTHING)
        plan = joint.plan_of(choice, Goal(math.inf), NOTHING)
        assert plan is not None
        programs.append(program_of(joint, Planned(plan, choice)))
    return programs


def auto_together(steps: Sequence[ModelStep], budget_bytes: int) -> tuple[list[SimulatedProgram], int]:
    """All jobs planned for one budget, as the runtime plans them; and the budget, which is raised if there is no such plan."""
    known: dict[tuple[Step, int], SimulatedProgram | BudgetTooSmall] = {}

    def prepare(step: Step, budget: int) -> SimulatedProgram:
        if (step, budget) not in known:
            try:
                known[step, budget] = _under(step, budget)
            except BudgetTooSmall as error:
                known[step, budget] = error
        found = known[step, budget]
        if isinstance(found, BudgetTooSmall):
            raise found
        return found

    def plannable(step: ModelStep) -> PlannableJob[Any]:
        graph = step.traced.graph
        state = sum(graph.tensors[pair.output].nbytes for pair in graph.carried)
        try:
            floor = prepare(step.traced, 1).memory.peak_bytes
        except BudgetTooSmall as error:
            floor = error.floor_bytes
        return PlannableJob(step.traced, prepare, state, floor, 1.0)

    jobs = [plannable(step) for step in steps]
    planned = plan_jobs(jobs, budget_bytes, math.inf)
    if planned is None:
        budget_bytes = smallest_budget(jobs, budget_bytes, math.inf)
        planned = plan_jobs(jobs, budget_bytes, math.inf)
        assert planned is not None
    profile: DeviceProfile = steps[0].planner.profile
    planned = offload_states(planned, jobs, budget_bytes, profile)
    return [one.program for one in planned], budget_bytes


# -- the metrics --------------------------------------------------------------------------------------------------------------


def _simulate(
    programs: Sequence[SimulatedProgram], steps: Sequence[ModelStep], budget_bytes: float, arrivals: Sequence[float]
) -> Run:
    longest = max(step.jit_us for step in steps)
    works = [
        work_of(program, arrives_us=us, steps=round(_STEPS * longest / step.jit_us))
        for program, step, us in zip(programs, steps, arrivals, strict=True)
    ]
    run = Simulation(works, int(min(budget_bytes, 2**62)), _DEPTH).until_all_have_ended()
    assert not run.deadlocks, "a job could not go on"
    return run


def _metrics(run: Run, programs: Sequence[SimulatedProgram], steps: Sequence[ModelStep]) -> Figures:
    vanilla_us = sum(len(ended) * step.jit_us for ended, step in zip(run.ended_us, steps, strict=True))
    vanilla_peak = sum(step.jit_peak for step in steps)
    took_us = run.elapsed_us - run.first_launch_us
    msr, eor = 1 - run.allocated_bytes / vanilla_peak, took_us / vanilla_us
    return {
        **metrics(msr, eor),
        "peak_bytes": run.allocated_bytes,
        "counted_bytes": run.peak_bytes,
        "idle": round(1 - run.busy_us / took_us, 4),
        "parks": run.parks,
        "planned_peaks": round(sum(p.plan.peak_bytes for p in programs) / vanilla_peak, 4),
    }


def _compared(steps: Sequence[ModelStep], arrivals: Sequence[float], budget_share: float | None = None) -> dict[str, Figures]:
    """Every method on the same jobs. Capuchin's budgets, and that of `auto`, save as much as TENSILE does."""
    programs = tensile_together(steps)
    tensile = _metrics(_simulate(programs, steps, math.inf, arrivals), programs, steps)
    found: dict[str, Figures] = {"tensile": tensile}
    for policy in _EACH_FOR_ITSELF:
        msr = tensile["msr"] if policy == "capuchin" else None
        programs = each_for_itself(steps, policy, msr)
        found[policy] = _metrics(_simulate(programs, steps, math.inf, arrivals), programs, steps)
    vanilla_peak = sum(step.jit_peak for step in steps)
    budgets = {"auto": tensile["peak_bytes"]}
    if budget_share is not None:
        budgets[f"auto, budget {budget_share:.0%}"] = int(budget_share * vanilla_peak)
    for name, asked in budgets.items():
        programs, budget = auto_together(steps, asked)
        found[name] = _metrics(_simulate(programs, steps, budget, arrivals), programs, steps)
        found[name] |= {"budget_bytes": budget, "asked_bytes": asked}
    return found


def scalability(model: str, device: str) -> dict[str, dict[str, Figures]]:
    """One to four equal jobs that begin together, by the number of jobs."""
    step = model_step(model, device)
    return {str(jobs): _compared([step] * jobs, [0.0] * jobs, 0.5) for jobs in range(1, MOST_JOBS + 1)}


def mixed(device: str) -> list[dict[str, Any]]:
    """The five models come one after another in random order, as far apart as five of ResNet-50's iterations."""
    rows: list[dict[str, Any]] = []
    apart = 5 * model_step("resnet50", device).jit_us
    for seed in range(REPETITIONS):
        order = list(MODELS)
        random.Random(seed).shuffle(order)
        steps = [model_step(name, device) for name in order]
        rows.append({"order": order, "methods": _compared(steps, [apart * k for k in range(len(order))], _MIXED_BUDGET)})
    return rows


def overhead(model: str, device: str) -> dict[str, Figures]:
    """What Capuchin's time is spent on, as multiples of plain jit's time of an iteration, by the number of jobs."""
    step = model_step(model, device)
    limit = step.least("tensile").peak_bytes
    passive = passive_iteration(step.planner.model, limit)
    programs = each_for_itself([step], "capuchin", 1 - limit / step.jit_peak)
    found: dict[str, Figures] = {}
    for jobs in range(1, MOST_JOBS + 1):
        run = _simulate(programs * jobs, [step] * jobs, math.inf, [0.0] * jobs)
        iterations = sum(len(ended) for ended in run.ended_us)
        plan = programs[0].plan
        found[str(jobs)] = {
            "first_iteration": round(passive.step_us / step.jit_us, 4),
            "waits_for_tensors": round((run.elapsed_us - run.first_launch_us - run.busy_us) / iterations / step.jit_us, 4),
            "recomputed": round(plan.recomputed_us / step.jit_us, 4),
            "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        }
    return found
