"""Liveness, order, retention and residencies, worked by hand on graphs that fit on paper."""

import dataclasses
import random

import pytest

from tensile_jax.ir import Graph, OperatorId, Tensor, TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain, segment_contents
from tests.builders import graph_of, tensor_named, training_graph
from tests.plan.small_steps import small_step

# x -> a -> b -> y, with a read again at the end:      place 0    1    2
CHAIN = graph_of(["a = heavy(x)", "b = light(a)", "y = heavy(b, a)"], inputs="x", outputs="y", sizes={"a": 10, "b": 20, "y": 40})


def ids(graph: Graph, names: str) -> list[TensorId]:
    return [tensor_named(graph, name) for name in names.split()]


# -- liveness -----------------------------------------------------------------------------------------------------------------


def test_a_tensor_begins_where_it_is_made_and_ends_where_it_is_last_read() -> None:
    liveness = find_liveness(CHAIN)
    x, a, b, y = ids(CHAIN, "x a b y")
    assert [liveness.begin[t] for t in (x, a, b, y)] == [-1, 0, 1, 2]
    assert [liveness.end[t] for t in (x, a, b, y)] == [3, 2, 2, 3]  # x is the caller's, y the result: both never end
    assert [liveness.uses[t] for t in (x, a, b, y)] == [(0,), (1, 2), (2,), ()]
    assert liveness.kept_by_caller == {x}


def test_a_donated_input_ends_where_it_is_last_read() -> None:
    graph = graph_of(["a = heavy(x)", "y = heavy(a)"], inputs="x", outputs="y", donated="x")
    liveness = find_liveness(graph)
    assert liveness.end[tensor_named(graph, "x")] == 0
    assert liveness.kept_by_caller == frozenset()


def test_a_constant_belongs_to_the_caller() -> None:
    graph = graph_of(["y = heavy(x, c)"], inputs="x", constants="c", outputs="y", donated="x")
    assert find_liveness(graph).kept_by_caller == {tensor_named(graph, "c")}


def test_a_result_that_nothing_reads_ends_where_it_is_made() -> None:
    graph = graph_of(["a, b = heavy(x)", "y = heavy(a)"], inputs="x", outputs="y")
    assert find_liveness(graph).end[tensor_named(graph, "b")] == 0


def test_an_update_is_heir_to_the_donated_state_that_it_replaces() -> None:
    lines = ["g = heavy(w, x)", "v = light(w, g)"]
    donated = graph_of(lines, inputs="w x", outputs="v", carried={"w": "v"}, donated="w")
    w, v = ids(donated, "w v")
    assert find_liveness(donated).alias[w] == v
    assert retain(find_liveness(donated), {}).aliases == {w: v}
    kept = graph_of(lines, inputs="w x", outputs="v", carried={"w": "v"})
    assert set(find_liveness(kept).alias) == {-1}


def test_what_is_updated_from_a_convolutions_gradient_is_rewritten_where_that_is_transposed() -> None:
    # the optimizer's state m and the weights w of a convolution, the bias b, and the weights d of a product
    lines = ["g = conv(x, y)", "n = light(m, g)", "v = light(w, n)", "s = reduction(g)", "c = light(b, s)", "e = heavy(x)",
             "f = light(d, e, s)"]  # fmt: skip
    carried = {"m": "n", "w": "v", "b": "c", "d": "f"}
    graph = graph_of(lines, inputs="x y m w b d", outputs="n v c f", carried=carried, donated="m w b d", sizes={"s": 10})
    m, w, b, d, n, v, c, f = ids(graph, "m w b d n v c f")
    assert dict(find_liveness(graph).aliases) == {m: n, w: v, b: c, d: f}
    liveness = find_liveness(graph, transposed_updates=True)
    assert liveness.rewritten == {m, w}
    assert dict(liveness.aliases) == {b: c, d: f}
    assert dict(liveness.possible_aliases) == {m: n, w: v, b: c, d: f}


def test_an_update_is_no_heir_while_the_old_state_is_still_read_or_if_it_has_another_size() -> None:
    late = graph_of(["v = light(w)", "y = heavy(w, v)"], inputs="w", outputs="v y", carried={"w": "v"}, donated="w")
    assert set(find_liveness(late).alias) == {-1}
    other = graph_of(["v = light(w)"], inputs="w", outputs="v", carried={"w": "v"}, donated="w", sizes={"w": 8})
    assert set(find_liveness(other).alias) == {-1}


def test_state_that_is_returned_as_it_came_is_not_its_own_heir() -> None:
    graph = graph_of(["y = heavy(w)"], inputs="w", outputs="y w", carried={"w": "w"}, donated="w")
    liveness = find_liveness(graph)
    assert set(liveness.alias) == {-1}
    assert liveness.end[tensor_named(graph, "w")] == 1


# -- retention and emission -----------------------------------------------------------------------------------------------------


