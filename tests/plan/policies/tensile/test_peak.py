"""Algorithm 1 of TENSILE, line by line, and the incremental footprint against it and against the definition."""

import random

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import Access, AccessSequence
from tensile_jax.plan.policies.tensile.footprint import Footprint, Peak, Recomputation
from tensile_jax.plan.policies.tensile.swap_scheduling import SharedLink, SwappedOut, SwapScheduling
from tests.builders import with_link
from tests.plan.policies.tensile.algorithm_1 import SwapEvent, events_of, find_peak, find_releases, starting_on_host
from tests.plan.sequences import random_sequence, sequence_of, usage

X, A, B, C, D, Y = (TensorId(t) for t in range(6))

# Operators of 20 us.       0         1         2         3         4
#                      x -> a    x -> b    b -> c    c -> d    a d -> y
#  a lies idle from 20 to 80; the footprint is 11, 16, 45, 45, 16, so that the peak is at 40, when c is generated.
VALLEY = sequence_of(
    ["a = x @ 20", "b = x @ 20", "c = b @ 20", "d = c @ 20", "y = a d @ 20"],
    {"x": 1, "a": 10, "b": 5, "c": 30, "d": 5, "y": 1},
    initial="x",
    results="y",
)


def peak_of(sequence: AccessSequence, *away: SwappedOut) -> Peak:
    """By Algorithm 1, and the same by the footprint."""
    found = find_peak(sequence, [event for a in away for event in events_of(a)])
    footprint = Footprint(sequence)
    for a in away:
        footprint.take_away(a.tensor, a.out_end_us, a.in_end_us, released_by=None if a.copies_out or a.after < 0 else a.after)
    assert footprint.peak() == found
    return found


# -- Algorithm 1 ----------------------------------------------------------------------------------------------------------------


def test_algorithm_1_line_1_what_is_there_at_the_beginning_begins_the_count() -> None:
    sequence = sequence_of(["y = x @ 10"], {"x": 100, "y": 0}, initial="x", results="x")
    assert peak_of(sequence) == Peak(100, frozenset({X}), None, 0.0)


def test_algorithm_1_lines_2_3_and_24_to_28_the_peak_with_its_tensors_its_last_access_and_its_time() -> None:
    assert peak_of(VALLEY) == Peak(45, frozenset({A, B, C}), Access(X, 0, "using", 0.0, 20.0, 1), 40.0)


def test_algorithm_1_line_4_what_is_released_at_t_is_reused_at_t() -> None:
    sequence = sequence_of(["a = x @ 10", "b = a @ 10"], {"x": 50, "a": 10, "b": 51}, initial="x")
    assert peak_of(sequence).nbytes == 10 + 51


def test_algorithm_1_line_4_what_an_operator_reads_is_there_while_it_writes() -> None:
    sequence = sequence_of(["a = x @ 10"], {"x": 50, "a": 10}, initial="x")
    assert peak_of(sequence).nbytes == 60


def test_algorithm_1_line_5_an_output_that_began_the_count_adds_nothing() -> None:
    lines, sizes = ["a = x @ 10", "y = a @ 10"], {"x": 1, "a": 10, "y": 100}
    assert peak_of(sequence_of(lines, sizes, initial="x", results="y")).nbytes == 110
    assert peak_of(sequence_of(lines, sizes, initial="x y", results="y")) == Peak(111, frozenset({X, A, B}), None, 0.0)


def test_algorithm_1_lines_5_to_7_an_updated_parameter_takes_the_memory_of_the_old_one() -> None:
    sequence = sequence_of(
        ["g = p @ 10", "v = p g @ 10", "y = g @ 10"], {"p": 100, "g": 5, "v": 100, "y": 7}, initial="p", updates={"v": "p"}
    )
    p, g, v, y = (TensorId(t) for t in range(4))
    assert peak_of(sequence) == Peak(112, frozenset({g, v, y}), Access(g, 1, "using", 10.0, 20.0, 5), 20.0)
    assert p not in peak_of(sequence).tensors


