"""What is predicted for a segment, and what compiling one segment teaches about others."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.ir import TensorId
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.search.choice import choice_of, compared, peak_of
from tensile_jax.plan.search.cost.segment_account import SegmentAccount
from tensile_jax.plan.search.cost.workspace import Compared, Correction, correction, predicted_workspace
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import least
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, training_graph

NOTHING = frozenset[TensorId]()


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


def shown(*segments: tuple[int, int, int], prior: float = 1.0, cautious: bool = True) -> CompiledSizes:
    """Compiled segments, by the places they begin and end at and what they need; 100 bytes were predicted for each."""
    found = {(begin, end, NOTHING, NOTHING): Compared(nbytes, 100.0) for begin, end, nbytes in segments}
    return CompiledSizes(found, prior=prior, cautious=cautious)


def test_a_part_of_a_segment_that_needs_more_than_predicted_takes_its_whole_ratio() -> None:
    sizes = shown((0, 10, 200), (10, 20, 300))
    assert correction(0, 10, sizes).ratio == 2.0
    assert correction(12, 17, sizes).ratio == 3.0
    assert correction(5, 15, sizes).ratio == 2.5
    assert correction(0, 10, shown((0, 10, 10**6))).ratio == 4.0


def test_without_caution_it_takes_less_of_the_ratio_the_smaller_it_is() -> None:
    sizes = shown((0, 10, 200), (10, 20, 300), cautious=False)
    assert correction(0, 10, sizes).ratio == 2.0
    assert correction(12, 17, sizes).ratio == 2.0
    assert correction(0, 1, sizes).ratio == 1.1


def test_a_segment_that_needs_less_says_less_of_its_parts() -> None:
    assert correction(0, 10, shown((0, 10, 50))).ratio == 0.5
    assert correction(0, 5, shown((0, 10, 50))).ratio == 0.75


def test_each_operator_takes_the_ratio_of_the_segment_that_has_the_most_in_common() -> None:
    assert correction(0, 10, shown((0, 12, 300), (0, 100, 200))).ratio == 3.0
    assert correction(0, 20, shown((0, 10, 300), (0, 100, 200))).ratio == 2.5


def test_operators_of_no_compiled_segment_take_the_prior() -> None:
    assert correction(20, 30, shown((0, 10, 200))).ratio == 1.0
    assert correction(20, 30, shown((0, 10, 200), prior=1.5)).ratio == 1.5
    assert correction(5, 15, shown((0, 10, 200), prior=1.5)).ratio == 1.75


def test_what_no_ratio_explains_is_taken_for_copies_of_results() -> None:
    sizes = CompiledSizes(
        {(0, 10, NOTHING, NOTHING): Compared(600, 0.0, 1000), (10, 20, NOTHING, NOTHING): Compared(500, 100.0, 200)}
    )
    assert correction(0, 10, sizes).copied == 0.6
    assert correction(2, 5, sizes).copied == 0.6  # a part copies its own results in the same proportion
    assert correction(10, 20, sizes) == Correction(4.0, 0.5)
    assert correction(20, 30, sizes) == Correction(1.0, 0.0)


def test_copies_that_were_seen_are_expected_of_parts_of_the_segment() -> None:
    schedule = least(some_step(), CompiledSizes())
    j = max(range(schedule.count), key=lambda j: schedule.after[j] & ~schedule.at[j])
    begin, end = (schedule.evaluator.places[schedule.cuts[i]] for i in (j, j + 1))
    predicted, results = workspace(schedule, CompiledSizes(), j)[0], schedule.after[j] & ~schedule.at[j]
    around = {(begin - 1, end + 1, NOTHING, NOTHING): Compared(5000, 0.0, 10_000)}
    copies = 0.5 * schedule.evaluator.condensed.bytes_of(results)
    assert copies > 0
    assert workspace(schedule, CompiledSizes(around, cautious=True), j) == (int(4 * predicted + copies), False)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 1000)), max_size=6),
    st.integers(0, 30),
    st.integers(1, 30),
    st.floats(1, 2),
    st.booleans(),
)
def test_a_correction_lies_between_those_that_it_is_made_of(
    segments: list[tuple[int, int, int]], begin: int, length: int, prior: float, cautious: bool
) -> None:
    sizes = shown(*((a, a + n, nbytes) for a, n, nbytes in segments), prior=prior, cautious=cautious)
    found = correction(begin, begin + length, sizes).ratio
    ratios = [min(max(one.nbytes / one.predicted, 0.25), 4.0) for one in sizes.workspaces.values()]
    assert min([prior, 1.0, *ratios]) - 1e-9 <= found <= max([prior, 1.0, *ratios]) + 1e-9


def test_the_prior_raises_what_is_predicted_before_anything_was_compiled() -> None:
    schedule = least(some_step(), CompiledSizes())
    for j in range(schedule.count):
        predicted = workspace(schedule, CompiledSizes(), j)[0]
        assert workspace(schedule, CompiledSizes(prior=1.5), j) == (int(1.5 * predicted), False)


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


def test_without_corrections_compiled_segments_keep_their_sizes_and_others_are_as_predicted_at_first() -> None:
    step = some_step()
    schedule = least(step, CompiledSizes())
    predicted = [workspace(schedule, CompiledSizes(), j)[0] for j in range(schedule.count)]
    shown_of_all = compared(schedule, [3 * nbytes + 100 for nbytes in predicted])
    first = next(key for key in shown_of_all if key[0] == 0)
    sizes = CompiledSizes({first: shown_of_all[first]}, cautious=True, margin=7).without_corrections()
    found = [workspace(schedule, sizes, j) for j in range(schedule.count)]
    assert found[0] == (shown_of_all[first].nbytes, True)
    assert found[1:] == [(nbytes, False) for nbytes in predicted[1:]]
