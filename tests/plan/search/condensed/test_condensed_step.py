"""What a condensed step keeps of a step."""

import random

import numpy as np
import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, tensor_named
from tests.plan.result.test_memory_curve import random_graph
from tests.plan.search.schedules import odd_step

UNIT = 2**16
LAST = "y = heavy(c, s, e)"


def classes(graph: Graph) -> dict[str, str]:
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    significant, derived = step.classes
    owned = step.liveness.kept_by_caller
    return {
        t.name: "owned" if t.id in owned else "significant" if significant[t.id] else "derived" if derived[t.id] else "small"
        for t in graph.tensors
    }


def test_every_tensor_belongs_to_one_of_four_classes() -> None:
    graph = graph_of(
        ["a = heavy(x, k)", "m = light(a)", "b = light(m, a)", "s = reduction(b)", "c = heavy(b)", "e = light(x)", LAST],
        inputs="x w", constants="k", outputs="y", donated="w",
        sizes={"x": UNIT, "k": 8, "w": UNIT, "a": UNIT, "m": 16 * UNIT, "b": UNIT, "s": 4, "c": UNIT, "e": UNIT, "y": UNIT},
    )  # fmt: skip
    assert classes(graph) == {
        "x": "owned", "k": "owned", "w": "significant", "a": "significant", "m": "derived", "b": "significant",
        "s": "small", "c": "significant", "e": "derived", "y": "significant",
    }  # fmt: skip


def test_a_node_ends_where_a_significant_tensor_is_made_and_reads_through_derived_ones() -> None:
    lines = ["a = heavy(x)", "m = light(a)", "b = heavy(m)", "y = heavy(m, b)"]
    graph = graph_of(lines, inputs="x", outputs="y", sizes={"x": 1, "a": UNIT, "m": 16 * UNIT, "b": UNIT, "y": UNIT})
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    evaluator = step.evaluator_for(tuple(range(len(lines) + 1)))
    condensed, bit = evaluator.condensed, {t.name: 1 << evaluator.bit[t.id] for t in graph.tensors if t.id in evaluator.bit}
    assert condensed.starts == (0, 1, 2, 3, 4)
    assert condensed.reads == (0, bit["a"], bit["a"], bit["a"] | bit["b"])
    assert condensed.makes == (bit["a"], 0, bit["b"], bit["y"])
    assert condensed.through == (0, 0, 1, 1)
    assert condensed.derived_us == (step.rerun_us[1],)
    recipe = condensed.recipes[evaluator.bit[tensor_named(graph, "b")]]
    assert recipe is not None
    assert (recipe.reads, recipe.makes, recipe.through, recipe.us) == (bit["a"], bit["b"], 1, step.rerun_us[2])


@pytest.mark.parametrize("seed", range(60))
def test_nodes_and_recipes_read_what_operators_read_through_derived_tensors(seed: int) -> None:
    step = odd_step(seed)
    evaluator, liveness, operators = step.evaluator, step.liveness, step.graph.operators
    condensed = evaluator.condensed
    _, derived = step.classes

    def sources(t: TensorId) -> set[int]:
        if t in evaluator.bit:
            return {evaluator.bit[t]}
        return set().union(*map(sources, operators[liveness.begin[t]].inputs)) if derived[t] else set()

    for node, (first, end) in enumerate(zip(condensed.starts, condensed.starts[1:], strict=False)):
        before = {t for op in operators[first:end] for t in op.inputs if liveness.begin[t] < first}
        assert set(members(condensed.reads[node])) == set().union(*map(sources, before))
        made = {evaluator.bit[t] for op in operators[first:end] for t in op.outputs if t in evaluator.bit}
        assert set(members(condensed.makes[node])) == made
    for i, recipe in enumerate(condensed.recipes):
        (t,) = condensed.tensors[i]
        place = liveness.begin[t]
        assert (recipe is None) == (place < 0 or operators[place].effectful)
        if recipe is not None:
            assert set(members(recipe.reads)) == set().union(*map(sources, operators[place].inputs))
    assert sum(condensed.us) == pytest.approx(sum(step.latencies))
    assert all(condensed.made[t] < condensed.made[i] for i, r in enumerate(condensed.recipes) if r for t in members(r.reads))


@pytest.mark.parametrize("seed", range(60))
def test_small_bytes_are_those_of_a_naive_count(seed: int) -> None:
    """What a segment holds: what is stored where it begins, and what it makes and is stored where it ends."""
    step = StepModel(random_graph(random.Random(seed)), PROFILE, state_may_stay_out=False)
    liveness, condensed, places = step.liveness, step.evaluator.condensed, step.evaluator.places
    significant, derived = step.classes
    last = np.max([step.dropped_at(price).ends for price in (4.0, 0.01)] + [step.undropped.ends], axis=0)
    alias = {new: old for old, new in liveness.aliases if not significant[old] and not significant[new]}
    spans: list[tuple[int, int, int]] = []
    for tensor in step.graph.tensors:
        t = tensor.id
        if significant[t] or derived[t] or t in liveness.kept_by_caller or t in alias:
            continue
        end = max([last[t], *(last[new] for new, old in alias.items() if old == t)])
        spans.append((liveness.begin[t], min(int(end), len(step.graph.operators)), tensor.nbytes))
    for i, a in enumerate(places):
        for j, b in enumerate(places[i:], start=i):
            stored = sum(n for begin, end, n in spans if begin < a <= end)
            made = sum(n for begin, end, n in spans if a <= begin < b <= end)
            assert condensed.small_bytes[i, j] == stored + made
