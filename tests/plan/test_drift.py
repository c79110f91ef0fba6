"""What is made of measured latencies: averages, the drift, corrected predictions, and the choice of the next plan."""

import dataclasses
import functools
import math
import pickle

import numpy as np
import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planned, Planner
from tensile_jax.plan.drift import Copied, Pace, Tracked, choose_again, corrections_from
from tensile_jax.plan_format import Plan, unranged
from tests.builders import PROFILE, training_graph

NOTHING = CompiledSizes()
LAUNCH = PROFILE.launch_us


@functools.cache
def planner() -> Planner:
    """One for all tests: what a planner chooses does not depend on what it was asked before (`test_policies.py`)."""
    return Planner(training_graph(8, activation=100_000, weight=1_000), PROFILE)


@functools.cache
def planned(of: Planner, share: float = 0.6) -> tuple[Planned, Goal]:
    goal = Goal(share * of.whole_peak_bytes(NOTHING))
    found = of.plan(goal, NOTHING)
    assert found is not None and len(found.plan.segments) > 2
    return found, goal


def predicted_us(plan: Plan) -> list[float]:
    return [s.latency_us + LAUNCH for s in plan.segments]


def track(tracked: Tracked, plan: Plan, us: list[float], *, threshold: float = 0.3) -> Tracked:
    return tracked.with_iteration(plan, us, out=Copied(), into=Copied(), threshold=threshold)


def is_due(tracked: Tracked) -> bool:
    """Whether a new plan is due, however short the plan in use has run."""
    return tracked.is_due(run_s=1.0, planning_s=0.0)


def test_averages_and_the_drift_are_those_of_the_paper() -> None:
    plan = planned(planner())[0].plan
    as_predicted, slow = predicted_us(plan), [3 * us for us in predicted_us(plan)]
    once = track(Tracked(), plan, as_predicted)
    assert once.segment_us == tuple(as_predicted) and once.drift(plan) == pytest.approx(0)
    twice = track(once, plan, slow)
    assert twice.segment_us == pytest.approx([2 * us for us in as_predicted])
    assert twice.drift(plan) == pytest.approx(1.0)
    fast = track(track(Tracked(), plan, [us / 2 for us in as_predicted]), plan, [us / 2 for us in as_predicted])
    assert fast.drift(plan) == pytest.approx(0.5) and is_due(fast)


def test_one_slow_iteration_is_not_enough_and_a_drift_that_ends_is_forgotten() -> None:
    plan = planned(planner())[0].plan
    as_predicted, slow = predicted_us(plan), [2 * us for us in predicted_us(plan)]
    once = track(Tracked(), plan, slow)
    assert not is_due(once) and is_due(track(once, plan, slow))
    recovered = track(track(once, plan, as_predicted), plan, as_predicted)
    assert recovered.above == 0 and not is_due(track(recovered, plan, as_predicted))


