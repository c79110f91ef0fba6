"""The program `tensile`: the group of all commands, which turns every error into one line on stderr and an exit code."""

import os
import sys
import warnings
from typing import Any

import click

from tensile_jax.cli.commands.calibrate import calibrate
from tensile_jax.cli.commands.compare import compare
from tensile_jax.cli.commands.control import budget, cancel, pause, resume, status
from tensile_jax.cli.commands.demo import demo
from tensile_jax.cli.commands.max_batch import max_batch
from tensile_jax.cli.commands.picture import picture
from tensile_jax.cli.commands.plan import plan
from tensile_jax.cli.commands.run import run
from tensile_jax.cli.commands.schema import schema
from tensile_jax.cli.commands.show import show
from tensile_jax.cli.commands.submit import submit
from tensile_jax.cli.errors import Failure, format_warning, in_one_line
from tensile_jax.cli.signals import INTERRUPTED, flush_output, listen_to_the_end

_TRACEBACK = "TENSILE_TRACEBACK"


class _Commands(click.Group):
    """The commands.

    The installed script calls the group without arguments. The group then handles the signals of the process, and ends the
    process. Other code calls the group with arguments, and the group leaves both to the caller.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self.main(*args, **kwargs)
        warnings.formatwarning = format_warning
        end = listen_to_the_end()
        end.code = self._exit_code()
        sys.exit(end.code)

    def _exit_code(self) -> int:
        """Run the command line, and return its exit code. Only this method turns an unexpected exception into one line."""
        try:
            try:
                self.main()
            except SystemExit as end:
                flush_output()
                return end.code if isinstance(end.code, int) else 0
            finally:
                flush_output()
            return 0
        except BrokenPipeError:
            return 1  # the reader of the output has closed the pipe
        except Exception as error:
            if os.environ.get(_TRACEBACK):
                raise
            Failure.unexpected(error, remedy=f"Set {_TRACEBACK}=1 to see where.").show()
            return Failure.exit_code

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
@click.version_option(package_name="tensile_jax")
def main() -> None:
    """Train JAX models under a budget of device memory.

    The budget decides what is swapped to host memory, recomputed or released, and when.
    """


for command in (
    run,
    submit,
    plan,
    max_batch,
    compare,
    calibrate,
    status,
    pause,
    resume,
    cancel,
    budget,
    show,
    picture,
    schema,
    demo,
):
    main.add_command(command)
