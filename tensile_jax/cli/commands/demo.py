"""`tensile demo`: trains three models at once in half of the memory that they take with plain `jax.jit`.

Plain `jax.jit` trains the same models first, one after another. The demo compares the memory, times, losses and accuracy of both.
The demo fails if the shared run exceeded the budget, or trained the models less well than plain `jax.jit` (`failed_checks`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table

from tensile_jax.cli.commands.run import refuse_troubles
from tensile_jax.cli.errors import Failure, Refusal
from tensile_jax.cli.formatting import format_accuracy, format_losses, format_share, format_us, readable_console
from tensile_jax.cli.jobs_file import JobsFile, read_jobs_file
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.folder import RunFolder
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome, PlainJob
from tensile_jax.cli.signals import exit_code
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console
from tensile_jax.units import format_bytes

_LEAST_ACCURACY = {"digits": 0.97}
_READABLE_WIDTH = 120
_SAME_LOSS = 1e-3  # relative difference of the first losses: state and batch are the same, but other fusions round differently


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The same jobs trained in two ways: with plain jit one after another (`plain`), and at once under one budget (`together`).

    In both, the jobs begin from the same states, read the same batches, and are in the same order.
    """

    plain: tuple[PlainJob, ...]
    together: JobsOutcome

    @property
    def pairs(self) -> Sequence[tuple[PlainJob, JobOutcome]]:
        """The two results of each job."""
        return tuple(zip(self.plain, self.together.jobs, strict=True))

    @property
    def plain_peaks_bytes(self) -> int:
        """The sum of the peaks under plain jit: the memory that the jobs would need at once."""
        return sum(job.peak_bytes for job in self.plain)

    @property
    def shared_peak_bytes(self) -> int:
        """The measured peak of the jobs under one budget."""
        assert self.together.peak_bytes is not None  # only that of a killed run is not known
        return self.together.peak_bytes


def demo_jobs() -> JobsFile:
    """The jobs of the demo."""
    with as_file(files("tensile_jax.cli.commands") / "demo.toml") as file:
        return read_jobs_file(file)


@click.command(short_help="The main job: train three models at once under a budget, beside plain jax.jit.")
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="The run folder. Without it: runs/demo, or the next one that is free, runs/demo-2.",
)
def demo(output: Path | None) -> None:
    """Train a CNN on handwritten digits, a decoder on text and ResNet-50 on photographs at once.

    They share half of the memory that they take under plain jit, under which they are trained one after another first, from the
    same states on the same batches. ResNet-50 comes first, the other two when it trains. Exit code 1 if the budget is not kept,
    a first loss is not plain jit's, or the CNN ends below 97 % test accuracy. Takes about two minutes on two cores.
    """
    run_demo(demo_jobs(), output or _free_folder(), least_accuracy=_LEAST_ACCURACY)


def run_demo(jobs: JobsFile, folder: Path, *, least_accuracy: dict[str, float]) -> None:
    """Run the demo with any jobs that have models. The run folder also gets results.json and memory.png."""
    if find_spec("matplotlib") is None:
        raise Refusal("tensile demo draws a picture, for which it needs matplotlib: pip install 'tensile_jax[data,plot]'")
    from tensile_jax.cli.pictures.memory import draw_memory  # these import JAX, and matplotlib
    from tensile_jax.cli.run.session import begin_jobs
    from tensile_jax.cli.run.single_model import run_plain

    RunFolder.refuse_used(folder)
    console = stderr_console()
    with Phases(console) as phases:
        plain = tuple(run_plain(job, phases) for job in jobs.jobs)
    jit_peaks = {job.name: job.peak_bytes for job in plain}
    outcome, record = begin_jobs(jobs, folder, console, jit_peaks=jit_peaks)
    if outcome.interrupted:
        click.echo(f"Interrupted; go on with: tensile run --resume {folder}", err=True)
        click.get_current_context().exit(exit_code())
    found = SideBySide(plain, outcome)
    save_json(found, folder / "results.json")
    picture = draw_memory(record, folder / "memory.png", title=f"Device memory of {len(plain)} jobs", jit_peaks=jit_peaks)
    refuse_troubles(outcome)
    readable_console(_READABLE_WIDTH).print(_table(found))
    for line in _lines(found):
        click.echo(line)
    click.echo(f"Run folder: {folder}; the picture of its memory over time: {picture}")
    missed = failed_checks(found, least_accuracy=least_accuracy)
    if missed:
        raise Failure(" ".join(missed))
    click.echo("The budget was kept.")


