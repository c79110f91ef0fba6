"""Algorithm 2 of TENSILE, line by line. The link moves one byte in a microsecond."""

import random
from itertools import pairwise
from typing import Any

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.policies.tensile.swap_scheduling import Interval, SharedLink, SwappedOut, SwapScheduling, feasible_intervals
from tests.builders import with_link
from tests.plan.policies.tensile.algorithm_1 import SwapEvent, events_of, find_peak
from tests.plan.sequences import random_sequence, sequence_of

X, A, B, C = (TensorId(t) for t in range(4))

# Operators of 20 us.       0         1         2         3         4
#                      x -> a    x -> b    b -> c    c -> d    a d -> y
#  a lies idle from 20 to 80; the peak is at 40, when a, b and c are there.
VALLEY = ["a = x @ 20", "b = x @ 20", "c = b @ 20", "d = c @ 20", "y = a d @ 20"]
SIZES = {"x": 1, "a": 10, "b": 5, "c": 30, "d": 5, "y": 1}


def valley(**sizes: int) -> AccessSequence:
    return sequence_of(VALLEY, {**SIZES, **sizes}, initial="x", results="y")


def scheduling(sequence: AccessSequence, **options: Any) -> SwapScheduling:
    """Algorithm 2 with these options, and those of the link: `duplex`, `max_swapping_rate`, `swapped`."""
    of_link = {name: options.pop(name) for name in ("duplex", "max_swapping_rate", "swapped") if name in options}
    return SwapScheduling(
        sequence, **{"profile": with_link(1.0), "across_iterations": False, "link": SharedLink(**of_link), **options}
    )


def runs(sequence: AccessSequence, count: int, **options: Any) -> list[tuple[SwappedOut, ...]]:
    """What as many runs schedule, each at the peak that the one before has left."""
    swapping = scheduling(sequence, **options)
    found: list[tuple[SwappedOut, ...]] = []
    for _ in range(count):
        events = [event for away in found for a in away for event in events_of(a)]
        found.append(swapping.run(find_peak(sequence, events)))
    return found


# -- scheduling_swap ----------------------------------------------------------------------------------------------------------


def test_algorithm_2_lines_1_to_16_out_as_early_and_in_as_late_as_possible() -> None:
    assert runs(valley(), 1) == [(SwappedOut(A, 0, 4, True, 20.0, 30.0, 70.0, 80.0),)]
    assert events_of(SwappedOut(A, 0, 4, True, 20.0, 30.0, 70.0, 80.0)) == (
        SwapEvent("swap_out", A, 20.0, 30.0), SwapEvent("swap_in", A, 70.0, 80.0)
    )  # fmt: skip


def test_algorithm_2_line_3_feasible_intervals_are_what_is_busy_leaves_free() -> None:
    busy = [Interval(0, 3), Interval(5, 6), Interval(5, 5), Interval(8, 12)]
    assert [*feasible_intervals(2, 10, iter(busy))] == [(3, 5), (6, 8)]
    assert [*feasible_intervals(2, 15, iter(busy))] == [(3, 5), (6, 8), (12, 15)]
    assert [*feasible_intervals(9, 11, iter(busy))] == []
    assert [*feasible_intervals(0, 4, iter(()))] == [(0, 4)]


def test_algorithm_2_lines_4_5_only_an_interval_that_covers_the_event_will_do() -> None:
    assert runs(valley(a=20), 1)[0][0].out_end_us == 40.0, "20 bytes are out right at the peak"
    assert runs(valley(a=21), 1) == [()], "21 would not be"


def test_algorithm_2_lines_4_5_one_tensor_is_swapped_at_a_time() -> None:
    # a and b are idle from 20 and 40 to 100; both would go out during [40, 50), and come in during [90, 100).
    lines = ["a = x @ 20", "b = x @ 20", "c = x @ 20", "d = c @ 20", "y = d @ 20", "z = a b @ 20"]
    sizes = {"x": 1, "a": 20, "b": 10, "c": 1, "d": 40, "y": 1, "z": 1}
    sequence = sequence_of(lines, sizes, initial="x", results="z")
    a, b = SwappedOut(A, 0, 5, True, 20.0, 40.0, 80.0, 100.0), SwappedOut(B, 1, 5, True, 40.0, 50.0, 70.0, 80.0)
    assert runs(sequence, 2) == [(a,), (b,)]


