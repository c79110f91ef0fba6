"""`tensile run`: trains one model under a budget, or several jobs that share a budget, and reports memory and time.

A run of several jobs has one of these exit codes:

    0    no job failed
    1    a job failed, or a file of the run folder could not be written
    130  Ctrl-C interrupted the run; 143: SIGTERM ended it
"""

from datetime import datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console

from tensile_jax.cli.errors import Failure, Refusal
from tensile_jax.cli.formatting import readable_console
from tensile_jax.cli.jobs_file import read_jobs_file, refuse_sharded_jobs
from tensile_jax.cli.options import (
    POSITIVE_COUNT,
    Limits,
    ModelChoice,
    refuse_typed,
    takes_limits,
    takes_step_or_jobs,
    writable_file,
)
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.folder import read_config
from tensile_jax.cli.run.report import JobsOutcome, jobs_lines, jobs_table, outcome_table
from tensile_jax.cli.signals import exit_code
from tensile_jax.plan_format import Plan
from tensile_jax.progress.stderr import stderr_console

_READABLE_WIDTH = 130


@click.command(short_help="Train a model, or several jobs, under a budget.")
@takes_step_or_jobs(for_jobs=("output", "resume"), for_both=("compile_cache", "as_json"), own_steps=False, required=False)
@takes_limits
@click.option("--steps", metavar="N", type=POSITIVE_COUNT, default=10, show_default=True, help="Steps to train.")
@click.option("--save-plan", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Keep the plan.")
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Start from this saved plan: it is compiled, and planned again if it breaks its budget.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The run folder of several jobs. Without it: runs/NAME-DATE-TIME.",
)
@click.option(
    "--resume",
    metavar="RUN",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Continue the jobs of this run folder, instead of a file.",
)
@click.option(
    "--compile-cache",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep what is compiled here, for the next run.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the table (see tensile schema run, run-jobs)."
)
def run(
    source: ModelChoice | Path | None,
    limits: Limits,
    steps: int,
    save_plan: Path | None,
    plan_file: Path | None,
    output: Path | None,
    resume: Path | None,
    compile_cache: Path | None,
    as_json: bool,
) -> None:
    """Train MODEL (bert, cnn, densenet121, gpt, gpt_scan, inceptionv3, inceptionv4, mlp, resnet50, vgg16) on its real input under
    a budget of device memory.

    Or train all jobs of the file JOBS.toml at once, under a budget that they share, with a live view on stderr. Another terminal
    can follow and control the run: tensile status, pause, resume, cancel, budget. What happened is kept in a run folder. Exit
    code 1: a job failed.

    Ctrl-C ends the training after the present step and prints the table; a second Ctrl-C does not wait for the step. Several jobs
    also save checkpoints, from which --resume continues.
    """
    if resume is not None and (source is not None or output is not None):
        what = "--output" if source is None else "a model or a file of jobs"
        raise Refusal(f"--resume={resume} and {what} exclude each other: the run has its own. Leave one of them out.")
    if isinstance(source, ModelChoice):
        _run_model(source, limits, steps, save_plan, plan_file, compile_cache, as_json=as_json)
    elif source is not None or resume is not None:
        _run_jobs(source, output, resume, compile_cache, as_json=as_json)
    else:
        raise Refusal("there is nothing to run. Name a model or a file of jobs, or a run to go on with: --resume=RUN.")


def _run_model(
    model: ModelChoice,
    limits: Limits,
    steps: int,
    save_plan: Path | None,
    plan_file: Path | None,
    compile_cache: Path | None,
    *,
    as_json: bool,
) -> None:
    saved = None
    if plan_file is not None:
        names = ("budget", "max_slowdown", "policy", "state_memory")
        refuse_typed(names, "and --plan exclude each other: a saved plan has its own. Leave one of them out.")
        saved = Plan.load(plan_file)
    from tensile_jax.cli.run.single_model import keep_compiled, run_model  # imports JAX

    keep_compiled(compile_cache)
    with Phases(stderr_console()) as phases:
        outcome, plan = run_model(model, limits, steps=steps, saved=saved, phases=phases)
    if save_plan is not None:
        plan.save(save_plan)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    else:
        Console().print(outcome_table(outcome))
    for note in plan.notes:
        click.echo(f"Note: {note}", err=True)
    if save_plan is not None:
        click.echo(f"The plan is in {save_plan}; see it with: tensile show {save_plan}", err=as_json)
    if outcome.interrupted:
        click.get_current_context().exit(exit_code())


def _run_jobs(file: Path | None, output: Path | None, resume: Path | None, compile_cache: Path | None, *, as_json: bool) -> None:
    """Run the jobs of the file in a new run folder, or go on with the run in the folder `resume` as it was configured."""
    jobs = None if file is None else read_jobs_file(file)
    if jobs is not None:
        refuse_sharded_jobs(jobs)
    config = None if resume is None else read_config(resume)
    from tensile_jax.cli.run.session import begin_jobs, resume_jobs  # these import JAX
    from tensile_jax.cli.run.single_model import keep_compiled

    keep_compiled(compile_cache)
    if config is not None and resume is not None:
        outcome, _ = resume_jobs(config, resume, stderr_console())
    else:
        assert file is not None and jobs is not None
        folder = output or Path("runs", f"{file.stem}-{datetime.now():%Y%m%d-%H%M%S}")
        outcome, _ = begin_jobs(jobs, folder, stderr_console())
    try:
        if as_json:
            click.echo(msgspec.json.encode(outcome))
        else:
            readable_console(_READABLE_WIDTH).print(jobs_table(outcome))
        for line in jobs_lines(outcome):
            click.echo(line, err=as_json)
    except OSError:
        if not outcome.interrupted:  # if it was interrupted, the terminal may be closed; the run folder has the results
            raise
    if outcome.interrupted:
        click.get_current_context().exit(exit_code())
    refuse_troubles(outcome)
    if any(job.state == "failed" for job in outcome.jobs):
        click.get_current_context().exit(Failure.exit_code)


def refuse_troubles(outcome: JobsOutcome) -> None:
    """Raises: Failure: files of the run folder could not be written. The message names one; `outcome.troubles` names all."""
    if outcome.troubles:
        more = len(outcome.troubles) - 1
        raise Failure(outcome.troubles[0] + (f"; nor could {more} other files." if more else "."))
