"""Capuchin's plan: hidden swaps by free time, then swaps and recomputations by what they cost, on graphs that fit on paper."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.capuchin.evictions import Evictions
from tensile_jax.plan.policies.capuchin.feedback import move_in_triggers
from tensile_jax.plan.policies.capuchin.passive_mode import observe
from tensile_jax.plan.policies.capuchin.policy import capuchin, plan_evictions
from tensile_jax.plan.policies.segments import Decision, choice_with
from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency
from tensile_jax.plan.search.choice import LEAST, peak_of
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, convolutions, floor_bytes, graph_of, tensor_named, with_link
from tests.plan.test_policies import PLANS, networks
from tests.test_properties import planned

SIZES = {name: 100_000 for name in "abcdepqrs"}
CHAIN = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c, b)", "p = heavy(d)", "e = heavy(p, a)"]
"""At 20,000 us each, with copies of 10,000 us; d (from 60,000 to 80,000 us) needs a, b, c, d and the 100 bytes of x."""


def step_of(lines: list[str], *, flops: int = 2_000_000, state_may_stay_out: bool = False, **sizes: int) -> StepModel:
    graph = graph_of(lines, sizes=SIZES | sizes, inputs="x", outputs=lines[-1].split()[0], flops=flops)
    return StepModel(graph, PROFILE, state_may_stay_out=state_may_stay_out)


def evicted(step: StepModel, target: float) -> tuple[dict[str, int], dict[str, tuple[Absence, ...]]]:
    """What is dropped beyond what XLA fuses, and what is away; by name."""
    retention, absences = plan_evictions(step, observe(step), target)
    name = [tensor.name for tensor in step.graph.tensors]
    before = step.base.dropped
    dropped = {name[t]: last for t, last in retention.dropped.items() if t not in before}
    return dropped, {name[t]: several for t, several in absences.items()}


def test_where_memory_suffices_nothing_is_evicted() -> None:
    assert evicted(step_of(CHAIN), 400_100) == ({}, {})


def test_a_swap_that_fits_between_two_accesses_goes_at_once_and_returns_at_the_last_moment() -> None:
    """a is read at place 1, until 40,000 us, and at 5, from 100,000: out until 50,000 (place 2), in from 90,000 us (place 4)."""
    step = step_of(CHAIN)
    a = tensor_named(step.graph, "a")
    assert evicted(step, 400_099) == ({}, {"a": (Absence(a, 2, 4, 20_000.0),)})


def test_the_eviction_with_the_most_free_time_comes_first() -> None:
    """a is free from 40,000 to 140,000 us, b (in the way as well) from 60,000 to 120,000 us. One of them is enough."""
    lines = [*CHAIN[:3], "d = heavy(c)", "p = heavy(d)", "q = heavy(p)", "r = heavy(q, b)", "s = heavy(r, a)"]
    dropped, absences = evicted(step_of(lines), 300_100)
    assert (dropped, list(absences)) == ({}, ["a"])
    dropped, absences = evicted(step_of(lines), 200_100)
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
    step = step_of(lines)
    a, b = tensor_named(step.graph, "a"), tensor_named(step.graph, "b")
    assert evicted(step, 200_100) == ({}, {"a": (Absence(a, 2, 5, 20_000.0),), "b": (Absence(b, 3, 5, 20_000.0),)})


def test_what_cannot_be_hidden_is_computed_again_where_that_is_cheaper() -> None:
    """Without work to hide behind (0 flops), copies of `a` take 20,000 us and place 0 runs for 1,001 us."""
    assert evicted(step_of(CHAIN, flops=0), 400_099) == ({"a": 1}, {})


def test_what_cannot_be_hidden_is_swapped_all_the_same_where_recomputation_is_dearer() -> None:
    """With x of 10 MB, place 0 takes 101,000 us. The copies: out 10,000 us but for the 2,000 us of c at place 2, before d at
    place 3; in 10,000 us but for the 2,000 us of p at place 4, after d."""
    step = step_of(CHAIN, flops=0, x=10_000_000)
    a = tensor_named(step.graph, "a")
    dropped, absences = evicted(step, 10_399_999)
    assert dropped == {}
    assert absences == {"a": (Absence(a, 2, 4, 2_000.0 + 2_000.0),)}


def test_a_chain_starts_from_what_is_still_stored() -> None:
    """To compute b again, a must be computed again first: a is stored for place 1 only, and is dropped beside b."""
    lines = ["a = light(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "p = heavy(d, c)", "q = heavy(p)", "e = heavy(q, b)"]
    dropped, absences = evicted(step_of(lines, flops=0, x=50_000), 400_000)
    assert absences == {}
    assert dropped["b"] == 2


def test_where_no_trigger_fits_the_recomputation_that_saves_most_for_its_time_takes_the_place_of_the_swap() -> None:
    """Copies of `a`, which has the most free time, are exposed. To make it again takes 101,000 us, to make b again 2,000 us."""
    lines = [
        "a = heavy(z)",
        "b = heavy(x)",
        "c = heavy(b, a)",
        "d = heavy(c)",
        "p = heavy(d)",
        "e = heavy(p, b)",
        "q = heavy(e, a)",
    ]
    graph = graph_of(lines, sizes=SIZES | {"z": 10_000_000, "x": 100_000, "c": 200_000}, inputs="x z", outputs="q")
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    most = max(kernel.nbytes for kernel in observe(step))
    dropped, absences = evicted(step, most - 1)
    assert (dropped, absences) == ({"b": 2}, {})


def test_what_others_are_computed_from_costs_its_time_for_each_of_them() -> None:
    """MSPS of `a` counts its 1,001 us twice once b, which is computed from a, is to be computed again."""
    lines = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "p = heavy(d)", "e = heavy(p, b)", "q = heavy(e, a)"]
    step = step_of(lines, flops=0)
    kernels = observe(step)
    evictions = Evictions(step, kernels, 0.0)
    of = {step.graph.tensors[e.gap.tensor].name: e for e in evictions.candidates() if e.gap.after > 0}
    before = evictions.recomputation(of["a"])
    b = evictions.recomputation(of["b"])
    assert before is not None and b is not None
    assert (before.latency_us, before.extra_us) == (1_001.0, 0.0)
    assert b.sources == {tensor_named(step.graph, "a")}
    evictions.recompute(of["b"], b)
    then = evictions.recomputation(of["a"])
    assert then is not None and (then.latency_us, then.extra_us) == (1_001.0, 1_001.0)


WAITS = ["a = heavy(x)", *(f"{new} = heavy({old})" for old, new in pairwise("abcdpqr")), "y = heavy(r, a)"]
"""Each takes 20,000 us. Copies of `a`, here of 300,000 bytes, take 30,000 us; places 1 and 7 read it."""


@pytest.mark.parametrize(
    ("limit", "p", "moves"), [(float("inf"), 100_000, True), (LEAST, 100_000, True), (LEAST, 900_000, False)]
)
def test_an_in_trigger_for_which_a_segment_waits_moves_earlier_where_there_is_room(limit: float, p: int, moves: bool) -> None:
    step = step_of(WAITS, a=300_000, p=p)
    a = tensor_named(step.graph, "a")
    choice = choice_with(Decision(step.base, {a: (Absence(a, 3, 6, 60_000.0),)}, ()), range(9))
    moved = move_in_triggers(step, choice, limit, CompiledSizes())
    assert planned(step, choice, "device").stall_us == pytest.approx(10_000.0, abs=10)
    assert choice.layout is not None and moved.layout is not None
    assert choice.layout.residencies[a] == (Residency(1, 3, MADE, True), Residency(6, 7, COPIED, False))
    assert moved.layout.residencies[a] == (Residency(1, 3, MADE, True), Residency(5 if moves else 6, 7, COPIED, False))
    assert (planned(step, moved, "device").stall_us == 0) == moves


def test_state_is_never_out_between_iterations_even_where_it_may_be() -> None:
    step = StepModel(convolutions(4, weight=300_000), PROFILE, state_may_stay_out=True)
    choice = capuchin(step, LEAST, CompiledSizes())
    assert choice is not None
    plan = planned(step, choice, "any")
    arrived = [e.name for e in plan.events if e.kind == "swap_in"]
    assert arrived
    assert set(arrived) == {e.name for e in plan.events if e.kind == "swap_out"}
    assert choice.layout is not None
    for old, new in step.pairs:
        assert choice.layout.residencies[old][0].arrival == BEGINS
        assert choice.layout.residencies[new][-1].last == len(choice.boundaries) - 1


def test_there_is_a_plan_for_the_floor_where_segments_need_less_than_the_kernels_that_were_observed() -> None:
    graph = graph_of(
        [
            "t0, u0 = heavy(x)",
            "t1, u1 = heavy(w)",
            "t2, u2 = heavy(u0)",
            "t3 = heavy(u1, u2)",
            "t4 = heavy(t2)",
            "t5 = heavy(u2, w)",
            "t6, u6 = heavy(t3)",
            "t7, u7 = heavy(t5)",
            "t8, u8 = heavy(u6)",
            "t9, u9 = heavy(u7)",
            "n = light(m, u9)",
            "v = light(w, n)",
        ],
        sizes=dict.fromkeys("t0 u0 t1 u1 t3 t4 t5 t6 u6 t7 u7 t8 u8 t9 u9 n m".split(), 1)
        | {"w": 65_536, "u2": 65_536, "v": 65_536, "x": 4, "t2": 4},
        inputs="w m x",
        outputs="u8 t9 n v",
        carried={"w": "v"},
        donated="w",
    )
    step = StepModel(order(graph), replace(with_link(50.0, 1.0), fused_reductions=False), state_may_stay_out=False)
    floor = floor_bytes(step, CompiledSizes(), capuchin)
    assert floor < max(kernel.nbytes for kernel in observe(step))
    choice = capuchin(step, floor, CompiledSizes())
    assert choice is not None and peak_of(step, choice, CompiledSizes()) == floor


@pytest.mark.parametrize("part", [0.9, 0.8, 0.76])
def test_a_lower_limit_evicts_until_it_is_kept(part: float) -> None:
    step = StepModel(convolutions(6), PROFILE, state_may_stay_out=False)
    limit = part * max(kernel.nbytes for kernel in observe(step))
    choice = capuchin(step, limit, CompiledSizes())
    assert choice is not None
    plan = planned(step, choice, "device")
    assert plan.peak_bytes <= limit
    assert plan.swapped_out_bytes + plan.recomputed_us > 0


@PLANS
@given(graph=networks(), part=st.floats(0, 1))
def test_needs_are_kept_up_to_date_as_if_found_anew(graph: Graph, part: float) -> None:
    step = StepModel(order(graph), PROFILE, state_may_stay_out=False)
    kernels = observe(step)
    evictions = Evictions(step, kernels, part * max(kernel.nbytes for kernel in kernels))
    for number, eviction in enumerate(evictions.candidates()):
        if evictions.helps(eviction):
            recomputation = evictions.recomputation(eviction)
            if recomputation is not None:
                evictions.recompute(eviction, recomputation)
            elif number % 2 and evictions.swap_overhead_us(eviction) < float("inf"):
                evictions.swap(eviction)
    retention = retain(step.liveness, evictions.dropped)
    assert [tuple(sorted(places)) for places in evictions._needs] == list(retention.needs)
    assert evictions._end == list(retention.end)
