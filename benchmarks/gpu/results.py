"""`make gpu-results`: 200 steps in one program with donated state in host memory beside plain jit's, and copies beside kernels.

Each row is a training (`trained.py`). What is launched as one program has its state in row-major layouts, and in layouts of XLA's
choice; segments are there for comparison. The budgets are those for which plans copy, and keep state in host memory.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Row
from benchmarks.gpu.rows import Run, Wanted

_WAYS = (("one_program", "row_major"), ("one_program", "auto"), ("segments", "row_major"))
_TRAININGS: tuple[tuple[str, int, dict[str, Any], str, str], ...] = (
    ("resnet50", 16, {}, "30%", "auto"),
    ("gpt", 64, {}, "30%", "auto"),
    ("gpt", 8, {"sequence_length": 256, "width": 256, "heads": 4, "layers": 4}, "45%", "tensile"),
    ("densenet121", 16, {}, "30%", "auto"),
    ("vgg16", 16, {}, "60%", "auto"),
)
_SMALL: tuple[tuple[str, int, dict[str, Any], str, str], ...] = (
    ("gpt", 4, {"sequence_length": 32, "width": 32, "heads": 2, "layers": 2}, "80%", "tensile"),
)
_STEPS, _EVERY = (200, 10), (12, 4)  # on a GPU, and in small


def run_of(*, small: bool) -> Run:
    """The trainings, the most important first."""
    return Run(list(_wanted(small)), shown)


def _wanted(small: bool) -> Iterator[Wanted]:
    steps, every = _EVERY if small else _STEPS
    for launch, layout in _WAYS:
        for model, batch_size, sizes, budget, policy in _SMALL if small else _TRAININGS:
            asked = {"model": model, "batch_size": batch_size, "budget": budget, "policy": policy, "launch": launch,
                     "state_layout": layout, "steps": steps}  # fmt: skip
            arguments = (model, "--batch-size", str(batch_size), "--sizes", json.dumps(sizes), "--budget", budget,
                         "--policy", policy, "--launch", launch, "--state-layout", layout, "--steps", str(steps),
                         "--every", str(every), "--allocator", "growing")  # fmt: skip
            yield Wanted(asked, lambda cases, given=arguments: cases.start_program("benchmarks.gpu.trained", *given))


def shown(row: Row) -> str:
    """One line for a person."""
    if row["not_finite_at"] is not None:
        return f"THE LOSS IS NOT FINITE after {row['not_finite_at']} steps; {_launched(row)}"
    worst = max(row["compared"], key=lambda one: one["off"])
    profile = row.get("profile")
    if profile is None:
        share = "not seen"
    else:
        share = f"{profile['beside_ms'] / profile['copied_ms']:.2f}" if profile["copied_ms"] else "none"
    return (
        f"{len(row['losses'])} losses are finite, the last is {row['losses'][-1]:.4f} (plain jit: {row['jit_losses'][-1]:.4f}); "
        f"a step is off by {worst['off']:.3f} at most; {row['repeated_until']} losses are those of a second run "
        f"(plain jit: {row['jit_repeated_until']}); {_launched(row)}, copies beside kernels: {share}"
    )


def _launched(row: Row) -> str:
    return f"{row['launches']} launches, {row['on_host']} tensors on the host"
