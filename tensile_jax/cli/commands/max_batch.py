"""`tensile max-batch`: finds the largest batch size with which a model's step fits in a budget."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensile_jax.budget import parse_budget
from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import format_us, readable_console, table_of
from tensile_jax.cli.options import (
    POLICY,
    Limits,
    ModelChoice,
    device_profile_option,
    host_budget_option,
    refuse_typed,
    state_memory_option,
    takes_model,
    writable_file,
)
from tensile_jax.cli.progress import Phases
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console
from tensile_jax.units import format_bytes

if TYPE_CHECKING:  # at run time this would import NumPy
    from tensile_jax.plan import PolicyName


def _in_bytes(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    del ctx, parameter
    try:
        budget = parse_budget(value)
    except ValueError as error:
        raise Refusal(f"--{error}") from error
    if budget.nbytes is None:
        raise Refusal(f'--budget={value} is a share of a peak, and every batch has its own peak. Give a size such as "8GiB".')
    return value


@click.command("max-batch", short_help="Find the largest batch that fits.")
@takes_model
@click.option("--budget", metavar="B", required=True, callback=_in_bytes, help='Bytes, or a size such as "8GiB".')
@click.option("--policy", type=POLICY, default="auto", show_default=True, help="How to plan.")
@device_profile_option
@host_budget_option
@state_memory_option
@click.option(
    "--speed",
    metavar="S",
    type=click.FloatRange(min=0, max=1),
    default=0.5,
    show_default=True,
    help="The least samples per second of a plan, as a share of plain jit's.",
)
@click.option("--most", metavar="N", type=click.IntRange(min=1), default=4096, show_default=True, help="Try no larger batch.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
def max_batch(
    model: ModelChoice,
    budget: str,
    policy: "PolicyName",
    device_profile: str | None,
    host_budget: str | None,
    state_memory: str,
    speed: float,
    most: int,
    output: Path | None,
) -> None:
    """Find the largest batch of MODEL whose train step fits under a budget of device memory, with plain jit and with a plan.

    The largest is found to 1/64 of its size. Peaks and times are predicted; nothing is compiled or run. tensile run MODEL
    --batch-size N --budget B compiles the step, and refuses the budget before the first step if it cannot be kept.
    Exit code 3: a batch of 1 does not fit.
    """
    refuse_typed(("batch_size",), "is what is looked for. Leave it out; --most=N limits it.")
    from tensile_jax.cli.run.max_batch import largest_batch, story_of  # imports JAX

    limits = Limits(budget, policy, device_profile, "any" if state_memory == "any" else "device", host_budget=host_budget)
    with Phases(stderr_console()) as phases:
        found = largest_batch(model, limits, speed=speed, most=most, phases=phases)
    if output is not None:
        save_json(found, output)
    table = table_of(
        f"{found.model} under {format_bytes(found.budget_bytes)} ({found.device_profile}, {found.policy}, predicted)",
        "", ">batch", ">peak", ">step", ">samples/s",
    )  # fmt: skip
    for cost in found.costs:
        how = "plain jit" if cost.plain else "planned"
        table.add_row(
            how, str(cost.batch_size), format_bytes(cost.peak_bytes), format_us(cost.step_us), f"{cost.samples_per_s:.4g}"
        )
    readable_console(100).print(table)
    click.echo(story_of(found))
    if output is not None:
        click.echo(f"Written to {output}")
