"""Capuchin's plan: hidden swaps by free time, then swaps and recomputations by what they cost, on graphs that fit on paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.ir import Graph
from tensile_jax.plan import Measured
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.residency import Absence
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.capuchin.evictions import Evictions
from tensile_jax.plan.policies.capuchin.passive_mode import observe
from tensile_jax.plan.policies.capuchin.policy import capuchin, plan_evictions
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST
from tests.builders import PROFILE, convolutions, graph_of, tensor_named
from tests.plan.test_policies import PLANS, networks
from tests.test_properties import planned

SIZES = {name: 100_000 for name in "abcdepqrs"}
CHAIN = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c, b)", "p = heavy(d)", "e = heavy(p, a)"]
"""At 20,000 us each, with copies of 10,000 us; d (from 60,000 to 80,000 us) needs a, b, c, d and the 100 bytes of x."""


def candidates_of(lines: list[str], *, flops: int = 2_000_000, state_may_stay_out: bool = False, **sizes: int) -> Candidates:
    graph = graph_of(lines, sizes=SIZES | sizes, inputs="x", outputs=lines[-1].split()[0], flops=flops)
    return Candidates(graph, PROFILE, state_may_stay_out=state_may_stay_out)


def evicted(candidates: Candidates, target: float) -> tuple[dict[str, int], dict[str, tuple[Absence, ...]]]:
    """What is dropped beyond what XLA fuses, and what is away; by name."""
    retention, absences = plan_evictions(candidates, observe(candidates), target)
    name = [tensor.name for tensor in candidates.graph.tensors]
    before = candidates[0].retention.dropped
    dropped = {name[t]: last for t, last in retention.dropped.items() if t not in before}
    return dropped, {name[t]: several for t, several in absences.items()}


def test_where_memory_suffices_nothing_is_evicted() -> None:
    assert evicted(candidates_of(CHAIN), 400_100) == ({}, {})


def test_a_swap_that_fits_between_two_accesses_goes_at_once_and_returns_at_the_last_moment() -> None:
    """a is read at place 1, until 40,000 us, and at 5, from 100,000: out until 50,000 (place 2), in from 90,000 us (place 4)."""
    candidates = candidates_of(CHAIN)
    a = tensor_named(candidates.graph, "a")
    assert evicted(candidates, 400_099) == ({}, {"a": (Absence(a, 2, 4, 20_000.0),)})


def test_the_eviction_with_the_most_free_time_comes_first() -> None:
    """a is free from 40,000 to 140,000 us, b (in the way as well) from 60,000 to 120,000 us. One of them is enough."""
    lines = [*CHAIN[:3], "d = heavy(c)", "p = heavy(d)", "q = heavy(p)", "r = heavy(q, b)", "s = heavy(r, a)"]
    dropped, absences = evicted(candidates_of(lines), 300_100)
    assert (dropped, list(absences)) == ({}, ["a"])
    dropped, absences = evicted(candidates_of(lines), 200_100)
    assert list(absences) == ["a", "b"]


def test_copies_of_one_direction_take_turns() -> None:
    """Both are read at places 1 and 6: a goes from 40,000 and b from 50,000 us, to the beginning of place 3; back b comes from
    100,000 and a from 110,000 us, during place 5."""
    lines = [
        "a, b = heavy(x)",
        "c = heavy(a, b)",
        "d = heavy(c)",
        "p = heavy(d)",
        "q = heavy(p)",
        "r = heavy(q)",
        "e = heavy(r, a, b)",
    ]
    candidates = candidates_of(lines)
    a, b = tensor_named(candidates.graph, "a"), tensor_named(candidates.graph, "b")
    assert evicted(candidates, 200_100) == ({}, {"a": (Absence(a, 2, 5, 20_000.0),), "b": (Absence(b, 3, 5, 20_000.0),)})


def test_what_cannot_be_hidden_is_computed_again_where_that_is_cheaper() -> None:
    """Without work to hide behind (0 flops), copies of `a` take 20,000 us and place 0 runs for 1,001 us."""
    assert evicted(candidates_of(CHAIN, flops=0), 400_099) == ({"a": 1}, {})


def test_what_cannot_be_hidden_is_swapped_all_the_same_where_recomputation_is_dearer() -> None:
    """With x of 10 MB, place 0 takes 101,000 us. The copies: out 10,000 us but for the 2,000 us of c at place 2, before d at
    place 3; in 10,000 us but for the 2,000 us of p at place 4, after d."""
    candidates = candidates_of(CHAIN, flops=0, x=10_000_000)
    a = tensor_named(candidates.graph, "a")
    dropped, absences = evicted(candidates, 10_399_999)
    assert dropped == {}
    assert absences == {"a": (Absence(a, 2, 4, 2_000.0 + 2_000.0),)}


def test_a_chain_starts_from_what_is_still_stored() -> None:
    """To compute b again, a must be computed again first: a is stored for place 1 only, and is dropped beside b."""
    lines = ["a = light(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "p = heavy(d, c)", "q = heavy(p)", "e = heavy(q, b)"]
    dropped, absences = evicted(candidates_of(lines, flops=0, x=50_000), 400_000)
    assert absences == {}
    assert dropped["b"] == 2


def test_state_is_never_out_between_iterations_even_where_it_may_be() -> None:
    candidates = Candidates(convolutions(4, weight=300_000), PROFILE, state_may_stay_out=True)
    choice = capuchin(candidates, LEAST, Measured())
    assert choice is not None
    plan = planned(candidates, choice, "any")
    arrived = [e.name for e in plan.events if e.kind == "swap_in"]
    assert arrived
    assert set(arrived) == {e.name for e in plan.events if e.kind == "swap_out"}
    assert all(
        a.leave >= 0 and a.back < len(candidates.graph.operators)
        for s in candidates[choice.candidate].absences.values()
        for a in s
    )


@pytest.mark.parametrize("part", [0.9, 0.8, 0.7])
def test_a_lower_limit_evicts_until_it_is_kept(part: float) -> None:
    candidates = Candidates(convolutions(6), PROFILE, state_may_stay_out=False)
    limit = part * max(kernel.nbytes for kernel in observe(candidates))
    choice = capuchin(candidates, limit, Measured())
    assert choice is not None
    plan = planned(candidates, choice, "device")
    assert plan.peak_bytes <= limit
    assert plan.swapped_out_bytes + plan.recomputed_us > 0


@PLANS
@given(graph=networks(), part=st.floats(0, 1))
def test_needs_are_kept_up_to_date_as_if_found_anew(graph: Graph, part: float) -> None:
    candidates = Candidates(order(graph), PROFILE, state_may_stay_out=False)
    kernels = observe(candidates)
    evictions = Evictions(candidates, kernels, part * max(kernel.nbytes for kernel in kernels))
    for eviction in evictions.candidates():
        if evictions.rate(eviction) > 0:
            evictions.evict(eviction)
    retention = retain(candidates.liveness, evictions.dropped)
    assert [tuple(sorted(places)) for places in evictions._needs] == list(retention.needs)
    assert evictions._end == list(retention.end)