def test_with_a_channel_for_each_direction_a_copy_out_may_run_beside_a_copy_in() -> None:
    # a is idle during [20, 60), its two copies fill that; b is idle during [40, 100), and the second peak is at 80.
    lines = ["a = x @ 20", "b = x @ 20", "d = x @ 20", "e = a x @ 20", "f = x @ 20", "z = b @ 20"]
    sizes = {"x": 1, "a": 20, "b": 10, "d": 50, "e": 0, "f": 60, "z": 1}
    sequence = sequence_of(lines, sizes, initial="x", results="z")
    a = SwappedOut(A, 0, 3, True, 20.0, 40.0, 40.0, 60.0)
    assert runs(sequence, 2) == [(a,), (SwappedOut(B, 2, 5, True, 60.0, 70.0, 90.0, 100.0),)]
    assert runs(sequence, 2, duplex=True) == [(a,), (SwappedOut(B, 1, 5, True, 40.0, 50.0, 90.0, 100.0),)]


def test_algorithm_2_lines_8_9_and_26_27_an_updated_parameter_comes_back_for_the_first_use_of_the_old_one() -> None:
    # p is used at 1 and updated at 3; the peak is at 0, when p stands for what the last iteration has made of it.
    sequence = sequence_of(
        ["h = x @ 10", "y = h p @ 10", "g = y @ 10", "v = p g @ 10", "z = y @ 20"],
        {"x": 100, "p": 10, "h": 1, "y": 1, "g": 10, "v": 10, "z": 1},
        initial="x p",
        updates={"v": "p"},
    )
    p, v = TensorId(1), TensorId(5)
    out = SwappedOut(v, 3, 5, True, 40.0, 50.0, 60.0, 60.0)
    into = SwappedOut(p, -1, 1, False, 0.0, 0.0, 0.0, 10.0)
    assert runs(sequence, 2, across_iterations=True) == [(out, into), ()]
    assert events_of(out) + events_of(into) == (SwapEvent("swap_out", v, 40.0, 50.0), SwapEvent("swap_in", p, 0.0, 10.0))
    assert runs(sequence, 1, across_iterations=False) == [()], "p would have to leave before the iteration begins"


def test_algorithm_2_lines_8_9_and_26_27_in_a_peak_after_the_update_it_must_be_out_by_then() -> None:
    lines = ["y = x p @ 20", "v = p y @ 10", "w = x @ 20", "z = w @ 20"]
    sizes = {"x": 1, "p": 10, "y": 1, "v": 10, "w": 1, "z": 90}
    sequence = sequence_of(lines, sizes, initial="x p", updates={"v": "p"})
    assert find_peak(sequence).time_us == 50.0
    assert runs(sequence, 1, across_iterations=True) == [()], "p is needed at once when the next iteration begins"
    lines[0:1] = ["u = x @ 20", "y = u p @ 20"]
    later = sequence_of(lines, {**sizes, "u": 1}, initial="x p", updates={"v": "p"})
    v, p = TensorId(3), TensorId(1)
    assert runs(later, 1, across_iterations=True) == [
        (SwappedOut(v, 2, 5, True, 50.0, 60.0, 90.0, 90.0), SwappedOut(p, -1, 1, False, 0.0, 0.0, 10.0, 20.0))
    ]


def test_algorithm_2_lines_26_27_an_updated_parameter_leaves_after_its_last_access_of_the_iteration() -> None:
    lines = ["h = x @ 10", "y = h p @ 10", "v = p y @ 10", "w = y @ 10", "e = v @ 10", "z = y @ 10"]
    sizes = {"x": 100, "p": 5, "h": 1, "y": 1, "v": 5, "w": 1, "e": 1, "z": 1}
    sequence = sequence_of(lines, sizes, initial="x p", updates={"v": "p"})
    assert runs(sequence, 1, across_iterations=True)[0][0] == SwappedOut(TensorId(4), 4, 6, True, 50.0, 55.0, 60.0, 60.0)


def test_algorithm_2_line_26_an_old_parameter_stands_for_the_updated_one_before_its_first_use_only() -> None:
    lines = ["h = x @ 10", "y = h p @ 10", "v = p y @ 10", "z = y @ 10"]
    sizes = {"x": 1, "p": 5, "h": 1, "y": 100, "v": 5, "z": 1}
    sequence = sequence_of(lines, sizes, initial="x p", updates={"v": "p"})
    assert find_peak(sequence).time_us == sequence.uses(TensorId(1))[0].begin_us
    assert runs(sequence, 1, across_iterations=True) == [()]


def test_algorithm_2_lines_12_to_18_without_a_first_access_there_is_no_swap() -> None:
    sequence = sequence_of(
        ["a = x @ 20", "b = x @ 20", "c = b @ 20"], {"x": 1, "a": 10, "b": 1, "c": 99}, initial="x", results="a c"
    )
    assert runs(sequence, 1) == [()]


