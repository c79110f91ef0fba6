"""`tensile submit`: trains the jobs of a jobs file on the devices of a Ray cluster.

The command has one of these exit codes:

    0    no job failed
    1    a job failed, or the cluster died
    130  Ctrl-C ended the jobs; 143: SIGTERM ended them
"""

from datetime import datetime
from pathlib import Path

import click
import msgspec

from tensile_jax.cli.errors import Failure, Refusal, in_options
from tensile_jax.cli.formatting import readable_console
from tensile_jax.cli.jobs_file import read_jobs_file
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.live_view import StatusView
from tensile_jax.cli.signals import exit_code
from tensile_jax.errors import ClusterError
from tensile_jax.progress.stderr import stderr_console

_READABLE_WIDTH = 170


@click.command(short_help="Train the jobs of a file on a Ray cluster.")
@click.argument("jobs", metavar="JOBS.toml", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--ray", "address", metavar="ADDRESS", default="auto", help="HOST:PORT of the head node; auto: this machine's.")
@click.option(
    "--checkpoints",
    metavar="DIR",
    help="A folder that all nodes share, or a URL such as gs://bucket/runs. Without it: runs/NAME-DATE-TIME.",
)
@click.option(
    "--devices-per-actor",
    metavar="N",
    type=click.IntRange(min=1),
    help="Make groups of N devices of a node. Without it: as many as a job needs.",
)
@click.option("--resume", is_flag=True, help="Go on from the checkpoints in the folder.")
@click.option("--detach", is_flag=True, help="Return when the jobs are accepted, and let them run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def submit(
    jobs: Path, address: str, checkpoints: str | None, devices_per_actor: int | None, resume: bool, detach: bool, as_json: bool
) -> None:
    """Train the jobs of the file JOBS.toml on the devices of a Ray cluster, and show their events until they have ended.

    Each device has the budget of the file. A job with `devices = 4` there is divided among four devices of one node. Another
    terminal can follow and control the jobs: tensile status, pause, resume, cancel with --ray. If a device or a node dies, its
    jobs continue elsewhere from their checkpoints. Exit code 1: a job failed.

    Ctrl-C ends every job after its present step, with a checkpoint from which --resume continues. A second Ctrl-C does not wait
    for that. Needs Ray: pip install 'tensile_jax[ray]'.
    """
    if resume and checkpoints is None:
        raise Refusal("--resume needs the folder to go on from. Name it: --checkpoints=DIR.")
    file = read_jobs_file(jobs)
    folder = f"runs/{jobs.stem}-{datetime.now():%Y%m%d-%H%M%S}" if checkpoints is None else checkpoints
    from tensile_jax.cli.run.cluster import follow_jobs, submit_jobs  # imports JAX

    console = stderr_console()
    try:
        with Phases(console) as phases:
            phases.begin("starting the devices of the cluster")
            run = submit_jobs(file, address, folder, resume=resume, devices_per_actor=devices_per_actor)
    except (ValueError, TypeError) as error:
        raise Refusal(as_option(str(error))) from error
    except ClusterError as error:
        raise Failure(as_option(str(error))) from error
    console.print(f"Checkpoints: {folder}; from another terminal: tensile status --ray {address}", markup=False, soft_wrap=True)
    if detach:
        return
    try:
        status, interrupted = follow_jobs(run, console)
    except ClusterError as error:
        raise Failure(as_option(str(error))) from error
    if as_json:
        click.echo(msgspec.json.encode(status))
    else:
        readable_console(_READABLE_WIDTH).print(StatusView(status.merged()))
    if interrupted:
        click.get_current_context().exit(exit_code())
    if any(job.state == "failed" for job in status.jobs):
        click.get_current_context().exit(Failure.exit_code)


def as_option(message: str) -> str:
    """`message` of `tensile_jax.ray` with its arguments written as options."""
    message = message.replace("resume=True", "--resume")
    options = (("address", "--ray"), ("checkpoints", "--checkpoints"), ("devices_per_actor", "--devices-per-actor"))
    for argument, option in options:
        if message.startswith((f"{argument}=", f"{argument}:")):
            message = option + message.removeprefix(argument)
    return in_options(message)