def test_algorithm_1_lines_8_to_10_the_last_access_releases() -> None:
    assert find_releases(VALLEY, (), ()) == {(X, 1), (A, 4), (B, 2), (C, 3), (D, 4)}


def test_algorithm_1_lines_9_and_11_12_only_an_access_that_does_not_release_is_the_last_input_access() -> None:
    # b and c at operators 2 and 3 are accesses before the second peak, but they release.
    sequence = sequence_of(
        ["a = x @ 20", "b = a @ 20", "c = b @ 20", "y = c a @ 20"], {"x": 1, "a": 1, "b": 1, "c": 9, "y": 9}, initial="x"
    )
    a = TensorId(1)
    assert peak_of(sequence).time_us == 60.0
    assert peak_of(sequence).last_input_access == Access(a, 1, "using", 20.0, 40.0, 1)


def test_algorithm_1_lines_13_and_17_to_19_a_swap_in_counts_from_its_end() -> None:
    early = SwappedOut(A, 0, 4, True, 20.0, 30.0, 40.0, 50.0)  # back at 50, when b and c are there
    assert peak_of(VALLEY, early) == Peak(45, frozenset({A, B, C}), Access(X, 0, "using", 0.0, 20.0, 1), 50.0)


def test_algorithm_1_lines_14_to_16_an_event_is_executed_after_the_last_access_before_it() -> None:
    assert [VALLEY.last_ended(t) for t in (20.0, 30.0, 70.0)] == [0, 0, 2]


def test_algorithm_1_lines_20_to_22_a_swap_out_counts_at_its_end() -> None:
    away = SwappedOut(A, 0, 4, True, 20.0, 30.0, 70.0, 80.0)
    assert peak_of(VALLEY, away) == Peak(35, frozenset({B, C}), Access(X, 0, "using", 0.0, 20.0, 1), 40.0)


def test_algorithm_1_lines_20_to_22_a_swap_out_counts_at_the_end_of_its_tua_if_that_is_later() -> None:
    # b is copied during [40, 45), while operator 2 uses it: it goes at 60, and is still there when q is back at 55.
    sequence = sequence_of(
        ["q = x @ 20", "b = x @ 20", "d = b @ 20", "y = q @ 20", "z = b @ 20"],
        {"x": 1, "q": 10, "b": 10, "d": 10, "y": 1, "z": 1},
        initial="x",
    )
    x, q, b, d = (TensorId(t) for t in range(4))
    swaps = [
        SwapEvent("swap_out", q, 20.0, 30.0), SwapEvent("swap_in", q, 50.0, 55.0),
        SwapEvent("swap_out", b, 40.0, 45.0), SwapEvent("swap_in", b, 70.0, 80.0),
    ]  # fmt: skip
    assert find_peak(sequence, swaps) == Peak(30, frozenset({q, b, d}), Access(b, 2, "using", 40.0, 60.0, 10), 55.0)


def test_algorithm_1_line_23_of_equal_heights_the_first_is_the_peak() -> None:
    assert [sum(usage(VALLEY, t).values()) for t in VALLEY.begins_us] == [11, 16, 45, 45, 16]
    assert peak_of(VALLEY).time_us == 40.0


def test_situation_5_the_access_before_a_swap_in_releases_unless_a_swap_out_lies_between() -> None:
    # a is generated at 0, used at 2, 4 and 6; out after 0, in before 2 and, from the host's copy, before 6.
    sequence = sequence_of(
        ["a = x @ 20", "b = x @ 20", "c = a @ 20", "d = x @ 20", "e = a @ 20", "f = x @ 20", "y = a @ 20"],
        {"x": 1, "a": 5, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "y": 1},
        initial="x",
        results="x b c d e f y",
    )
    away = (SwappedOut(A, 0, 2, True, 20.0, 25.0, 35.0, 40.0), SwappedOut(A, 4, 6, False, 100.0, 100.0, 115.0, 120.0))
    events = [event for a in away for event in events_of(a)]
    assert [event.kind for event in events] == ["swap_out", "swap_in", "swap_in"]
    assert find_releases(sequence, events, ()) == {(A, 4), (A, 6)}
    assert peak_of(sequence, *away).nbytes == max(sum(usage(sequence, t, away).values()) for t in range(140))