RETRY = ["a = x @ 10", "b = x @ 10", "c = a b @ 10", "d = c @ 20", "e = d @ 20", "y = a e @ 10"]


def test_algorithm_2_lines_18_19_retry_after_the_first_access() -> None:
    # a is idle during [10, 20), enough for one copy of 8 us but not for two, and again during [30, 70).
    sizes = {"x": 1, "a": 8, "b": 1, "c": 1, "d": 30, "e": 30, "y": 1}
    sequence = sequence_of(RETRY, sizes, initial="x", results="y")
    assert find_peak(sequence).time_us == 50.0
    assert runs(sequence, 1) == [(SwappedOut(A, 2, 5, True, 30.0, 38.0, 62.0, 70.0),)]


def test_algorithm_2_line_18_a_swap_out_without_its_swap_in_is_withdrawn() -> None:
    sizes = {"x": 1, "a": 8, "b": 1, "c": 1, "d": 30, "e": 30, "y": 1}
    swapping = scheduling(sequence_of(RETRY, sizes, initial="x", results="y"))
    swapping.run(find_peak(sequence_of(RETRY, sizes, initial="x", results="y")))
    assert swapping._out == [(30.0, 38.0), (62.0, 70.0)]  # pyright: ignore[reportPrivateUsage] # what is busy


def test_algorithm_2_line_32_there_is_no_retry_after_the_latest_time() -> None:
    # The same, but the peak comes at 30, as soon as a has been used.
    sizes = {"x": 1, "a": 8, "b": 1, "c": 1, "d": 60, "e": 1, "y": 1}
    sequence = sequence_of(RETRY, sizes, initial="x", results="y")
    assert find_peak(sequence).time_us == 30.0
    assert runs(sequence, 1) == [()]


# -- the loop over the tensors of the peak ------------------------------------------------------------------------------------


def test_algorithm_2_line_22_the_largest_tensor_first_and_of_equal_ones_the_first() -> None:
    lines = ["a = x @ 20", "b = x @ 20", "c = x @ 20", "d = x @ 40", "e = d @ 40", "y = a b c @ 20"]
    sizes = {"x": 1, "a": 4, "b": 6, "c": 6, "d": 1, "e": 50, "y": 1}
    found = runs(sequence_of(lines, sizes, initial="x", results="y"), 4)
    assert [[away.tensor for away in some] for some in found] == [[B], [C], [A], []]


def test_algorithm_2_lines_23_24_the_swap_out_lies_between_the_tga_and_the_peak() -> None:
    (away,) = runs(valley(), 1)[0]
    assert valley().generating(A).end_us <= away.out_begin_us
    assert away.out_end_us <= find_peak(valley()).time_us


def test_algorithm_2_line_25_a_tensor_is_swapped_out_once() -> None:
    assert runs(valley(), 2)[1] == ()
    assert runs(valley(d=0, b=1), 3)[1:] == [(), ()]


def test_algorithm_2_line_28_swapping_keeps_to_the_rate_of_the_job() -> None:
    lines = ["a = x @ 20", "b = x @ 20", "c = x @ 20", "d = x @ 40", "e = d @ 40", "y = a b c @ 20"]
    sizes = {"x": 1, "a": 4, "b": 6, "c": 6, "d": 1, "e": 50, "y": 1}
    sequence = sequence_of(lines, sizes, initial="x", results="y", job=3)

    def swapped(rate: float, others: int) -> int:
        return len([away for away in runs(sequence, 4, max_swapping_rate={3: rate}, swapped={1: others}) if away])

    assert swapped(1.0, 0) == 3
    assert swapped(0.5, 1) == 2, "0 of 1, then 1 of 2, then 2 of 3 are too many"
    assert swapped(0.0, 1) == 1, "0 of 1 is not above the limit yet"
    assert swapped(0.5, 9) == 3


def test_algorithm_2_line_28_what_is_generated_and_never_used_is_not_swapped() -> None:
    sequence = sequence_of(["y z = x @ 20"], {"x": 1, "y": 1, "z": 9}, initial="x", results="y z")
    assert runs(sequence, 1) == [()]


def test_a_fixed_tensor_is_never_swapped() -> None:
    assert runs(sequence_of(VALLEY, SIZES, initial="x", results="y", fixed="a"), 1) == [()]


# a is generated at 0 and used at 2, 4 and 6, with an operator of 20 us in every gap; the peak is at 100, in the last gap.
USED_THREE_TIMES = ["a = x @ 20", "b = x @ 20", "c = a @ 20", "d = x @ 20", "e = a @ 20", "f = x @ 20", "y = a @ 20"]


