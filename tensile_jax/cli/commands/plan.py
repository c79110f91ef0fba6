"""`tensile plan`: plans a step, or several jobs that share a budget, without running them."""

from dataclasses import replace
from pathlib import Path

import click

from tensile_jax.cli.formatting import readable_console
from tensile_jax.cli.jobs_file import read_jobs_file, refuse_sharded_jobs
from tensile_jax.cli.options import Limits, ModelChoice, OwnStep, takes_limits, takes_step_or_jobs, writable_file
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.report import plan_lines, plan_table
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console

_READABLE_WIDTH = 120


@click.command(short_help="Plan a step, or several jobs, without running them.")
@takes_step_or_jobs(for_jobs=(), for_both=("output",), own_steps=True)
@takes_limits
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
def plan(source: ModelChoice | OwnStep | Path, limits: Limits, output: Path | None) -> None:
    """Plan the step of MODEL (bert, cnn, densenet121, gpt, gpt_scan, inceptionv3, inceptionv4, mlp, resnet50, vgg16), or your
    own, without running it, or all jobs of the file JOBS.toml under their budget.

    MODULE:FUNCTION is a function of yours that returns (step, args), with arrays or jax.ShapeDtypeStructs as args, or what an
    entrypoint of a job returns.

    Nothing is compiled, so workspaces and the peak are estimates. There is one exception: for JOBS.toml with a budget in per
    cent, plain jit is compiled, unless the profile is that of another device. tensile run --plan starts from what is written
    here, corrects the estimates and keeps the budget. Exit code 3: no plan keeps the budget.
    """
    if isinstance(source, Path):
        _plan_jobs(source, output)
    else:
        _plan_step(source, limits, output)


def _plan_step(source: ModelChoice | OwnStep, limits: Limits, output: Path | None) -> None:
    from tensile_jax.cli.run.step_source import calls_of_step, find_step  # imports JAX
    from tensile_jax.exec.fitting.forms import bound_us

    with Phases(stderr_console()) as phases:
        phases.begin("tracing")
        found = find_step(source)
        calls = calls_of_step(found, limits, phases)
        made = calls.plan(found.args, {})
        phases.begin("bounding what any plan can do")
        made = replace(made, bound_us=bound_us(calls.step(found.args, {}), calls.budget))
    if output is not None:
        made.save(output)
    click.echo(str(made))
    if output is not None:
        is_model = isinstance(source, ModelChoice)
        start = f"tensile run ... --plan {output}" if is_model else f'tensile.jit(step, plan=tensile.Plan.load("{output}"))'
        click.echo(f"Written to {output}; see it with: tensile show {output}; start from it with: {start}")


def _plan_jobs(file: Path, output: Path | None) -> None:
    jobs = read_jobs_file(file)
    refuse_sharded_jobs(jobs)
    from tensile_jax.cli.run.joint_plan import plan_jobs_file  # imports JAX

    with Phases(stderr_console()) as phases:
        joint = plan_jobs_file(jobs, phases)
    if output is not None:
        save_json(joint, output)
    readable_console(_READABLE_WIDTH).print(plan_table(joint))
    for line in plan_lines(joint):
        click.echo(line)
    if output is not None:
        click.echo(f"Written to {output}")