def test_what_is_dropped_makes_its_inputs_stay_for_those_who_compute_it_again() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = light(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d, b)"], inputs="x", outputs="y", donated="x"
    )
    a, b = ids(graph, "a b")
    kept = retain(find_liveness(graph), {})
    assert (kept.end[a], kept.end[b]) == (1, 4)
    dropped = retain(find_liveness(graph), {b: 2})
    assert (dropped.end[a], dropped.end[b]) == (4, 2)
    assert dropped.reruns[1] == (4,)
    last = segment_contents(dropped, 4, 5)
    assert (last.again, last.inputs) == ((1,), tuple(sorted(ids(graph, "a d"))))
    together = segment_contents(dropped, 0, 5)
    assert together.again == (), "what the segment makes itself is never made twice"
    assert segment_contents(dropped, 0, 4).outputs == tuple(ids(graph, "a d"))


def test_a_chain_of_dropped_tensors_starts_from_what_is_stored() -> None:
    graph = graph_of(["a = light(x)", "b = light(a)", "c = heavy(b)", "y = heavy(c, b)"], inputs="x", outputs="y")
    a, b, x, c = ids(graph, "a b x c")
    retention = retain(find_liveness(graph), {a: 1, b: 2})
    assert segment_contents(retention, 3, 4).again == (0, 1)
    assert segment_contents(retention, 3, 4).inputs == (x, c)


# -- stored bytes ---------------------------------------------------------------------------------------------------------------


def stored(graph: Graph) -> list[int]:
    return stored_unless_swapped(retain(find_liveness(graph), {})).tolist()


def test_stored_bytes_at_every_boundary() -> None:
    assert stored(CHAIN) == [100, 110, 130, 140]


def test_updated_state_adds_nothing_where_the_old_state_was_donated() -> None:
    lines = ["g = heavy(w, x)", "v = light(w, g)", "y = heavy(x)"]
    options = {"inputs": "w x", "outputs": "v y", "carried": {"w": "v"}, "sizes": {"x": 1, "y": 1}}
    assert stored(graph_of(lines, donated="w", **options)) == [101, 201, 101, 102]
    assert stored(graph_of(lines, **options)) == [101, 201, 201, 202]


# -- order ----------------------------------------------------------------------------------------------------------------------


def is_topological(graph: Graph) -> bool:
    known = {t.id for t in graph.tensors if t.producer is None}
    for op in graph.operators:
        if not known.issuperset(op.inputs):
            return False
        known.update(op.outputs)
    return True


def test_updates_are_placed_right_after_their_gradients() -> None:
    graph = order(training_graph(3))
    place = {op.outputs[0]: k for k, op in enumerate(graph.operators)}
    heavy = [k for k, op in enumerate(graph.operators) if op.kind == "heavy"]
    for k in range(3):
        gradient, update = place[tensor_named(graph, f"g{k}")], place[tensor_named(graph, f"v{k}")]
        assert gradient < update
        assert not any(gradient < h < update for h in heavy)


UPDATE_BEFORE_THE_PEAK = [
    "a = heavy(x)", "g = heavy(a)", "b = heavy(a)", "c = heavy(b)", "y = heavy(c)", "v = light(w, g)"
]  # fmt: skip


@pytest.mark.parametrize(("donated", "last"), [("w", 4), ("", 5)])
def test_an_early_update_that_raises_the_peak_stays_late_where_state_is_not_donated(donated: str, last: int) -> None:
    graph = graph_of(
        UPDATE_BEFORE_THE_PEAK, inputs="x w", outputs="y v", carried={"w": "v"}, donated=donated,
        sizes={"g": 1000, "w": 1000, "v": 1000, "b": 2000} if donated else {"g": 1, "w": 1000, "v": 1000, "b": 2000},
    )  # fmt: skip
    assert order(graph).operators[-1].id == last


def test_temporaries_of_an_update_that_xla_fuses_do_not_push_it_late() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(a)", "g = heavy(b)", "y = heavy(a, b)", "s = light(g)", "r = light(s)", "v = light(w, r, s)"],
        inputs="x w", outputs="y v", carried={"w": "v"}, donated="w", sizes=dict.fromkeys("wgsrv", 1000),
    )  # fmt: skip
    assert [op.id for op in order(graph).operators] == [0, 1, 2, 4, 5, 6, 3]


def test_a_large_gradient_of_small_operands_waits_until_the_activations_are_gone() -> None:
    lines = ["a = heavy(x)", "h = heavy(a, w)", "d = light(h)", "g = heavy(a, d)", "v = light(w, g)", "e = heavy(d, s)"]
    sizes = {"w": 4000, "g": 4000, "v": 4000, "a": 500, "h": 500, "d": 500, "e": 10}

    def ordered(saved: int) -> list[int]:
        graph = graph_of(
            ["s = heavy(x)", *lines], inputs="x w", outputs="e v", carried={"w": "v"}, donated="w", sizes={**sizes, "s": saved}
        )
        return [op.id for op in order(graph).operators]

    assert ordered(3000) == [0, 1, 2, 3, 6, 4, 5]  # g is made when s is gone
    assert ordered(5) == [0, 1, 2, 3, 4, 5, 6]  # s is no burden, so the gradient is consumed at once


