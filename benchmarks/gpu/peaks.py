"""`make gpu-peaks`: the most memory that XLA's allocator has in use, beside what plans say.

Each row is a case (`../case.py`) or, with `launch` "plain jit", plain jit's step alone. XLA has tried its kernels before, in
another process, if `--at-once` is 2 or more. So the workspaces are those of the chosen kernels, and the allocator's peak contains
nothing else. `allocator_peaks` are the allocator's peaks after each step, and `peak_bytes` is the peak by the package's account.
`predicted_peak_bytes` is the plan's peak, of which the allocator hands out `planned_allocator_bytes` without being asked.
`allocator` says how JAX takes memory: when it starts, which is its default, or `growing` (`XLA_PYTHON_CLIENT_PREALLOCATE=false`).
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Row
from benchmarks.gpu.rows import Run, Wanted

_ALLOCATORS = ("preallocated", "growing")
_STEPS: tuple[tuple[str, int, dict[str, Any], tuple[str, ...]], ...] = (
    ("resnet50", 16, {}, ("50%", "30%")),
    ("vgg16", 16, {}, ("50%",)),
    ("gpt", 64, {}, ("50%", "30%")),
    ("densenet121", 16, {}, ("50%", "30%")),
)
_SMALL = (("gpt", 4, {"sequence_length": 32, "width": 32, "heads": 2, "layers": 2}, ("50%",)),)
_WAYS = (("segments", "row_major"), ("one_program", "row_major"), ("one_program", "auto"))
_ALONE = 20, 3  # steps on a GPU, and in small


def run_of(*, small: bool) -> Run:
    """The cases, the most important first."""
    return Run(list(_wanted(small)), shown)


def _wanted(small: bool) -> Iterator[Wanted]:
    steps = str(_ALONE[small])
    for allocator in _ALLOCATORS:
        for model, batch_size, sizes, budgets in _SMALL if small else _STEPS:
            same = {"model": model, "batch_size": batch_size}
            step = ("--batch-size", str(batch_size), "--sizes", json.dumps(sizes), "--allocator", allocator, "--alone", steps,
                    "--steps", "1")  # fmt: skip
            asked: dict[str, str | int] = {
                **same,
                "budget": "",
                "launch": "plain jit",
                "state_layout": "",
                "allocator": allocator,
            }
            yield _case(asked, model, *step, "--budget", "none", "--plain-only")
            for budget in budgets:
                for launch, layout in _WAYS:
                    asked = {**same, "budget": budget, "launch": launch, "state_layout": layout, "allocator": allocator}
                    how = ("--launch", launch, "--state-layout", layout, "--state-memory", "any")
                    yield _case(asked, model, *step, "--budget", budget, *how)


def _case(asked: dict[str, str | int], model: str, *options: str) -> Wanted:
    return Wanted(asked, lambda cases: cases.start(model, *options))


def shown(row: Row) -> str:
    """One line for a person. Parts are of plain jit's compiled peak."""
    jit, peaks = row["jit_peak_bytes"], row["allocator_peaks"]
    for_allocator = (row.get("planned_allocator_bytes") or 0) / jit
    by_allocator = f"{peaks[0] / jit:.4f} after a step, {peaks[-1] / jit:.4f} after {len(peaks)}" if peaks else "unknown"
    if "peak_bytes" not in row:
        return f"by the allocator {by_allocator}"
    return (
        f"by the allocator {by_allocator}; by the package's account {row['peak_bytes'] / jit:.4f}; "
        f"planned {row['predicted_peak_bytes'] / jit:.4f}, {for_allocator:.4f} of it for the allocator; "
        f"budget {row['budget_bytes'] / jit:.4f}"
    )
