"""`tensile compare`: what every policy would make of a model's step."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from tensile_jax.cli.options import Limits, ModelChoice, device_profile_option, state_memory_option, takes_model, writable_file
from tensile_jax.cli.progress import Live, stderr_console
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.tables import readable_console
from tensile_jax.plan_format import save_json


@click.command(short_help="Plan a model's step with every policy.")
@takes_model
@device_profile_option
@state_memory_option
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
@click.option(
    "--picture",
    metavar="NAME",
    type=click.Path(path_type=Path),
    callback=writable_file,
    help="Draw the curve: NAME.png and NAME.svg.",
)
def compare(
    model: ModelChoice,
    device_profile: str | None,
    state_memory: Literal["device", "any"],
    output: Path | None,
    picture: Path | None,
) -> None:
    """Plan MODEL's step with every policy, under many budgets, without running it.

    MSR, EOR and CBR are the paper's: memory saved, time, and their ratio, against policy "none". All of it is predicted from the
    device profile.
    """
    if picture is not None and find_spec("matplotlib") is None:
        raise Refusal("--picture needs matplotlib: pip install 'tensile_jax[plot]'")
    from tensile_jax.cli.comparison import budgets_table, least_table  # these import JAX
    from tensile_jax.cli.session import planned_step

    limits = Limits(None, "auto", device_profile, state_memory)
    with Live(stderr_console()) as live:
        live.wait_for("tracing")
        built = model.build()
        made = planned_step(built, limits, live=live).compare(built.state_shape, built.batch_shape)
    title = f"{model.name}, batch {model.batch_size}"
    if output is not None:
        save_json(made, output)
    drawn: tuple[Path, ...] = ()
    if picture is not None:
        from tensile_jax.cli.picture import draw  # imports matplotlib

        drawn = draw(made, picture, title=title)
    console = readable_console(110)
    console.print(least_table(made, title=title))
    console.print(budgets_table(made))
    if output is not None:
        click.echo(f"Written to {output}")
    for file in drawn:
        click.echo(f"Drawn: {file}")
