"""Defines `Choice`, what a policy decides: a layout of the step, or that the step runs as one executable.

A *layout* says where the step is cut into *segments*, stretches of operators that are each compiled as one executable, and when
each tensor is on the device (`result/layout.py`). A *policy*, a way to plan, is a function

    policy(model, limit, measured) -> Choice | None

`model` is a `StepModel`: the facts about the step on a device. `limit` is the most bytes of device memory. The function returns
None if the policy has no plan under the limit. The limit `LEAST` asks for the plan with the least memory; for this limit, every
policy has a choice. `measured` contains the sizes that XLA has reported for executables compiled so far. They replace estimates.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensile_jax.ir import TensorId
from tensile_jax.plan.result.build import build_plan, empty_plan
from tensile_jax.plan.result.layout import BEGINS, MADE, Layout, Residency, contents_of, on_device
from tensile_jax.plan.result.segment_sizes import whole_peak_bytes
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.workspace import Compared, CompiledSizes, SegmentKey, predicted_workspace
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.start_schedules import assemble
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Barriers, Plan

LEAST = 0.0
"""The limit that asks for as little memory as a policy can do with."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a policy decides; `layout` is None if the step runs as one executable.

    With `barriers`, segments are joined into larger executables. An optimization barrier between two segments keeps XLA from
    mixing their operators; `barriers` says which values pass through it.
    """

    layout: Layout | None
    barriers: Barriers | None = None

    @property
    def runs_whole(self) -> bool:
        """Whether the step runs as one executable."""
        return self.layout is None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The places between segments; none if the step runs as one executable."""
        return () if self.layout is None else self.layout.boundaries

    @property
    def key(self) -> object:
        """Equal for choices that are the same."""
        if self.layout is None:
            return None
        return self.layout.key, self.barriers


Policy = Callable[[StepModel, float, CompiledSizes], Choice | None]

WHOLE = Choice(None)
"""The choice to run the step as one executable."""


def choice_of(model: StepModel, schedule: Schedule) -> Choice:
    """The choice that a schedule describes: its significant tensors, what the caller owns, and small tensors while needed."""
    evaluator = schedule.evaluator
    boundaries = tuple(evaluator.places[cut] for cut in schedule.cuts)
    each = zip(evaluator.condensed.tensors, schedule.residencies, strict=True)
    residencies = {t: several for those, several in each if several for t in those}
    return Choice(with_small_tensors(model, boundaries, residencies))


def with_small_tensors(
    model: StepModel, boundaries: Sequence[int], residencies: Mapping[TensorId, tuple[Residency, ...]]
) -> Layout:
    """The layout of these residencies of significant tensors, with those of all small tensors and of what the caller owns."""
    liveness = model.liveness
    graph = liveness.graph
    significant, derived = model.classes
    k, count = len(boundaries) - 1, len(graph.operators)
    found = dict(residencies)
    small: list[TensorId] = []
    for tensor in graph.tensors:
        t = tensor.id
        if t in liveness.kept_by_caller:
            found[t] = (Residency(0, k, BEGINS, False),)
        elif not significant[t] and not derived[t]:
            small.append(t)
    at, after = on_device(Layout(tuple(boundaries), found))
    waiting = sorted(small, key=lambda t: liveness.begin[t], reverse=True)
    there: set[TensorId] = set()
    last = {t: -1 for t in small}
    first: dict[TensorId, int] = {}
    for j, (a, b) in enumerate(pairwise(boundaries)):
        while waiting and liveness.begin[waiting[-1]] < a:
            t = waiting.pop()
            first[t] = 0 if liveness.begin[t] < 0 else j
            there.add(t)
        contents = contents_of(liveness, a, b, at[j] | there, sorted(after[j] - at[j]))
        for t in contents.inputs:
            if t in last:
                last[t] = j
    for t in waiting:
        first[t] = k if liveness.begin[t] >= 0 else 0
    results = set(graph.outputs)
    for t in small:
        until = k if t in results else last[t]
        if liveness.begin[t] < 0:
            found[t] = (Residency(0, max(until, 0), BEGINS, False),)
        elif first[t] <= until:
            found[t] = (Residency(first[t], until, MADE, False),)
    assert count == boundaries[-1]
    return Layout(tuple(boundaries), dict(sorted(found.items())))


def schedule_of(model: StepModel, layout: Layout, measured: CompiledSizes, possible: Collection[int] = ()) -> Schedule:
    """The schedule of a layout, from which its segments' workspaces follow; residencies are kept as the layout says.

    Args:
        possible: places where moves may cut the schedule, beside those where every schedule of the step may be cut.
    """
    made = _assembled(model, layout, measured, possible)
    assert made is not None, "a layout keeps what its segments compute tensors from"
    return made


