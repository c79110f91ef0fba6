"""What is computed with arrays, against the same told one by one, on small random graphs."""

import random

import numpy as np
import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import operator_latency, rerun_latencies
from tensile_jax.plan.analysis.liveness import Liveness, find_liveness
from tensile_jax.plan.analysis.minimum_cut import _ancestors, _keeping, _prices
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.search.condensed.possible_boundaries import possible_boundaries
from tensile_jax.plan.search.swaps import LinkDirection
from tests.builders import PROFILE, graph_of

SEEDS = range(30)


def random_graph(seed: int) -> Graph:
    """Some operators of one or two results, and state that is donated and updated; sizes from nothing to what is worth a copy."""
    rng = random.Random(seed)
    names, lines = ["x", "w", "s"], []
    sizes = {name: rng.randrange(1, 300_000) for name in names}
    count = rng.randrange(2, 30)
    for k in range(count):
        kind = rng.choice(["heavy", "light", "light", "reduction"])
        reads = rng.sample(names, min(len(names), rng.randrange(1, 4)))
        made = [f"t{k}", f"u{k}"] if rng.random() < 0.2 else [f"t{k}"]
        lines.append(f"{', '.join(made)} = {kind}({', '.join(reads)})")
        sizes |= {name: rng.choice([0, rng.randrange(1, 1000), rng.randrange(1, 300_000)]) for name in made}
        names += made
    for old, new in (("w", "v"), ("s", "r")):
        lines.append(f"{new} = light({old}, {rng.choice(names)})")
        sizes[new] = sizes[old]
    return graph_of(
        lines, sizes=sizes, inputs="x w s", outputs=f"v r t{count - 1}", carried={"w": "v", "s": "r"},
        donated=rng.choice(["w s", "w", ""]), flops=rng.randrange(10_000),
    )  # fmt: skip


def random_retention(seed: int) -> tuple[Retention, Fusion]:
    """A graph of which some tensors are dropped."""
    rng = random.Random(seed)
    liveness = find_liveness(random_graph(seed))
    dropped: dict[TensorId, int] = {}
    for tensor in liveness.graph.tensors:
        t = tensor.id
        if liveness.begin[t] >= 0 and t not in liveness.graph.outputs and rng.random() < 0.4:
            dropped[t] = rng.choice([liveness.begin[t], *liveness.uses[t]])
    return retain(liveness, dropped), find_fusion(liveness, fused_reductions=seed % 2 == 0)


# -- retention ------------------------------------------------------------------------------------------------------------------


def naive_needs(liveness: Liveness, dropped: dict[TensorId, int]) -> dict[TensorId, set[int]]:
    """The definition, repeated until nothing changes."""
    needs = {t.id: set(liveness.uses[t.id]) for t in liveness.graph.tensors}
    while True:
        before = {t: set(n) for t, n in needs.items()}
        for op in liveness.graph.operators:
            far = {p for d in op.outputs if d in dropped for p in needs[d] if p > dropped[d]}
            for t in op.inputs:
                needs[t] |= far
        if needs == before:
            return needs


@pytest.mark.parametrize("seed", SEEDS)
def test_retention_is_the_definition_repeated_until_nothing_changes(seed: int) -> None:
    retention, _ = random_retention(seed)
    liveness, dropped = retention.liveness, dict(retention.dropped)
    count = len(liveness.graph.operators)
    needs = naive_needs(liveness, dropped)
    assert [set(n) for n in retention.needs] == [needs[t.id] for t in liveness.graph.tensors]
    assert all(list(n) == sorted(n) for n in retention.needs)
    for place, op in enumerate(liveness.graph.operators):
        assert set(retention.reruns[place]) == {p for d in op.outputs if d in dropped for p in needs[d] if p > dropped[d]}
    for t, end in enumerate(retention.end):
        kept = count if liveness.end[t] == count else max([liveness.end[t], *needs[TensorId(t)]])
        assert end == dropped.get(TensorId(t), kept)


# -- the network ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_prices_are_those_of_the_formula(seed: int) -> None:
    retention, fusion = random_retention(seed)
    liveness, tensors = retention.liveness, retention.liveness.graph.tensors
    for price in (0.05, 1.0, 4.0):
        found = _prices(liveness, fusion, price, PROFILE)
        for place, op in enumerate(liveness.graph.operators):
            out = sum(tensors[t].nbytes for t in op.outputs)
            smaller = (fusion.largest / max(out, 1)) ** 0.1
            if op.kind == "light":
                written = sum(tensors[t].nbytes for t in op.outputs if fusion.materialised[t])
                row = fusion.row[place]
                joined = max(price, 1.0) if row % 2 else 2 * price if row else price
                expected = joined * fusion.reread[place] + price * smaller * 2 * written + 0.01 * min(price, 1.0) * out
            else:
                expected = price * smaller * operator_latency(op, PROFILE) * PROFILE.bytes_per_us
            assert found[place] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_is_free_for_results_and_impossible_for_what_is_gone(seed: int) -> None:
    retention, fusion = random_retention(seed)
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    turn = seed % (count + 1)
    tensors = np.array([t.id for t in liveness.graph.tensors if t.producer is not None])
    for t, cost in zip(tensors.tolist(), _keeping(liveness, fusion, retention, tensors, turn, 0.5), strict=True):
        if retention.end[t] >= count:
            assert cost == 0.0
        elif t in retention.dropped and retention.end[t] < turn:
            assert cost == np.inf
        else:
            assert cost == liveness.graph.tensors[t].nbytes * (1 - 1e-6 + (0.0 if fusion.materialised[t] else 0.5))


