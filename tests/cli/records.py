"""Small records of runs for tests: two jobs, of which the second arrives at 100 us, and one copy in each direction."""

from dataclasses import replace

from tensile_jax.runtime_records import JobStatus, Level, Record, Span, Stage, Status

MIB = 2**20

RECORD = Record(
    spans=(
        Span("compute", "a", "s0", 0, 0.0, 100.0, 0),
        Span("out", "a", "w", 0, 90.0, 150.0, 3 * MIB),
        Span("compute", "b", "s0", 0, 100.0, 300.0, 0),
        Span("into", "a", "w", 1, 250.0, 290.0, 3 * MIB),
        Span("compute", "a", "s0", 1, 300.0, 400.0, 0),
    ),
    levels=(
        Level(0.0, 10 * MIB, {"a": 4 * MIB}, 3 * MIB),
        Level(100.0, 10 * MIB, {"a": 4 * MIB, "b": 5 * MIB}),
        Level(150.0, 10 * MIB, {"a": 1 * MIB, "b": 5 * MIB}, 6 * MIB),
        Level(300.0, 8 * MIB, {"a": 4 * MIB}, 4 * MIB),
    ),
)

WITH_STAGES = Record(
    spans=tuple(replace(span, begin_us=span.begin_us + 100.0, end_us=span.end_us + 100.0) for span in RECORD.spans),
    levels=tuple(replace(level, time_us=level.time_us + 100.0) for level in RECORD.levels),
    stages=(
        Stage("preparing", "a", "tracing", 20.0, 50.0),
        Stage("compiling", "a", "compiling 2 segments", 50.0, 100.0),
        Stage("preparing", "b", "planning", 110.0, 140.0),
        Stage("compiling", "b", "compiling 2 segments", 140.0, 170.0),
        Stage("queued", "b", "needs 5 MiB", 170.0, 200.0),
        Stage("preparing", "c", "tracing", 180.0, 220.0),
        Stage("queued", "c", "needs 9 MiB", 220.0, 450.0, "cancelled"),
        Stage("preparing", "d", "tracing", 300.0, 340.0, "failed"),
    ),
)
"""The same 100 us later, with what the jobs went through before their first iteration, and two more that ended there."""

STATUS = Status(
    time_s=12.3,
    budget_bytes=1200 * MIB,
    host_budget_bytes=4096 * MIB,
    device_bytes=812 * MIB,
    peak_bytes=1100 * MIB,
    host_bytes=300 * MIB,
    out_share=0.31,
    into_share=0.22,
    jobs=(
        JobStatus("resnet", "running", 2, 14, 200, 0.693, 2.1, 400 * MIB, 500 * MIB, 512 * MIB, 120 * MIB, 1234.5, 0, ""),
        JobStatus("gpt", "queued", 1, 0, 1500, None, None, 0, 0, 310 * MIB, 0, 0.0, 0, "needs 310 MiB"),
        JobStatus("cnn[red]", "finished", 1, 2000, 2000, 0.01234, 133.3, 0, 210 * MIB, 230 * MIB, 0, 32.0, 0, ""),
    ),
)
