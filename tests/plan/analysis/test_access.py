"""Tensor access sequences (TENSILE, sections III-A and IV-A), drawn on paper."""

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import Access, Chain, Execution, RecomputeNeeds, access_sequence, find_accesses, find_chain
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain
from tests.builders import graph_of, tensor_named
from tests.plan.sequences import sequence_of

X, A, B, Y = (TensorId(t) for t in range(4))

#    x --0--> a --1--> b --2--> y, and a again at 2
CHAIN = sequence_of(["a = x @ 10", "b = a @ 20", "y = a b @ 5"], {"x": 1, "a": 10, "b": 20, "y": 40}, initial="x", results="y")


def test_operators_are_executed_one_after_another() -> None:
    assert (CHAIN.begins_us, CHAIN.ends_us, CHAIN.end_us) == ((0.0, 10.0, 30.0), (10.0, 30.0, 35.0), 35.0)


def test_accesses_of_a_tensor_are_its_tga_and_then_its_tuas() -> None:
    assert CHAIN.accesses[A] == (
        Access(A, 0, "generating", 0.0, 10.0, 10),
        Access(A, 1, "using", 10.0, 30.0, 10),
        Access(A, 2, "using", 30.0, 35.0, 10),
    )
    assert CHAIN.generating(A) == CHAIN.accesses[A][0]
    assert CHAIN.uses(A) == CHAIN.accesses[A][1:]


def test_the_placeholder_is_a_tga() -> None:
    assert CHAIN.accesses[X] == (Access(X, -1, "generating", 0.0, 0.0, 1), Access(X, 0, "using", 0.0, 10.0, 1))


def test_a_result_whose_memory_is_there_from_the_beginning_is_generated_by_its_operator() -> None:
    sequence = sequence_of(["y = x @ 10", "z = y @ 10"], {"x": 1, "y": 1, "z": 1}, initial="x y")
    y = TensorId(1)
    assert [(a.operator, a.kind) for a in sequence.accesses[y]] == [(-1, "generating"), (0, "generating"), (1, "using")]
    assert (sequence.generating(y).operator, [a.operator for a in sequence.uses(y)]) == (0, [1])


def test_an_event_is_triggered_by_the_last_operator_that_has_ended() -> None:
    assert [CHAIN.last_ended(t) for t in (0.0, 9.9, 10.0, 29.0, 30.0, 40.0)] == [-1, -1, 0, 0, 1, 2]


def test_the_first_use_from_a_time() -> None:
    uses = [CHAIN.first_use_from(A, t) for t in (0.0, 10.0, 10.1, 30.0, 30.1)]
    assert [None if use is None else use.operator for use in uses] == [1, 1, 2, 2, None]


def test_a_tensor_lives_from_its_tga_to_the_end_of_its_last_access() -> None:
    assert CHAIN.lifetimes() == {X: (0.0, 10.0), A: (0.0, 35.0), B: (10.0, 35.0), Y: (30.0, 35.0)}


def test_the_memory_of_an_old_parameter_is_the_updated_ones_from_its_update_on() -> None:
    sequence = sequence_of(["g = p @ 10", "v = g @ 10", "y = g @ 10"], dict.fromkeys("pgvy", 4), initial="p", updates={"v": "p"})
    p, _, v, _ = (TensorId(t) for t in range(4))
    assert v in sequence.results
    assert (sequence.lifetimes()[p], sequence.lifetimes()[v]) == ((0.0, 10.0), (10.0, 30.0))


def test_what_nothing_uses_is_released_after_the_first_operator_or_its_own() -> None:
    sequence = sequence_of(["y z = x @ 10", "w = y @ 10"], dict.fromkeys("xyzwu", 1), initial="x u", results="w")
    assert sequence.lifetimes()[TensorId(4)] == (0.0, 10.0)
    assert sequence.lifetimes()[TensorId(2)] == (0.0, 10.0)


