"""`tensile memory`: says how much device memory a step needs under plain `jax.jit`, and which tensors hold the peak."""

from pathlib import Path

import click

from tensile_jax.cli.options import (
    POSITIVE_COUNT,
    ModelChoice,
    OwnStep,
    device_profile_option,
    html_option,
    takes_step,
    writable_file,
)
from tensile_jax.cli.progress import Phases
from tensile_jax.progress.stderr import stderr_console


@click.command(short_help="Say what a step needs in memory, and what holds the peak.")
@takes_step
@device_profile_option
@click.option("--compile", "compiles", is_flag=True, help="Compile the step, for XLA's own peak beside the predicted one.")
@click.option("--budgets", is_flag=True, help="Plan under some budgets, and say what less memory costs. Takes longer.")
@click.option("--top", metavar="N", type=POSITIVE_COUNT, default=10, show_default=True, help="Rows of the largest tensors.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
@html_option
def memory(
    source: ModelChoice | OwnStep,
    device_profile: str | None,
    compiles: bool,
    budgets: bool,
    top: int,
    output: Path | None,
    html: Path | None,
) -> None:
    """Say what a step needs on the device under plain jax.jit, where its peak is reached, and which tensors hold it.

    MODEL is one of the models of tensile run. MODULE:FUNCTION is a function of yours that returns (step, args), with arrays or
    jax.ShapeDtypeStructs as args, or what an entrypoint of a job returns. Nothing runs.
    """
    from tensile_jax.cli.run.step_source import find_step  # imports JAX
    from tensile_jax.memory_report.memory import memory as report_on
    from tensile_jax.memory_report.report import describe

    with Phases(stderr_console()) as phases:
        phases.begin("tracing")
        found = find_step(source)
        report = report_on(
            found.step,
            *found.args,
            compile=compiles,
            budgets=budgets,
            device_profile=device_profile,
            progress=phases.update,
            **found.jit_options,
        )
    if output is not None:
        output.write_text(report.to_json() + "\n")
    if html is not None:
        report.save(html)
    click.echo(describe(report, rows=top, in_shell=True))
    for file in (output, html):
        if file is not None:
            click.echo(f"Written to {file}")
