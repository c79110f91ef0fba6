"""Plain `jax.jit` of jobs: compiled for their peaks, of whose sum a budget may be a share, and trained to be compared with."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tensile_jax.cli.job_source import Shapes, same_source, shapes_of
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.progress import Live
from tensile_jax.exec.step.compile import peak_of


@dataclass(frozen=True, slots=True, eq=False)
class PlainStep:
    """The executable, the most device memory that it takes, and how long XLA took."""

    compiled: Any
    peak_bytes: int
    compile_s: float


def compile_plain(shapes: Shapes) -> PlainStep:
    """The step as plain jit compiles it, its state donated."""
    began = time.perf_counter()
    compiled = jax.jit(shapes.step, donate_argnums=0).lower(shapes.state, shapes.batch).compile()
    return PlainStep(compiled, peak_of(compiled), time.perf_counter() - began)


def plain_peaks(entries: Iterable[JobEntry], live: Live) -> dict[str, int]:
    """Each job's peak under plain jit, by its name; what several jobs train is compiled once.

    Raises:
        Refusal: a job cannot be made.
    """
    groups: dict[bytes, list[JobEntry]] = {}
    for entry in entries:
        groups.setdefault(same_source(entry), []).append(entry)
    peaks: dict[str, int] = {}
    what = "compiling plain jit, of whose peaks the budget is a share"
    for done, group in enumerate(groups.values()):
        live.tell(what, done, len(groups), group[0].name)
        peak_bytes = compile_plain(shapes_of(group[0])).peak_bytes
        peaks.update({entry.name: peak_bytes for entry in group})
    live.tell(what, len(groups), len(groups))
    return {entry.name: peaks[entry.name] for group in groups.values() for entry in group}


def resolve_budget(jobs: JobsFile, live: Live, known: Mapping[str, int] | None = None) -> tuple[int, dict[str, int]]:
    """The budget in bytes, and plain jit's peaks by job: `known`, or compiled for where the budget is a share; or none."""
    budget = jobs.device.budget
    peaks = dict(known or {})
    if budget.nbytes is not None:
        return budget.nbytes, peaks
    peaks = peaks or plain_peaks(jobs.jobs, live)
    return budget.resolve(sum(peaks.values())), peaks
