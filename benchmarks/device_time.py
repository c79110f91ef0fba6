"""Measures steps that are issued one after another, as in a training, and reads from a profile what the GPU did in them.

Where `pipelined_ms` is far above `busy_ms`, the GPU waits for the host, which issues launches. Where `beside_ms` is far below
`copied_ms`, kernels wait for copies between device memory and host memory.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

_STEPS, _WAITED = 10, 5
PROFILED = 3

Span = tuple[float, float]
"""Begin and end, in nanoseconds."""


class Profile(NamedTuple):
    """What ran on the streams of a GPU in a step, on average.

    Attributes:
        busy_ms: the time in which at least one kernel or copy ran; None if there is no GPU.
        kernels: how many kernels and copies ran. A CUDA graph may count as one.
        copied_ms: the time in which at least one copy between device memory and host memory ran.
        beside_ms: the part of `copied_ms` in which a kernel ran, too.
    """

    busy_ms: float | None
    kernels: float
    copied_ms: float
    beside_ms: float


def measured(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    """How long steps take that are issued one after another, and what a profile of them shows; `state` may be donated.

    `pipelined_ms` is the time of a step if none is waited for, `waited_ms` the median time if each is waited for, and `call_ms`
    the median time until a call returns. The other figures are those of a `Profile`.
    """

    def run(steps: int) -> list[float]:
        nonlocal state
        calls: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            state, _ = step(state, batch)
            calls.append((time.perf_counter() - began) * 1e3)
        jax.block_until_ready(state)
        return calls

    def timed(steps: int) -> float:
        began = time.perf_counter()
        run(steps)
        return (time.perf_counter() - began) * 1e3 / steps

    run(3)
    pipelined_ms = timed(_STEPS)
    calls = run(_STEPS)
    waited_ms = statistics.median(timed(1) for _ in range(_WAITED))
    return {
        "pipelined_ms": pipelined_ms,
        "waited_ms": waited_ms,
        "call_ms": statistics.median(calls),
        **profiled(lambda: run(PROFILED))._asdict(),
    }


def profiled(run: Callable[[], object]) -> Profile:
    """What the GPU does while `run` issues `PROFILED` steps and waits for them."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise, every call of a Python function is recorded, and takes longer
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        file = next(Path(folder).rglob("*.xplane.pb"))
        return read_profile(jax.profiler.ProfileData.from_file(str(file)))


def read_profile(data: Any) -> Profile:
    """What ran on the streams of the GPUs in the profile of `PROFILED` steps."""
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in _on_streams(data):
        span = (event.start_ns, event.start_ns + event.duration_ns)
        (copies if _is_between_memories(event) else kernels).append(span)
    busy, copied, computed = covered([*copies, *kernels]), covered(copies), covered(kernels)
    return Profile(
        busy / 1e6 / PROFILED if copies or kernels else None,
        (len(copies) + len(kernels)) / PROFILED,
        copied / 1e6 / PROFILED,
        (copied + computed - busy) / 1e6 / PROFILED,
    )


def covered(spans: Sequence[Span]) -> float:
    """How long at least one of the spans lasts."""
    found = until = 0.0
    for begin, end in sorted(spans):
        found += max(0.0, end - max(begin, until))
        until = max(until, end)
    return found


def _on_streams(data: Any) -> Iterator[Any]:
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if "Stream" in line.name:
                    yield from line.events


def _is_between_memories(event: Any) -> bool:
    """CUPTI names the direction of a copy, and the kinds of memory that it is between: `kind_src:pinned kind_dst:device ...`."""
    if not event.name.startswith("Memcpy"):
        return False
    details = " ".join(str(value) for name, value in event.stats if name == "memcpy_details")
    return event.name in ("MemcpyH2D", "MemcpyD2H") or "pinned" in details or "host" in details
