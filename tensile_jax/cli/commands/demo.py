"""`tensile demo`: trains three models at once in half of the memory that they take with plain `jax.jit`.

Plain `jax.jit` trains the same models first, one after another. The demo compares memory, times, losses and accuracy.
The demo fails if the shared run exceeded the budget, or trained the models less well than plain `jax.jit` (`failed_checks`).
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table

from tensile_jax.cli.commands.run import refuse_troubles
from tensile_jax.cli.errors import Failure, Refusal
from tensile_jax.cli.formatting import format_accuracy, format_losses, format_share, format_us, readable_console
from tensile_jax.cli.jobs_file import JobsFile, read_jobs_file
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.folder import RunFolder, read_events
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome, PlainJob
from tensile_jax.cli.signals import exit_code
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console
from tensile_jax.runtime_records import Record, Span
from tensile_jax.units import format_bytes

_LEAST_ACCURACY = {"digits": 0.97}
_READABLE_WIDTH = 120
_NEXT = """
Next, your own step:
  @tensile.jit(budget="50%", donate_argnums=0)  # where jax.jit stood; import tensile_jax as tensile
  print(step.plan(state, batch))                # what it needs and costs; tensile.memory(step, state, batch): without a budget
  docs/getting-started.md                       # explains both, in a clone of the repository"""
_SAME_LOSS = 1e-3  # relative difference of the first losses: state and batch are the same, but other fusions round differently


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The same jobs trained in two ways: with plain jit one after another (`plain`), and at once under one budget (`together`).

    In both, the jobs begin from the same states, read the same batches, and are in the same order.

    Attributes:
        own_step_us: by job, the time of a step together, without other jobs' launches (`own_step_us`).
        first_steps_s: from the begin of the run together until every job had ended its first step.
    """

    plain: tuple[PlainJob, ...]
    together: JobsOutcome
    own_step_us: Mapping[str, float | None]
    first_steps_s: float

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
    """Train an encoder and a decoder on text and a CNN on handwritten digits at once.

    They share half of the memory that they take under plain jit, under which they are trained one after another first, from the
    same states on the same batches. The encoder comes first, the other two when it trains. Exit code 1 if the budget is not kept,
    a first loss is not plain jit's, or the CNN ends below 97 % test accuracy.
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
    first_steps = {event.job: event.time_s for event in reversed(read_events(folder)) if event.kind == "step"}
    own = {job.name: own_step_us(record, job.name) for job in plain}
    found = SideBySide(plain, outcome, own, max(first_steps.values(), default=0.0))
    save_json(found, folder / "results.json")
    picture = draw_memory(record, folder / "memory.png", title=f"Device memory of {len(plain)} jobs", jit_peaks=jit_peaks)
    refuse_troubles(outcome)
    out = readable_console(_READABLE_WIDTH)
    for part in _sections(found):
        out.print(part, markup=False, highlight=False)
    click.echo(f"\nRun folder: {folder}; the picture of its memory over time: {picture}")
    missed = failed_checks(found, least_accuracy=least_accuracy)
    if missed:
        raise Failure(" ".join(missed))
    click.echo("The budget was kept.")
    click.echo(_NEXT)


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


def own_step_us(record: Record, job: str) -> float | None:
    """The median time of the job's steps but the first, without other jobs' launches in them; None if there were none.

    A step lasts from the begin of its first launch or copy to the end of its last one, so waiting for copies is counted.
    """
    steps: dict[int, list[Span]] = {}
    for span in record.spans:
        if span.job == job:
            steps.setdefault(span.step, []).append(span)
    times: list[float] = []
    others = [span for span in record.spans if span.job != job and span.lane == "compute"]
    for _, spans in sorted(steps.items())[1:]:
        begin, end = min(span.begin_us for span in spans), max(span.end_us for span in spans)
        shared = sum(max(0.0, min(end, other.end_us) - max(begin, other.begin_us)) for other in others)
        times.append(end - begin - shared)
    return statistics.median(times) if times else None


def _sections(found: SideBySide) -> Iterator[RenderableType]:
    """What was measured: a sentence that says what the figures are, then the figures. No line is wider than the terminal."""
    together = found.together
    peaks = [(job.name, format_bytes(job.peak_bytes), format_bytes(ours.peak_bytes or 0)) for job, ours in found.pairs]
    both = ("all three at once" if len(peaks) == 3 else "all at once"), found.plain_peaks_bytes, found.shared_peak_bytes
    yield (
        "Memory: the most that a job held on the device. Plain jit's is what XLA states; together, it is measured. All at once "
        "would need the sum of plain jit's. Together, each job has a plan that fits the budget, and jobs take turns."
    )
    yield _figures([*peaks, (both[0], format_bytes(both[1]), format_bytes(both[2]))])
    yield (
        f"Together: {format_share(both[2], both[1])} of plain jit's memory, under a budget of "
        f"{format_bytes(together.budget_bytes)}.\n"
    )
    yield (
        "Time of a step, once warm: the median of all but the first. Together, it has the waiting for copies in it, "
        "but not the launches of other jobs."
    )
    steps = [(job.name, job.step_us, found.own_step_us.get(job.name)) for job in found.plain]
    yield _figures([(name, _time(plain_us), _time(ours_us)) for name, plain_us, ours_us in steps])
    yield (
        f"\nUntil every job had ended its first step, paid once: {sum(job.first_step_s for job in found.plain):.1f} s with plain "
        f"jit (tracing, compiling), {found.first_steps_s:.1f} s together (tracing, planning, compiling; jobs that were ready "
        "trained meanwhile).\n"
    )
    yield "Loss, from the first step to the last: both train on the same batches from the same first state."
    yield _figures(
        [
            (job.name, format_losses(job.loss_first, job.loss_last), format_losses(ours.loss_first, ours.loss_last))
            for job, ours in found.pairs
        ]
    )
    tested = [(job.name, format_accuracy(job.test_accuracy), format_accuracy(ours.test_accuracy)) for job, ours in found.pairs]
    if any(plain or ours for _, plain, ours in tested):
        yield "\nAccuracy on images that were not trained on:"
        yield _figures([row for row in tested if row[1] or row[2]])


def _figures(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for name in ("plain jit", "together"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _time(us: float | None) -> str:
    return "" if us is None else format_us(float(f"{us:.3g}"))
