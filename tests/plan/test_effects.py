"""Effectful operators: every policy leaves them alone, every order keeps theirs, and the replay refuses what does not."""

import dataclasses
import random
from collections.abc import Collection

import pytest

from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph, OperatorId
from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.choice import LEAST
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan, ranges, unranged
from tests.builders import graph_of, plan_by_hand, tensor_named, training_graph
from tests.plan.small_steps import small_step
from tests.test_properties import planned


def with_effects(graph: Graph, places: Collection[int]) -> Graph:
    """The graph with effects at these places of its operators; they are heavy."""
    return dataclasses.replace(
        graph,
        operators=tuple(
            dataclasses.replace(op, effectful=True, kind="heavy") if p in places else op for p, op in enumerate(graph.operators)
        ),
    )


def with_prints(graph: Graph, read: Collection[str]) -> Graph:
    """The graph with an operator that reads and makes nothing after the operators that make these tensors."""
    operators = []
    for op in graph.operators:
        operators.append(op)
        for t in op.outputs:
            if graph.tensors[t].name in read:
                operators.append(dataclasses.replace(op, kind="heavy", inputs=(t,), outputs=(), effectful=True, name="print"))
    place = {old.id: OperatorId(p) for p, old in enumerate(operators) if not (old.effectful and not old.outputs)}
    tensors = tuple(dataclasses.replace(t, producer=None if t.producer is None else place[t.producer]) for t in graph.tensors)
    operators = tuple(dataclasses.replace(op, id=OperatorId(p)) for p, op in enumerate(operators))
    return dataclasses.replace(graph, operators=operators, tensors=tensors)


def effects_of(graph: Graph) -> list[int]:
    return [op.id for op in graph.operators if op.effectful]


def test_what_an_effectful_operator_makes_is_kept_whatever_is_to_be_dropped() -> None:
    lines = ["a = heavy(x)", "b = light(a)", "c = heavy(b)", "y = heavy(c, b, a)"]
    graph = graph_of(lines, inputs="x", outputs="y")
    a, b = tensor_named(graph, "a"), tensor_named(graph, "b")
    quiet, loud = find_liveness(graph), find_liveness(with_effects(graph, {0}))
    assert retain(quiet, {a: 1, b: 2}).reruns == ((3,), (3,), (), ())
    assert retain(loud, {a: 1, b: 2}).reruns == ((), (3,), (), ())
    assert retain(loud, {a: 1, b: 2}).dropped == {b: 2}


@pytest.mark.parametrize("seed", range(40))
def test_every_policy_makes_plans_that_leave_effects_alone(seed: int) -> None:
    rng = random.Random(seed)
    small, profile = small_step(seed)
    small = dataclasses.replace(small, operators=tuple(sorted(small.operators, key=lambda op: op.id)))  # as it was traced
    places = rng.sample(range(len(small.operators)), min(3, len(small.operators)))
    graph = with_effects(small, places)
    for policy in POLICIES.values():
        step = StepModel(order(graph), profile, state_may_stay_out=rng.random() < 0.5)
        for limit in (LEAST, float("inf")):
            choice = policy(step, limit, CompiledSizes())
            if choice is None or choice.runs_whole:
                continue
            plan = planned(step, choice, "any" if step.state_may_stay_out else "device")
            check(plan, step.graph)  # which refuses effects that are recomputed, dropped or in another order


@pytest.mark.parametrize("seed", range(60))
def test_every_order_keeps_that_of_effects(seed: int) -> None:
    rng = random.Random(seed)
    graph = training_graph(rng.randint(1, 4), donated=rng.random() < 0.5, weight=rng.choice((1_000, 1_000_000)))
    names = [graph.tensors[t].name for op in graph.operators for t in op.outputs]
    graph = with_prints(graph, set(rng.sample(names, min(5, len(names)))))
    graph = with_effects(graph, [p for p, op in enumerate(graph.operators) if op.effectful or rng.random() < 0.15])
    ordered = order(graph)
    assert effects_of(ordered) == sorted(effects_of(graph))
    assert sorted(op.id for op in ordered.operators) == list(range(len(graph.operators)))


def test_a_print_of_an_update_does_not_hold_the_updates_back() -> None:
    graph = order(with_prints(training_graph(3), {"v2", "v0"}))
    place = {graph.tensors[t].name: p for p, op in enumerate(graph.operators) for t in op.outputs}
    prints = [p for p, op in enumerate(graph.operators) if op.effectful]
    assert place["v2"] < place["g1"] < place["v1"] < place["g0"] < place["v0"] < prints[0] < prints[1]


# -- the replay ----------------------------------------------------------------------------------------------------------------

LINES = ("a = heavy(x)", "b = heavy(x)", "c = heavy(a)", "y = heavy(c, b)")


def plan_of(graph: Graph) -> Plan:
    """Every operator a segment."""
    retention = retain(find_liveness(graph), {})
    return plan_by_hand(graph, retention, range(len(graph.operators) + 1), workspace=1_000)


def test_a_plan_that_recomputes_an_effect_is_refused() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    loud = with_effects(graph, {0})
    plan = plan_of(loud)
    check(plan, loud)
    segments = list(plan.segments)
    segments[2] = dataclasses.replace(segments[2], recomputes=((0, 1),), inputs=(*segments[2].inputs, *segments[0].inputs))
    again = dataclasses.replace(plan, segments=tuple(segments))
    check(again, graph)
    with pytest.raises(InvalidPlan, match="Segment 2: recomputes heavy_0, which has an effect"):
        check(again, loud)


def test_a_plan_that_changes_the_order_of_effects_is_refused() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    swapped = dataclasses.replace(graph, operators=tuple(graph.operators[i] for i in (1, 0, 2, 3)))
    plan = plan_of(swapped)
    assert [unranged(s.operators) for s in plan.segments] == [[1], [0], [2], [3]]
    check(plan, graph)
    check(plan, with_effects(graph, {0, 2}))
    with pytest.raises(InvalidPlan, match="Segment 1: runs heavy_0 after heavy_1, whose effect comes later"):
        check(plan, with_effects(graph, {0, 1}))


def test_a_plan_that_leaves_an_effect_out_is_refused() -> None:
    graph = with_prints(graph_of(LINES, inputs="x", outputs="y"), {"c"})
    plan = plan_of(graph)
    check(plan, graph)
    place = next(i for i, s in enumerate(plan.segments) if unranged(s.operators) == effects_of(graph))
    segments = list(plan.segments)
    segments[place] = dataclasses.replace(segments[place], operators=ranges([]))
    with pytest.raises(InvalidPlan, match="1 operators never ran"):
        check(dataclasses.replace(plan, segments=tuple(segments)), graph)