def test_a_gradient_that_is_no_larger_than_its_operands_does_not_wait() -> None:
    lines = ["s = heavy(x)", "a = heavy(x)", "d = heavy(a, w)", "g = heavy(a, d)", "v = light(w, g)", "e = heavy(d, s)"]
    sizes = {"w": 900, "g": 900, "v": 900, "a": 500, "d": 500, "s": 3000}
    graph = graph_of(lines, inputs="x w", outputs="e v", carried={"w": "v"}, donated="w", sizes=sizes)
    assert [op.id for op in order(graph).operators] == [0, 1, 2, 3, 4, 5]


def test_what_depends_on_inputs_alone_goes_right_before_its_first_reader() -> None:
    graph = order(graph_of(["m = light(x)", "a = heavy(x)", "b = heavy(a)", "y = heavy(b, m)"], inputs="x", outputs="y"))
    assert [op.id for op in graph.operators] == [1, 2, 0, 3]


def random_graph(seed: int) -> Graph:
    rng = random.Random(seed)
    names, lines, sizes = ["x", "w"], [], {"x": rng.randrange(1, 1000), "w": rng.randrange(1, 1000)}
    for k in range(rng.randrange(1, 25)):
        kind = rng.choice(["heavy", "light", "light", "reduction"])
        reads = rng.sample(names, min(len(names), rng.randrange(1, 4)))
        lines.append(f"t{k} = {kind}({', '.join(reads)})")
        sizes[f"t{k}"] = rng.randrange(0, 1000)
        names.append(f"t{k}")
    outputs = {names[-1], *rng.sample(names[2:], min(2, len(names) - 2))}
    return graph_of(lines, sizes=sizes, inputs="x w", outputs=" ".join(sorted(outputs)), donated=rng.choice(["", "w", "x w"]))


@pytest.mark.parametrize("seed", range(100))
def test_any_order_is_topological_and_of_the_same_operators(seed: int) -> None:
    graph = random_graph(seed)
    ordered = order(graph)
    assert is_topological(ordered)
    assert sorted(op.id for op in ordered.operators) == [op.id for op in graph.operators]
    assert ordered.tensors == graph.tensors and ordered.outputs == graph.outputs


@pytest.mark.parametrize("seed", range(100))
def test_stored_bytes_are_those_of_a_naive_count(seed: int) -> None:
    graph = random_graph(seed)
    liveness = find_liveness(graph)
    naive = [
        sum(t.nbytes for t in graph.tensors if liveness.begin[t.id] < b <= liveness.end[t.id])
        for b in range(len(graph.operators) + 1)
    ]
    assert stored(graph) == naive


# -- the graph itself -----------------------------------------------------------------------------------------------------------


def test_a_graph_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="topological order: light_1 reads a before it is there"):
        dataclasses.replace(CHAIN, operators=(CHAIN.operators[1], CHAIN.operators[0], CHAIN.operators[2]))


def test_a_graph_whose_tensors_are_out_of_place_is_refused() -> None:
    with pytest.raises(ValueError, match="at the place that their id names"):
        dataclasses.replace(CHAIN, tensors=CHAIN.tensors[::-1])


def test_a_tensor_of_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="Tensor a must have a size of 0 bytes or more: got -1"):
        Tensor(TensorId(0), "a", "batch", -1, (), "float32", OperatorId(0))


@pytest.mark.parametrize("seed", range(20))
def test_the_last_need_and_the_end_of_a_tensor_follow_from_all_its_needs(seed: int) -> None:
    rng = random.Random(seed)
    graph = small_step(seed, most=30).graph
    liveness = find_liveness(graph)
    dropped = {t.id: max(liveness.begin[t.id], 0) + rng.randint(0, 3) for t in graph.tensors if rng.random() < 0.4}
    retention = retain(liveness, dropped)
    for t, needs in enumerate(retention.needs):
        assert retention.last_needs[t] == max(needs, default=-1)
        end = max(liveness.end[t], *needs, -1)
        assert retention.end[t] == dropped.get(TensorId(t), end)


def test_the_input_of_a_long_chain_is_kept_for_the_last_one_that_computes_the_chain_again() -> None:
    length = 6000  # all needs together are 18 million places
    chain = [f"t{i + 1} = light(t{i})" for i in range(length)]
    readers = [f"s{i} = heavy(t{length - i})" for i in range(length)]
    graph = graph_of([*chain, *readers], inputs="t0", outputs="s0", donated="t0")
    liveness = find_liveness(graph)
    retention = retain(
        liveness, {t.id: liveness.begin[t.id] for t in graph.tensors if t.name[0] == "t" and t.producer is not None}
    )
    (t0,) = graph.inputs
    assert retention.last_needs[t0] == retention.end[t0] == 2 * length - 1
