"""A record as Chrome trace events."""

import random

from tensile_jax.cli.run.trace import trace_events
from tensile_jax.runtime_records import LaneName, Level, Record, Span
from tests.cli.chrome_trace import check_format, check_slices_nest
from tests.cli.records import MIB, RECORD, WITH_STAGES


def of(trace: dict, ph: str, name: str | None = None) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == ph and name in (None, e["name"])]


def test_segments_are_on_their_jobs_tracks_and_copies_on_the_lanes() -> None:
    trace = trace_events(RECORD)
    check_format(trace)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(trace, "M", "thread_name")}
    assert [(names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in of(trace, "X")] == [
        ("a", "s0", 0.0, 100.0, {"job": "a", "step": 0, "nbytes": 0}),
        ("device to host", "a: w", 90.0, 60.0, {"job": "a", "step": 0, "nbytes": 3 * MIB}),
        ("b", "s0", 100.0, 200.0, {"job": "b", "step": 0, "nbytes": 0}),
        ("host to device", "a: w", 250.0, 40.0, {"job": "a", "step": 1, "nbytes": 3 * MIB}),
        ("a", "s0", 300.0, 100.0, {"job": "a", "step": 1, "nbytes": 0}),
    ]
    assert [e["args"]["name"] for e in of(trace, "M", "process_name")] == ["jobs", "link", "memory"]


def test_stages_are_on_tracks_of_their_own_and_a_job_that_never_ran_ends_there() -> None:
    trace = trace_events(WITH_STAGES)
    check_format(trace)
    check_slices_nest(trace)
    assert [e["args"]["name"] for e in of(trace, "M", "process_name")] == ["jobs", "link", "memory", "before the first step"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(trace, "M", "thread_name")}
    stages = [e for e in of(trace, "X") if e["cat"] == "stage"]
    assert [(names[e["pid"], e["tid"]], e["name"], e["args"]["note"]) for e in stages if e["args"]["job"] == "c"] == [
        ("c", "preparing", "tracing"), ("c", "queued", "needs 9 MiB"),
    ]  # fmt: skip
    assert [(names[e["pid"], e["tid"]], e["name"], e["ts"]) for e in of(trace, "i")] == [
        ("d", "failed", 340.0), ("c", "cancelled", 450.0),
    ]  # fmt: skip


def test_a_job_that_holds_nothing_counts_as_zero() -> None:
    assert [(e["ts"], e["args"]) for e in of(trace_events(RECORD), "C", "device bytes")] == [
        (0.0, {"a": 4 * MIB, "b": 0}),
        (100.0, {"a": 4 * MIB, "b": 5 * MIB}),
        (150.0, {"a": 1 * MIB, "b": 5 * MIB}),
        (300.0, {"a": 4 * MIB, "b": 0}),
    ]


def test_measured_bytes_are_told_where_known_and_the_budget_where_it_changes() -> None:
    trace = trace_events(RECORD)
    check_format(trace)

    def values(name: str) -> list[tuple[float, int]]:
        return [(e["ts"], e["args"]["bytes"]) for e in of(trace, "C", name)]

    assert values("measured bytes") == [(0.0, 3 * MIB), (150.0, 6 * MIB), (300.0, 4 * MIB)]
    assert values("budget") == [(0.0, 10 * MIB), (300.0, 8 * MIB)]


def test_an_empty_record_is_a_trace_of_names() -> None:
    trace = trace_events(Record((), ()))
    check_format(trace)
    assert {e["ph"] for e in trace["traceEvents"]} == {"M"}


def test_times_that_are_no_numbers_are_left_out_and_none_runs_backwards() -> None:
    nan, inf = float("nan"), float("inf")
    spans = (Span("out", "a", "x", 0, nan, 1.0, 1), Span("out", "a", "y", 0, 0.0, inf, 1), Span("out", "a", "z", 0, 5.0, 4.0, 1))
    trace = trace_events(Record(spans, (Level(nan, 1, {"a": 1}),)))
    check_format(trace)
    assert [(e["name"], e["dur"]) for e in of(trace, "X")] == [("a: z", 0.0)]
    assert of(trace, "C") == []


def test_random_records_keep_the_format() -> None:
    rng = random.Random(0)
    lanes: tuple[LaneName, ...] = ("compute", "out", "into")
    for _ in range(50):
        spans = tuple(
            Span(rng.choice(lanes), rng.choice("abc"), "s", i, at := rng.uniform(0, 1e6), at + rng.uniform(0, 9), i)
            for i in range(rng.randrange(20))
        )
        levels = tuple(Level(float(t), rng.choice((5, 9)), {rng.choice("abc"): t}, t or None) for t in range(rng.randrange(9)))
        trace = trace_events(Record(spans, levels))
        check_format(trace)
        assert len(of(trace, "X")) == len(spans)
        assert len(of(trace, "C", "device bytes")) == len(levels)
