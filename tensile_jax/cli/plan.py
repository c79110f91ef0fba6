"""`tensile plan`: plan a model's step without running it."""

from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from tensile_jax.cli.options import Limits, ModelChoice, takes_limits, takes_model, writable_file
from tensile_jax.cli.progress import Live
from tensile_jax.exec.budget import parse_budget


@click.command(short_help="Plan a model's step without running it.")
@takes_model
@takes_limits
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
def plan(model: ModelChoice, limits: Limits, output: Path | None) -> None:
    """Plan MODEL (cnn, gpt, mlp, resnet50, vgg16) without running it.

    Workspaces are estimates, since nothing is compiled; only a budget in per cent compiles plain jit, on this machine.
    Exit code 3: no plan keeps the budget.
    """
    from tensile_jax.cli.session import planned_step  # imports JAX

    with Live(Console(stderr=True)) as live:
        live.wait_for("tracing and planning")
        built = model.build()
        step = planned_step(built, limits, live=live)
        made = step.plan(built.state_shape, built.batch_shape)
        live.wait_for("bounding what any plan can do")
        made = replace(made, bound_us=step.bound_us(built.state_shape, built.batch_shape))
    click.echo(str(made))
    if limits.budget is not None and parse_budget(limits.budget).share is not None and limits.device_profile is not None:
        click.echo(
            f"--budget={limits.budget} is of plain jit's peak as compiled for this machine, not for the profile.", err=True
        )
    if output is not None:
        made.save(output)
        click.echo(f"Written to {output}; see it with: tensile show {output}")
