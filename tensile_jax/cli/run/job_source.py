"""Finds what a job of a jobs file trains: its model or entrypoint, its shapes, and its peak under plain `jax.jit`.

This module trains nothing. The shapes of a model's state and batch are known without making them. An *entrypoint*, a user's
function that makes a job, must be called to find the shapes; the arrays that it makes are then freed again.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.progress import Phases
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS, Model
from tensile_jax.trace import shape_struct


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """A step, and a `ShapeDtypeStruct` for each array of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


@dataclass(frozen=True, slots=True, eq=False)
class PlainStep:
    """An executable of plain jit, its peak of device memory, and how long XLA compiled it."""

    compiled: Any
    peak_bytes: int
    compile_s: float


def find_modules_here() -> None:
    """Add the current folder to `sys.path`, as `python -m` does, so that entrypoints can be in it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def entrypoint_of(entry: JobEntry) -> Entrypoint:
    """The entrypoint that makes the job."""
    return Entrypoint(entry.model or entry.entrypoint or "", entry.args)


def model_of(entry: JobEntry) -> Model | None:
    """The job's model; None if the job has an entrypoint.

    Raises:
        Refusal: the model does not accept the job's `args`.
    """
    if entry.model is None:
        return None
    function = MODELS[entry.model]
    with_line = f"{entry.where}.args"
    try:
        inspect.signature(function).bind(**entry.args)
    except TypeError as error:
        known = ", ".join(inspect.signature(function).parameters)
        raise Refusal(f"{with_line}: {entry.model}: {error}. It takes: {known}.") from error
    try:
        return function(**entry.args)
    except (ValueError, TypeError) as error:
        raise Refusal(f"{with_line}: {error}") from error


def shapes_of(entry: JobEntry) -> Shapes:
    """The job's step and shapes. An entrypoint makes a state for that, which is freed when this function returns.

    Raises:
        Refusal: the job cannot be made.
    """
    model = model_of(entry)
    if model is not None:
        return Shapes(model.step, model.state_shape, model.batch_shape)
    try:
        step, state, batches = entrypoint_of(entry).make()
        given = batches if isinstance(batches, Iterable) else batches()
        batch = next(iter(given))
    except StopIteration as error:
        raise Refusal(f"{entry.where}: its batches gave nothing. Give at least one batch.") from error
    except (ImportError, TypeError, ValueError) as error:
        raise Refusal(f"{entry.where}: {error}") from error
    return Shapes(step, jax.tree.map(shape_struct, state), jax.tree.map(shape_struct, batch))


def same_source(entry: JobEntry) -> bytes:
    """A key that is equal for jobs with the same model or entrypoint and the same `args`."""
    return msgspec.json.encode((entry.model, entry.entrypoint, sorted(entry.args.items())), enc_hook=str)


def compile_plain(shapes: Shapes) -> PlainStep:
    """The step compiled by plain jit, with its state donated."""
    began = time.perf_counter()
    compiled = jax.jit(shapes.step, donate_argnums=0).lower(shapes.state, shapes.batch).compile()
    return PlainStep(compiled, peak_of(compiled), time.perf_counter() - began)


def resolve_budget(jobs: JobsFile, phases: Phases, known: Mapping[str, int] | None = None) -> tuple[int, dict[str, int]]:
    """The budget in bytes, and the jobs' peaks under plain jit, by name.

    The peaks are those of `known`, if there are any. Otherwise plain jit is compiled if the budget is a share of the peaks, and
    there are no peaks if the budget is a number of bytes.
    """
    budget = jobs.device.budget
    peaks = dict(known or {})
    if budget.nbytes is not None:
        return budget.nbytes, peaks
    peaks = peaks or _plain_peaks(jobs.jobs, phases)
    return budget.resolve(sum(peaks.values())), peaks


def _plain_peaks(entries: Iterable[JobEntry], phases: Phases) -> dict[str, int]:
    """Each job's peak under plain jit, by name. Jobs that train the same thing are compiled once."""
    groups: dict[bytes, list[JobEntry]] = {}
    for entry in entries:
        groups.setdefault(same_source(entry), []).append(entry)
    peaks: dict[str, int] = {}
    what = "compiling plain jit, of whose peaks the budget is a share"
    for done, group in enumerate(groups.values()):
        phases.update(what, done, len(groups), group[0].name)
        peak_bytes = compile_plain(shapes_of(group[0])).peak_bytes
        peaks.update({entry.name: peak_bytes for entry in group})
    phases.update(what, len(groups), len(groups))
    return peaks
