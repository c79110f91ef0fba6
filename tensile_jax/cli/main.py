"""Defines `tensile`, the group of all commands, which turns every expected error into a message on stderr and an exit code."""

from typing import Any

import click

from tensile_jax.cli.commands.calibrate import calibrate
from tensile_jax.cli.commands.check import check
from tensile_jax.cli.commands.compare import compare
from tensile_jax.cli.commands.control import budget, cancel, pause, resume, status
from tensile_jax.cli.commands.demo import demo
from tensile_jax.cli.commands.errors import errors
from tensile_jax.cli.commands.max_batch import max_batch
from tensile_jax.cli.commands.memory import memory
from tensile_jax.cli.commands.picture import picture
from tensile_jax.cli.commands.plan import plan
from tensile_jax.cli.commands.run import run
from tensile_jax.cli.commands.schema import schema
from tensile_jax.cli.commands.show import show
from tensile_jax.cli.commands.submit import submit
from tensile_jax.cli.errors import in_one_line
from tensile_jax.cli.signals import INTERRUPTED
from tensile_jax.cli.version import VERSION_HELP, print_version


class _Commands(click.Group):
    """The commands. Errors of arguments, and interrupts where the caller handles the signals, become one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with in_one_line():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # other code calls the commands, and handles the signals itself
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version, help=VERSION_HELP)
def main() -> None:
    """Train JAX models under a budget of device memory.

    The budget decides what is swapped to host memory, recomputed or released, and when.
    """


for command in (
    run,
    submit,
    plan,
    memory,
    max_batch,
    compare,
    check,
    calibrate,
    status,
    pause,
    resume,
    cancel,
    budget,
    show,
    picture,
    schema,
    errors,
    demo,
):
    main.add_command(command)