def _free_folder() -> Path:
    first = Path("runs/demo")
    later = (first.with_name(f"demo-{number}") for number in range(2, 10**6))
    return next(path for path in (first, *later) if not path.exists())


def failed_checks(found: SideBySide, *, least_accuracy: Mapping[str, float]) -> list[str]:
    """One line for each check that failed: the budget, the first losses, and `least_accuracy` (by job)."""
    lines: list[str] = []
    together = found.together
    if found.shared_peak_bytes > together.budget_bytes:
        peak, budget = format_bytes(found.shared_peak_bytes), format_bytes(together.budget_bytes)
        lines.append(f"The measured peak of all jobs, {peak}, is above the budget, {budget}.")
    for plain, job in found.pairs:
        if job.state != "finished":
            lines.append(f"{job.name} {job.state}: {job.note or 'without a reason'}.")
            continue
        if job.loss_first is None or not math.isclose(job.loss_first, plain.loss_first, rel_tol=_SAME_LOSS):
            lines.append(f"{job.name}: the first loss, {job.loss_first or 0.0:.4f}, is not plain jit's, {plain.loss_first:.4f}.")
        least = least_accuracy.get(job.name, 0.0)
        if (accuracy := job.test_accuracy or 0.0) < least:
            lines.append(f"{job.name}: {accuracy:.2%} test accuracy after {job.steps_done} steps, less than {least:.0%}.")
    return lines


def _table(found: SideBySide) -> Table:
    """A table with two rows for each job, plain jit and shared budget, and two rows for all jobs together."""
    table = Table(title="The same jobs, one after another and at once", title_justify="left", title_style="bold")
    for name in ("job", "how"):
        table.add_column(name, no_wrap=True, min_width=9)
    for name in ("peak", "time", "step", "loss", "test"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in found.pairs:
        labels = ((pair[0].name, "plain jit"), (f"{pair[1].steps_done} steps", "together"))
        for label, job in zip(labels, pair, strict=True):
            peak = format_bytes(job.peak_bytes) if job.peak_bytes else ""
            step = "" if job.step_us is None else format_us(float(f"{job.step_us:.3g}"))
            losses, accuracy = format_losses(job.loss_first, job.loss_last), format_accuracy(job.test_accuracy)
            table.add_row(*label, peak, f"{job.time_s:.1f} s", step, losses, accuracy, end_section=job is pair[1])
    together = found.together
    plain_s = sum(job.time_s for job in found.plain)
    table.add_row("all: sum", "plain jit", format_bytes(found.plain_peaks_bytes), f"{plain_s:.1f} s")
    table.add_row("all: shared", "together", format_bytes(found.shared_peak_bytes), f"{together.time_s:.1f} s", style="bold")
    return table


def _lines(found: SideBySide) -> list[str]:
    """The lines below the table."""
    together = found.together
    return [
        f"Together: {format_bytes(found.shared_peak_bytes)} measured of {format_bytes(together.budget_bytes)}, "
        f"{format_share(found.shared_peak_bytes, found.plain_peaks_bytes)} of the sum of plain jit's peaks, in "
        f"{format_share(together.time_s, sum(job.time_s for job in found.plain))} of plain jit's time one after another; "
        "compiling and planning counted.",
        "Same first states, same batches; later losses part as rounding grows from step to step. Plain jit's peak is what XLA "
        "states. A job's time together is from its submission to its end. A step's time is the median of the last steps; "
        "together, it includes other jobs' launches.",
    ]
