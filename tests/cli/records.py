"""A small record of a run for tests: two jobs, of which the second arrives at 100 us, and one copy in each direction."""

from tensile_jax.runtime_records import JobStatus, Level, Record, Span, Status

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
