"""Makes the compiled plan of one step at one set of shapes, from its trace on, so that the plan keeps the budget.

    trace -> plan -> compile its segments -> the plan with XLA's own sizes -> run it, or plan again if it exceeds the budget

The planner (`plan/planner.py`) estimates each segment's workspace until XLA has compiled that segment. XLA's figure then replaces
the estimate. If the plan with these figures exceeds the budget, the planner chooses again, with what is known now, until a plan's
*compiled* peak is within the budget. If no choice is left, plans with the least peaks are compiled, so that the error can name a
budget that is known to work.

If the step runs on devices of several processes, one of them does this, and tells the others what to compile (`orders.py`). The
largest workspace in any of the processes counts.
"""

import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from tensile_jax.budget import Budget, too_small_for_step
from tensile_jax.errors import BudgetTooSmall, InvalidPlan
from tensile_jax.exec.step.agreement import ALONE, Agreement
from tensile_jax.exec.step.compile import GPUS, Compiler, Executable, memory_of, peak_of
from tensile_jax.exec.step.confirmed_plans import Confirmed, confirmed_for
from tensile_jax.exec.step.executor import Executor, Observation
from tensile_jax.exec.step.instructions import instructions_of
from tensile_jax.exec.step.kept_plans import Kept, keep, kept_file, load
from tensile_jax.exec.step.lower import SegmentBuilder
from tensile_jax.exec.step.next_try import Tried, Try, first_try, next_try
from tensile_jax.exec.step.one_program import program_code
from tensile_jax.exec.step.orders import CompilePrograms, CompileSegments, CompileWhole
from tensile_jax.exec.step.transfer import Transfer, divided_as, is_divided
from tensile_jax.ir import OperatorId, TensorId
from tensile_jax.plan import Choice, DeviceProfile, Goal, Measured, Planned, Planner
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.analysis.corrections import Corrections
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.joined import can_be_joined, joined, programs_of
from tensile_jax.plan.search.choice import WHOLE
from tensile_jax.plan_format import Plan, PolicyName, Segment, unranged
from tensile_jax.trace import TracedStep
from tensile_jax.trace.driven_loops import DrivenLoop

_MOST_ATTEMPTS = 8
_MORE_SEARCHES, _MORE_ATTEMPTS, _ROOM, _FASTER = 2, 4, 0.03, 0.99
"""Searches with what compiling has shown, and their attempts; the part of the limit that a plan must leave free for a search,
and the part of the plan's time in which another one must be predicted to run. A decoder of 124 million parameters at 50 %,
compiled for an H200, needs 40 % with its first plan, and takes 1.096 times plain time; with the second one 50 % and 1.073. At
30 %, its first plan needs 28.9 % and moves 1.243 times plain jit's bytes: with a room of 0.05 it was kept, and a second one moves
1.188. In the size of `make paper`, InceptionV4 was predicted to need 59 MB of a CPU, and needs 33: under 50 MB it had the plan
with the least peak, which takes 3 times as long as plain jit, and has one that takes 1.1 times as long."""
_MOST_SLOWDOWN_ATTEMPTS = 4
_MARGIN = 0.01
"""The share of the limit that a plan keeps free for what predictions miss: twice that much at first, and once more after every
attempt. On an H200 (`make bench-h200`), two budgets each of ResNet-50 and the decoder then need 7 rounds of compiling. Beginning
with no margin, they needed 10."""

_NEAR = 1.3
"""Times the budget, if that is a number of bytes: a step that is predicted to need no more as one executable is compiled so,
since it may need less. Not tuned, but seen on 2026-11-27: plain jit's peak is predicted more than 1.3 times too high for 9 of 64
kinds of training steps on a CPU and for 1 of 53 that were compiled for an H200, and more than 1.1 times for 18 and 7."""
_NEAR_FLOOR = 0.5
"""A budget in bytes is not refused before the step is compiled as one executable, if no plan is known to need less than this part
of plain jit's predicted peak; nor is a share of that, if it is this part of what some plan needs. Not tuned."""
_MISJUDGED = 0.6
"""If the budget is a share, and the segments need less than this part of the workspaces that were predicted for them, plain jit
is compiled: its predicted peak may be as wrong. Not tuned, but seen on 2026-11-27 of 55 kinds of training steps under 60 % on a
CPU: the segments of 25 needed less, and the plans of 15 of these had 63 to 106 % of plain jit's peak. 4 others had 64 to 83 %."""

