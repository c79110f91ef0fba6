"""Training steps of many kinds: what people train beside the paper's networks, written as they write it, in small sizes.

`WORKLOADS` are training steps of one form, on which plans are tried. `PROGRAMS` have the forms of the libraries that they use.
"""

from collections.abc import Callable, Mapping

from benchmarks.workloads.language import LANGUAGE
from benchmarks.workloads.procedures import PROCEDURES
from benchmarks.workloads.programs import PROGRAMS, Program
from benchmarks.workloads.reinforcement import REINFORCEMENT
from benchmarks.workloads.science import SCIENCE
from benchmarks.workloads.sequences import SEQUENCES
from benchmarks.workloads.vision import VISION
from benchmarks.workloads.workload import Workload

WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    **VISION, **LANGUAGE, **SEQUENCES, **SCIENCE, **REINFORCEMENT, **PROCEDURES,
}  # fmt: skip

__all__ = ["PROGRAMS", "WORKLOADS", "Program", "Workload"]
