"""Converts the record of a run to Chrome trace events, which https://ui.perfetto.dev and chrome://tracing display.

Each event has a phase `ph`:

    "M"  the name, or the position, of a process or a track
    "X"  a span, which begins at `ts` and lasts `dur`
    "i"  an instant
    "C"  the values of a counter from `ts` on

The trace has four processes. "jobs" has a track for each job, with the segments (executables of its plan) that ran. "link" has a
track for each direction between host and device, with the copies. "memory" has counters. The counter "device bytes" has a series
for each job; chrome://tracing stacks the series, and Perfetto shows them side by side. "before the first step" has a track for
each job, with what the job did and waited for until its first step. If the job ended without a step, an instant event
shows how it ended. Times are in microseconds, as the format requires.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from tensile_jax.runtime_records import LaneName, Level, Record, Span, Stage

_COMPUTE, _LINK, _MEMORY, _BEFORE = 1, 2, 3, 4
_LINK_TRACKS: dict[LaneName, tuple[int, str]] = {"out": (1, "device to host"), "into": (2, "host to device")}


def trace_events(record: Record) -> dict[str, Any]:
    """The JSON object of the trace, with events in order of `ts`."""
    tracks = {job: number for number, job in enumerate(_jobs(record), start=1)}
    events = [_span(span, tracks) for span in record.spans if isfinite(span.begin_us) and isfinite(span.end_us)]
    events += [one for stage in record.stages for one in _stage(stage, tracks[stage.job])]
    events += _memory(record.levels, tuple(tracks))
    events.sort(key=lambda event: event["ts"])
    waited = {stage.job: tracks[stage.job] for stage in record.stages}
    return {"traceEvents": [*_names(tracks, waited), *events], "displayTimeUnit": "ms"}


def _jobs(record: Record) -> list[str]:
    """The names of the jobs, in the order in which they appear in the record."""
    spans = ((span.begin_us, span.job) for span in record.spans)
    levels = ((level.time_us, job) for level in record.levels for job in level.jobs)
    stages = ((stage.begin_us, stage.job) for stage in record.stages)
    return list(dict.fromkeys(job for _, job in sorted((*spans, *levels, *stages), key=lambda pair: pair[0])))


def _names(tracks: dict[str, int], waited: dict[str, int]) -> Iterable[dict[str, Any]]:
    before = [(_BEFORE, "before the first step")] if waited else []
    for pid, name in ((_COMPUTE, "jobs"), (_LINK, "link"), (_MEMORY, "memory"), *before):
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    named = [(_COMPUTE, number, job) for job, number in tracks.items()]
    named += [(_LINK, number, name) for number, name in _LINK_TRACKS.values()]
    named += [(_BEFORE, number, job) for job, number in waited.items()]
    for pid, tid, name in named:
        yield _metadata("thread_name", pid, tid, {"name": name})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _span(span: Span, tracks: dict[str, int]) -> dict[str, Any]:
    if span.lane == "compute":
        pid, tid, name = _COMPUTE, tracks[span.job], span.name
    else:
        pid, tid, name = _LINK, _LINK_TRACKS[span.lane][0], f"{span.job}: {span.name}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": span.begin_us,
        "dur": max(0.0, span.end_us - span.begin_us),
        "args": {"job": span.job, "step": span.step, "nbytes": span.nbytes},
    }


def _stage(stage: Stage, track: int) -> Iterable[dict[str, Any]]:
    where = {"cat": "stage", "pid": _BEFORE, "tid": track}
    duration = max(0.0, stage.end_us - stage.begin_us)
    yield {
        "ph": "X", "name": stage.name, **where, "ts": stage.begin_us, "dur": duration,
        "args": {"job": stage.job, "note": stage.note},
    }  # fmt: skip
    if stage.ended is not None:
        yield {"ph": "i", "name": stage.ended, **where, "ts": stage.end_us, "s": "t", "args": {"job": stage.job}}


def _memory(levels: Sequence[Level], jobs: tuple[str, ...]) -> Iterable[dict[str, Any]]:
    """The counters. A job that holds nothing has the value zero, because a counter keeps its last value. The budget has an event
    at each change.
    """
    budget: int | None = None
    for level in levels:
        if not isfinite(level.time_us):
            continue
        yield _counter("device bytes", level.time_us, {job: level.jobs.get(job, 0) for job in jobs})
        if level.measured_bytes is not None:
            yield _counter("measured bytes", level.time_us, {"bytes": level.measured_bytes})
        if level.budget_bytes != budget:
            budget = level.budget_bytes
            yield _counter("budget", level.time_us, {"bytes": budget})


def _counter(name: str, ts: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "cat": "memory", "pid": _MEMORY, "tid": 0, "ts": ts, "args": values}
