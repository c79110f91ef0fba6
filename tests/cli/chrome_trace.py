"""Checks a trace against the rules of Chrome's trace event format, by which Perfetto and chrome://tracing read it."""

import json
from typing import Any

_ROUNDING_US = 1e-3


def check_format(trace: dict[str, Any]) -> None:
    """Raise AssertionError if the trace breaks one of the rules of Chrome's trace event format on which viewers rely."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    for event in events:
        assert event["ph"] in "MXCi"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in tracks
        if event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())


def check_slices_nest(trace: dict[str, Any]) -> None:
    """Raise AssertionError if two slices of one track overlap without one of them containing the other: viewers drop one."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_ends: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begin + _ROUNDING_US:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + _ROUNDING_US, (begin, end, open_ends[-1])
            open_ends.append(end)
