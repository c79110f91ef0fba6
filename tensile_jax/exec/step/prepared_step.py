"""One step at one set of shapes, from trace to a running plan.

    trace -> order -> candidates -> choice -> segments -> check -> compile -> the segments' own sizes -> check -> the same again,
    if these break the budget -> executor

Workspaces are estimates until XLA has compiled a segment. What it says replaces the estimate; if the footprint then exceeds the
budget, the planner chooses again knowing more, until a plan's *compiled* peak is under the budget. If no choice is left, the
plan with the least peak is compiled, so that the error can name a budget that is known to work.

A plan that its replay refuses (`plan/result/check.py`) is our mistake, and the user's step need not stand still for it: the
policy is asked again for less, then the others. The fault becomes a note of the plan that is taken instead.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Literal

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall, InvalidPlan, TensileError
from tensile_jax.exec.step.compile import Compiler, Executable, peak_of
from tensile_jax.exec.step.confirmed_plans import confirmed_for
from tensile_jax.exec.step.executor import Executor, Observation
from tensile_jax.exec.step.instructions import instructions_of
from tensile_jax.exec.step.lower import SegmentBuilder
from tensile_jax.exec.step.transfer import Transfer
from tensile_jax.ir import TensorId
from tensile_jax.plan import (
    LEAST,
    POLICIES,
    WHOLE,
    Candidates,
    Choice,
    DeviceProfile,
    Measured,
    build_plan,
    build_whole_plan,
    check,
    empty_plan,
    floor,
    floors,
    layout,
    least_limit,
    least_step_us,
    order,
    whole_peak,
)
from tensile_jax.plan.search.choice import peak_of as peak_of_choice
from tensile_jax.plan.search.choice import whole
from tensile_jax.plan.search.swaps import Link, keep_state_out, state_that_may_stay_out
from tensile_jax.plan_format import Plan, PolicyName, format_bytes, unranged
from tensile_jax.trace import TracedStep

_MOST_ATTEMPTS = 8
_MOST_SLOWDOWN_ATTEMPTS = 4
_MARGIN = 0.01  # of the budget, more with each attempt
_MOST_REFUSED = 12  # plans of one policy that their replays refuse, one after another
_BELOW_REFUSED = 0.97  # of the peak of a plan that was refused: the limit for the next
_LOWER = 0.9  # the next budget, after the device ran out of memory under this one

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A plan, the choice that it came from, and the executables of its segments.

    There are none where the step runs whole, or where the plan is only predicted.
    """

    plan: Plan
    executables: list[Executable] | None
    choice: Choice


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What the user asked for, apart from the budget. With `max_slowdown` there is none: the least memory is wanted."""

    policy: PolicyName
    profile: DeviceProfile
    state_memory: Literal["device", "any"]
    progress: Progress | None = None
    max_slowdown: float | None = None
    may_swap: bool = True


class PreparedStep:
    """A traced step, its candidates (made here, or shared with another of the same step), and in the end its compiled plan."""

    def __init__(
        self,
        step: TracedStep,
        budget: Budget | None,
        options: Options,
        compiler: Compiler,
        *,
        candidates: Candidates | None = None,
    ) -> None:
        self.step = step
        self.budget = budget
        self.options = options
        self.policy = POLICIES[options.policy]
        stays_out = options.state_memory == "any"
        self.candidates = candidates or Candidates(
            order(step.graph), options.profile, state_may_stay_out=stays_out, may_swap=options.may_swap
        )
        self.graph = self.candidates.graph
        self.compiler = compiler
        self.builder = SegmentBuilder(step.program)
        self.measured = Measured()
        self.plan_s = 0.0
        self.jit_compile_s = 0.0
        self.out_of_memory = 0  # under earlier plans
        self._whole: Any = None
        self._faults: dict[Hashable, str] = {}  # by choice, what its replay said
        self._without_swaps: PreparedStep | None = None

    def without_swaps(self) -> "PreparedStep":
        """The same step, of which only plans without swaps are made."""
        if self._without_swaps is None:
            self._without_swaps = PreparedStep(self.step, None, replace(self.options, may_swap=False), self.compiler)
        return self._without_swaps

    # -- planning ---------------------------------------------------------------------------------------------------

    @property
    def jit_peak_bytes(self) -> int:
        """Peak of plain `jax.jit`, which is compiled for this, once."""
        self.whole_executable()
        assert self.measured.whole is not None
        return self.measured.whole

    def whole_executable(self) -> Any:
        """Plain `jax.jit`'s own executable of the step."""
        if self._whole is None:
            self._tell("compiling plain jit", 0, 1)
            began = time.perf_counter()
            self._whole = self.compiler.compile_whole(self.step.traced)
            self.jit_compile_s = time.perf_counter() - began
            self.measured = replace(self.measured, whole=peak_of(self._whole))
            self._tell("compiling plain jit", 1, 1)
        return self._whole

    def limit(self) -> float:
        """The budget in bytes, infinite if there is none; what `max_slowdown` comes to, if that was given instead."""
        if self.budget is not None:
            return self.budget.nbytes if self.budget.nbytes is not None else self.budget.resolve(self.jit_peak_bytes)
        return float("inf") if self.options.max_slowdown is None else self._least_limit(self.options.max_slowdown)

    def _least_limit(self, max_slowdown: float) -> float:
        """The limit that `max_slowdown` comes to, as far as is known: with what compiling has shown it is another."""

        def plan_under(limit: float) -> Plan | None:
            found = self._next(limit, self.measured)
            return None if found is None else found.plan

        return least_limit(
            plan_under,
            lowest=max(floor(self.candidates, self.measured, self.policy)[0] - 1, LEAST),
            highest=max(whole_peak(self.candidates, self.measured), floor(self.candidates, self.measured, self.policy)[0]),
            most_us=max_slowdown * self.candidates.whole_us,
        )

    def predict(self) -> Plan:
        """The plan with estimated workspaces; compiles nothing but, for a budget in per cent, plain jit.

        Raises:
            BudgetTooSmall: not even the least peak is under the budget.
        """
        return self.predicted().plan

    def predicted(self) -> Compiled:
        """The same, with the choice that it came from."""
        began = time.perf_counter()
        limit = self.limit()
        found = self._next(limit, self.measured)
        if found is None and self.policy(self.candidates, limit, self.measured) is not None:
            raise self._nothing_survives()
        if found is None:
            raise self._too_small(limit, floor(self.candidates, self.measured, self.policy)[0], "about ")
        self.plan_s = time.perf_counter() - began
        return found

    def _next(self, limit: float, measured: Measured) -> Compiled | None:
        """The first choice under the limit whose plan survives its replay, with that plan; None if there is none."""
        for choice in self._choices(limit, measured):
            plan = self._plan(choice, limit)
            if plan is not None:
                return Compiled(plan, None, choice)
        return None

    def _choices(self, limit: float, measured: Measured) -> Iterator[Choice]:
        """What the policy chooses, then what is left if that is refused: for less, by the other policies, and last whole.

        There are none where the policy has no choice under the limit: then the budget is too small for it.
        """
        first = self.policy(self.candidates, limit, measured)
        if first is None:
            return
        for policy in (self.policy, *(p for p in POLICIES.values() if p is not self.policy)):
            lower, choice = limit, first if policy is self.policy else policy(self.candidates, limit, measured)
            for _ in range(_MOST_REFUSED):
                if choice is None:
                    break
                yield choice
                if lower == LEAST:
                    break
                lower = min(lower, _BELOW_REFUSED * peak_of_choice(self.candidates, choice, measured))
                choice = policy(self.candidates, lower, measured)
        if whole_peak(self.candidates, measured) <= limit:
            yield whole(self.candidates)

    def bound_us(self) -> float:
        """Microseconds that no plan under the budget is faster than; those of the step as one executable, if it fits."""
        candidates = self.candidates
        if whole_peak(candidates, self.measured) <= self.limit():
            return candidates.whole_us
        return least_step_us(candidates.liveness, candidates.fusion, candidates.latencies, self.options.profile, self.limit())

    def _plan(self, choice: Choice, limit: float) -> Plan | None:
        """The plan of a choice; None if its replay refuses it."""
        header = self._header(limit)
        if choice.candidate == WHOLE:
            plan = build_whole_plan(
                self.graph,
                header,
                self.options.profile,
                peak_bytes=whole_peak(self.candidates, self.measured),
                latency_us=sum(self.candidates.latencies),
            )
            return replace(plan, workspaces="compiled" if self.measured.whole is not None else "predicted")
        chosen = layout(self.candidates, choice, self.measured)
        plan = build_plan(chosen, self.candidates, header)
        plan = replace(plan, floor_bytes=min(plan.floor_bytes, plan.peak_bytes))
        try:
            check(plan, self.graph)
        except InvalidPlan as fault:
            self._faults.setdefault((choice.candidate, choice.boundaries, tuple(choice.absences.values())), str(fault))
            return None
        return plan

    def _nothing_survives(self) -> TensileError:
        return TensileError(
            f"No plan for {self.graph.name!r} could be verified, so none was run; this is a mistake of tensile_jax, and nothing "
            'has happened to the arguments. Try policy="none" or another budget, or run the step with jax.jit; and please report '
            f"it with this: {'; '.join(dict.fromkeys(self._faults.values()))}"
        )

    def _header(self, limit: float) -> Plan:
        floor_bytes, _ = floor(self.candidates, self.measured, self.policy)
        held = [t for t in self.graph.tensors if t.producer is None]
        held.sort(key=lambda t: (-t.nbytes, t.id))
        return replace(
            empty_plan(self.graph),
            tensile_version=package_version(),
            policy=self.options.policy,
            device_profile=self.options.profile.name,
            state_memory=self.options.state_memory,
            budget_bytes=None if self.budget is None else int(limit),
            max_slowdown=self.options.max_slowdown if self.budget is None else None,
            jit_peak_bytes=self.measured.whole,
            unplanned_peak_bytes=self.candidates.unplanned_bytes,
            floor_bytes=floor_bytes,
            floor_tensors=tuple(t.name for t in held[:5]),
            notes=tuple(
                f"Another plan was refused when it was verified ({fault}), and this one was taken. Please report that."
                for fault in dict.fromkeys(self._faults.values())
            ),
        )

    def _too_small(self, limit: float, floor_bytes: int, about: str) -> BudgetTooSmall:
        graph = self.graph
        resident = sum(t.nbytes for t in graph.tensors if t.producer is None)
        state = sum(graph.tensors[pair.input].nbytes for pair in graph.carried)
        largest = sorted((t for t in graph.tensors if t.producer is None), key=lambda t: -t.nbytes)[:3]
        names = ", the largest being " + ", ".join(f"{t.name} ({format_bytes(t.nbytes)})" for t in largest) if largest else ""
        hints: list[str] = []
        alone = [t for t in graph.tensors if t.nbytes > limit and self.candidates.fusion.materialised[t.id]]
        if alone:
            one = max(alone, key=lambda t: t.nbytes)
            hints.append(f"One tensor alone is larger than the budget: {one.name} ({format_bytes(one.nbytes)}).")
        kept = sum(graph.tensors[p.input].nbytes for p in graph.carried if p.input not in graph.donated)
        if kept:
            hints.append(
                f"The state is not donated, so old and new state ({format_bytes(kept)} each) lie side by side: "
                "donate it (donate_argnums=0)."
            )
        if self.options.state_memory == "device" and state:
            hints.append(f'With state_memory="any" the state ({format_bytes(state)}) may stay in host memory between its uses.')
        return BudgetTooSmall(
            f"budget {format_bytes(limit)} ({int(limit)} bytes) is too small for {graph.name!r}: the smallest that works is "
            f"{about}{format_bytes(floor_bytes)} ({floor_bytes} bytes). Arguments of the step hold "
            f"{format_bytes(resident)}{names}. " + " ".join(hints),
            budget_bytes=int(limit),
            floor_bytes=floor_bytes,
        )

    # -- compiling --------------------------------------------------------------------------------------------------

    def prepare(self) -> "RunningPlan":
        """A plan whose compiled peak is under the budget, ready to run.

        Raises:
            BudgetTooSmall: there is none; the error names the least peak that compiling has confirmed.
        """
        found = self.choose_and_compile()
        return RunningPlan(self, found.plan, found.executables)

    def choose_and_compile(self) -> Compiled:
        """A plan whose compiled peak is under the budget, and the executables of its segments; None if it runs whole.

        Raises:
            BudgetTooSmall: there is none; the error names the least peak that compiling has confirmed.
        """
        if self.budget is None and self.options.max_slowdown is not None:
            return self._fast_enough()
        limit = self.limit()
        if self.options.policy != "auto":
            return self._search(limit)
        options = self.options
        kind = (self.graph.fingerprint, options.policy, options.profile, options.state_memory, options.may_swap)
        confirmed = confirmed_for((*kind, self.compiler.device.device_kind))
        above = confirmed.above(limit)
        found = None if above is None else self._realised(above, limit)
        if found is None or found.plan.peak_bytes > limit:  # XLA may tune a kernel to more scratch than before
            try:
                found = self._search(limit)
            except BudgetTooSmall:
                lower = confirmed.below(limit, 0)
                found = None if lower is None else self._realised(lower, limit)
                if found is None:
                    raise
            else:
                lower = confirmed.below(limit, found.plan.peak_bytes)
                if lower is not None:
                    found = self._realised(lower, limit) or found
        confirmed.add(limit, found.plan.peak_bytes, found.choice)
        return found

    def _fast_enough(self) -> Compiled:
        """The plan with the least compiled peak of those that are predicted to be fast enough."""
        best: Compiled | None = None
        for _ in range(_MOST_SLOWDOWN_ATTEMPTS):
            limit = self.limit()
            if best is not None and best.plan.peak_bytes <= limit:
                break
            chosen = self._next(limit, self.measured)
            found = None if chosen is None else self._realised(chosen.choice, limit)
            if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
                best = found
        if best is None:
            raise self._nothing_survives()
        return best

    def _search(self, limit: float) -> Compiled:
        margin = 0
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            began = time.perf_counter()
            chosen = self._next(limit, replace(self.measured, margin=margin))
            self.plan_s += time.perf_counter() - began
            if chosen is None:
                break
            found = self._realised(chosen.choice, limit)
            if found is not None and found.plan.peak_bytes <= limit:
                return found
            margin = int(limit * _MARGIN * attempt)
        return self._at_the_floor(limit)

    def _at_the_floor(self, limit: float) -> Compiled:
        best: Compiled | None = None
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for _ in range(_MOST_ATTEMPTS):
            least = float("inf") if best is None else best.plan.peak_bytes
            if least <= limit:
                break
            choice = next(
                (
                    choice
                    for nbytes, choice in floors(self.candidates, self.measured, self.policy)
                    if nbytes < least and (choice.candidate, choice.boundaries) not in seen
                ),
                None,
            )
            if choice is None:
                break
            seen.add((choice.candidate, choice.boundaries))
            found = self._realised(choice, limit)
            if found is not None and found.plan.peak_bytes < least:
                best = found
        if best is None:
            raise self._nothing_survives()
        if best.plan.peak_bytes <= limit:
            return best
        raise self._too_small(limit, best.plan.peak_bytes, "")

    def _realised(self, choice: Choice, limit: float) -> Compiled | None:
        """The plan of `choice` and its executables, whole or in segments; None if its replay refuses it."""
        if choice.candidate != WHOLE:
            return self._compiled(choice, limit)
        self.whole_executable()
        plan = self._plan(choice, limit)
        return None if plan is None else Compiled(plan, None, choice)

    def _compiled(self, choice: Choice, limit: float) -> Compiled | None:
        """The plan of `choice` with its segments compiled and their own workspaces in it."""
        began = time.perf_counter()
        plan = self._plan(choice, limit)
        self.plan_s += time.perf_counter() - began
        if plan is None:
            return None
        executables = self.compile(plan)
        sizes = dict(self.measured.workspaces)
        for (a, b), nbytes in zip(pairwise(choice.boundaries), self.workspaces(plan, executables), strict=True):
            sizes[choice.candidate, a, b] = nbytes
        self.measured = replace(self.measured, workspaces=sizes)
        plan = self._plan(choice, limit)
        return None if plan is None else Compiled(replace(plan, workspaces="compiled"), executables, choice)

    def keep_out(self, found: Compiled, tensors: Collection[TensorId]) -> Compiled:
        """The same segments with these state tensors on the host between their uses, across the iteration boundary.

        Nothing else changes, so neither do results; no segment holds more than before. If the replay refuses that plan, `found`
        remains.
        """
        if not tensors or found.plan.whole:
            return found
        retention = self.candidates[found.choice.candidate].retention
        profile = self.options.profile
        out = keep_state_out(retention, Link(), latencies=self.candidates.latencies, profile=profile, late=False, only=tensors)
        choice = replace(found.choice, absences={**found.choice.absences, **out})
        budget = found.plan.budget_bytes
        limit = float("inf") if budget is None else budget
        if found.executables is not None:
            return self._realised(choice, limit) or found
        plan = self._plan(choice, limit)
        return found if plan is None else Compiled(plan, None, choice)

    def may_stay_out(self, found: Compiled) -> tuple[tuple[TensorId, int], ...]:
        """State tensors that `keep_out` could send out and that are not out yet, and their bytes."""
        if found.plan.whole:
            return ()
        retention = self.candidates[found.choice.candidate].retention
        pairs = state_that_may_stay_out(retention)
        away = found.choice.absences
        return tuple((old.id, old.nbytes) for old, new in pairs if old.id not in away and new.id not in away)

    def compile(self, plan: Plan) -> list[Executable]:
        """The executables of the plan's segments."""
        codes = [
            self.builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, s.donated) for s in plan.segments
        ]
        return self.compiler.compile(codes, lambda done, of: self._tell("compiling segments", done, of))

    def workspaces(self, plan: Plan, executables: Sequence[Executable]) -> list[int]:
        """What XLA says of each segment's workspace."""
        size = [t.nbytes for t in self.graph.tensors]
        return [
            max(0, e.workspace(outputs=sum(size[t] for t in s.outputs), donated=sum(size[t] for t in s.donated)))
            for s, e in zip(plan.segments, executables, strict=True)
        ]

    def prepare_for_less(self, running: "RunningPlan") -> "RunningPlan":
        """A plan for less than `running`, to which the device could not give what it asked for; itself if there is none.

        The lower budget holds from then on. Where there is no lower plan, `running` goes on: it has just survived.
        """
        before = self.budget
        if running.lowest or running.executor is None:
            return running
        self.budget = Budget(int(min(self.limit(), running.plan.peak_bytes) * _LOWER), None)
        try:
            lower = self.prepare()
        except BudgetTooSmall:
            self.budget, running.lowest = before, True
            return running
        self.out_of_memory += running.executor.out_of_memory
        return lower

    def _tell(self, what: str, done: int, of: int) -> None:
        if self.options.progress is not None:
            self.options.progress(what, done, of)


class RunningPlan:
    """A compiled plan, the executor that runs it, and what was observed of it."""

    def __init__(self, prepared: PreparedStep, plan: Plan, executables: Sequence[Executable] | None) -> None:
        self.prepared = prepared
        self.plan = plan
        self.observations: list[Observation] = []
        self.executor: Executor | None = None
        self.lowest = False  # no plan needs less
        if executables is not None:
            transfer = Transfer(prepared.compiler.device)
            instructions = instructions_of(plan, prepared.graph, [e.call for e in executables])
            variables = tuple(prepared.step.program.constants.values())
            run_ahead = prepared.compiler.device.platform != "cpu"
            self.executor = Executor(instructions, variables, transfer, run_ahead=run_ahead)


def package_version() -> str:
    """The version of this package, as installed."""
    try:
        return version("tensile_jax")
    except PackageNotFoundError:
        return "0+unknown"