_MOST_PROGRAMS = 3  # that are compiled of a step, each with a plan of its own (`next_try.py`)
_FAST = 1.02
"""Times the step as one executable: a plan that keeps the limit and is no slower is taken. A better one would gain less than
the compilations of a long training cost."""
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

    `agreed_swaps` are the swaps on which several jobs of policy `tensile` have agreed, if this is one of them. `launch` is
    "segments", "program" (segments between two copies are one executable where that keeps the budget), or "auto".
    """

    policy: PolicyName
    profile: DeviceProfile
    state_memory: Literal["device", "any"]
    progress: Progress | None = None
    max_slowdown: float | None = None
    may_swap: bool = True
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
            shown so far. Under the same budget, both have the same plan.
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
        self.options = options
        self.planner = (
            Planner(
                step.graph,
                options.profile,
                policy=options.policy,
                state_memory=options.state_memory,
                may_swap=options.may_swap,
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
        self._chosen: dict[Budget | None, Choice] = {} if same is None else same._chosen
        self.plan_s = 0.0
        self.compile_s = 0.0
        self.jit_compile_s = 0.0
        self.out_of_memory = 0  # how often, under earlier plans
        self._whole: Any = None
        self._without_swaps: PreparedStep | None = None
        self.origin = self  # the step of which this one is a variant (`variants.py`)
        self.variants: dict[str, list[PreparedStep]] = {}  # of this step, by what was rewritten, once they were made
        self.loops: list[DrivenLoop] | None = None  # those that could be driven, once they were sought
        self.traced_bodies: dict[OperatorId, PreparedStep] = {}  # of these loops, by the loop's operator, once they were traced

    def without_swaps(self) -> "PreparedStep":
        """The same step, from which only plans without swaps are made."""
        if self._without_swaps is None:
            made = PreparedStep(self.step, None, replace(self.options, may_swap=False), self.compiler)
            made = made.corrected(self.planner.step.corrections)
            if self.origin is not self:
                made.origin = self.origin.without_swaps()
            self._without_swaps = made
        return self._without_swaps

    def corrected(self, corrections: Corrections) -> "PreparedStep":
        """The same step, whose planner predicts latencies with these corrections. The two share all executables.

        Corrections are of the operators of this step, so its variants do not have them (`variants.py`).
        """
        made = copy(self)
        made.planner = self.planner.corrected(corrections)
        made._chosen, made.variants = {}, {}
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
        if self._whole is None and self.origin is not self:
            self._whole = self.origin.whole_executable()
            self.measured = replace(self.measured, whole=self.origin.measured.whole)
            self.jit_compile_s = self.origin.jit_compile_s
        elif self._whole is None:
            self.agreement.tell(CompileWhole())
            self.compile_whole()
        return self._whole

    def compile_whole(self) -> None:
        """Compile plain `jax.jit`'s executable, if that was not done yet, and learn its peak, the largest of all processes."""
        if self._whole is None:
            self._tell("compiling plain jit", 0, 1)
            began = time.perf_counter()
            self._whole = self.compiler.compile_whole(self.step.traced)
            self.jit_compile_s = time.perf_counter() - began
            self._tell("compiling plain jit", 1, 1)
        self.measured = replace(self.measured, whole=max(self.agreement.gather(peak_of(self._whole))))
        confirmed_for(self.kind).whole_bytes = self.measured.whole

    def recall_whole(self) -> None:
        """Take over plain jit's peak from an equal step, if plain jit was compiled for that."""
        known = confirmed_for(self.kind).whole_bytes
        if self.measured.whole is None and self.options.policy == "auto" and self._compiles_for_profile:
            self.measured = replace(self.measured, whole=known)

    def try_whole(self) -> None:
        """Compile plain `jax.jit`'s executable if the budget in bytes is hardly below its predicted peak: it may keep the budget.

        It is then the plan, and no other is sought. Of equal steps, one is compiled so.
        """
        self.recall_whole()
        predicted = self._untried_whole_bytes()
        if predicted is not None and not self._is_share and predicted <= _NEAR * self.limit():
            self.whole_executable()

    def whole_may_help(self, floor_bytes: int) -> bool:
        """Whether plain jit's step should be compiled before a budget is refused of which no other plan needs less than this.

        It may need less than was predicted, and keep a budget in bytes; or more, so that a share of its peak suffices.
        """
        predicted = self._untried_whole_bytes()
        if predicted is None:
            return False
        return floor_bytes <= self.limit() / _NEAR_FLOOR if self._is_share else predicted <= floor_bytes / _NEAR_FLOOR

    @property
    def _is_share(self) -> bool:
        return self.budget is not None and self.budget.share is not None

    def _untried_whole_bytes(self) -> int | None:
        """Plain jit's peak as predicted; None if it is known already, or if plain jit's step is not to be tried.

        A peak that may be above the device's memory does not count: XLA may then compute tensors of plain jit's step again by
        itself, which is slower than a plan (docs/results.md, "XLA's own rematerialization").
        """
        known = self.measured.whole is not None or self.budget is None
        if known or self.options.policy != "auto" or not self._compiles_for_profile:
            return None
        predicted = self.planner.whole_peak_bytes(self.measured)
        return predicted if predicted <= memory_of(self.compiler.device) else None

    @property
    def _compiles_for_profile(self) -> bool:
        """Whether this machine's compiler knows anything of the profile's device, so that they are of one platform."""
        return (self.options.profile.platform == "cpu") == (self.compiler.device.platform == "cpu")

    def limit(self) -> float:
        """The budget in bytes; infinite if there is none. If `max_slowdown` was given, the least memory that it allows for."""
        return self._goal().limit

    def budget_in_bytes(self) -> Budget | None:
        """The budget as a number of bytes. A share is one of plain jit's compiled peak, if the whole step was compiled already.

        Otherwise it is a share of the peak that the planner predicts, and nothing is compiled. So it is if the profile is that of
        another platform, of which this machine's compiler knows nothing.
        """
        if self.budget is None or self.budget.share is None:
            return self.budget
        measured = self.measured if self._compiles_for_profile else replace(self.measured, whole=None)
        return self.budget.in_bytes(self.planner.whole_peak_bytes(measured), compiled=measured.whole is not None)

    def _goal(self) -> Goal:
        """The limit, as far as it is known now: with `max_slowdown` it may change when segments have been compiled."""
        budget = self.budget_in_bytes()
        if budget is not None and budget.nbytes is not None:
            return Goal(budget.nbytes)
        if self.options.max_slowdown is None:
            return Goal(float("inf"))
        return Goal(self.planner.least_limit(self.options.max_slowdown, self.measured), self.options.max_slowdown)

    def predict(self) -> Plan:
        """The plan with estimated workspaces. Nothing is compiled.

        Raises:
            BudgetTooSmall: not even the plan with the least peak keeps the budget.
        """
        return self.predicted().plan

    def predicted(self) -> Compiled:
        """The plan that `predict` returns, with the choice from which it was made."""
        began = time.perf_counter()
        goal = self._goal()
        if self.options.policy == "auto" and goal.max_slowdown is None and not self.measured.workspaces:
            known = confirmed_for((self.kind, self.measured.whole))
            found = self._in_line_with(known, goal, self._predict_anew, self._predicted_choice)
            known.add(goal.limit, found.plan.peak_bytes, found.choice)
        else:
            found = self._predict_anew(goal)
        self.plan_s = time.perf_counter() - began
        return found

    def _predict_anew(self, goal: Goal) -> Compiled:
        without_margin = self.in_one_program or goal.max_slowdown is not None
        found = self.planner.plan(goal, self.measured) if without_margin else self._planned(goal)
        if found is None and self.planner.has_choice(goal.limit, self.measured):
            raise self.planner.no_verified_plan()
        if found is None:
            raise self._too_small(goal.limit, self.planner.floor_bytes(self.measured), None)
        if not without_margin:
            shown = self._predicted_choice(found.choice, goal)
            if shown is None:
                raise self.planner.no_verified_plan()
            return shown
        if self.in_one_program and can_be_joined(found.plan, self.graph):
            choice = replace(found.choice, barriers=first_try(goal.limit, devices=self.step.devices).form)
            as_program = self.planner.plan_of(choice, goal, self.measured)
            if as_program is not None:
                found = Planned(as_program, choice)
        return Compiled(self.with_basis(found.plan), None, found.choice)

    def _planned(self, goal: Goal, attempt: int = 1) -> Planned | None:
        """The planner's choice, and its plan with the margin; None if there is none."""
        measured = self._with_margin(goal, attempt)
        chosen = self.planner.plan(goal, measured)
        if chosen is None and measured.margin:
            return self.planner.plan(goal, replace(measured, margin=0))
        return chosen

    def quick_us(self, upper: float) -> float:
        """Microseconds of a step in a plan that is found quickly, with a margin if there is one with it.

        It is infinite if there is no plan, or more than `upper`, perhaps infinite, if there seems to be none that is faster.
        """
        goal = self._goal()
        # with opened loops, the bound takes longer than such a plan: 31 seconds for 1, of an LSTM of 32 steps
        if not self.planner.step.has_iterations and upper < float("inf") and self.bound_us() >= upper:
            return float("inf")
        measured = self.measured if self.in_one_program else self._with_margin(goal)
        found = self.planner.quick_us(goal.limit, measured, upper)
        if found == float("inf") and measured.margin:
            return self.planner.quick_us(goal.limit, self.measured, upper)
        return found

    def _with_margin(self, goal: Goal, attempt: int = 1) -> Measured:
        """What was measured, with a margin for segments that were not compiled yet, each time a larger one.

        A margin that leaves no choice is halved, and then given up.
        """
        limit = 0.0 if goal.limit == float("inf") else goal.limit
        wanted = int(limit * _MARGIN * (attempt + 1))
        most = limit - self.planner.floor_bytes(self.measured)
        return replace(self.measured, margin=next((margin for margin in (wanted, wanted // 2) if margin <= most), 0))

    def _predicted_choice(self, choice: Choice, goal: Goal) -> Compiled | None:
        """The plan of `choice` with estimated workspaces; None if the replay, which checks every plan, refuses it."""
        plan = self._plan_of(choice, goal)
        return None if plan is None else Compiled(plan, None, choice)

    @property
    def kind(self) -> object:
        """What must be equal for two steps to have the same plans."""
        options = self.options
        how = self.in_one_program, options.profile, options.state_memory, options.may_swap
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

    def _too_small(self, limit: float, floor_bytes: int, compiled: Plan | None) -> BudgetTooSmall:
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
            least=least if least is not None and least.peak_bytes == floor_bytes else None,
            devices=self.step.devices,
        )

    # -- compiling --------------------------------------------------------------------------------------------------

    def prepare(self) -> "RunningPlan":
        """A plan whose compiled peak is within the budget, ready to run.

        Raises:
            BudgetTooSmall: there is no such plan; the error names the least peak that compiling has confirmed.
        """
        found = self.choose_and_compile()
        return RunningPlan(self, found.plan, found.executables, found.choice, found.joined)

    def choose_and_compile(self) -> Compiled:
        """A plan whose compiled peak is within the budget, and the executables of its segments.

        Raises:
            BudgetTooSmall: there is no such plan; the error names the least peak that compiling has confirmed.
        """
        if self.budget is None and self.options.max_slowdown is not None:
            return self._chosen_before() or self._choose(self._fast_enough)
        if self.budget is not None and self.budget.share is not None and self.budget.share >= 1:
            self.whole_executable()  # it will run, so the budget is a share of its own peak and not of a prediction
        if self.options.policy != "auto":
            return self._chosen_before() or self._choose(lambda: self._search(self._goal()))
        confirmed = confirmed_for(self.kind)
        file = self._take_over(confirmed)
        goal = self._goal()
        found = self._in_line_with(confirmed, goal, self._search, self.compiled)
        confirmed_for(self.origin.kind).variants.add(self.kind)
        if confirmed.add(goal.limit, found.plan.peak_bytes, found.choice) and file is not None:
            floor = self.planner.floor_bytes(self.measured)
            keep(file, Kept(confirmed.entries, self.measured.workspaces, floor, self.measured.whole))
        return found

    def _choose(self, search: Callable[[], Compiled]) -> Compiled:
        """What `search` finds. An equal step then has the same plan, although more is known of the step by then."""
        found = search()
        self._chosen[self.budget] = found.choice
        return found

    def _chosen_before(self) -> Compiled | None:
        """The plan that this step or an equal one has under this budget, compiled; None if there is none."""
        choice = self._chosen.get(self.budget)
        if choice is None:
            return None
        goal = self._goal()
        found = self.compiled(choice, goal)
        exceeded = found is not None and self.budget is not None and found.plan.peak_bytes > goal.limit
        return None if exceeded else found

    def _in_line_with(
        self,
        known: Confirmed,
        goal: Goal,
        search: Callable[[Goal], Compiled],
        plan_of: Callable[[Choice, Goal], Compiled | None],
    ) -> Compiled:
        """The plan that `search` finds, unless the plan of another budget fits better (`confirmed_plans.py`).

        Nothing fits better than the step as one executable, once that is known to keep the limit.

        Raises:
            BudgetTooSmall: `search` has found none, and no other fits.
        """
        limit = goal.limit
        whole = self.measured.whole
        above = WHOLE if whole is not None and whole <= limit else known.above(limit)
        found = None if above is None else plan_of(above, goal)
        if (
            found is not None and found.plan.peak_bytes <= limit
        ):  # XLA may have chosen a kernel that needs more workspace than before
            return found
        try:
            found = search(goal)
        except BudgetTooSmall:
            lower = known.below(limit, 0)
            found = None if lower is None else plan_of(lower, goal)
            if found is None or found.plan.peak_bytes > limit:
                raise
            return found
        lower = None if found.plan.whole else known.below(limit, found.plan.peak_bytes)
        other = None if lower is None else plan_of(lower, goal)
        return found if other is None or other.plan.peak_bytes > limit else other

    def _take_over(self, confirmed: Confirmed) -> Path | None:
        """Add to `confirmed` what earlier processes have kept, unless this one has confirmed a choice itself; the file to keep
        it in."""
        order = [op.id for op in self.graph.operators]
        file = kept_file(repr((self.kind, order, package_version(), jax.__version__, version("jaxlib"))))
        kept = None if file is None or confirmed.entries else load(file)
        if kept is None or not all(self.planner.is_possible(entry.choice) for entry in kept.choices):
            return file
        for entry in kept.choices:
            confirmed.add(*entry)
        whole = self.measured.whole or kept.whole_bytes
        self.measured = replace(self.measured, workspaces={**kept.workspaces, **self.measured.workspaces}, whole=whole)
        self.planner.remember_floor(self.measured, kept.floor_bytes)
        return file

    def _fast_enough(self) -> Compiled:
        """The plan with the least compiled peak among those that were tried and are predicted to be fast enough."""
        best: Compiled | None = None
        for _ in range(_MOST_SLOWDOWN_ATTEMPTS):
            goal = self._goal()
            if best is not None and best.plan.peak_bytes <= goal.limit:
                break
            chosen = self.planner.plan(goal, self.measured)
            found = None if chosen is None else self._as_program(chosen, goal) or self.compiled(chosen.choice, goal)
            if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
                best = found
        if best is None:
            raise self.planner.no_verified_plan()
        return best

    def _search(self, goal: Goal) -> Compiled:
        """The plan of the planner's choice, compiled, within the limit.

        If the planner has no choice that compiling confirms, the plan with the least peak is compiled. Where compiling shows that
        predictions were too high, the step may fit as one executable, or the planner may have a faster plan by then. If the
        budget is a share of plain jit's peak, that is compiled then, and the plan may exceed what the share is found to be.
        """
        chosen = self.planner.plan(goal, self.measured) if self.in_one_program else None
        found = None if chosen is None else self._as_program(chosen, goal)
        if found is not None:
            return found
        found = self._within(goal, _MOST_ATTEMPTS) or self._smallest_plan(goal)
        predicted = None if found.plan.whole or self._is_share else self._untried_whole_bytes()
        if predicted is not None and predicted * self._shown_ratio() <= goal.limit:
            whole = self.compiled(WHOLE, goal)
            if whole is not None and whole.plan.peak_bytes <= goal.limit:
                return whole
        limit = goal.limit
        for _ in range(_MORE_SEARCHES):
            goal = self._goal_as_shown()
            slow = found.plan.step_us > _FAST * self.planner.step.whole_us
            if not slow or found.plan.peak_bytes > (1 - _ROOM) * goal.limit:
                break
            other = self._within(goal, _MORE_ATTEMPTS, faster_than=_FASTER * found.plan.step_us)
            if other is None or other.plan.step_us >= found.plan.step_us:
                break
            found = other
        goal = self._goal_as_shown()
        return found if goal.limit == limit else self.compiled(found.choice, goal) or found

    def _goal_as_shown(self) -> Goal:
        """The limit, which is a share of plain jit's own peak where the compiled segments show that it was misjudged."""
        if self._is_share and self._shown_ratio() < _MISJUDGED and self._untried_whole_bytes() is not None:
            self.whole_executable()
        return self._goal()

    def _shown_ratio(self) -> float:
        """What the segments compiled so far have needed as workspace, over what was predicted; 1 if that was nothing."""
        shown = self.measured.workspaces.values()
        needed, expected = sum(one.nbytes for one in shown), sum(one.predicted for one in shown)
        return needed / expected if expected > 0 else 1.0

    def _within(self, goal: Goal, attempts: int, faster_than: float = float("inf")) -> Compiled | None:
        """The planner's choice, compiled; if that exceeds the limit, the same choice with as few changes as possible.

        Compiling takes long, and what does not change is not compiled again. None if there is no choice, or none of which the
        planner says that it is faster than so many microseconds, or if the last attempt exceeds the limit, too.
        """
        chosen: Planned | None = None
        for attempt in range(1, attempts + 1):
            began = time.perf_counter()
            if chosen is not None:
                chosen = self.planner.revise(chosen.choice, goal, self._with_margin(goal, attempt))
            if chosen is None:
                chosen = self._planned(goal, attempt)
            self.plan_s += time.perf_counter() - began
            if chosen is None or chosen.plan.step_us > faster_than:
                return None
            found = self.compiled(chosen.choice, goal)
            if found is not None and found.plan.peak_bytes <= goal.limit:
                return found
        return None

    def _as_program(self, chosen: Planned, goal: Goal) -> Compiled | None:
        """The fastest plan in one program that keeps the limit, of those that are compiled in turn (`next_try.py`).

        None if none does, or segments cannot be joined; or if on one device, they are predicted to be faster launched one by one.
        """
        if not self.in_one_program:
            return None
        best: Compiled | None = None
        plan: Planned | None = chosen
        tried: list[Tried] = []
        following: Try | None = first_try(goal.limit, devices=self.step.devices)
        while following is not None and plan is not None and can_be_joined(plan.plan, self.graph):
            found = self.compiled(replace(plan.choice, barriers=following.form), goal)
            if found is None:
                break
            if found.plan.peak_bytes <= goal.limit and (best is None or found.plan.step_us < best.plan.step_us):
                best = found
            tried.append(Tried(*following, found.plan.peak_bytes))
            fast = best is not None and best.plan.step_us <= _FAST * self.planner.step.whole_us
            if fast or len(tried) == _MOST_PROGRAMS:
                break
            following = next_try(tried, goal.limit, devices=self.step.devices)
            if following is not None:
                began = time.perf_counter()
                plan = self.planner.plan(Goal(following.limit, goal.max_slowdown), self.measured)
                self.plan_s += time.perf_counter() - began
        slower = best is not None and best.joined is not None and best.joined.step_us > chosen.plan.step_us
        return None if slower and self.options.launch == "auto" and self.step.devices == 1 else best

    def _smallest_plan(self, goal: Goal) -> Compiled:
        """The plan with the least peak that compiling shows, made faster if it keeps the limit.

        Which plans are compiled does not depend on what was measured before: a budget that the error names must work in another
        process, too, which comes here with other measurements.

        Raises:
            BudgetTooSmall: it does not.
        """
        before = self.measured.workspaces
        self.measured = replace(self.measured, workspaces={})
        try:
            best = self._lowest_compiled(goal)
        finally:
            self.measured = replace(self.measured, workspaces={**before, **self.measured.workspaces})
        if best is None:
            raise self.planner.no_verified_plan()
        if best.plan.peak_bytes > goal.limit:
            tried = not self._is_share and self.whole_may_help(best.plan.peak_bytes)
            whole = self.compiled(WHOLE, goal) if tried else None
            if whole is not None and whole.plan.peak_bytes < best.plan.peak_bytes:
                best = whole
        if best.plan.peak_bytes > goal.limit:
            raise self._too_small(goal.limit, best.plan.peak_bytes, best.plan)
        if best.plan.whole:
            return best
        other = self.compiled(self.planner.least_choice(self.measured), goal)
        faster = other is not None and other.plan.peak_bytes <= goal.limit and other.plan.step_us < best.plan.step_us
        return other if other is not None and faster else best

    def _lowest_compiled(self, goal: Goal) -> Compiled | None:
        """The plan with the least peak that compiling shows, or the first one that keeps the limit; None if all are refused."""
        best: Compiled | None = None
        seen: set[object] = set()
        for _ in range(_MOST_ATTEMPTS):
            choice = self.planner.lowest_choice(self.measured)
            if choice.key in seen or (best is not None and best.plan.peak_bytes <= goal.limit):
                break
            seen.add(choice.key)
            found = self.compiled(choice, goal)
            if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
                best = found
        return best

    def compiled(self, choice: Choice, goal: Goal) -> Compiled | None:
        """The plan of `choice`, compiled; None if the replay, which checks every plan, refuses it."""
        if choice.runs_whole:
            self.whole_executable()
            plan = self._plan_of(choice, goal)
            return None if plan is None else Compiled(plan, None, choice)
        began = time.perf_counter()
        plan = self._plan_of(choice, goal)
        self.plan_s += time.perf_counter() - began
        if plan is None:
            return None
        if plan.barriers is not None:
            programs = self.compile_programs(plan)
            return None if programs is None else Compiled(programs.plan, programs.executables, choice, programs.joined)
        executables = self.compile(plan)
        self.measured = self.planner.with_measured(choice, self.workspaces(plan, executables), self.measured)
        plan = self._plan_of(choice, goal)
        return None if plan is None else Compiled(replace(plan, workspaces="compiled"), executables, choice)

    def _plan_of(self, choice: Choice, goal: Goal) -> Plan | None:
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
        plan = self._plan_of(choice, goal)
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
        size = [t.nbytes for t in self.graph.tensors]
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
            transfer = Transfer(prepared.compiler.device)
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
