"""`tensile demo`, the main job: three models trained at once under half of what they take, beside plain `jax.jit`."""

from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

import click

from tensile_jax.cli.jobs_file import JobsFile, read_jobs_file
from tensile_jax.cli.progress import Live, stderr_console
from tensile_jax.cli.refusal import Failure, Refusal
from tensile_jax.cli.run_jobs import refuse_troubles
from tensile_jax.cli.stop_signals import exit_code
from tensile_jax.cli.tables import readable_console
from tensile_jax.plan_format import save_json

_LEAST_ACCURACY = {"digits": 0.97}
_READABLE_WIDTH = 120


def demo_jobs() -> JobsFile:
    """The jobs of the demo."""
    with as_file(files("tensile_jax.cli") / "demo.toml") as file:
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
    same states on the same batches. ResNet-50 comes late. Exit code 1 if the budget is not kept, a first loss is not plain
    jit's, or the CNN ends below 97 % test accuracy. Takes a few minutes on two cores.
    """
    run_demo(demo_jobs(), output or _free_folder(), least_accuracy=_LEAST_ACCURACY)


def run_demo(jobs: JobsFile, folder: Path, *, least_accuracy: dict[str, float]) -> None:
    """The same for any jobs of models; the run folder also gets results.json and memory.png."""
    if find_spec("matplotlib") is None:
        raise Refusal("tensile demo draws a picture, for which it needs matplotlib: pip install 'tensile_jax[data,plot]'")
    from tensile_jax.cli.jobs_session import begin_jobs  # these import JAX, and matplotlib
    from tensile_jax.cli.memory_picture import draw_memory
    from tensile_jax.cli.plain_run import run_plain
    from tensile_jax.cli.run_folder import RunFolder
    from tensile_jax.cli.side_by_side import SideBySide, shortcomings, side_by_side_table, verdict

    RunFolder.refuse_used(folder)
    console = stderr_console()
    with Live(console) as live:
        plain = tuple(run_plain(job, live) for job in jobs.jobs)
    alone = {job.name: job.peak_bytes for job in plain}
    done = begin_jobs(jobs, folder, console, jit_peaks=alone)
    if done.outcome.interrupted:
        click.echo(f"Interrupted; go on with: tensile run --resume {folder}", err=True)
        click.get_current_context().exit(exit_code())
    found = SideBySide(plain, done.outcome)
    save_json(found, folder / "results.json")
    picture = draw_memory(done.record, folder / "memory.png", title=f"Device memory of {len(plain)} jobs", alone=alone)
    refuse_troubles(done.outcome)
    readable_console(_READABLE_WIDTH).print(side_by_side_table(found))
    for line in verdict(found):
        click.echo(line)
    click.echo(f"Run folder: {folder}; the picture of its memory over time: {picture}")
    missed = shortcomings(found, least_accuracy=least_accuracy)
    if missed:
        raise Failure(" ".join(missed))
    click.echo("The budget was kept.")


def _free_folder() -> Path:
    first = Path("runs/demo")
    later = (first.with_name(f"demo-{number}") for number in range(2, 10**6))
    return next(path for path in (first, *later) if not path.exists())