def is_possible(model: StepModel, choice: Choice) -> bool:
    """Whether every segment of a choice, which may be of another version of this package, can compute what it needs."""
    layout, count = choice.layout, len(model.graph.operators)
    if layout is None:
        return True
    ascends = all(a < b for a, b in pairwise(layout.boundaries))
    return (
        ascends
        and layout.boundaries[:: len(layout.boundaries) - 1] == (0, count)
        and _assembled(model, layout, CompiledSizes()) is not None
    )


def _assembled(model: StepModel, layout: Layout, measured: CompiledSizes, possible: Collection[int] = ()) -> Schedule | None:
    others = {*layout.boundaries, *possible} - set(model.boundaries)
    evaluator = model.evaluator_for(tuple(sorted(others))).with_measured(measured)
    at_place = {place: cut for cut, place in enumerate(evaluator.places)}
    cuts = [at_place[place] for place in layout.boundaries]
    several = [layout.residencies.get(t, ()) for (t,) in evaluator.condensed.tensors]
    return assemble(evaluator, cuts, several, as_they_are=True)


def workspaces_of(schedule: Schedule) -> list[tuple[int, bool]]:
    """The workspace of each segment in bytes, and whether it was measured."""
    found: list[tuple[int, bool]] = []
    for j, account in enumerate(schedule.accounts):
        wanted = schedule.after[j] & ~schedule.at[j]
        found.append(schedule.evaluator.workspace(schedule.cuts[j], schedule.cuts[j + 1], account, wanted))
    return found


def compared(schedule: Schedule, workspaces: Sequence[int]) -> dict[SegmentKey, Compared]:
    """The workspaces that XLA has reported for the segments of a schedule, beside what was predicted."""
    evaluator = schedule.evaluator
    found: dict[SegmentKey, Compared] = {}
    for j, (account, nbytes) in enumerate(zip(schedule.accounts, workspaces, strict=True)):
        wanted = schedule.after[j] & ~schedule.at[j]
        key = evaluator.key(schedule.cuts[j], schedule.cuts[j + 1], account.again, wanted)
        predicted = predicted_workspace(account, evaluator.profile)
        found[key] = Compared(nbytes, predicted, evaluator.condensed.bytes_of(wanted))
    return found


def whole_peak(model: StepModel, measured: CompiledSizes) -> int:
    """Peak of the step as one executable, in bytes, by the account of the device's allocator."""
    needed = whole_needs(model, measured)
    return model.decided(("whole peak", needed), lambda: whole_peak_bytes(needed, model.graph, model.given_profile))


def whole_needs(model: StepModel, measured: CompiledSizes) -> int:
    """What the step needs as one executable, in bytes: XLA's figure if the step was compiled so, otherwise the account of the
    step as one segment.
    """
    if measured.whole is not None:
        return measured.whole
    if not model.graph.operators:
        return sum(t.nbytes for t in model.graph.tensors)
    return one_segment_bytes(model.whole.plain_evaluator) - model.whole.small_rewritten_bytes


def one_segment_bytes(evaluator: Evaluator) -> int:
    """What the step as one segment holds and needs."""
    model = evaluator.condensed
    last = len(model.boundaries) - 1
    wanted = model.at_end & ~model.at_begin
    aliased = 0
    for new, old in evaluator.alias_of.items():
        if not model.at_end >> old & 1:
            aliased |= 1 << new
    found = evaluator.evaluate(0, last, model.at_begin, wanted, aliased & wanted)
    assert found is not None  # all inputs are there
    held = model.base_bytes + model.bytes_of(model.at_begin) + found.result_bytes
    return held + int(model.small_bytes[0, last]) + predicted_workspace(found.account, evaluator.profile)


def predicted_plan(model: StepModel, choice: Choice, measured: CompiledSizes) -> Plan:
    """The plan of a choice that does not run whole, with predicted workspaces where none was measured, and without a header."""
    assert choice.layout is not None
    workspaces = [nbytes for nbytes, _ in workspaces_of(schedule_of(model, choice.layout, measured))]
    return build_plan(choice.layout, model.liveness, workspaces, model.costs, empty_plan(model.graph))


def peak_of(model: StepModel, choice: Choice, measured: CompiledSizes) -> int:
    """The peak of a choice, in bytes: from compiled sizes for the segments that were compiled, and from estimates for the
    others.
    """
    return whole_peak(model, measured) if choice.layout is None else predicted_plan(model, choice, measured).peak_bytes


def step_us(model: StepModel, choice: Choice, measured: CompiledSizes) -> float:
    """The predicted microseconds of a step under the choice."""
    return model.whole_us if choice.layout is None else predicted_plan(model, choice, measured).step_us
