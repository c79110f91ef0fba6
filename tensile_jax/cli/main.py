"""The group of commands, and how errors leave it: one line on stderr and an exit code, never a traceback."""

from typing import Any

import click

from tensile_jax.cli.compare import compare
from tensile_jax.cli.demo import demo
from tensile_jax.cli.plan import plan
from tensile_jax.cli.refusal import DoesNotFit, Refusal, in_options
from tensile_jax.cli.run import run
from tensile_jax.cli.run_picture import picture
from tensile_jax.cli.schema import schema
from tensile_jax.cli.show import show
from tensile_jax.cli.status import status
from tensile_jax.cli.steer import budget, cancel, pause, resume
from tensile_jax.errors import BudgetTooSmall, JobsFileError, TensileError

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BudgetTooSmall as error:
            raise DoesNotFit(in_options(str(error))) from error
        except JobsFileError as error:
            raise Refusal(str(error)) from error  # it names keys of the file, not options
        except (TensileError, ModuleNotFoundError) as error:
            raise Refusal(in_options(str(error))) from error
        except KeyboardInterrupt:
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
