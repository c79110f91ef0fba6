"""What is computed with arrays, against the same told one by one, on small random graphs."""

import random
from bisect import bisect_left

import numpy as np
import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import operator_latency, rerun_latencies
from tensile_jax.plan.analysis.liveness import Liveness, find_liveness
from tensile_jax.plan.analysis.rematerialization import _ancestors, _keeping, _prices
from tensile_jax.plan.analysis.residency import (
    Absence,
    Residency,
    away_bytes,
    find_residencies,
    stored_bytes,
    stored_unless_swapped,
)
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.search.segmentation import _candidate_boundaries, _temporaries, _workspace, boundary_table, chains, pressure
from tensile_jax.plan.search.swaps import Gap, Lane, find_gaps
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


def random_absences(retention: Retention, seed: int) -> dict[TensorId, tuple[Absence, ...]]:
    """Some tensors away between some of their needs."""
    rng = random.Random(seed)
    found: dict[TensorId, tuple[Absence, ...]] = {}
    turns = sorted(rng.randrange(len(retention.liveness.graph.operators)) for _ in range(2))
    for g in (g for turn in turns for g in find_gaps(retention, turn=turn, state_may_stay_out=False)):
        apart = all(away.back <= g.after for away in found.get(g.tensor, ()))
        if apart and g.after + 1 < g.before - 1 and rng.random() < 0.7:
            found[g.tensor] = (*found.get(g.tensor, ()), Absence(g.tensor, max(g.after, 0), g.before - 1, 0.0))
    return found


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
                joined = max(price, 1.0) if fusion.row[place] % 2 else 2 * price
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


# -- residencies ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_stored_without_the_absences_is_what_the_stays_add_up_to(seed: int) -> None:
    retention, fusion = random_retention(seed)
    absences = random_absences(retention, seed)
    residencies = find_residencies(retention, absences)
    count = len(retention.liveness.graph.operators)
    naive = [sum(s.nbytes for s in residencies if s.begin < b <= s.end) for b in range(count + 1)]
    assert stored_bytes(residencies, count).tolist() == naive
    assert (stored_unless_swapped(retention) - away_bytes(retention, absences)).tolist() == naive
    assert [s.tensor for s in residencies] == sorted(s.tensor for s in residencies)
    written = [s for s in find_residencies(retention, {}) if fusion.materialised[s.tensor]]
    assert stored_unless_swapped(retention, fusion.written).tolist() == stored_bytes(written, count).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_gaps_lie_between_the_needs_around_the_turn(seed: int) -> None:
    retention, _ = random_retention(seed)
    liveness, tensors = retention.liveness, retention.liveness.graph.tensors
    aliases = retention.aliases
    for turn in range(len(liveness.graph.operators)):
        expected: set[Gap] = set()
        for t in (t.id for t in tensors if t.nbytes >= 2**16):
            before = next((p for p in retention.needs[t] if p >= turn), retention.end[t])
            after = max((p for p in retention.needs[t] if p < turn), default=liveness.begin[t])
            if t in liveness.kept_by_caller or t in retention.dropped or (t in aliases and before not in retention.needs[t]):
                continue
            if after < turn <= retention.end[t] and before - after > 1:
                expected.add(Gap(t, after, before))
        found = find_gaps(retention, turn=turn, state_may_stay_out=False)
        assert set(found) == expected and len(found) == len(expected)


# -- the table of boundaries ----------------------------------------------------------------------------------------------------


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
def test_latencies_of_running_again_and_pressure_are_those_of_each_operator(seed: int) -> None:
    retention, fusion = random_retention(seed)
    operators, tensors = retention.liveness.graph.operators, retention.liveness.graph.tensors
    again = rerun_latencies(retention.liveness, fusion, PROFILE)
    assert again.tolist() == [rerun_latency(p, retention, fusion) for p in range(len(operators))]
    aliases = set(retention.aliases.values())
    own = [sum(tensors[t].nbytes for t in op.outputs if t not in aliases and fusion.materialised[t]) for op in operators]
    assert (pressure(retention, fusion, PROFILE) - chains(retention, fusion)).tolist() == own


@pytest.mark.parametrize("seed", SEEDS)
def test_workspace_is_the_most_that_lives_and_dies_inside_less_what_is_made_later(seed: int) -> None:
    retention, fusion = random_retention(seed)
    count = len(retention.liveness.graph.operators)
    residencies = find_residencies(retention, {})
    boundaries = _candidate_boundaries(retention, stored_bytes(residencies, count), ())
    k = len(boundaries)
    bucket = np.array([max(i for i, b in enumerate(boundaries) if b <= p) for p in range(count + 1)])
    inside = _temporaries(retention, fusion, set())
    grid = np.zeros((k, k))
    for first, last, weight in inside.T.tolist():
        grid[bucket[first], bucket[last]] += weight
    rng = np.random.default_rng(seed)
    lent = np.triu(rng.integers(0, 1000, (k, k)).astype(float), 1)
    found = _workspace(retention, fusion, PROFILE, boundaries, bucket, grid, inside, lent)
    alone = [
        sum(weight for first, last, weight in inside.T.tolist() if bucket[first] == bucket[last] and first <= p <= last)
        + chains(retention, fusion)[p]
        for p in range(count)
    ]
    for a in range(k):
        for b in range(a + 1, k):
            most = 0.0
            for q in range(a, b):
                across = sum(grid[u, v] for u in range(a, q + 1) for v in range(q, b) if u != v)
                most = max(most, across + max(alone[boundaries[q] : boundaries[q + 1]]) - lent[q + 1, b])
            assert found[a, b] == most


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_board_holds_and_hands_on_is_what_its_stays_say(seed: int) -> None:
    retention, fusion = random_retention(seed)
    residencies = find_residencies(retention, random_absences(retention, seed))
    count = len(retention.liveness.graph.operators)
    table = boundary_table(retention, fusion, PROFILE, residencies=residencies)

    def handed_on(residency: Residency, a: int, b: int) -> bool:
        return a <= residency.begin < b <= (residency.end if residency.whole else count)

    for i, a in enumerate(table.boundaries):
        for j in range(i + 1, len(table.boundaries)):
            b = table.boundaries[j]
            made = sum(s.nbytes for s in residencies if s.begin >= 0 and handed_on(s, a, b))
            assert table.held[i, j] == stored_bytes(residencies, count)[a] + made


@pytest.mark.parametrize("seed", SEEDS)
def test_between_two_heavy_operators_the_narrowest_boundary_is_a_candidate(seed: int) -> None:
    retention, _ = random_retention(seed)
    operators = retention.liveness.graph.operators
    stored = stored_bytes(find_residencies(retention, {}), len(operators)).tolist()
    found = _candidate_boundaries(retention, np.array(stored), ())
    heavy = [p for p, op in enumerate(operators) if op.kind == "heavy"]
    for first, last in zip([0, *heavy], [*heavy, len(operators)], strict=True):
        inner = stored[first + 1 : last + 1]
        if inner:
            narrowest = first + 1 + inner.index(min(inner))
            assert narrowest in found[bisect_left(found, first + 1) :]


# -- the link -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_gives_the_same_windows_as_trying_every_time(seed: int) -> None:
    rng = random.Random(seed)
    lane = Lane()
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
            enough = float(rng.randrange(0, 80))
            near = lane.latest(float(when), float(length), enough=enough)
            assert near == expected if expected >= enough else near < enough
        lane.take(begin, begin + length)
        busy |= set(range(int(begin), int(begin) + length))
