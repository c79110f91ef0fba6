"""`tensile max-batch`: finds the largest batch with which a step fits into a budget."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tensile_jax.budget import parse_budget
from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import format_us, readable_console, table_of
from tensile_jax.cli.options import (
    POLICY,
    ModelChoice,
    OwnStep,
    device_profile_option,
    host_budget_option,
    refuse_typed,
    state_memory_option,
    takes_step,
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
@takes_step
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
    source: ModelChoice | OwnStep,
    budget: str,
    policy: "PolicyName",
    device_profile: str | None,
    host_budget: str | None,
    state_memory: str,
    speed: float,
    most: int,
    output: Path | None,
) -> None:
    """Find the largest batch with which a step fits under a budget of device memory, with plain jit and with a plan.

    MODEL is one of the models of tensile run. MODULE:FUNCTION is a function of yours that takes batch_size and returns
    (step, args), with arrays or jax.ShapeDtypeStructs as args, or what an entrypoint of a job returns.

    The largest batch is found to 1/64 of its size. Peaks and times are predicted; nothing is compiled or run. tensile run MODEL
    --batch-size N --budget B compiles the step, and refuses the budget before the first step if it cannot be kept. Exit code 3: a
    batch of 1 does not fit.
    """
    refuse_typed(("batch_size",), "is what is looked for. Leave it out; --most=N limits it.")
    import jax

    from tensile_jax.cli.run.step_source import find_step, with_batch_size
    from tensile_jax.exec.call.options import JitOptions, PlanOptions
    from tensile_jax.memory_report.largest_batch import find_largest

    options = PlanOptions(
        budget=budget,
        policy=policy,
        device_profile=device_profile,
        host_budget=host_budget,
        state_memory="any" if state_memory == "any" else "device",
    )

    def make(batch_size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        found = find_step(with_batch_size(source, batch_size))
        return found.step if found.donated is None else jax.jit(found.step, **found.jit_options), found.args

    with Phases(stderr_console()) as phases:
        found = find_largest(make, options, JitOptions(), speed=speed, most=most, progress=phases.update)
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
    click.echo(str(found))
    if output is not None:
        click.echo(f"Written to {output}")
