"""Choices made faster in place: one by hand, and on small random steps held to the limit, to time, and to lower limits."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tensile_jax.plan import Choice, Measured
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.registry import floor
from tensile_jax.plan.result.build import build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import cheapest, layout, peak_of, segment_peaks, whole_peak
from tensile_jax.plan.search.local_search import _Search, _step_us, _steps_us, improve
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, graph_of, header_for, tensor_named
from tests.plan.small_steps import small_step

UNIT = 2**16
SEEDS = range(25)


def planned(candidates: Candidates, choice: Choice) -> Plan:
    chosen = layout(candidates, choice, Measured())
    plan = build_plan(chosen, candidates.costs, header_for(candidates.graph, state_memory="any"))
    check(plan, candidates.graph)
    return plan


def test_what_there_is_room_for_stays_or_leaves_later() -> None:
    """`a` and `b` are away while d, the largest, is made and read. A copy takes 16,384 us, an operator 10,000."""
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "e = heavy(d)", "f = heavy(e, b)", "y = heavy(f, a)"],
        sizes={"x": 0, "a": UNIT, "b": UNIT, "c": UNIT, "d": 4 * UNIT, "e": UNIT, "f": UNIT, "y": UNIT},
        inputs="x", outputs="y", flops=1_000_000,
    )  # fmt: skip
    profile = replace(PROFILE, workspace_growth=1e-20, device_to_host_bytes_per_us=4.0, host_to_device_bytes_per_us=4.0)
    candidates = Candidates(graph, profile, state_may_stay_out=False)
    a, b = tensor_named(graph, "a"), tensor_named(graph, "b")
    absences = {a: (Absence(a, 1, 5, 0.0),), b: (Absence(b, 2, 4, 0.0),)}
    index = candidates.add("by hand", lambda: (retain(candidates.liveness, {}), absences, ()))
    choice = Choice(index, tuple(range(8)), absences)
    assert segment_peaks(candidates, choice, Measured()).tolist() == [n * UNIT for n in (1, 2, 2, 5, 6, 4, 3)]

    tight = improve(candidates, choice, 6 * UNIT, Measured())  # beside c and d there is room for b
    assert tight.absences == {a: (Absence(a, 2, 5, 0.0),)}
    assert segment_peaks(candidates, tight, Measured()).tolist() == [n * UNIT for n in (1, 2, 3, 6, 6, 4, 3)]
    assert improve(candidates, choice, 7 * UNIT - 1, Measured()).absences == tight.absences
    ample = improve(candidates, choice, 8 * UNIT, Measured())
    assert ample.absences == {}
    assert [planned(candidates, c).step_us for c in (choice, tight, ample)] == [115_541.0, 82_773.0, 70_007.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_times_moves_as_they_are_assembled(seed: int) -> None:
    graph, profile = small_step(seed, most=24)
    candidates = Candidates(graph, profile, state_may_stay_out=seed % 2 == 0)
    for family in candidates.families()[1:]:
        for index in family:
            choice = cheapest(candidates, [[index]], float("inf"), Measured())
            if choice is None or not choice.absences:
                continue
            search = _Search(candidates, choice, Measured())
            assert search._step_us == pytest.approx(planned(candidates, choice).step_us, abs=0.02)
            moves = [(swap, changed) for swap in search._swaps for changed, _ in search._moves(swap, 2**60)]
            at_once = _steps_us(search._swaps, moves, search._runs, profile)
            one_by_one = [_step_us(search._with(*move), search._runs, profile) for move in moves]
            assert at_once.tolist() == pytest.approx(one_by_one)
            if moves:
                search._swaps = search._with(*moves[len(moves) // 2])
                moved = planned(candidates, search.choice()).step_us
                assert one_by_one[len(moves) // 2] == pytest.approx(moved, abs=0.02)


@pytest.mark.parametrize("state_memory", ["device", "any"])
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_no_slower_under_the_limit_and_a_lower_limit_needs_no_more(seed: int, state_memory: str) -> None:
    graph, profile = small_step(seed, most=24)
    candidates = Candidates(graph, profile, state_may_stay_out=state_memory == "any")
    least, _ = floor(candidates, Measured())
    peaks: list[int] = []
    for limit in np.linspace(least, whole_peak(candidates, Measured()), 40):
        plain = cheapest(candidates, candidates.families(), float(limit), Measured())
        assert plain is not None
        better = improve(candidates, plain, float(limit), Measured())
        assert plain.boundaries == better.boundaries
        assert peak_of(candidates, plain, Measured()) <= peak_of(candidates, better, Measured()) <= limit
        plan = planned(candidates, better)
        assert plan.peak_bytes <= limit
        assert plan.step_us <= planned(candidates, plain).step_us + 0.02
        peaks.append(peak_of(candidates, better, Measured()))
    assert all(lower <= higher for lower, higher in pairwise(peaks))
