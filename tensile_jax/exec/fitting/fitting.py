"""Makes and compiles plans of one step under one budget, and collects what compiling shows about the step.

    Fitting(step, budget, known)    turns choices of the planner into plans, and compiles them; `known` is what compiling has
                                    shown so far, and grows with each plan that is compiled
    find_plan.py                    decides which choices are compiled

A *choice* says where the step is cut into segments, and when each tensor is on the device. A *segment* is a stretch of operators
that is compiled as one executable. The planner estimates the memory that a segment needs beside its inputs and outputs. Once XLA
has compiled the segment, XLA's figure replaces the estimate. All sizes are bytes on each device. If several processes report
different sizes, the largest counts.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tensile_jax.budget import Budget
from tensile_jax.budget_errors import HostNeed, too_small_for_step
from tensile_jax.errors import BudgetTooSmall, InvalidPlan
from tensile_jax.exec.compiling.compiler import Executable, Sizes
from tensile_jax.exec.compiling.program_code import chosen_layouts, program_code
from tensile_jax.exec.compiling.segment_code import SegmentCode
from tensile_jax.exec.compiling.step import CompiledPlan, DrivenBody, Spent, Step
from tensile_jax.exec.compiling.whole_executable import whole_executable
from tensile_jax.exec.fitting.knowledge import Knowledge, Precedent
from tensile_jax.exec.fitting.knowledge_store import STORE
from tensile_jax.exec.processes.orders import CompilePrograms, CompileSegments
from tensile_jax.exec.running.driven_loop import driven_segment
from tensile_jax.ir import Graph, OperatorId, TensorId
from tensile_jax.plan import Choice, CompiledSizes, Goal, Planned
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.joined import graph_of_programs, joined, programs_of
from tensile_jax.plan_format import MEMORIES, Memory, Plan, PlannedLoop, Segment, peaks_of, unranged, with_peaks
from tensile_jax.progress.phases import PLAIN_JIT, PLANNING

_MARGIN = 0.01
"""Of the limit: kept free for what predictions miss, doubled at first and raised with every attempt. A larger margin gives memory
away, a smaller one needs more rounds of compiling (`make bench-h200`)."""
_SOON_MARGINS = 2  # more such margins where a plan is to be there soon: fewer rounds, slower plans (`make bench-workloads`)
_ADAPTED, _SAME_SHARE = 1.03, 1.05
"""A plan of other shapes is adapted if the slowdown and the share of plain jit's peak differ by no more. More saves more searches
and may give slower plans (not tuned)."""
_WORTH_HOPING = 1.5  # how many times as fast a plan must be that corrected predictions rule out, to be compiled; not tuned
_NOT_JOINED = (
    "launch={!r} was asked for. Each segment is launched by itself, since joined they need more than the budget, or since "
    "there is a copy at every boundary."
)
_SYNCHRONOUS = "launch={!r} was asked for. Each segment is launched by itself, since in the program that XLA has compiled {}."
_ROW_MAJOR = (
    "state_layout='auto' was asked for. All state is row-major, since XLA chooses layouts only where a step is one program on "
    "one device."
)

_Found = TypeVar("_Found")


class _PlanCount:
    """Counts the plans that all fittings of a step have made for one budget, to show progress: `about` is how many there will be
    in all.
    """

    def __init__(self) -> None:
        self.done = 0
        self.about = 1

    def expect(self, more: int) -> None:
        """There will be about so many more."""
        self.about = self.done + more

    def count(self) -> None:
        """One more was made."""
        self.done += 1
        self.about = max(self.about, self.done)


class Fitting:
    """The search for a plan of `step` under `budget`.

    Args:
        known: what is known of the step so far.
        predicts: whether nothing is to be compiled.
        quickly: whether executables are to be there soon, and may run more slowly.
        plans: counts the plans of all forms of the step; None: this is the first one's fitting.

    Attributes:
        known: what is known by now.
        quickly: as given.
    """

    def __init__(
        self,
        step: Step,
        budget: Budget | None,
        known: Knowledge,
        *,
        predicts: bool = False,
        quickly: bool = False,
        plans: _PlanCount | None = None,
    ) -> None:
        self.step = step
        self.budget = budget
        self.known = known
        self.planner = step.planner
        self.options = step.options
        self._predicts = predicts
        self.quickly = quickly
        self._plans = plans or _PlanCount()
        self._spent = Spent()
        self._has_prior = not predicts
        precedent = None if predicts else STORE.precedent(step.structure)
        self._alike = {} if precedent is None else precedent.workspaces
        self._tried: set[object] = set()  # the keys of the choices that were compiled
        self._fault: str | None = None  # of the copies in the latest program that was compiled
        self._bodies: dict[OperatorId, CompiledPlan] = {}  # of driven loops, once they are compiled

    @property
    def measured(self) -> CompiledSizes:
        """What compiling has shown so far, and what that lets expect."""
        measured = self.known.measured
        if self._has_prior:
            measured = replace(self.planner.with_prior(measured), alike=self._alike)
        return replace(measured, cautious=bool(measured.compared))

    @property
    def spent(self) -> Spent:
        """What it has taken so far."""
        return self._spent

    def recall(self, kept: Knowledge) -> None:
        """Take over what an earlier process has kept of this kind of step; what is known already is better."""
        self.known = kept.merged(self.known)
        if self.known.measured == kept.measured and kept.floor_bytes is not None:
            self.planner.remember_floor(kept.measured, kept.floor_bytes)

    def of(self, form: Step) -> "Fitting":
        """The fitting of another form of the step to the same budget; itself, if it is that of the form.

        It begins with what is known of that form, and with plain jit's peak. A prediction uses nothing else that compiling has
        shown.
        """
        if form is self.step:
            return self
        known = Knowledge() if self._predicts else STORE.known(form.kind)
        known = known.with_jit_peak(self.known.jit_peak_bytes)
        return Fitting(form, self.budget, known, predicts=self._predicts, quickly=self.quickly, plans=self._plans)

    def under(self, budget: Budget | None) -> "Fitting":
        """The fitting of the same step to another budget, with what is known by now."""
        return Fitting(self.step, budget, self.known, predicts=self._predicts, quickly=self.quickly, plans=self._plans)

    @contextmanager
    def without_workspaces(self) -> Iterator[None]:
        """A `with` block that plans as if no segment had been compiled. After it, everything is known again, with what was
        learned in the block.
        """
        before = self.known.measured.workspaces
        self.known = replace(self.known, measured=replace(self.known.measured.without_hints(), workspaces={}))
        self._has_prior = False
        try:
            yield
        finally:
            self._has_prior = not self._predicts
            found = {**before, **self.known.measured.workspaces}
            self.known = replace(self.known, measured=replace(self.known.measured, workspaces=found))

    # -- planning ---------------------------------------------------------------------------------------------------------------

    def budget_in_bytes(self) -> Budget | None:
        """The budget as a number of bytes. A share is one of plain jit's compiled peak, if that is known.

        Otherwise it is a share of the predicted peak, and nothing is compiled. That is also so if the profile is for another
        platform, for which this machine's compiler cannot compile.
        """
        if self.budget is None or self.budget.share is None:
            return self.budget
        measured = self.measured if self.step.compiles_for_profile else replace(self.measured, whole=None)
        return self.budget.in_bytes(self.planner.whole_peak_bytes(measured), compiled=measured.whole is not None)

    def goal(self) -> Goal:
        """The limit, as far as it is known now: with `max_slowdown` it may change when segments have been compiled."""
        budget = self.budget_in_bytes()
        if budget is not None and budget.nbytes is not None:
            return Goal(budget.nbytes)
        slowdown = self.options.max_slowdown
        return Goal(float("inf")) if slowdown is None else Goal(self.planner.least_limit(slowdown, self.measured), slowdown)

    def limit(self) -> float:
        """The budget in bytes; infinite if there is none. If `max_slowdown` was given, the least memory that it allows for."""
        return self.goal().limit

    def floor_bytes(self) -> int:
        """The smallest limit for which there is a plan, as far as is known."""
        return self.planner.floor_bytes(self.measured)

    def chosen(self, goal: Goal) -> Planned | None:
        """The planner's choice without a margin, and the plan of that choice; None if there is none."""
        with self._planning():
            return self.planner.plan(goal, self.measured)

    def chosen_for_program(self, goal: Goal) -> Planned | None:
        """The planner's choice of segments for a program, and the plan of that choice; None if there is none.

        If copies are part of the program, the choice is made for one executable (`StepModel.as_one_program`).
        """
        step = self.step
        if not step.copies_inside:
            return self.chosen(goal)
        planner = step.once("planner of one program", step.planner.of_one_program)
        with self._planning():
            return planner.plan(goal, self.measured)

    def chosen_with_margin(self, goal: Goal, attempt: int = 1) -> Planned | None:
        """The planner's choice with the margin, and the plan of that choice; None if there is none."""
        measured = self.with_margin(goal, attempt)
        with self._planning():
            return _with_or_without_hints(lambda sizes: self.planner.plan(goal, sizes), measured)

    def chosen_quickly(self, goal: Goal) -> Planned | None:
        """A choice that is found in a short search, with the margin, and the plan of that choice; None if none is found."""
        with self._planning():
            return _with_or_without_hints(lambda sizes: self.planner.quick_plan(goal, sizes), self.with_margin(goal))

    def chosen_in_hope(self, goal: Goal, expected: Planned | None) -> Planned | None:
        """The planner's choice if what compiling has shown of some segments says nothing of others, and if it is then much faster
        than `expected`; otherwise None.

        Segments compiled for another budget may differ much from those that this one needs.
        """
        most_us = float("inf") if expected is None else expected.plan.step_us / _WORTH_HOPING
        if not self.measured.workspaces or most_us <= self.planner.model.whole_us:
            return None
        with self._planning():
            found = self.planner.plan(goal, self.measured.without_corrections())
        return found if found is not None and found.plan.step_us < most_us else None

    def revised(self, choice: Choice, goal: Goal, attempt: int) -> Planned | None:
        """This choice with as few changes as bring it under the limit with the margin; None if there is no such choice."""
        measured = self.with_margin(goal, attempt)
        with self._planning():
            return _with_or_without_hints(lambda sizes: self.planner.revise(choice, goal, sizes), measured)

    def improved(self, choice: Choice, goal: Goal) -> Planned | None:
        """A faster choice than this one, found with the sizes that compiling has shown. It keeps the limit with the margin. None
        if none is found.
        """
        with self._planning():
            return self.planner.improve(choice, goal, self.with_margin(goal))

    def adapted(self, precedent: Precedent, goal: Goal) -> Planned | None:
        """The plan of an equal step on other shapes, changed to fit this one; None if it does not, or would be much slower."""
        with self._planning():
            if not self.resembles(precedent, goal):
                return None
            found = self.planner.adapt(precedent.choice, goal, self.with_margin(goal))
            most_us = _ADAPTED * precedent.slowdown * self.planner.model.whole_us
            return None if found is None or found.plan.step_us > most_us else found

    def resembles(self, precedent: Precedent, goal: Goal) -> bool:
        """Whether the limit is nearly the same share of plain jit's peak."""
        share = goal.limit / max(self.planner.whole_peak_bytes(self.measured), 1)
        return precedent.share / _SAME_SHARE <= share <= precedent.share * _SAME_SHARE

    def bound_us(self) -> float:
        """A lower bound, in microseconds, of the time of any plan under the budget; the time of the whole step, if that fits."""
        return self.planner.bound_us(self.limit(), self.measured)

    def quick_us(self, upper: float) -> float:
        """Microseconds of a step in a plan that is found quickly, with a margin if there is one with it.

        Infinity means that no plan was found, or that none seems to take less than `upper`.
        """
        goal = self.goal()
        with self._told():
            # with opened loops, computing the bound takes longer than such a plan
            if not self.planner.model.has_iterations and upper < float("inf") and self.bound_us() >= upper:
                return float("inf")
            measured = self.measured if self.step.in_one_program else self.with_margin(goal)

            def finite_us(sizes: CompiledSizes) -> float | None:
                us = self.planner.quick_us(goal.limit, sizes, upper)
                return us if us < float("inf") else None

            found = _with_or_without_hints(finite_us, measured)
            return float("inf") if found is None else found

    def expect_plans(self, more: int) -> None:
        """Tell the user that about so many more plans will be made, of all forms together."""
        self._plans.expect(more)

    def with_margin(self, goal: Goal, attempt: int = 1) -> CompiledSizes:
        """The measured sizes, with a margin for segments that were not compiled yet. Each call gives a larger margin.

        A margin that leaves no choice is halved, and then given up.
        """
        limit = 0.0 if goal.limit == float("inf") else goal.limit
        wanted = int(limit * _MARGIN * (attempt + 1 + (_SOON_MARGINS if self.quickly else 0)))
        most = limit - self.planner.quick_floor(self.measured)
        return replace(self.measured, margin=next((margin for margin in (wanted, wanted // 2) if margin <= most), 0))

    def predicted(self, choice: Choice, goal: Goal) -> CompiledPlan | None:
        """The plan of `choice` with estimated workspaces; None if the replay, which checks every plan, refuses it."""
        plan = self._plan_of(choice, goal)
        return None if plan is None else self._result(choice, plan, None)

    def as_predicted(self, found: Planned) -> CompiledPlan:
        """A plan that the planner has made, with estimated workspaces."""
        return self._result(found.choice, self._with_basis(found.plan), None)

    def too_small(self, limit: float, floor_bytes: int, compiled: Plan | None) -> BudgetTooSmall:
        """The error for a limit below the floor: that of a plan that was compiled, or else the predicted one."""
        planner = self.planner
        least = compiled or planner.plan_of(planner.least_choice(self.measured), Goal(float("inf")), self.measured)
        budget = self.budget_in_bytes()
        basis, beside = ("", 0) if budget is None else (budget.basis, budget.beside)
        return too_small_for_step(
            self.step.graph,
            limit + beside,
            floor_bytes + beside,
            about="" if compiled else "about ",
            basis=basis,
            state_memory=self.options.state_memory,
            stored=planner.stored,
            source=self.step.traced.source_of,
            least=least if least is not None and least.peak_bytes == floor_bytes else None,
            devices=self.step.traced.devices,
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

    # -- compiling --------------------------------------------------------------------------------------------------------------

    def begin_plain_jit(self) -> None:
        """Begin to compile plain `jax.jit`'s executable for its peak, in a thread, if that was not done yet."""
        if not self.step.plain_jit.is_known():
            self._tell(PLAIN_JIT, 0, 1)
            self.step.plain_jit.begin()

    def compile_plain_jit(self, *, to_run: bool) -> None:
        """Learn plain jit's peak. Its executable is compiled if that was not done yet, to run or for its sizes only."""
        plain_jit = self.step.plain_jit
        was_known = plain_jit.is_known(to_run=to_run)
        found = plain_jit.compiled(self._tell) if to_run else plain_jit.sized(self._tell)
        self._spent += Spent(compile_s=0.0 if was_known else found.seconds)
        self.known = self.known.with_jit_peak(found.peak_bytes)

    @property
    def jit_peak_bytes(self) -> int:
        """The peak of plain `jax.jit`. The whole step is compiled for this, if that was not done yet."""
        if self.measured.whole is None:
            self.compile_plain_jit(to_run=False)
        assert self.measured.whole is not None
        return self.measured.whole

    def compiled(self, choice: Choice, goal: Goal) -> CompiledPlan | None:
        """The plan of `choice`, compiled; None if the replay, which checks every plan, refuses it."""
        if choice.runs_whole:
            self.compile_plain_jit(to_run=True)
            plan = self._plan_of(choice, goal)
            return None if plan is None else self._result(choice, plan, [whole_executable(self.step, plan.peak_bytes)])
        plan = self._plan_of(choice, goal)
        if plan is None:
            return None
        if plan.barriers is not None:
            return self.compile_programs(plan, choice)
        executables = self.compile_segments(plan)
        plan = self._with_sizes(choice, goal, plan, [e.sizes for e in executables])
        return None if plan is None else self._result(choice, plan, executables)

    def sized(self, choice: Choice, goal: Goal) -> CompiledPlan | None:
        """The plan of `choice` with XLA's sizes, and without executables where the sizes are known sooner.

        None if the replay, which checks every plan, refuses the plan.
        """
        if choice.barriers is not None or not self.step.compiler.sizes_quickly:
            return self.compiled(choice, goal)
        if choice.runs_whole:
            self.compile_plain_jit(to_run=False)
            plan = self._plan_of(choice, goal)
            return None if plan is None else self._result(choice, plan, None)
        plan = self._plan_of(choice, goal)
        plan = None if plan is None else self._with_sizes(choice, goal, plan, self.segment_sizes(plan))
        return None if plan is None else self._result(choice, plan, None)

    def _with_sizes(self, choice: Choice, goal: Goal, plan: Plan, sizes: Sequence[Sizes]) -> Plan | None:
        """The plan again, with the sizes that compiling has shown."""
        if choice.key not in self._tried:
            self._tried.add(choice.key)
            self._spent += Spent(tries=1)
        found = self.planner.with_measured(choice, self.workspaces(plan, sizes), self.measured)
        self.known = replace(self.known, measured=found.without_hints())
        again = self._plan_of(choice, goal)
        return None if again is None else replace(again, workspaces="compiled")

    def offload_state(self, found: CompiledPlan, tensors: Collection[TensorId]) -> CompiledPlan:
        """The same segments with these state tensors on the host between their uses, across the iteration boundary.

        If the replay, which checks every plan, refuses that plan, the result is `found`.
        """
        if not tensors or found.plan.whole or found.choice is None:
            return found
        choice = self.planner.offload_state(found.choice, tensors)
        budget_bytes = found.plan.budget_bytes
        goal = Goal(float("inf") if budget_bytes is None else budget_bytes, found.plan.max_slowdown)
        again = self.predicted(choice, goal) if found.executables is None else self.compiled(choice, goal)
        return found if again is None else again

    def compile_segments(self, plan: Plan) -> list[Executable]:
        """The executables of the plan's segments. A loop that runs under a plan of its own is one of them.

        On a CPU, segments that exceed the budget are compiled again in an order of operators that needs less memory. Of several
        processes, none does so, since their sizes may differ.
        """
        self.step.agreement.tell(CompileSegments(plan, to_run=True))
        compiled = lambda codes: self._compile(codes, "compiling segments")  # noqa: E731
        return self._of_segments(plan, self._driven_segment, compiled, lambda executable: executable.sizes)

    def segment_sizes(self, plan: Plan) -> list[Sizes]:
        """XLA's sizes of the executables of `compile_segments`. The segments are compiled no further than for this."""
        self.step.agreement.tell(CompileSegments(plan, to_run=False))

        def sizes(codes: Sequence[SegmentCode]) -> list[Sizes]:
            began = time.perf_counter()
            found = self.step.compiler.sizes(codes, lambda done, of: self._tell("compiling segments", done, of))
            self._spent += Spent(compile_s=time.perf_counter() - began)
            return found

        return self._of_segments(plan, lambda segment: self._driven_segment(segment).sizes, sizes, lambda found: found)

    def _of_segments(
        self,
        plan: Plan,
        of_driven: Callable[[Segment], _Found],
        of_codes: Callable[[Sequence[SegmentCode]], list[_Found]],
        sizes_of: Callable[[_Found], Sizes],
    ) -> list[_Found]:
        """What is made of each segment: of a driven loop by `of_driven`, and of all others together by `of_codes`.

        Of segments that exceed the budget, it is made again, as `compile_segments` says. `sizes_of` gives XLA's sizes in it.
        """
        step = self.step
        driven = [unranged(segment.operators)[0] in step.bodies for segment in plan.segments]
        others = [s for s, is_driven in zip(plan.segments, driven, strict=True) if not is_driven]
        codes = [
            step.builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, s.donated) for s in others
        ]  # fmt: skip
        made = of_codes(codes)
        if plan.budget_bytes is not None and step.compiler.can_save_memory and len(step.agreement.processes) == 1:
            needs = [partial(self._needed_bytes, s) for s in others]
            over = [i for i, found in enumerate(made) if needs[i](sizes_of(found)) > plan.budget_bytes]
            for i, other in zip(over, of_codes([codes[i].saving_memory() for i in over]), strict=True):
                if needs[i](sizes_of(other)) < needs[i](sizes_of(made[i])):
                    made[i] = other
        rest = iter(made)
        return [of_driven(s) if is_driven else next(rest) for s, is_driven in zip(plan.segments, driven, strict=True)]

    def _needed_bytes(self, segment: Segment, sizes: Sizes) -> int:
        """What is on the device while a segment runs, with these sizes of XLA."""
        (workspace,) = self._workspaces_of([segment], [sizes], self.step.graph)
        return segment.resident_bytes + workspace

    def _driven_segment(self, segment: Segment) -> Executable:
        operator = unranged(segment.operators)[0]
        body = self.step.bodies[operator]
        return driven_segment(body.loop, self._body(operator), segment, self.step.graph, body.for_less)

    def _body(self, operator: OperatorId) -> CompiledPlan:
        """The plan of a driven loop's body, compiled once."""
        found = self._bodies.get(operator)
        if found is None:
            self._bodies[operator] = found = self.step.bodies[operator].compile()
            self._spent += replace(found.spent, ranking_s=0.0)
        return found

    def compile_programs(self, plan: Plan, choice: Choice | None) -> CompiledPlan | None:
        """A plan whose segments are joined into programs, compiled, with their sizes.

        None if the replay refuses it, or if copies in it do not run beside kernels (`async_copies.py`).
        """
        step = self.step
        step.agreement.tell(CompilePrograms(plan))
        programs, profile = programs_of(plan, step.graph), self.planner.model.profile
        graph = graph_of_programs(plan, step.graph)
        segments = joined(plan, programs, step.graph, profile).segments
        executables = self.program_executables(plan)
        if plan.state_layout == "auto" and plan.layouts is None:
            found = executables[0].layouts
            plan = replace(plan, layouts=chosen_layouts(plan, segments[0], graph, found))
            if any(given != made for given, made in found):  # results must have the layouts of the arguments that they replace
                executables = self.program_executables(plan)
        workspaces = self._workspaces_of(segments, [e.sizes for e in executables], graph)
        self._fault = next((e.fault for e in executables if e.fault is not None), None)
        if self._fault is not None:
            return None
        launched = joined(plan, programs, step.graph, profile, workspaces)
        try:
            check(launched, graph)
        except InvalidPlan:
            return None
        plan = replace(
            plan,
            launches=len(programs),
            workspaces="compiled",
            peak_bytes=launched.peak_bytes,
            allocator_bytes=launched.allocator_bytes,
        )
        return self._result(choice, plan, executables, launched)

    def program_executables(self, plan: Plan) -> list[Executable]:
        """The executables of the programs into which the segments of a plan are joined."""
        assert plan.barriers is not None
        step = self.step
        programs = programs_of(plan, step.graph)
        segments = joined(plan, programs, step.graph, self.planner.model.profile).segments
        codes = [
            program_code(plan, program, segment, plan.barriers, step.builder, graph_of_programs(plan, step.graph))
            for program, segment in zip(programs, segments, strict=True)
        ]
        return self._compile(codes, "compiling programs")

    def workspaces(self, plan: Plan, sizes: Sequence[Sizes]) -> list[int]:
        """Each segment's workspace in bytes, from XLA's sizes; of several processes, the largest."""
        return self._workspaces_of(plan.segments, sizes, self.step.graph)

    def _workspaces_of(self, segments: Sequence[Segment], sizes: Sequence[Sizes], graph: Graph) -> list[int]:
        step = self.step
        counts_host = step.compiler.device.platform == "cpu"  # XLA for CPUs counts host memory as if it were the device's
        size = [t.nbytes + (t.host_bytes or 0 if counts_host else 0) for t in graph.tensors]
        own = [
            max(0, one.workspace(outputs=sum(size[t] for t in s.outputs), donated=sum(size[t] for t in s.donated)))
            for s, one in zip(segments, sizes, strict=True)
        ]
        return [max(several) for several in zip(*step.agreement.gather(own), strict=True)]

    def _compile(self, codes: Sequence[Any], what: str) -> list[Executable]:
        began = time.perf_counter()
        told = lambda done, of: self._tell(what, done, of)  # noqa: E731
        executables = self.step.compiler.compile(codes, told, quickly=self.quickly)
        self._spent += Spent(compile_s=time.perf_counter() - began)
        return executables

    # -- plans ------------------------------------------------------------------------------------------------------------------

    def _plan_of(self, choice: Choice, goal: Goal) -> Plan | None:
        """The plan of `choice`; None if the replay, which checks every plan, refuses it."""
        with self._timed():
            plan = self.planner.plan_of(choice, goal, self.measured)
            return None if plan is None else self._with_basis(plan)

    def _result(
        self, choice: Choice | None, plan: Plan, executables: Sequence[Executable] | None, launched: Plan | None = None
    ) -> CompiledPlan:
        return CompiledPlan(self.step, choice, plan, launched or plan, executables, self._spent)

    def _with_basis(self, plan: Plan) -> Plan:
        """The plan, which says what its budget was computed from, what was done to the step, and what plain jit takes."""
        budget, traced = self.budget_in_bytes(), self.step.traced
        mine = budget is not None and budget.nbytes == plan.budget_bytes
        basis = budget.basis if budget is not None and mine else plan.budget_basis
        notes = () if plan.whole else traced.notes
        launch = self.options.launch
        if launch in ("program", "one_program") and plan.launch == "segments" and not plan.whole:
            notes += ((_NOT_JOINED if self._fault is None else _SYNCHRONOUS).format(launch, self._fault),)
        if self.options.state_layout == "auto" and not plan.whole:
            if plan.launches == 1 and traced.devices == 1:
                plan = replace(plan, state_layout="auto")
            else:
                notes += (_ROW_MAJOR,)
        plan = replace(plan, budget_basis=basis, notes=(*notes, *plan.notes), devices=traced.devices)
        plan = replace(plan, jit_step_us=round(self.step.jit_step_us, 3))
        return plan if plan.whole else self._with_loops(plan)

    def _with_loops(self, plan: Plan) -> Plan:
        """The plan, which has those of driven loops' bodies. Host memory counts for both, each of which has half of it."""
        loops = tuple(
            PlannedLoop(o, body.loop.name, body.loop.loop.length, self._plan_of_body(o, body))
            for o, body in self.step.bodies.items()
        )
        if not loops:
            return plan
        peaks: dict[Memory, int] = {
            m: (peaks_of(plan)[m] or 0) + max(peaks_of(loop.plan)[m] or 0 for loop in loops) for m in MEMORIES
        }
        budget = None if plan.host_budget_bytes is None else 2 * plan.host_budget_bytes
        return replace(with_peaks(plan, peaks), loops=loops, host_budget_bytes=budget)

    def _plan_of_body(self, operator: OperatorId, body: DrivenBody) -> Plan:
        return self._bodies[operator].plan if operator in self._bodies else body.plan

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Count the time of making one more plan, and tell the user of it."""
        with self._timed(), self._told():
            yield

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time as time spent on planning."""
        began = time.perf_counter()
        yield
        self._spent += Spent(plan_s=time.perf_counter() - began)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the user that one more plan is made."""
        plans = self._plans
        self._tell(PLANNING, plans.done, max(plans.about, plans.done + 1))
        yield
        plans.count()
        self._tell(PLANNING, plans.done, plans.about)

    def _tell(self, what: str, done: int, of: int) -> None:
        if self.options.progress is not None:
            self.options.progress(what, done, of)


def _with_or_without_hints(find: Callable[[CompiledSizes], _Found | None], measured: CompiledSizes) -> _Found | None:
    """What is found with what was measured and with the hints, or else with what was measured alone; None if it is nothing."""
    found, alone = find(measured), measured.without_hints()
    return find(alone) if found is None and alone != measured else found
