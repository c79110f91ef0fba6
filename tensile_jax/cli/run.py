"""`tensile run`: train a model on its real input under a budget, and say what it took."""

from pathlib import Path

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from tensile_jax.cli.options import Limits, ModelChoice, takes_limits, takes_model, writable_file
from tensile_jax.cli.outcome import outcome_table
from tensile_jax.cli.progress import Live
from tensile_jax.cli.refusal import Refusal
from tensile_jax.schedule import Plan

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


@click.command(short_help="Train a model under a budget.")
@takes_model
@takes_limits
@click.option("--steps", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Steps to train.")
@click.option("--save-plan", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Keep the plan.")
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run this saved plan instead of making one.",
)
@click.option(
    "--compile-cache",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep what is compiled here, for the next run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (see tensile schema run) instead of a table.")
def run(
    model: ModelChoice,
    limits: Limits,
    steps: int,
    save_plan: Path | None,
    plan_file: Path | None,
    compile_cache: Path | None,
    as_json: bool,
) -> None:
    """Train MODEL (cnn, gpt, mlp, resnet50, vgg16) on its real input under a budget of device memory.

    Ctrl-C ends after the step that is under way, with the table of the steps done; a second one does not wait.
    """
    saved = None
    if plan_file is not None:
        _refuse_with_plan("budget", "policy", "state_memory")
        saved = Plan.load(plan_file)
    from tensile_jax.cli.session import run_session  # imports JAX

    with Live(Console(stderr=True)) as live:
        outcome, plan = run_session(model, limits, steps=steps, saved=saved, compile_cache=compile_cache, live=live)
    if save_plan is not None:
        plan.save(save_plan)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    else:
        Console().print(outcome_table(outcome))
    if save_plan is not None:
        click.echo(f"The plan is in {save_plan}; see it with: tensile show {save_plan}", err=as_json)
    if outcome.interrupted:
        click.get_current_context().exit(_INTERRUPTED)


def _refuse_with_plan(*names: str) -> None:
    """A saved plan has its own budget, policy and place for the state."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise Refusal(f"{option} and --plan exclude each other: a saved plan has its own. Leave one of them out.")