def test_algorithm_2_line_34_the_rest_of_the_accesses_need_a_swap_in_only() -> None:
    sizes = {"x": 1, "a": 10, "b": 1, "c": 1, "d": 1, "e": 1, "f": 50, "y": 1}
    assert runs(sequence_of(USED_THREE_TIMES, sizes, initial="x"), 1) == [
        (
            SwappedOut(A, 0, 2, True, 20.0, 30.0, 30.0, 40.0),
            SwappedOut(A, 2, 4, False, 60.0, 60.0, 70.0, 80.0),
            SwappedOut(A, 4, 6, False, 100.0, 100.0, 110.0, 120.0),
        )
    ]


def test_algorithm_2_line_34_an_access_without_room_before_it_is_left_as_it_is() -> None:
    short = ["a = x @ 20", "b = x @ 20", "c = a @ 20", "d = x @ 9", "e = a @ 20", "f = x @ 20", "y = a @ 20"]
    sizes = {"x": 1, "a": 10, "b": 1, "c": 1, "d": 1, "e": 1, "f": 50, "y": 1}
    assert runs(sequence_of(short, sizes, initial="x"), 1) == [
        (
            SwappedOut(A, 0, 2, True, 20.0, 30.0, 30.0, 40.0),
            SwappedOut(A, 4, 6, False, 89.0, 89.0, 99.0, 109.0),
        )
    ]


def test_algorithm_2_line_34_an_old_parameter_that_the_host_has_needs_no_swap_out() -> None:
    # The first peak is at 0, before p is used; the next at 40, between its two uses.
    lines = ["h = x @ 20", "y = h p @ 20", "b = y @ 20", "c = b p @ 20", "v = p c @ 20", "z = c @ 20"]
    sizes = {"x": 90, "p": 10, "h": 1, "y": 1, "b": 85, "c": 1, "v": 10, "z": 1}
    sequence = sequence_of(lines, sizes, initial="x p", updates={"v": "p"})
    p, v = TensorId(1), TensorId(6)
    assert runs(sequence, 3, across_iterations=True) == [
        (SwappedOut(v, 4, 6, True, 100.0, 110.0, 120.0, 120.0), SwappedOut(p, -1, 1, False, 0.0, 0.0, 10.0, 20.0)),
        (SwappedOut(p, 1, 3, False, 40.0, 40.0, 50.0, 60.0),),
        (),
    ]


# -- what holds for every schedule --------------------------------------------------------------------------------------------


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


@pytest.mark.parametrize("seed", range(150))
def test_windows_are_exclusive_accesses_find_their_tensors_and_no_swap_raises_the_peak(seed: int) -> None:
    rng = random.Random(seed)
    sequence = random_sequence(seed)
    duplex = rng.random() < 0.5
    options = {
        "duplex": duplex,
        "across_iterations": rng.random() < 0.7,
        "profile": with_link(rng.choice([0.5, 1.0, 4.0, 100.0]), rng.choice([1.0, 4.0, 100.0])),
    }
    swapping, tries_all = scheduling(sequence, **options), scheduling(sequence, **options)
    swaps: list[SwappedOut] = []
    peaks = [find_peak(sequence)]
    while found := swapping.run(peaks[-1]):
        assert found == tries_all.run(peaks[-1])
        tries_all._failed.clear()  # pyright: ignore[reportPrivateUsage] # what it leaves out must not matter
        swaps += found
        peaks.append(find_peak(sequence, [event for away in swaps for event in events_of(away)]))
    assert tries_all.run(peaks[-1]) == ()
    assert all(before.nbytes >= after.nbytes for before, after in pairwise(peaks))
    events = [event for away in swaps for event in events_of(away)]
    lanes = [[e for e in events if e.kind == kind] for kind in ("swap_out", "swap_in")] if duplex else [events]
    for lane in lanes:
        ordered = sorted(lane, key=lambda event: event.begin_us)
        assert all(one.end_us <= other.begin_us for one, other in pairwise(ordered))
    for event in events:
        assert 0.0 <= event.begin_us < event.end_us <= sequence.end_us
        for access in sequence.accesses[event.tensor]:
            assert not overlap((event.begin_us, event.end_us), (access.begin_us, access.end_us))
    on_host: set[TensorId] = {sequence.updates[a.tensor] for a in swaps if a.before == len(sequence.ends_us)}
    for away in sorted(swaps, key=lambda away: away.out_begin_us):
        assert away.copies_out or away.tensor in on_host, "only what the host has may be dropped"
        on_host.add(away.tensor)
        assert away.after < away.before
    for away in swaps:
        for access in sequence.accesses[away.tensor]:
            assert access.end_us <= away.out_begin_us or away.in_end_us <= access.begin_us, "nothing is used when absent"
