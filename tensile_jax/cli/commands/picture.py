"""`tensile picture`: draws the device memory of a past run or of a saved plan over time, without JAX."""

from importlib.util import find_spec
from pathlib import Path

import click

from tensile_jax.cli.errors import Refusal, refusing_options
from tensile_jax.cli.options import html_option, refuse_typed, writable_file
from tensile_jax.cli.run.folder import read_jit_peaks, read_record
from tensile_jax.plan_format import Plan


@click.command(short_help="Draw the memory of a past run or a plan over time.")
@click.argument("source", metavar="RUN|PLAN.JSON", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="A PNG.")
@html_option
@click.option("--from", "from_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Leave out what was before.")
@click.option("--to", "to_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Leave out what came after.")
def picture(source: Path, output: Path | None, html: Path | None, from_s: float | None, to_s: float | None) -> None:
    """Draw the device memory of the run in the folder RUN, or of the plan in PLAN.JSON.

    For a run: what is planned for each job, what was measured, and the budget; below, when each job was prepared, compiled and
    queued, when it computed, and when the link was busy. Seconds count from the beginning of the run. For a plan: what is on the
    device in each segment, by role.
    """
    if output is None and html is None:
        raise Refusal("Name the file to write: --output=FILE.png for a picture, or --html=FILE.html for a page.")
    if output is not None and find_spec("matplotlib") is None:
        raise Refusal("--output needs matplotlib: pip install 'tensile_jax[plot]'")
    if output is None:
        refuse_typed(("from_s", "to_s"), "is for --output. A page zooms by itself. Leave it out.")
    if source.is_file():
        refuse_typed(("from_s", "to_s"), f"is for a run, and {source} is a plan. Leave it out.")
        _picture_plan(source, output, html)
    else:
        _picture_run(source, output, html, from_s, to_s)


def _picture_plan(file: Path, output: Path | None, html: Path | None) -> None:
    plan = Plan.load(file)
    if output is not None:
        from tensile_jax.cli.pictures.plan import draw_plan  # imports matplotlib

        click.echo(f"Drawn: {draw_plan(plan, output)}")
    if html is not None:
        plan.save_html(html)
        click.echo(f"Written to {html}")


def _picture_run(run: Path, output: Path | None, html: Path | None, from_s: float | None, to_s: float | None) -> None:
    record = read_record(run)
    jit_peaks = read_jit_peaks(run)
    ran = {job for level in record.levels for job in level.jobs}
    jobs = ran | {stage.job for stage in record.stages}
    title = f"Device memory of {run.resolve().name}: {len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}"
    known = jit_peaks if ran <= jit_peaks.keys() else None
    with refusing_options():
        if output is not None:
            from tensile_jax.cli.pictures.memory import draw_memory  # imports matplotlib

            drawn = draw_memory(record, output, title=title, jit_peaks=known, from_s=from_s, to_s=to_s)
            click.echo(f"Drawn: {drawn}")
        if html is not None:
            from tensile_jax.pages.run_page import save_run  # imports NumPy

            save_run(record, html, title=title, jit_peaks=known)
            click.echo(f"Written to {html}")
