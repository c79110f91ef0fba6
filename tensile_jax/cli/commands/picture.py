"""`tensile picture`: draws the device memory of a past run over time, from the record in the run's folder, without JAX."""

from importlib.util import find_spec
from pathlib import Path

import click

from tensile_jax.cli.errors import Refusal, refusing_options
from tensile_jax.cli.options import writable_file
from tensile_jax.cli.run.folder import read_jit_peaks, read_record


@click.command(short_help="Draw a past run's memory over time.")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, required=True, help="A PNG."
)
@click.option("--from", "from_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Leave out what was before.")
@click.option("--to", "to_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Leave out what came after.")
def picture(run: Path, output: Path, from_s: float | None, to_s: float | None) -> None:
    """Draw the device memory of the run in the folder RUN: planned for each job, measured, and the budget.

    Below it, when each job computed and when the link was busy. Seconds count from the beginning of the run.
    """
    if find_spec("matplotlib") is None:
        raise Refusal("tensile picture needs matplotlib: pip install 'tensile_jax[plot]'")
    record = read_record(run)
    jit_peaks = read_jit_peaks(run)
    jobs = {job for level in record.levels for job in level.jobs}
    from tensile_jax.cli.pictures.memory import draw_memory  # imports matplotlib

    title = f"Device memory of {run.resolve().name}: {len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}"
    with refusing_options():
        drawn = draw_memory(
            record, output, title=title, jit_peaks=jit_peaks if jobs <= jit_peaks.keys() else None, from_s=from_s, to_s=to_s
        )
    click.echo(f"Drawn: {drawn}")