def test_a_recomputation_releases_after_an_access_and_generates_again_before_the_next() -> None:
    again = [Recomputation(A, 0, 4)]
    assert find_releases(VALLEY, (), again) == {(X, 1), (A, 0), (A, 4), (B, 2), (C, 3), (D, 4)}
    assert find_peak(VALLEY, (), again) == Peak(35, frozenset({B, C}), Access(X, 0, "using", 0.0, 20.0, 1), 40.0)


def test_an_old_parameter_is_on_the_host_at_the_beginning_if_the_updated_one_stays_out_at_the_end() -> None:
    sequence = sequence_of(
        ["h = x @ 10", "y = h p @ 10", "v = p y @ 10", "z = y @ 20"],
        {"x": 100, "p": 10, "h": 1, "y": 1, "v": 10, "z": 1},
        initial="x p",
        updates={"v": "p"},
    )
    p, v = TensorId(1), TensorId(4)
    away = (SwappedOut(v, 2, 4, True, 30.0, 40.0, 50.0, 50.0), SwappedOut(p, -1, 1, False, 0.0, 0.0, 0.0, 10.0))
    events = [event for a in away for event in events_of(a)]
    assert starting_on_host(sequence, events) == {p}
    assert starting_on_host(sequence, events[1:]) == frozenset()
    assert peak_of(sequence).nbytes == 111
    assert peak_of(sequence, *away).nbytes == 101


def test_an_iteration_without_operators_holds_nothing() -> None:
    assert peak_of(sequence_of([], {})) == Peak(0, frozenset(), None, 0.0)


# -- against the definition -----------------------------------------------------------------------------------------------------


def naive(sequence: AccessSequence, swaps: list[SwappedOut], recomputed: list[Recomputation]) -> tuple[int, float]:
    times = {0.0, *sequence.begins_us, *(a.in_end_us for a in swaps)} - {sequence.end_us}
    heights = {t: sum(usage(sequence, t, swaps, recomputed).values()) for t in sorted(times)}
    height = max(heights.values())
    return height, next(t for t, h in heights.items() if h == height)


@pytest.mark.parametrize("seed", range(150))
def test_the_sweep_the_footprint_and_the_definition_agree_after_every_event(seed: int) -> None:
    rng = random.Random(seed)
    sequence = random_sequence(seed)
    footprint = Footprint(sequence)
    swapping = SwapScheduling(
        sequence,
        with_link(rng.choice([0.5, 1.0, 4.0]), rng.choice([0.5, 1.0, 4.0])),
        across_iterations=rng.random() < 0.5,
        link=SharedLink(duplex=rng.random() < 0.5),
    )
    swaps: list[SwappedOut] = []
    recomputed: list[Recomputation] = []
    for turn in range(12):
        peak = footprint.peak()
        assert peak == find_peak(sequence, [e for a in swaps for e in events_of(a)], recomputed)
        assert (peak.nbytes, peak.time_us) == naive(sequence, swaps, recomputed)
        if (peak.nbytes, peak.time_us) != (sum(sequence.nbytes[t] for t in peak.tensors), 0.0):
            assert peak.tensors == usage(sequence, peak.time_us, swaps, recomputed).keys()
        if turn < 6:
            for away in swapping.run(peak):
                by = None if away.copies_out or away.after < 0 else away.after
                footprint.take_away(away.tensor, away.out_end_us, away.in_end_us, released_by=by)
                swaps.append(away)
        else:
            gone = swapping.swapped | {r.tensor for r in recomputed}
            gaps = [
                Recomputation(t, some[k].operator, some[k + 1].operator)
                for t, some in sequence.accesses.items()
                for k in range(len(some) - 1)
                if t not in gone and t not in sequence.initial and some[k].end_us < some[k + 1].begin_us
            ]
            if gaps:
                again = rng.choice(gaps)
                leave, back = sequence.ends_us[again.after], sequence.begins_us[again.before]
                footprint.take_away(again.tensor, leave, back, released_by=again.after)
                recomputed.append(again)
