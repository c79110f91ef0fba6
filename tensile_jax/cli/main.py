"""The group of all commands, and how errors leave it: one line on stderr and an exit code, never a traceback."""

import os
import sys
from typing import Any

import click

from tensile_jax.cli.commands.compare import compare
from tensile_jax.cli.commands.control import budget, cancel, pause, resume, status
from tensile_jax.cli.commands.demo import demo
from tensile_jax.cli.commands.picture import picture
from tensile_jax.cli.commands.plan import plan
from tensile_jax.cli.commands.run import run
from tensile_jax.cli.commands.schema import schema
from tensile_jax.cli.commands.show import show
from tensile_jax.cli.errors import Failure, in_one_line
from tensile_jax.cli.signals import INTERRUPTED, flush_output, listen_to_the_end

_TRACEBACK = "TENSILE_TRACEBACK"


class _Commands(click.Group):
    """The commands. Called without arguments, as the installed script calls it, it is the whole process: it takes the signals."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self.main(*args, **kwargs)
        listen_to_the_end()
        sys.exit(self._exit_code())

    def _exit_code(self) -> int:
        """The exit code of the command line; only here an unexpected exception is kept from being a traceback."""
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
            return 1  # whoever read the output has gone, and wants no more of it
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
        except KeyboardInterrupt:  # where another process calls the commands, and takes the signals itself
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tensile_jax")
def main() -> None:
    """Train JAX models under a budget of device memory.

    The budget decides what is swapped to host memory, recomputed or released, and when.
    """


for command in (run, plan, compare, status, pause, resume, cancel, budget, show, picture, schema, demo):
    main.add_command(command)
