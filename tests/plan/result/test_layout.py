"""Layouts on paper: where tensors are on the device, how they came there, and what segments then run."""

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.layout import (
    BEGINS,
    COPIED,
    MADE,
    Contents,
    Layout,
    Residency,
    contents_of,
    layout_of,
    on_device,
    segments_of,
)
from tests.builders import graph_of, plan_by_hand, tensor_named

GRAPH = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "e = heavy(d, w)", "y = heavy(e, a)"],
    inputs="x w", outputs="y", donated="w",
)  # fmt: skip
LIVENESS = find_liveness(GRAPH)
X, W, A, B, C, D, E, Y = (tensor_named(GRAPH, name) for name in "xwabcdey")
EVERYWHERE = tuple(range(7))


def residencies(*absences: Absence, boundaries: tuple[int, ...] = EVERYWHERE, **dropped: int) -> dict[TensorId, object]:
    retention = retain(LIVENESS, {tensor_named(GRAPH, name): last for name, last in dropped.items()})
    by_tensor = {t: tuple(a for a in absences if a.tensor == t) for t in {a.tensor for a in absences}}
    return dict(layout_of(retention, by_tensor, boundaries).residencies)


def test_a_tensor_is_there_from_the_boundary_after_it_is_made_to_the_segment_that_needs_it_last() -> None:
    found = residencies()
    assert found[X] == (Residency(0, 6, BEGINS, False),)  # the caller's
    assert found[W] == (Residency(0, 4, BEGINS, False),)
    assert found[A] == (Residency(1, 5, MADE, False),)
    assert found[B] == (Residency(2, 2, MADE, False),)
    assert found[Y] == (Residency(6, 6, MADE, False),)


def test_what_lives_inside_a_segment_has_no_residency() -> None:
    found = residencies(boundaries=(0, 2, 4, 6))
    assert found[A] == (Residency(1, 2, MADE, False),)
    assert C not in found
    assert found[W] == (Residency(0, 2, BEGINS, False),)


def test_a_dropped_tensor_stays_for_its_last_place_and_is_computed_again() -> None:
    found = residencies(a=1)
    assert found[A] == (Residency(1, 1, MADE, False),)
    layout = layout_of(retain(LIVENESS, {A: 1}), {}, EVERYWHERE)
    assert segments_of(LIVENESS, layout)[5] == Contents(5, 6, (0,), (X, E), (Y,))


def test_an_absence_ends_one_residency_and_begins_another() -> None:
    away = (Residency(1, 2, MADE, True), Residency(4, 5, COPIED, False))
    assert residencies(Absence(A, 2, 4, 0.0))[A] == away


def test_what_leaves_as_soon_as_it_is_made_is_at_no_boundary_before() -> None:
    gone = (Residency(1, 0, MADE, True), Residency(2, 2, COPIED, False))
    assert residencies(Absence(A, 1, 4, 0.0), boundaries=(0, 2, 4, 6))[A] == gone
    layout = Layout(EVERYWHERE, {A: (Residency(1, 0, MADE, True), Residency(5, 5, COPIED, False))})
    at, after = on_device(layout)
    assert [A in there for there in at] == [False, False, False, False, False, True, False]
    assert [A in there for there in after] == [True, False, False, False, False, False]  # the copy back is issued afterwards


def test_an_absence_during_no_segment_is_left_out_unless_its_copy_serves_a_later_one() -> None:
    assert residencies(Absence(W, 2, 3, 0.0))[W] == (Residency(0, 4, BEGINS, False),)
    both = residencies(Absence(A, 2, 3, 0.0), Absence(A, 3, 5, 0.0))[A]
    assert both == (Residency(1, 2, MADE, True), Residency(3, 3, COPIED, True), Residency(5, 5, COPIED, False))


def test_state_that_is_on_the_host_when_the_iteration_begins_is_copied_before_the_segment_of_its_return() -> None:
    assert residencies(Absence(W, -1, 3, 0.0))[W] == (Residency(3, 4, COPIED, False),)
    assert residencies(Absence(W, -1, -1, 0.0))[W] == (Residency(0, 4, COPIED, False),)
    assert residencies(Absence(W, -1, 0, 0.0))[W] == (Residency(0, 4, COPIED, False),)


def test_a_tensor_that_stays_on_the_host_has_no_residency_at_the_end() -> None:
    assert residencies(Absence(Y, 5, 6, 0.0))[Y] == (Residency(6, 5, MADE, True),)


def test_a_tensor_that_is_there_is_an_input_even_if_another_result_of_its_operator_is_computed_again() -> None:
    graph = graph_of(["a, b = heavy(x)", "c = heavy(a)", "y = heavy(a, b, c)"], inputs="x", outputs="y")
    x, a, c, y = (tensor_named(graph, name) for name in "xacy")
    for order in ((a, c, x), (x, c, a)):
        assert contents_of(find_liveness(graph), 2, 3, order, [y]) == Contents(2, 3, (0,), (x, a, c), (y,))


def test_a_segment_without_an_input_of_the_step_is_refused() -> None:
    with pytest.raises(KeyError):
        contents_of(LIVENESS, 4, 5, [D], [E])


def test_a_tensor_is_computed_again_once_and_kept_for_later_segments() -> None:
    layout = Layout(
        EVERYWHERE,
        {
            X: (Residency(0, 6, BEGINS, False),), W: (Residency(0, 4, BEGINS, False),),
            A: (Residency(1, 1, MADE, False), Residency(4, 5, MADE, False)), B: (Residency(2, 2, MADE, False),),
            C: (Residency(3, 3, MADE, False),), D: (Residency(4, 4, MADE, False),), E: (Residency(5, 5, MADE, False),),
            Y: (Residency(6, 6, MADE, False),),
        },
    )  # fmt: skip
    contents = segments_of(LIVENESS, layout)
    assert contents[3] == Contents(3, 4, (0,), (X, C), (A, D))
    assert contents[5] == Contents(5, 6, (), (A, E), (Y,))


def test_copies_are_issued_after_the_last_need_and_awaited_by_the_next_one() -> None:
    retention = retain(LIVENESS, {})
    plan = plan_by_hand(GRAPH, retention, EVERYWHERE, {A: (Absence(A, 3, 4, 0.0),)})
    check(plan, GRAPH)
    copies = [(e.kind, e.trigger, e.until) for e in plan.events if e.kind.startswith("swap")]
    assert copies == []  # from segment 4 on, `a` is there again
    plan = plan_by_hand(GRAPH, retention, EVERYWHERE, {A: (Absence(A, 2, 4, 0.0),)})
    check(plan, GRAPH)
    copies = [(e.kind, e.trigger, e.until) for e in plan.events if e.kind.startswith("swap")]
    assert copies == [("swap_out", 1, 3), ("swap_in", 3, 5)]
