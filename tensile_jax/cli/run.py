"""`tensile run`: train a model on its real input under a budget, or several jobs that share one, and say what it took."""

from pathlib import Path

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from tensile_jax.cli.options import POSITIVE_COUNT, Limits, ModelChoice, takes_limits, takes_model_or_jobs, writable_file
from tensile_jax.cli.outcome import outcome_table
from tensile_jax.cli.progress import Live, stderr_console
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.run_jobs import resume_run, run_jobs
from tensile_jax.cli.stop_signals import exit_code
from tensile_jax.plan_format import Plan


@click.command(short_help="Train a model, or several jobs, under a budget.")
@takes_model_or_jobs(for_jobs=("output", "resume"), for_both=("source", "compile_cache", "as_json"), required=False)
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
    help="In the place of a file: go on with the jobs of this run folder.",
)
@click.option(
    "--compile-cache",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep what is compiled here, for the next run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (see tensile schema run, run-jobs) for the table.")
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
    """Train MODEL (cnn, gpt, mlp, resnet50, vgg16) on its real input under a budget of device memory.

    Or train all jobs of the file JOBS.toml at once, under a budget that they share, with a live view on stderr. Another terminal
    can look and steer: tensile status, pause, resume, cancel, budget. What happened is kept in a run folder. Exit code 1: a job
    failed.

    Ctrl-C ends after the step that is under way, with the table of the steps done; a second one does not wait. Several jobs save
    a checkpoint then, and --resume goes on from there.
    """
    if resume is not None:
        if source is not None or output is not None:
            what = "--output" if source is None else "a model or a file of jobs"
            raise Refusal(f"--resume={resume} and {what} exclude each other: the run has its own. Leave one of them out.")
        resume_run(resume, compile_cache=compile_cache, as_json=as_json)
    elif isinstance(source, Path):
        run_jobs(source, output, compile_cache=compile_cache, as_json=as_json)
    elif source is None:
        raise Refusal("there is nothing to run. Name a model or a file of jobs, or a run to go on with: --resume=RUN.")
    else:
        _run_model(source, limits, steps, save_plan, plan_file, compile_cache, as_json=as_json)


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
        _refuse_with_plan("budget", "max_slowdown", "policy", "state_memory")
        saved = Plan.load(plan_file)
    from tensile_jax.cli.session import run_session  # imports JAX

    with Live(stderr_console()) as live:
        outcome, plan = run_session(model, limits, steps=steps, saved=saved, compile_cache=compile_cache, live=live)
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


def _refuse_with_plan(*names: str) -> None:
    """A saved plan has its own budget, policy and place for the state."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise Refusal(f"{option} and --plan exclude each other: a saved plan has its own. Leave one of them out.")
