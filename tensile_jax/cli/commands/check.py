"""`tensile check`: runs a step under a plan and as plain `jax.jit`, and says whether the results agree, and what both cost."""

from dataclasses import asdict
from pathlib import Path

import click

from tensile_jax.atomic_file import write_whole
from tensile_jax.cli.errors import refusing_options
from tensile_jax.cli.options import POSITIVE_COUNT, Limits, ModelChoice, OwnStep, takes_limits, takes_step, writable_file
from tensile_jax.cli.progress import Phases
from tensile_jax.progress.stderr import stderr_console

_DEFAULTS = (None, "auto", "device")  # those of the options, which a step that tensile_jax.jit has returned may have otherwise


@click.command(short_help="Compare a step under a plan with plain jit.")
@takes_step
@takes_limits
@click.option("--steps", metavar="N", type=POSITIVE_COUNT, default=4, show_default=True, help="Compare so many steps in a row.")
@click.option(
    "--timed-calls", metavar="N", type=POSITIVE_COUNT, default=5, show_default=True, help="Time so many calls of each side."
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
@click.pass_context
def check(
    ctx: click.Context, source: ModelChoice | OwnStep, limits: Limits, steps: int, timed_calls: int, output: Path | None
) -> None:
    """Run a step under a plan and as plain jax.jit, on the same arguments, and compare results, peaks and times.

    MODEL is one of the models of tensile run. MODULE:FUNCTION is a function of yours that returns (step, args), with arrays as
    args, or what an entrypoint of a job returns.

    An output differs if it is further from plain jit's output than rounding explains: further than plain jit is from itself under
    another rounding. Exit code 1: an output differs. Exit code 3: no plan keeps the budget.
    """
    from tensile_jax.checking.check import check as check_step  # imports JAX
    from tensile_jax.checking.check import refuse_unrunnable
    from tensile_jax.cli.run.step_source import find_step
    from tensile_jax.exec.call.options import JitOptions, PlanOptions, read_options

    with Phases(stderr_console()) as phases:
        phases.begin("tracing")
        with refusing_options():
            given = {name: value for name, value in asdict(limits).items() if value not in _DEFAULTS}
            read_options(PlanOptions(**given))
            found = find_step(source, to_run=True)
            refuse_unrunnable(found.step, found.args, {})
        options = JitOptions() if found.donated is None else JitOptions(donate_argnums=found.donated)
        report = check_step(
            found.step,
            *found.args,
            steps=steps,
            timed_calls=timed_calls,
            progress=phases.update,
            **given,
            **options,
        )
    if output is not None:
        write_whole(output, report.to_json().encode() + b"\n")
    click.echo(str(report))
    if output is not None:
        click.echo(f"Written to {output}")
    ctx.exit(report.exit_code)