def test_a_sequence_that_cannot_be_executed_is_refused() -> None:
    with pytest.raises(ValueError, match="Operator 0 uses tensor 7 before it is generated"):
        find_accesses([Execution((TensorId(7),), (), 1.0)], {}, initial=[])
    with pytest.raises(ValueError, match="Operator 0 must take more than 0 us: got 0.0"):
        find_accesses([Execution((), (), 0.0)], {}, initial=[])
    with pytest.raises(ValueError, match="Tensor 0 cannot give its memory to tensor 1: it is used after the update"):
        sequence_of(["v = p @ 1", "y = p @ 1"], dict.fromkeys("pvy", 1), initial="p", updates={"v": "p"})


def test_the_sequence_of_a_cut_graph_has_one_operator_a_segment() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = light(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d, b)"], inputs="x", outputs="y", donated="x"
    )
    x, a, b, c, d, y = (tensor_named(graph, name) for name in "xabcdy")
    latencies = (10.0, 1.0, 20.0, 30.0, 40.0)
    whole = access_sequence(retain(find_liveness(graph), {}), (0, 2, 4, 5), latencies)
    assert whole.ends_us == (11.0, 61.0, 101.0)
    assert {t: [(s.operator, s.kind) for s in some] for t, some in whole.accesses.items()} == {
        x: [(-1, "generating"), (0, "using")],
        b: [(0, "generating"), (1, "using"), (2, "using")],
        d: [(1, "generating"), (2, "using")],
        y: [(2, "generating")],
    }
    assert whole.making[b] == RecomputeNeeds((x,), 11.0)  # a never leaves its segment
    assert whole.making[d] == RecomputeNeeds((b,), 50.0)  # nor does c
    again = access_sequence(retain(find_liveness(graph), {b: 2}), (0, 2, 4, 5), latencies)
    assert again.ends_us == (11.0, 61.0, 102.0)  # the last segment computes b again
    assert [s.operator for s in again.accesses[a]] == [0, 2]


def test_a_chain_starts_from_what_is_stored_as_long_and_leaves_small_tensors_alone() -> None:
    graph = graph_of(
        ["a = heavy(x)", "s = reduction(a)", "b = heavy(a, s)", "c = heavy(b)", "y = heavy(c, b, x)"],
        inputs="x", outputs="y", sizes={"s": 4},
    )  # fmt: skip
    x, a, s, b = (tensor_named(graph, name) for name in "xasb")
    retention = retain(find_liveness(graph), {})
    assert find_chain(retention, b) == Chain((x,), (0, 1, 2)), "a and s are gone when b is needed at last"
    assert find_chain(retention, b, smallest_bytes=5) == Chain((x,), (0, 2))
    assert find_chain(retain(find_liveness(graph), {s: 1}), b, smallest_bytes=5).places == (0, 1, 2), "s is dropped anyway"
    assert find_chain(retention, s) == Chain((a,), (1,))


def test_what_the_caller_owns_is_fixed_and_stays_to_the_end() -> None:
    graph = graph_of(["a = heavy(x)", "y = heavy(a)"], inputs="x", outputs="y")
    sequence = access_sequence(retain(find_liveness(graph), {}), (0, 1, 2), (10.0, 10.0))
    x = tensor_named(graph, "x")
    assert (sequence.fixed, sequence.lifetimes()[x]) == ({x}, (0.0, 20.0))
    small = access_sequence(retain(find_liveness(graph), {}), (0, 1, 2), (10.0, 10.0), smallest_bytes=101)
    assert small.fixed == set(small.accesses), "all are of 100 bytes"


def test_updated_state_of_a_graph_is_an_updated_parameter() -> None:
    graph = graph_of(
        ["g = heavy(w, x)", "v = light(w, g)"], inputs="w x", outputs="v", carried={"w": "v"}, donated="w"
    )  # fmt: skip
    sequence = access_sequence(retain(find_liveness(graph), {}), (0, 1, 2), (10.0, 0.0))
    assert sequence.updates == {tensor_named(graph, "v"): tensor_named(graph, "w")}
    assert sequence.ends_us == (10.0, 10.001), "an operator that is free by the cost model takes a nanosecond"