@pytest.mark.parametrize("seed", SEEDS)
def test_ancestors_are_all_that_the_places_depend_on(seed: int) -> None:
    liveness = find_liveness(random_graph(seed))
    operators = liveness.graph.operators
    turn = random.Random(seed).randrange(1, len(operators) + 1)
    places = random.Random(seed).sample(range(turn), min(turn, 2))
    expected: set[int] = set()
    waiting = list(places)
    while waiting:
        place = waiting.pop()
        if place >= 0 and place not in expected:
            expected.add(place)
            waiting += [liveness.begin[t] for t in operators[place].inputs]
    assert _ancestors(liveness, np.unique(places), turn).tolist() == sorted(expected)
    assert _ancestors(liveness, np.array([], dtype=np.int64), turn).tolist() == []


# -- what is stored -------------------------------------------------------------------------------------------------------------


def naively_stored(retention: Retention, counted: np.ndarray) -> list[int]:
    """What is stored at each boundary, tensor by tensor."""
    liveness, aliases = retention.liveness, retention.aliases
    found: list[int] = []
    for b in range(len(liveness.graph.operators) + 1):
        total = 0
        for tensor in liveness.graph.tensors:
            t = tensor.id
            there = t not in aliases.values() and liveness.begin[t] < b <= retention.end[aliases.get(t, t)]
            total += tensor.nbytes if there and counted[t] else 0
        found.append(total)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_stored_is_what_the_tensors_add_up_to(seed: int) -> None:
    retention, fusion = random_retention(seed)
    assert stored_unless_swapped(retention).tolist() == naively_stored(retention, np.ones(len(retention.end), dtype=bool))
    assert stored_unless_swapped(retention, fusion.written).tolist() == naively_stored(retention, fusion.written)


@pytest.mark.parametrize("seed", SEEDS)
def test_between_two_heavy_operators_the_narrowest_boundary_is_possible(seed: int) -> None:
    retention, _ = random_retention(seed)
    operators = retention.liveness.graph.operators
    stored = stored_unless_swapped(retention)
    found = possible_boundaries(retention, stored)
    heavy = [p for p, op in enumerate(operators) if op.kind == "heavy"]
    for first, last in zip([0, *heavy], [*heavy, len(operators)], strict=True):
        inner = stored[first + 1 : last + 1].tolist()
        if inner:
            assert first + 1 + inner.index(min(inner)) in found


# -- latencies ------------------------------------------------------------------------------------------------------------------


def rerun_latency(place: int, retention: Retention, fusion: Fusion) -> float:
    graph = retention.liveness.graph
    operator = graph.operators[place]
    if operator.kind == "heavy":
        return operator_latency(operator, PROFILE)
    extra = fusion.reread[place]
    if operator.kind == "reduction":
        extra += operator.nbytes
    extra += sum(2 * graph.tensors[t].nbytes for t in operator.outputs if fusion.materialised[t])
    return min(extra, 4 * operator.nbytes) / PROFILE.bytes_per_us


@pytest.mark.parametrize("seed", SEEDS)
def test_latencies_of_running_again_are_those_of_each_operator(seed: int) -> None:
    retention, fusion = random_retention(seed)
    again = rerun_latencies(retention.liveness, fusion, PROFILE)
    assert again.tolist() == [rerun_latency(p, retention, fusion) for p in range(len(retention.liveness.graph.operators))]


# -- the link -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_gives_the_same_windows_as_trying_every_time(seed: int) -> None:
    rng = random.Random(seed)
    lane = LinkDirection()
    busy: set[int] = set()

    def free(begin: int, length: int) -> bool:
        return not busy & set(range(begin, begin + length))

    for _ in range(25):
        length, when = rng.randrange(1, 6), rng.randrange(0, 80)
        if rng.random() < 0.5:
            begin = lane.earliest(float(when), float(length))
            assert begin == next(b for b in range(when, 1000) if free(b, length))
        else:
            begin = lane.latest(float(when), float(length))
            expected = next(b for b in range(when - length, -1000, -1) if free(b, length))
            assert begin == expected
        lane.take(begin, begin + length)
        busy |= set(range(int(begin), int(begin) + length))
