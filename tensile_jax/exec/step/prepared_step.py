"""A step at one set of shapes, traced and ready to be planned and compiled.

It holds the planner, what compiling has shown so far, and what the user asked for; it makes the plan of a choice, and compiles
plans. Which choice keeps the budget is found in `fitting_plan.py`.

If the step runs on devices of several processes, one of them does this, and tells the others what to compile (`orders.py`). The
largest workspace in any of the processes counts.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import jax

from tensile_jax.budget import Budget, HostNeed, too_small_for_step
from tensile_jax.errors import BudgetTooSmall, InvalidPlan
from tensile_jax.exec.step.agreement import ALONE, Agreement
from tensile_jax.exec.step.compile import GPUS, Compiler, Executable, Whole, peak_of
from tensile_jax.exec.step.confirmed_plans import confirmed_for
from tensile_jax.exec.step.executor import Executor, Observation
from tensile_jax.exec.step.instructions import instructions_of
from tensile_jax.exec.step.lower import SegmentBuilder
from tensile_jax.exec.step.one_program import program_code
from tensile_jax.exec.step.orders import CompilePrograms, CompileSegments, CompileWhole
from tensile_jax.exec.step.transfer import Transfer, divided_as, is_divided
from tensile_jax.ir import OperatorId, TensorId
from tensile_jax.plan import Choice, DeviceProfile, Goal, Measured, Planned, Planner
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.analysis.corrections import Corrections
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.joined import joined, programs_of
from tensile_jax.plan_format import Plan, PolicyName, Segment, unranged
from tensile_jax.trace import Rewrite, TracedStep
from tensile_jax.trace.plannable_loops import PlannableLoop

_MARGIN = 0.01
"""The share of the limit that a plan keeps free for what predictions miss: twice that much at first, and once more after every
attempt. On an H200 (`make bench-h200`), two budgets each of ResNet-50 and the decoder then need 7 rounds of compiling. Beginning
with no margin, they needed 10."""
_MOST_ITERATIONS = 8  # of an opened loop, each of which a program contains; not tuned: as many as there are chunks of rows
_LONG_LAUNCH = 0.005
"""Of the step as one executable: from there on, joining five segments gains 2 %. On one device, programs gain nothing else, and
XLA packs their buffers with gaps. On an H200, ResNet-50 with batch 16 at 50 % of plain jit's peak needs 56.7 % as one program,
and 49.4 % in segments (benchmarks/results/nvidia-h200/second-run.json); compiled without a GPU, 5.7 % are gaps."""
LaunchName = Literal["auto", "segments", "program"]
_NOT_JOINED = (
    "launch='program' was asked for. Each segment is launched by itself, since joined they need more than the budget, or since "
    "there is a copy at every boundary."
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A plan, the planner's choice from which it was made, and the executables of its segments.

    `executables` are None if the step runs whole, as one executable, or if the plan is only predicted. If segments are joined
    into programs, there is one executable for each of these, and `joined` is the plan that the executor carries out.
    """

    plan: Plan
    executables: list[Executable] | None
    choice: Choice
    joined: Plan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What the user asked for, apart from the budget. With `max_slowdown` there is no budget: the least memory is wanted.

    `host_limit` is the most bytes that a plan may have in host memory, on each device; zero: nothing is swapped. `host_basis`
    says for people where the limit comes from, and is empty if the user gave it. `agreed_swaps` are the swaps on which several
    jobs of policy `tensile` have agreed, if this is one of them. `launch` is "segments", "program" (segments between two copies
    are one executable where that keeps the budget), or "auto".
    """

    policy: PolicyName
    profile: DeviceProfile
    state_memory: Literal["device", "any"]
    progress: Progress | None = None
    max_slowdown: float | None = None
    host_limit: float = float("inf")
    host_basis: str = ""
    agreed_swaps: tuple[SwappedOut, ...] | None = None
    launch: LaunchName = "segments"


class CompiledPrograms(NamedTuple):
    """A plan whose segments are joined into programs, their executables, and the plan of these, with XLA's sizes."""

    plan: Plan
    executables: list[Executable]
    joined: Plan


