"""Plans one step: the entry point of this package for one job.

A `Planner` knows a step's graph, a device profile and a *policy*, which is a way to plan. A plan cuts the step into *segments*,
stretches of operators that are each compiled as one executable. The methods of a planner give

    plan            the plan of the policy under a limit in bytes
    quick_plan      a plan under a limit that is found in a short search, and may be slower
    floor_bytes     the smallest limit for which the policy has a plan
    quick_floor     a limit for which the policy has a plan, hardly above `floor_bytes`; only the first call takes long
    bytes_at_ends   a lower bound on the memory of every plan, known at once
    least_limit     the smallest limit with which the step is slower by at most a given factor
    bound_us        a lower bound on the time of every plan under a limit
    offload_state   given the choice of a plan (where the step is cut, and when each tensor is on the device): a choice with the
                    same segments that keeps some of the state on the host between its uses

The planner *replays* each plan before it returns it: an independent check goes through the plan's segments and copies without
running them (`result/check.py`). A plan that the replay refuses is a mistake of this package. The planner then asks the policy
for a plan with less memory, and after that the other policies. A note in the final plan gives the reason of the refusal.

The *workspace* of a segment is the memory that the segment needs beside its inputs and results. A planner estimates the
workspace, unless the segment was compiled and `CompiledSizes` has the true size. Nothing here compiles or runs. If no plan keeps
the limit, `plan` returns None and raises no error. Sizes in bytes, times in microseconds.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from tensile_jax.errors import InvalidPlan, TensileError
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.analysis.corrections import Corrections
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.latest_results import LatestResults
from tensile_jax.plan.policies.auto import improved, quick, revise
from tensile_jax.plan.policies.host_limit import host_peak_of
from tensile_jax.plan.policies.registry import POLICIES, PolicyName, lowest
from tensile_jax.plan.policies.tensile.policy import access_sequence_of, tensile
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.result.build import build_plan, build_whole_plan, empty_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.joined import as_programs
from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search.alike_iterations import alike
from tensile_jax.plan.search.bounds.memory_bound import bytes_at_ends
from tensile_jax.plan.search.bounds.time_bound import least_step_us
from tensile_jax.plan.search.choice import (
    LEAST,
    WHOLE,
    Choice,
    choice_of,
    compared,
    is_possible,
    peak_of,
    schedule_of,
    whole_needs,
    whole_peak,
    workspaces_of,
)
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.search import fast
from tensile_jax.plan.search.state_on_host import keep_state_out
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan, with_budgets

_HALVINGS = 8  # steps of the bisection for the least limit: finer than workspaces are predicted; each step plans once; not tuned
_NEAR = 1.02  # factor around the previous least limit within which the next is looked for first: a guess, not tuned
_MOST_REFUSED = 12  # plans of one policy that are tried if their replays refuse them; not tuned, since no refusal is known
_BELOW_REFUSED = 0.97  # of a refused plan's peak: the next limit; not tuned
_MOST_PRIOR = 2.0  # a peak that was predicted worse says nothing of segments; not tuned
_NAMED_TENSORS = 5  # the tensors that an error about the floor names


class Goal(NamedTuple):
    """What a plan is made for: a limit in bytes (infinite for no limit).

    With `max_slowdown`, the limit is the one that was found for this slowdown.
    """

    limit: float
    max_slowdown: float | None = None


class Planned(NamedTuple):
    """A plan, and the choice that it was built from."""

    plan: Plan
    choice: Choice


class Planner:
    """Plans one step with one policy.

    Args:
        whole_graph: the graph of the step as plain jit runs it, if loops of `graph` are opened.
        host_limit: the most bytes that a plan may have in host memory; zero for plans without swaps.
        versions: those of this package and of JAX, which plans name.
        agreed_swaps: for policy `tensile`, the swaps that were chosen for several jobs together (`multi_job/joint_swaps.py`).

    Attributes:
        graph: the step's graph, its operators in the order in which plans run them.
        model: what the policies know of the step and the device.
    """

    def __init__(
        self,
        graph: Graph,
        profile: DeviceProfile,
        *,
        policy: PolicyName = "auto",
        state_memory: Literal["device", "any"] = "device",
        host_limit: float = float("inf"),
        versions: tuple[str, str] = ("", ""),
        model: StepModel | None = None,
        whole_graph: Graph | None = None,
        agreed_swaps: tuple[SwappedOut, ...] | None = None,
    ) -> None:
        self.model = model or StepModel(
            order(graph),
            profile,
            state_may_stay_out=state_memory == "any",
            host_limit=host_limit,
            whole_graph=None if whole_graph is None or whole_graph is graph else order(whole_graph),
        )
        self.graph = self.model.graph
        self.profile = profile
        self.policy_name: PolicyName = policy
        self.state_memory: Literal["device", "any"] = state_memory
        self._policy = POLICIES[policy] if agreed_swaps is None else partial(tensile, agreed=agreed_swaps)
        self._versions = versions
        self._latest = LatestResults()
        self._faults: dict[object, str] = {}  # by choice, why its replay refused the plan

    def with_policy(self, policy: PolicyName) -> "Planner":
        """A planner of the same step with another policy; the two share what they know of the step."""
        return Planner(
            self.graph,
            self.profile,
            policy=policy,
            state_memory=self.state_memory,
            versions=self._versions,
            model=self.model,
        )

    def across_iterations(self) -> "Planner":
        """A planner of the same step whose state may be in host memory between two iterations; itself, if it is one."""
        if self.state_memory == "any":
            return self
        model = StepModel(
            self.graph, self.profile, state_may_stay_out=True, host_limit=self.model.host_limit,
            whole_graph=self.model.whole_graph, corrections=self.model.corrections, in_one_program=self.model.in_one_program,
        )  # fmt: skip
        return Planner(
            self.graph,
            self.profile,
            policy=self.policy_name,
            state_memory="any",
            versions=self._versions,
            model=model,
        )

    def of_one_program(self) -> "Planner":
        """A planner of the same step whose plans are to become one executable, with their copies inside."""
        return self._with_model(self.model.as_one_program())

    def corrected(self, corrections: Corrections) -> "Planner":
        """A planner of the same step with these corrections of its latencies, with the same policy and options."""
        return self._with_model(self.model.corrected(corrections))

    def with_host_limit(self, host_limit: float) -> "Planner":
        """A planner of the same step with another limit of host memory, with the same policy and options."""
        model = self.model.with_host_limit(host_limit)
        return self if model is self.model else self._with_model(model)

    def _with_model(self, model: StepModel) -> "Planner":
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)  # `copy` would make a planner of it that was pickled
        made.model = model
        made._latest, made._faults = LatestResults(), {}
        return made

    def __reduce__(self) -> Any:
        """A planner is pickled without what it has computed."""
        model = self.model
        kept = self._kept()
        given = (
            model.graph,
            model.whole_graph,
            self.profile,
            model.state_may_stay_out,
            model.host_limit,
            model.in_one_program,
            model.corrections,
            kept,
        )
        return _remade, given

    def _kept(self) -> dict[str, Any]:
        names = ("policy_name", "state_memory", "_policy", "_versions")
        return {name: getattr(self, name) for name in names}

    def swapping_accesses(self) -> AccessSequence | None:
        """What the choice of swaps for several jobs must know of the step; None if the policy does not take part in it."""
        takes_part = self.policy_name == "tensile" and self.model.may_swap and self.graph.operators
        return access_sequence_of(self.model) if takes_part else None

    @property
    def faults(self) -> tuple[str, ...]:
        """What the replays of refused plans have said so far."""
        return tuple(dict.fromkeys(self._faults.values()))

    def no_verified_plan(self) -> TensileError:
        """The error to raise if the policy has choices, but the replay refuses all of their plans."""
        return TensileError(
            f"No plan for {self.graph.name!r} could be verified, so none was run; this is a mistake of tensile_jax, and nothing "
            'has happened to the arguments. Try policy="none" or another budget, or run the step with jax.jit; and please report '
            f"it with this: {'; '.join(self.faults)}"
        )

    # -- limits ---------------------------------------------------------------------------------------------------------------

    @property
    def whole_us(self) -> float:
        """The predicted time of the step as plain jit runs it, in microseconds."""
        return self.model.whole_us

    def whole_peak_bytes(self, measured: CompiledSizes) -> int:
        """The peak of the step as one executable: the compiled size if it is known, otherwise the prediction."""
        return whole_peak(self.model, measured)

    def floor_bytes(self, measured: CompiledSizes) -> int:
        """The smallest limit for which the policy has a plan, where no margin is kept."""
        measured = measured.without_hints()
        return self._latest.of("floor", measured, lambda: peak_of(self.model, self.lowest_choice(measured), measured))

    def quick_floor(self, measured: CompiledSizes) -> int:
        """A limit for which the policy has a plan, hardly above the smallest one.

        It is the peak, with these sizes, of the plan that would need least if all estimates were right. That plan is sought once.
        """
        measured = measured.without_hints()

        def found() -> int:
            estimated = self._latest.of("lowest estimate", (), lambda: self.lowest_choice(CompiledSizes()))
            return min(peak_of(self.model, estimated, measured), whole_peak(self.model, measured))

        return self._latest.of("quick floor", measured, found)

    def with_prior(self, measured: CompiledSizes) -> CompiledSizes:
        """The same sizes, with plain jit's peak as a hint for a step of which no segment was compiled yet
        (`CompiledSizes.prior`).

        If plain jit needs more beside arguments and results than was predicted, segments are expected to need more in the same
        ratio. If plain jit needs less, nothing changes.
        """
        return replace(measured, prior=self._latest.of("prior", measured.whole, lambda: self._prior(measured.whole)))

    def _prior(self, whole: int | None) -> float:
        ends, predicted = self.bytes_at_ends(), whole_needs(self.model, CompiledSizes())
        return 1.0 if whole is None or predicted <= ends else min(max((whole - ends) / (predicted - ends), 1.0), _MOST_PRIOR)

    def bytes_at_ends(self) -> int:
        """Bytes of arguments and results: a lower bound on the memory of every plan, and of plain jit's step."""
        return bytes_at_ends(self.graph, state_may_stay_out=self.model.state_may_stay_out)

    def remember_floor(self, measured: CompiledSizes, floor_bytes: int) -> None:
        """Take over the smallest limit that another planner of this step has found with these compiled sizes."""
        for computation in ("floor", "quick floor"):
            self._latest.put(computation, measured.without_hints(), floor_bytes)

    def is_possible(self, choice: Choice) -> bool:
        """Whether a choice that was kept in a file is one of this step."""
        return is_possible(self.model, choice)

    def lowest_choice(self, measured: CompiledSizes) -> Choice:
        """The choice of the policy with the least peak; that of `auto` is found quickly, and may be slow."""
        return self._latest.of("lowest choice", measured, lambda: lowest(self.model, measured, self._policy))

    def least_choice(self, measured: CompiledSizes) -> Choice:
        """The choice of the policy with the least peak, made as fast as it can be there."""
        choice = self._policy(self.model, LEAST, measured)
        assert choice is not None  # every policy has a choice for the limit `LEAST`
        return choice

    def least_plan(self, measured: CompiledSizes) -> Plan:
        """The plan of that choice, made for no limit.

        Raises:
            TensileError: its replay refuses it.
        """
        plan = self.plan_of(self.least_choice(measured), Goal(float("inf")), measured)
        if plan is None:
            raise self.no_verified_plan()
        return plan

    def least_limit(self, max_slowdown: float, measured: CompiledSizes) -> float:
        """The least limit that has a plan of at most `max_slowdown` times the time of the step as one executable.

        Bisection finds it, because a plan under a lower limit is hardly ever faster. The result was tried: it has such a plan.
        """
        before = self._latest.latest("least limit")
        near = before[1] if before is not None and before[0][0] == max_slowdown else None
        arguments = max_slowdown, measured
        return self._latest.of("least limit", arguments, lambda: self._find_least_limit(max_slowdown, measured, near))

    def _find_least_limit(self, max_slowdown: float, measured: CompiledSizes, near: float | None) -> float:
        """Computes `least_limit`. The search begins near `near`, the limit that was found with other compiled sizes."""

        def is_fast_enough(limit: float) -> bool:
            found = self.plan(Goal(limit, max_slowdown), measured)
            return found is not None and found.plan.step_us <= max_slowdown * self.model.whole_us

        lowest = max(self.floor_bytes(measured) - 1, LEAST)
        highest = float(max(whole_peak(self.model, measured), self.floor_bytes(measured)))
        exact = max((highest - lowest) / 2**_HALVINGS, 1)
        if near is not None and lowest < (middle := near * _NEAR) < highest:
            lowest, highest = (max(lowest, near / _NEAR), middle) if is_fast_enough(middle) else (middle, highest)
        while highest - lowest > exact:
            middle = (lowest + highest) / 2
            if is_fast_enough(middle):
                highest = middle
            else:
                lowest = middle
        return highest

    def bound_us(self, limit: float, measured: CompiledSizes) -> float:
        """A lower bound on the microseconds of every plan under the limit; the time of the whole step, if that fits."""
        if whole_peak(self.model, measured) <= limit:
            return self.model.whole_us
        known = self.model
        return least_step_us(known.liveness, known.fusion, known.costs, limit, state_may_stay_out=self.state_memory == "any")

    def quick_us(self, limit: float, measured: CompiledSizes, upper: float = float("inf")) -> float:
        """Microseconds of a step under the limit, of a plan of `auto` that is found quickly.

        Infinity means that no plan was found. Any value above `upper` means that nothing faster seems to exist. If loops are
        opened, the plan is the one that treats all iterations alike.
        """
        if whole_peak(self.model, measured) <= limit:
            return self.model.whole_us
        if self.model.has_iterations:
            schedule = alike(self.model, limit, measured)
            return float("inf") if schedule is None else schedule.step_us
        schedule = fast(self.model.with_host_limit(float("inf")), limit, measured, upper)
        if schedule is not None and schedule.host_peak > self.model.host_limit:
            schedule = fast(self.model, limit, measured, upper)
        if schedule is not None and (
            schedule.step_us >= upper or peak_of(self.model, choice_of(self.model, schedule), measured) <= limit
        ):
            return schedule.step_us
        if schedule is None and upper < float("inf"):
            return float("inf")
        found = self.plan(Goal(limit), measured)
        return float("inf") if found is None else found.plan.step_us

    def stored(self, tensor: TensorId) -> bool:
        """Whether the tensor is expected to be written to device memory, and not to be fused away."""
        return self.model.fusion.materialised[tensor]

    # -- plans ----------------------------------------------------------------------------------------------------------------

    def quick_plan(self, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """A plan of `auto` under the limit that is found in a short search, and may be slower than that of `plan`.

        None if that search finds none, and for other policies.
        """
        if self.policy_name != "auto":
            return None
        return self._under_limit(quick(self.model, goal.limit, measured), goal, measured)

    def has_choice(self, limit: float, measured: CompiledSizes) -> bool:
        """Whether the policy has a choice under the limit; the replay may still refuse its plan."""
        if self._is_below_floor(limit, measured):
            return False
        return self._first_choice(limit, measured) is not None

    def _first_choice(self, limit: float, measured: CompiledSizes) -> Choice | None:
        """The policy's own choice under the limit; None if it has none."""
        return self._latest.of("choice", (limit, measured), lambda: self._policy(self.model, limit, measured))

    def _is_below_floor(self, limit: float, measured: CompiledSizes) -> bool:
        """Whether the limit is below the policy's floor. Always false for `auto`, which searches below its floor, too."""
        return self.policy_name != "auto" and measured.margin == 0 and LEAST < limit < self.floor_bytes(measured)

    def plan(self, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """The first choice under the limit whose plan passes its replay, with that plan; None if there is none."""
        runs_whole = whole_peak(self.model, measured) <= goal.limit
        matters = measured if runs_whole else replace(measured, whole=None)
        found = self._latest.of("plan", (goal, matters, runs_whole), lambda: self._planned(goal, measured))
        if found is None or found.plan.jit_peak_bytes == measured.whole:
            return found
        return found._replace(plan=replace(found.plan, jit_peak_bytes=measured.whole))

    def _planned(self, goal: Goal, measured: CompiledSizes) -> Planned | None:
        if self._is_below_floor(goal.limit, measured):
            return None
        for choice in self._choices(goal.limit, measured):
            plan = self.plan_of(choice, goal, measured)
            if plan is not None:
                return Planned(plan, choice)
        return None

    def plan_of(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Plan | None:
        """The plan of a choice; None if its replay refuses it."""
        header = self._header(goal, measured)
        if choice.layout is None:
            needed, latency_us = whole_needs(self.model, measured), self.model.whole_latency_us
            plan = build_whole_plan(self.graph, header, self.model.profile, needed_bytes=needed, latency_us=latency_us)
            return replace(plan, workspaces="compiled" if measured.whole is not None else "predicted")
        schedule = schedule_of(self.model, choice.layout, measured)
        workspaces = [nbytes for nbytes, _ in workspaces_of(schedule)]
        plan = build_plan(choice.layout, self.model.liveness, workspaces, self.model.costs, header)
        plan = replace(plan, floor_bytes=min(plan.floor_bytes, plan.peak_bytes))
        if choice.barriers is not None:
            plan = as_programs(plan, self.graph, choice.barriers, self.model.profile)
        try:
            check(plan, self.graph)
        except InvalidPlan as fault:
            self._faults.setdefault(choice.key, str(fault))
            return None
        return plan

    def with_measured(self, choice: Choice, workspaces: Sequence[int], measured: CompiledSizes) -> CompiledSizes:
        """`measured` and, in addition, the workspaces of the compiled segments of a choice."""
        assert choice.layout is not None
        found = compared(schedule_of(self.model, choice.layout, measured), workspaces)
        if all(measured.workspaces.get(key) == shown for key, shown in found.items()):
            return measured
        return replace(measured, workspaces={**measured.workspaces, **found})

    def revise(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """A choice that compiling has shown to exceed the limit, with as few changes as bring it under the limit, and its plan.

        None if the search finds no such changes, and for policies other than `auto`.
        """
        if choice.layout is None or self.policy_name != "auto":
            return None
        return self._under_limit(revise(self.model, choice, goal.limit, measured), goal, measured)

    def improve(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """A choice that leaves memory unused, changed to be faster, and its plan; None if no faster one is found, and for
        policies other than `auto`.
        """
        if choice.layout is None or self.policy_name != "auto":
            return None
        return self._under_limit(improved(self.model, choice, goal.limit, measured), goal, measured)

    def _under_limit(self, choice: Choice | None, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """The choice with its plan; None if there is no choice, or if its plan exceeds the limit."""
        plan = None if choice is None else self.plan_of(choice, goal, measured)
        return None if choice is None or plan is None or plan.peak_bytes > goal.limit else Planned(plan, choice)

    def adapt(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        """The plan of a choice that was made for the same operators on other shapes, changed to fit this step; None if that is
        impossible.
        """
        if choice.layout is None or self.policy_name != "auto" or not self.is_possible(choice):
            return None
        fitting = self.revise(choice, goal, measured)
        return None if fitting is None else self.improve(fitting.choice, goal, measured) or fitting

    def _choices(self, limit: float, measured: CompiledSizes) -> Iterator[Choice]:
        """The policy's choice, then others in case the plan of that choice is refused.

        The others are the policy's choices for lower limits, the choices of the other policies, and the step as one executable.
        Nothing is yielded if the policy has no choice under the limit, because then the budget is too small. Only `auto` can plan
        operators that must be a segment by themselves.
        """
        first = self._first_choice(limit, measured)
        if first is None:
            return
        any_alone = any(op.alone for op in self.graph.operators)
        others = () if any_alone else (p for p in POLICIES.values() if p is not self._policy)
        for policy in (self._policy, *others):
            lower, choice = limit, first if policy is self._policy else policy(self.model, limit, measured)
            for _ in range(_MOST_REFUSED):
                if choice is None:
                    break
                yield choice
                if lower == LEAST:
                    break
                lower = min(lower, _BELOW_REFUSED * peak_of(self.model, choice, measured))
                choice = policy(self.model, lower, measured)
        if whole_peak(self.model, measured) <= limit:
            yield WHOLE

    def _header(self, goal: Goal, measured: CompiledSizes) -> Plan:
        held = [t for t in self.graph.tensors if t.producer is None]
        held.sort(key=lambda t: (-t.nbytes, t.id))
        unlimited = goal.limit == float("inf") or goal.max_slowdown is not None
        return replace(
            with_budgets(empty_plan(self.graph), self.model.budgets),
            tensile_version=self._versions[0],
            jax_version=self._versions[1],
            policy=self.policy_name,
            device_profile=self.profile.name,
            rates=self.profile.basis,
            state_memory=self.state_memory,
            budget_bytes=None if unlimited else int(goal.limit),
            max_slowdown=goal.max_slowdown,
            jit_peak_bytes=measured.whole,
            unplanned_peak_bytes=self.model.unplanned_bytes,
            floor_bytes=self.quick_floor(measured),
            floor_tensors=tuple(t.name for t in held[:_NAMED_TENSORS]),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        unlike, heavy = self.model.unpredicted
        if unlike:
            yield f"The times of {unlike} of {heavy} heavy operators are rough: a calibration measures none like them."
        for fault in self.faults:
            yield f"Another plan was refused when it was verified ({fault}), and this one was taken. Please report that."

    # -- state on the host between its uses -------------------------------------------------------------------------------------

    def offload_state(self, choice: Choice, tensors: Collection[TensorId]) -> Choice:
        """The same segments with these state tensors on the host between their uses, across the iteration boundary.

        Nothing else changes, so results stay the same to the bit, and no segment holds more than before. If host memory is too
        small for all of them, the largest go there; ties go to the lower tensor id.
        """
        largest_first = sorted(tensors, key=lambda t: (-self.graph.tensors[t].nbytes, t))

        def exceeds(count: int) -> bool:
            return host_peak_of(self.model, keep_state_out(self.model, choice, largest_first[:count])) > self.model.host_limit

        fitting = bisect_left(range(1, len(largest_first) + 1), True, key=exceeds)
        return keep_state_out(self.model, choice, largest_first[:fitting]) if fitting else choice

    def may_be_offloaded(self, choice: Choice) -> tuple[tuple[TensorId, int], ...]:
        """The state tensors that `offload_state` could still put on the host, and their bytes."""
        if choice.layout is None:
            return ()
        residencies = choice.layout.residencies
        away = {t for t, several in residencies.items() if any(r.leaves or r.arrival == COPIED for r in several)}
        return tuple(
            (old, self.graph.tensors[old].nbytes) for old, new in self.model.pairs if old not in away and new not in away
        )


def _remade(
    graph: Graph,
    whole_graph: Graph | None,
    profile: DeviceProfile,
    state_may_stay_out: bool,
    host_limit: float,
    in_one_program: bool,
    corrections: Corrections,
    kept: dict[str, Any],
) -> Planner:
    """The planner that was pickled."""
    model = StepModel(
        graph, profile, state_may_stay_out=state_may_stay_out, host_limit=host_limit, whole_graph=whole_graph,
        in_one_program=in_one_program,
    )  # fmt: skip
    planner = Planner(graph, profile, model=model)
    planner.__dict__.update(kept)
    return planner if corrections.change_nothing else planner.corrected(corrections)