def test_a_plan_is_replaced_only_after_it_has_run_ten_times_as_long_as_planning_takes() -> None:
    drifted = Tracked(above=2)
    assert drifted.is_due(run_s=10.0, planning_s=1.0) and not drifted.is_due(run_s=9.9, planning_s=1.0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_jumps_is_not_a_measurement(wrong: float) -> None:
    plan = planned(planner())[0].plan
    known = track(Tracked(), plan, predicted_us(plan))
    spoiled = [wrong, *predicted_us(plan)[1:]]
    assert track(known, plan, spoiled) is known
    assert track(known, plan, predicted_us(plan)[1:]) is known
    copied = Copied(10**7, wrong)
    kept = known.with_iteration(plan, predicted_us(plan), out=copied, into=copied, threshold=0.3)
    assert kept.out == kept.into == Copied()
    assert Pace().with_iteration(wrong) == Pace()
    assert not Pace((10.0,) * 5).is_unusual(wrong, 0.3)


def test_the_pace_is_known_after_some_iterations() -> None:
    pace = Pace()
    for _ in range(3):
        assert not pace.is_unusual(1000.0, 0.3)
        pace = pace.with_iteration(10.0)
    assert pace.median_us == pytest.approx(10.0)
    assert pace.is_unusual(14.0, 0.3) and pace.is_unusual(6.0, 0.3) and not pace.is_unusual(12.0, 0.3)


def test_a_load_that_stays_is_noticed_after_another_unusual_iteration_and_is_usual_in_the_end() -> None:
    pace = Pace()
    for _ in range(5):
        pace = pace.with_iteration(10.0)
    pace = pace.with_iteration(15.0)  # once, for no reason
    unusual = 0
    while pace.is_unusual(100.0, 0.3):
        pace, unusual = pace.with_iteration(100.0), unusual + 1
    assert unusual == 3 and pace.median_us == 100.0


@pytest.mark.parametrize("seed", range(6))
def test_a_corrected_planner_predicts_what_was_measured(seed: int) -> None:
    """Also of a planner that was corrected before."""
    rng = np.random.default_rng(seed)
    factors, (out, into) = np.exp(rng.uniform(-3, 3, 32)).tolist(), rng.uniform(0.01, 2.0, 2).tolist()
    before = planner()
    found, goal = planned(before)
    for _ in range(2):
        us = [f * s.latency_us + LAUNCH for f, s in zip(factors, found.plan.segments, strict=False)]
        nbytes = 10**7
        tracked = track(Tracked(), found.plan, us)
        tracked = dataclasses.replace(tracked, out=Copied(nbytes, nbytes * out), into=Copied(nbytes, nbytes * into))
        corrections = corrections_from(before, found.plan, tracked)
        assert 1 / before.corrected(corrections).model.profile.device_to_host_bytes_per_us == pytest.approx(out)
        assert 1 / before.corrected(corrections).model.profile.host_to_device_bytes_per_us == pytest.approx(into)
        before = before.corrected(corrections)
        again = before.plan_of(found.choice, goal, NOTHING)
        assert again is not None and again.peak_bytes == found.plan.peak_bytes
        own = [s.latency_us - s.recomputed_us for s in again.segments]
        assert own == pytest.approx(
            [f * (s.latency_us - s.recomputed_us) for f, s in zip(factors, found.plan.segments, strict=False)], abs=0.02, rel=1e-4
        )
        recomputed = [o for s in again.segments for o in unranged(s.recomputes)]
        if len(recomputed) == len(set(recomputed)):  # an operator that runs again in several segments has their mean
            assert [s.latency_us + LAUNCH for s in again.segments] == pytest.approx(us, abs=0.02, rel=1e-4)
        found = Planned(again, found.choice)


def test_a_plan_stays_if_everything_is_slower_alike() -> None:
    of = planner()
    found, goal = planned(of)
    slow = track(Tracked(), found.plan, [3 * us for us in predicted_us(found.plan)])
    nbytes = 10**7
    link = Copied(nbytes, 3 * nbytes / PROFILE.device_to_host_bytes_per_us)
    corrections = corrections_from(of, found.plan, dataclasses.replace(slow, out=link, into=link))
    renewal = choose_again(of, corrections, found.choice, goal, NOTHING)
    assert not renewal.changed and renewal.choice is found.choice


def test_another_plan_is_taken_if_it_is_faster_by_enough_and_keeps_the_limit() -> None:
    of = planner()
    found, goal = planned(of)
    slow = track(Tracked(), found.plan, [20 * us for us in predicted_us(found.plan)])  # now copies are cheap
    corrections = corrections_from(of, found.plan, slow)
    renewal = choose_again(of, corrections, found.choice, goal, NOTHING)
    corrected = of.corrected(corrections)
    old, new = (corrected.plan_of(choice, goal, NOTHING) for choice in (found.choice, renewal.choice))
    assert renewal.changed and old is not None and new is not None
    assert new.step_us < 0.95 * old.step_us and new.peak_bytes <= goal.limit
    assert new.swapped_out_bytes > old.swapped_out_bytes


def test_a_planner_that_was_pickled_makes_the_same_choice() -> None:
    of = planner()
    found, goal = planned(of)
    slow = track(Tracked(), found.plan, [20 * us for us in predicted_us(found.plan)])
    corrections = corrections_from(of, found.plan, slow)
    here = choose_again(of, corrections, found.choice, goal, NOTHING)
    there = choose_again(*pickle.loads(pickle.dumps((of, corrections, found.choice, goal, NOTHING))))
    assert there.changed == here.changed and there.choice.key == here.choice.key
