"""Writes `docs/results.md`, what was measured, and `docs/predicted.md`, what was compiled or simulated for an H200."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.results_pages import compiled, jobs_on_cpu, on_h200, planning_on_cpu, simulated, steps_on_cpu
from benchmarks.results_pages.section import Group, page

_DOCS = Path(__file__).parents[2] / "docs"
_MEASURED = """
This page shows what was measured, on an H200 and on CPUs. [Predicted and compiled](predicted.md) shows what did not run.
[The paper's experiments](../benchmarks/README.md) have a page of their own.

Peaks and times are relative to plain `jax.jit` in the same process unless the text says otherwise: 0.5 is half. State is donated.
`python -m benchmarks.results_pages` writes this page from the JSON files that each section names.

Each section has its own date. On an H200, that is when one was at hand. On a CPU, it is when the part that the section measures
last changed in a way that its figures show. What is older than the newest version shows the version of that day.
"""
_PREDICTED = """
Nothing on this page ran on a GPU. [Measured](results.md) shows what ran.

- *Compiled*: XLA's compiler for an H200, on a machine without one. Its memory is exact. *Traffic* is the bytes that its kernels
  read and write, and stands for their time.
- *Simulated*: the planner's own model of an H200, whose rates were [fitted to measured steps](results.md#the-profile-h200).

Figures are relative to plain `jax.jit` unless the text says otherwise. `python -m benchmarks.results_pages` writes this page
from the JSON files that each section names.
"""


def pages() -> Mapping[str, str]:
    """The text of each page, by its name in `docs/`."""
    h200 = "ResNet-50 has images of 224x224. The decoder has the sizes of GPT-2 small. Both train in fp32 with Adam."
    cpu = "Two cores of a shared machine, jax 0.10.2. Times of steps are good to about 10 %."
    measured = (
        Group("Measured on an NVIDIA H200", f"Virtual machines with one H200, 16 cores and jax 0.11.2. {h200}", on_h200.SECTIONS),
        Group("Steps on a CPU", cpu, steps_on_cpu.SECTIONS),
        Group("Several jobs on a CPU", "A `Runtime`, a Ray cluster, and what they cost.", jobs_on_cpu.SECTIONS),
        Group(
            "Planning and prediction on a CPU",
            "How long the planner takes, and how exact its inputs are.",
            planning_on_cpu.SECTIONS,
        ),
    )
    predicted = (
        Group(
            "Compiled for an NVIDIA H200",
            "jax 0.10.2. Plans that would run keep their budgets. First choices may not, and the text says so.",
            compiled.SECTIONS,
        ),
        Group("Simulated", "Plans, their predicted times, and how long planning takes. Nothing is compiled.", simulated.SECTIONS),
    )
    return {
        "results.md": page("Results: measured", _MEASURED, measured),
        "predicted.md": page("Results: predicted and compiled", _PREDICTED, predicted),
    }


def main() -> None:
    """Write both pages."""
    for name, text in pages().items():
        (_DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
