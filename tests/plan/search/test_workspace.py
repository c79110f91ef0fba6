"""What is predicted for a segment, and what compiling one segment teaches about others."""

import dataclasses

import pytest

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.search.choice import choice_of, compared, peak_of
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import least
from tensile_jax.plan.search.segment_account import SegmentAccount
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.workspace import Compared, predicted_workspace, ratio_near
from tests.builders import PROFILE, training_graph

NOTHING = frozenset[int]()


def some_step() -> StepModel:
    return StepModel(order(training_graph(6)), PROFILE, state_may_stay_out=False)


def workspace(schedule: Schedule, measured: CompiledSizes, j: int) -> tuple[int, bool]:
    evaluator = schedule.evaluator.with_measured(measured)
    wanted = schedule.after[j] & ~schedule.at[j]
    return evaluator.workspace(schedule.cuts[j], schedule.cuts[j + 1], schedule.accounts[j], wanted)


def test_the_prediction_is_a_linear_function_of_both_orders_rounded_up() -> None:
    profile = dataclasses.replace(PROFILE, late_weight=0.3, early_weight=0.5)
    assert predicted_workspace(SegmentAccount(0.0, 0.0, 100, 200, 0, 0, 1), profile) == 130
    assert predicted_workspace(SegmentAccount(0.0, 0.0, 1, 0, 0, 0, 1), profile) == 1


def test_the_ratio_is_that_of_the_segment_that_overlaps_most_as_far_as_it_does() -> None:
    shown = {(0, 10, NOTHING, NOTHING): Compared(200, 100.0), (10, 20, NOTHING, NOTHING): Compared(300, 100.0)}
    assert ratio_near(0, 10, shown) == 2.0  # pyright: ignore[reportArgumentType] # an empty set is a set of any tensors
    assert ratio_near(12, 17, shown) == 1 + 0.5 * 2  # pyright: ignore[reportArgumentType]
    assert ratio_near(20, 30, shown) == 1.0  # pyright: ignore[reportArgumentType]
    far = {(0, 10, NOTHING, NOTHING): Compared(10**6, 1.0)}
    assert ratio_near(0, 10, far) == 4.0  # pyright: ignore[reportArgumentType]


def test_what_was_measured_stands_and_what_overlaps_is_corrected() -> None:
    step = some_step()
    schedule = least(step, CompiledSizes())
    j = max(range(schedule.count), key=lambda j: workspace(schedule, CompiledSizes(), j)[0])
    predicted, known = workspace(schedule, CompiledSizes(), j)
    assert predicted > 0 and not known
    shown = dict([list(compared(schedule, [3 * predicted] * schedule.count).items())[j]])
    measured = CompiledSizes(shown, margin=1000)
    assert workspace(schedule, measured, j) == (3 * predicted, True)
    for other in range(schedule.count):
        if other != j:  # segments of one schedule do not overlap
            assert workspace(schedule, measured, other) == (workspace(schedule, CompiledSizes(), other)[0] + 1000, False)


def test_the_margin_is_asked_of_what_was_not_compiled_only() -> None:
    schedule = least(some_step(), CompiledSizes())
    measured = CompiledSizes(compared(schedule, [7] * schedule.count), margin=1000)
    assert all(workspace(schedule, measured, j) == (7, True) for j in range(schedule.count))
    assert workspace(schedule, CompiledSizes(margin=1000), 0) == (workspace(schedule, CompiledSizes(), 0)[0] + 1000, False)


@pytest.mark.parametrize("beyond", [0, 10**7])
def test_the_floor_takes_predictions_at_their_word_until_they_are_refuted(beyond: int) -> None:
    step = some_step()
    schedule = least(step, CompiledSizes())
    shown = [workspace(schedule, CompiledSizes(), j)[0] + beyond for j in range(schedule.count)]
    refuted = CompiledSizes(compared(schedule, shown))
    assert (peak_of(step, choice_of(step, schedule), refuted) > floor_bytes(step, CompiledSizes())) == (beyond > 0)
    assert floor_bytes(step, refuted) >= floor_bytes(step, CompiledSizes())