class PreparedStep:
    """A traced step and its planner, from which compiled plans are made.

    Args:
        same: another trace of an equal step with equal options, if there is one. Its planner is used, and what compiling it has
            shown so far, and its limit of host memory. Under the same budget, both have the same plan.
        agreement: how the processes agree of which the step uses devices.
    """

    def __init__(
        self,
        step: TracedStep,
        budget: Budget | None,
        options: Options,
        compiler: Compiler,
        *,
        same: "PreparedStep | None" = None,
        agreement: Agreement = ALONE,
    ) -> None:
        self.step = step
        self.agreement = agreement
        self.budget = budget
        if same is not None:
            options = replace(options, host_limit=same.options.host_limit, host_basis=same.options.host_basis)
        self.options = options
        self.planner = (
            Planner(
                step.graph,
                options.profile,
                policy=options.policy,
                state_memory=options.state_memory,
                host_limit=options.host_limit,
                version=package_version(),
                whole_graph=step.whole_graph,
                agreed_swaps=options.agreed_swaps,
            )
            if same is None
            else same.planner
        )
        self.graph = self.planner.graph
        self.compiler = compiler
        self.builder = SegmentBuilder(step.program, step.divided)
        self.measured = Measured() if same is None else same.measured
        self.chosen: dict[tuple[Budget | None, float], Choice] = {} if same is None else same.chosen
        self.plan_s = 0.0
        self.ranking_s = 0.0  # what choosing this one of the step's variants has taken
        self.compile_s = 0.0
        self.jit_compile_s = 0.0
        self.out_of_memory = 0  # how often, under earlier plans
        self._whole: Any = None
        self._compiling_whole: Future[Whole] | None = None
        self._limited: tuple[float, PreparedStep] | None = None  # the latest with another limit of host memory
        self.variant_of: PreparedStep | None = None  # the step of which this one is a variant (`variants.py`)
        self.variants: dict[Rewrite, PreparedStep | None] = {}  # of this step, once they were made; None: the rewrite has none
        self.loops: list[PlannableLoop] | None = None  # those that could be driven, once they were sought
        self.traced_bodies: dict[OperatorId, PreparedStep] = {}  # of these loops, by the loop's operator, once they were traced

    @property
    def origin(self) -> "PreparedStep":
        """The step of which this one is a variant; itself, if it is none."""
        return self if self.variant_of is None else self.variant_of

    def with_host_limit(self, host_limit: float, basis: str = "") -> "PreparedStep":
        """The same step, from which plans are made that have so many bytes in host memory at most; with zero, none are swapped.

        The two share all executables. A limit that holds all tensors of the step is none.
        """
        planner = self.planner.with_host_limit(host_limit)
        if planner is self.planner:
            return self
        if self._limited is None or self._limited[0] != host_limit:
            made = copy(self)
            made.planner = planner
            made.options = replace(self.options, host_limit=host_limit, host_basis=basis)
            made.chosen, made.variants, made.traced_bodies, made._limited = {}, {}, {}, None
            if self.variant_of is not None:
                made.variant_of = self.variant_of.with_host_limit(host_limit, basis)
            self._limited = host_limit, made
        return self._limited[1]

    def corrected(self, corrections: Corrections) -> "PreparedStep":
        """The same step, whose planner predicts latencies with these corrections. The two share all executables.

        Corrections are of the operators of this step, so its variants do not have them (`variants.py`).
        """
        made = copy(self)
        made.planner = self.planner.corrected(corrections)
        made.chosen, made.variants, made._limited = {}, {}, None
        made.variant_of = self.origin
        return made

    def swapping_accesses(self) -> AccessSequence | None:
        """The accesses from which swaps are chosen for several jobs together; None if the policy does not take part in that."""
        return self.planner.swapping_accesses()

    def with_swaps(self, swaps: tuple[SwappedOut, ...]) -> "PreparedStep":
        """The same step, for which several jobs have agreed on these swaps; itself, if it has them already."""
        if swaps == self.options.agreed_swaps:
            return self
        made = PreparedStep(self.step, None, replace(self.options, agreed_swaps=swaps), self.compiler)
        return made.corrected(self.planner.step.corrections)

    # -- planning ---------------------------------------------------------------------------------------------------

    @property
    def jit_peak_bytes(self) -> int:
        """The peak of plain `jax.jit`. The whole step is compiled for this, once."""
        if self.measured.whole is None:
            self.whole_executable()
        assert self.measured.whole is not None
        return self.measured.whole

    def whole_executable(self) -> Any:
        """Plain `jax.jit`'s own executable of the step, which is that of its variants, too."""
        if self._whole is None and self.variant_of is not None:
            self._whole = self.variant_of.whole_executable()
            self.measured = replace(self.measured, whole=self.variant_of.measured.whole)
        elif self._whole is None:
            self.agreement.tell(CompileWhole())
            self.compile_whole()
        return self._whole

    def whole_call(self) -> Callable[..., Any]:
        """What runs the whole step: plain `jax.jit`'s own executable, called so that it takes all arguments of the step."""
        return self.compiler.whole_call(self.whole_executable(), self.step)

    def begin_whole(self) -> None:
        """Begin to compile plain `jax.jit`'s executable in a thread, beside the planning; `whole_executable` waits for it.

        If other processes are to compile it, too, nothing is done: they wait for orders then.
        """
        origin = self.origin
        if origin._whole is None and origin._compiling_whole is None and len(origin.agreement.processes) == 1:
            origin._compiling_whole = origin.compiler.begin_whole(origin.step.traced)

    def compile_whole(self) -> None:
        """Compile plain `jax.jit`'s executable, if that was not done yet, and learn its peak, the largest of all processes."""
        if self._whole is None:
            self._tell("compiling plain jit", 0, 1)
            compiling = self._compiling_whole or self.compiler.begin_whole(self.step.traced)
            self._whole, self.jit_compile_s = compiling.result()
            self._compiling_whole = None
            self._tell("compiling plain jit", 1, 1)
        self.measured = replace(self.measured, whole=max(self.agreement.gather(peak_of(self._whole))))
        confirmed_for(self.kind).whole_bytes = self.measured.whole

    def recall_whole(self) -> None:
        """Take over plain jit's peak from an equal step, if plain jit was compiled for that."""
        known = confirmed_for(self.kind).whole_bytes
        if self.measured.whole is None and self.options.policy == "auto" and self.compiles_for_profile:
            self.measured = replace(self.measured, whole=known)

    @property
    def compiles_for_profile(self) -> bool:
        """Whether this machine's compiler knows anything of the profile's device, so that they are of one platform."""
        return (self.options.profile.platform == "cpu") == (self.compiler.device.platform == "cpu")

    def limit(self) -> float:
        """The budget in bytes; infinite if there is none. If `max_slowdown` was given, the least memory that it allows for."""
        return self.goal().limit

    def budget_in_bytes(self) -> Budget | None:
        """The budget as a number of bytes. A share is one of plain jit's compiled peak, if the whole step was compiled already.

        Otherwise it is a share of the peak that the planner predicts, and nothing is compiled. So it is if the profile is that of
        another platform, of which this machine's compiler knows nothing.
        """
        if self.budget is None or self.budget.share is None:
            return self.budget
        measured = self.measured if self.compiles_for_profile else replace(self.measured, whole=None)
        return self.budget.in_bytes(self.planner.whole_peak_bytes(measured), compiled=measured.whole is not None)

    def goal(self) -> Goal:
        """The limit, as far as it is known now: with `max_slowdown` it may change when segments have been compiled."""
        budget = self.budget_in_bytes()
        if budget is not None and budget.nbytes is not None:
            return Goal(budget.nbytes)
        if self.options.max_slowdown is None:
            return Goal(float("inf"))
        return Goal(self.planner.least_limit(self.options.max_slowdown, self.measured), self.options.max_slowdown)

    def planned(self, goal: Goal, attempt: int = 1) -> Planned | None:
        """The planner's choice, and its plan with the margin; None if there is none."""
        measured = self.with_margin(goal, attempt)
        chosen = self.planner.plan(goal, measured)
        if chosen is None and measured.margin:
            return self.planner.plan(goal, replace(measured, margin=0))
        return chosen

    def quick_us(self, upper: float) -> float:
        """Microseconds of a step in a plan that is found quickly, with a margin if there is one with it.

        It is infinite if there is no plan, or more than `upper`, perhaps infinite, if there seems to be none that is faster.
        """
        goal = self.goal()
        # with opened loops, the bound takes longer than such a plan: 31 seconds for 1, of an LSTM of 32 steps
        if not self.planner.step.has_iterations and upper < float("inf") and self.bound_us() >= upper:
            return float("inf")
        measured = self.measured if self.in_one_program else self.with_margin(goal)
        found = self.planner.quick_us(goal.limit, measured, upper)
        if found == float("inf") and measured.margin:
            return self.planner.quick_us(goal.limit, self.measured, upper)
        return found

    def with_margin(self, goal: Goal, attempt: int = 1) -> Measured:
        """What was measured, with a margin for segments that were not compiled yet, each time a larger one.

        A margin that leaves no choice is halved, and then given up.
        """
        limit = 0.0 if goal.limit == float("inf") else goal.limit
        wanted = int(limit * _MARGIN * (attempt + 1))
        most = limit - self.planner.floor_bytes(self.measured)
        return replace(self.measured, margin=next((margin for margin in (wanted, wanted // 2) if margin <= most), 0))

    def predicted_choice(self, choice: Choice, goal: Goal) -> Compiled | None:
        """The plan of `choice` with estimated workspaces; None if the replay, which checks every plan, refuses it."""
        plan = self.plan_of(choice, goal)
        return None if plan is None else Compiled(plan, None, choice)

    @property
    def kind(self) -> object:
        """What must be equal for two steps to have the same plans."""
        options = self.options
        how = self.in_one_program, options.profile, options.state_memory, self.planner.step.host_limit
        return self.graph.fingerprint, how, self.compiler.device.device_kind

    @property
    def in_one_program(self) -> bool:
        """Whether the segments are to be one executable, if a form of it keeps the budget."""
        options = self.options
        if options.launch != "auto":
            return options.launch == "program"
        if options.policy != "auto" or self.compiler.device.platform not in GPUS:
            return False
        step = self.planner.step
        # equal iterations of a loop share executables, and in one program each would be compiled
        if step.most_iterations > _MOST_ITERATIONS:
            return False
        return self.step.devices > 1 or step.profile.launch_us > _LONG_LAUNCH * step.whole_us

    def bound_us(self) -> float:
        """A lower bound, in microseconds, of the time of any plan under the budget; the time of the whole step, if that fits."""
        return self.planner.bound_us(self.limit(), self.measured)

    def too_small(self, limit: float, floor_bytes: int, compiled: Plan | None) -> BudgetTooSmall:
        """The error for a limit below the floor: that of a plan that was compiled, or else the predicted one."""
        planner = self.planner
        least = compiled or planner.plan_of(planner.least_choice(self.measured), Goal(float("inf")), self.measured)
        stored = self.planner.stored
        budget = self.budget_in_bytes()
        basis, beside = ("", 0) if budget is None else (budget.basis, budget.beside)
        return too_small_for_step(
            self.graph,
            limit + beside,
            floor_bytes + beside,
            about="" if compiled else "about ",
            basis=basis,
            state_memory=self.options.state_memory,
            stored=stored,
            source=self.step.source_of,
            least=least if least is not None and least.peak_bytes == floor_bytes else None,
            devices=self.step.devices,
            host=self._host_need(floor_bytes, beside),
        )

    def _host_need(self, floor_bytes: int, beside: int) -> HostNeed | None:
        """What the step would need if there was no limit of host memory; None if there is none, or if that would not help."""
        free = self.planner.with_host_limit(float("inf"))
        if free is self.planner or free.floor_bytes(self.measured) >= floor_bytes:
            return None
        least = free.least_plan(self.measured)
        limit, basis = self.options.host_limit, self.options.host_basis
        return HostNeed(limit, basis, least.peak_bytes + beside, least.host_peak_bytes or 0)

    # -- compiling --------------------------------------------------------------------------------------------------

    def compiled(self, choice: Choice, goal: Goal) -> Compiled | None:
        """The plan of `choice`, compiled; None if the replay, which checks every plan, refuses it."""
        if choice.runs_whole:
            self.whole_executable()
            plan = self.plan_of(choice, goal)
            return None if plan is None else Compiled(plan, None, choice)
        began = time.perf_counter()
        plan = self.plan_of(choice, goal)
        self.plan_s += time.perf_counter() - began
        if plan is None:
            return None
        if plan.barriers is not None:
            programs = self.compile_programs(plan)
            return None if programs is None else Compiled(programs.plan, programs.executables, choice, programs.joined)
        executables = self.compile(plan)
        self.measured = self.planner.with_measured(choice, self.workspaces(plan, executables), self.measured)
        plan = self.plan_of(choice, goal)
        return None if plan is None else Compiled(replace(plan, workspaces="compiled"), executables, choice)

    def plan_of(self, choice: Choice, goal: Goal) -> Plan | None:
        """The plan of `choice`; None if the replay, which checks every plan, refuses it."""
        plan = self.planner.plan_of(choice, goal, self.measured)
        return None if plan is None else self.with_basis(plan)

    def with_basis(self, plan: Plan) -> Plan:
        """The plan, which says what its budget was computed from, and what was done to the step."""
        budget = self.budget_in_bytes()
        mine = budget is not None and budget.nbytes == plan.budget_bytes
        basis = budget.basis if budget is not None and mine else plan.budget_basis
        notes = () if plan.whole else self.step.notes
        if self.options.launch == "program" and plan.launch == "segments" and not plan.whole:
            notes += (_NOT_JOINED,)
        return replace(plan, budget_basis=basis, notes=(*notes, *plan.notes), devices=self.step.devices)

    def offload_state(self, found: Compiled, tensors: Collection[TensorId]) -> Compiled:
        """The same segments with these state tensors on the host between their uses, across the iteration boundary.

        If the replay, which checks every plan, refuses that plan, the result is `found`.
        """
        if not tensors or found.plan.whole:
            return found
        choice = self.planner.offload_state(found.choice, tensors)
        budget_bytes = found.plan.budget_bytes
        goal = Goal(float("inf") if budget_bytes is None else budget_bytes, found.plan.max_slowdown)
        if found.executables is not None:
            return self.compiled(choice, goal) or found
        plan = self.plan_of(choice, goal)
        return found if plan is None else Compiled(plan, None, choice)

    def may_be_offloaded(self, found: Compiled) -> tuple[tuple[TensorId, int], ...]:
        """(tensor, bytes) of each state tensor that `offload_state` could keep on the host and that is not kept there yet."""
        return self.planner.may_be_offloaded(found.choice)

    def compile(self, plan: Plan) -> list[Executable]:
        """The executables of the plan's segments."""
        self.agreement.tell(CompileSegments(plan))
        codes = [
            self.builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, s.donated) for s in plan.segments
        ]
        began = time.perf_counter()
        executables = self.compiler.compile(codes, lambda done, of: self._tell("compiling segments", done, of))
        self.compile_s += time.perf_counter() - began
        return executables

    def compile_programs(self, plan: Plan) -> "CompiledPrograms | None":
        """The executables of a plan whose segments are joined into programs, and their sizes; None if the replay refuses it."""
        self.agreement.tell(CompilePrograms(plan))
        programs, profile = programs_of(plan), self.planner.step.profile
        segments = joined(plan, programs, self.graph, profile).segments
        executables = self.program_executables(plan)
        found = joined(plan, programs, self.graph, profile, self._workspaces_of(segments, executables))
        try:
            check(found, self.graph)
        except InvalidPlan:
            return None
        plan = replace(plan, launches=len(programs), workspaces="compiled", peak_bytes=found.peak_bytes)
        return CompiledPrograms(plan, executables, found)

    def program_executables(self, plan: Plan) -> list[Executable]:
        """The executables of the programs into which the segments of a plan are joined."""
        assert plan.barriers is not None
        programs = programs_of(plan)
        codes = [
            program_code(plan, program, segment, plan.barriers, self.builder, self.graph)
            for program, segment in zip(
                programs, joined(plan, programs, self.graph, self.planner.step.profile).segments, strict=True
            )
        ]
        began = time.perf_counter()
        executables = self.compiler.compile(codes, lambda done, of: self._tell("compiling programs", done, of))
        self.compile_s += time.perf_counter() - began
        return executables

    def workspaces(self, plan: Plan, executables: Sequence[Executable]) -> list[int]:
        """Each segment's workspace in bytes, from XLA's figures; of several processes, the largest."""
        return self._workspaces_of(plan.segments, executables)

    def _workspaces_of(self, segments: Sequence[Segment], executables: Sequence[Executable]) -> list[int]:
        counts_host = self.compiler.device.platform == "cpu"  # XLA for CPUs counts host memory as if it were the device's
        size = [t.nbytes + (t.host_bytes or 0 if counts_host else 0) for t in self.graph.tensors]
        own = [
            max(0, e.workspace(outputs=sum(size[t] for t in s.outputs), donated=sum(size[t] for t in s.donated)))
            for s, e in zip(segments, executables, strict=True)
        ]
        return [max(sizes) for sizes in zip(*self.agreement.gather(own), strict=True)]

    def _tell(self, what: str, done: int, of: int) -> None:
        if self.options.progress is not None:
            self.options.progress(what, done, of)


class RunningPlan:
    """A compiled plan, the executor that runs it, and what was observed of it."""

    def __init__(
        self,
        prepared: PreparedStep,
        plan: Plan,
        executables: Sequence[Executable] | None,
        choice: Choice | None = None,
        joined_plan: Plan | None = None,
    ) -> None:
        self.prepared = prepared
        self.choice = choice  # None for a saved plan
        self.executables = None if executables is None else list(executables)
        self.plan = plan
        self.joined = joined_plan
        self.observations: list[Observation] = []
        self.executor: Executor | None = None
        self.lowest = False  # whether no plan is known that needs less memory
        self.distinct_segments = 1 if executables is None else len(set(map(id, executables)))
        if executables is not None:
            transfer = Transfer(prepared.compiler.device, committed=prepared.compiler.committed)
            instructions = instructions_of(joined_plan or plan, prepared.graph, [e.call for e in executables])
            variables = constants_of(prepared)
            run_ahead = prepared.compiler.device.platform != "cpu"
            self.executor = Executor(instructions, variables, transfer, run_ahead=run_ahead, agreement=prepared.agreement)


def constants_of(prepared: PreparedStep) -> tuple[Any, ...]:
    """The arrays that the step captures, where its segments expect them."""
    step, constants = prepared.step, prepared.step.program.constants
    if step.divided is None:
        return tuple(jax.device_put(c, prepared.compiler.device) if is_divided(c) else c for c in constants.values())
    return tuple(divided_as(value, step.divided.of[v]) for v, value in constants.items())


def package_version() -> str:
    """The version of this package, as installed."""
    try:
        return version("tensile_jax")
    except PackageNotFoundError:
        return "0+unknown"
