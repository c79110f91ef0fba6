"""`tensile status`, `pause`, `resume`, `cancel`, `budget`: show a run, or change it, from another terminal. Need no JAX."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import click
import msgspec

from tensile_jax.budget import parse_budget
from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import readable_console
from tensile_jax.cli.run.control import Request, ask, ask_status
from tensile_jax.cli.run.live_view import StatusView
from tensile_jax.errors import BudgetError
from tensile_jax.runtime_records import FINAL, JobState
from tensile_jax.units import format_bytes

_READABLE_WIDTH = 170

# For each command: the words printed of a changed job; the states of the jobs that it changes if no job is named.
_CHANGES: dict[Literal["pause", "resume", "cancel"], tuple[str, frozenset[JobState]]] = {
    "pause": ("will pause", frozenset({"preparing", "queued", "running"})),
    "resume": ("goes on", frozenset({"paused"})),
    "cancel": ("is cancelled", frozenset({"preparing", "queued", "running", "paused"})),
}

_run_argument = click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
_job_argument = click.argument("job", metavar="[JOB]", required=False)


@click.command(short_help="Show how a run of several jobs stands.")
@_run_argument
@_job_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def status(run: Path, job: str | None, as_json: bool) -> None:
    """Show how the jobs of the run in the folder RUN stand, or one of them."""
    found = ask_status(run)
    if job is not None:
        known = [one.name for one in found.jobs]
        if job not in known:
            raise Refusal(f"JOB={job}: the run in {run} has no such job. It has: {', '.join(known) or 'none yet'}.")
        found = replace(found, jobs=tuple(one for one in found.jobs if one.name == job))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        readable_console(_READABLE_WIDTH).print(StatusView(found))


@click.command(short_help="Pause a job of a run, or all of them.")
@_run_argument
@_job_argument
def pause(run: Path, job: str | None) -> None:
    """Let JOB of the run in the folder RUN stop after its present step; without JOB, all that have not ended."""
    _change("pause", run, job)


@click.command(short_help="Let a paused job of a run go on, or all of them.")
@_run_argument
@_job_argument
def resume(run: Path, job: str | None) -> None:
    """Let the paused JOB of the run in the folder RUN go on; without JOB, all that are paused."""
    _change("resume", run, job)


@click.command(short_help="Cancel a job of a run, or all of them.")
@_run_argument
@_job_argument
def cancel(run: Path, job: str | None) -> None:
    """End JOB of the run in the folder RUN before its last step; without JOB, all that have not ended."""
    _change("cancel", run, job)


@click.command(short_help="Give a run another budget of device memory.")
@_run_argument
@click.argument("nbytes", metavar="BYTES")
def budget(run: Path, nbytes: str) -> None:
    """Let the jobs of the run in the folder RUN share BYTES of device memory from now on: a number, or "8GiB"."""
    try:
        wanted = parse_budget(nbytes).nbytes
    except BudgetError as error:
        raise Refusal(f"BYTES: {error}") from error
    if wanted is None:
        raise Refusal(f'BYTES={nbytes}: a share is taken when a run begins. Give a number of bytes, or a size such as "8GiB".')
    ask(run, Request("budget", budget_bytes=wanted))
    click.echo(f"The budget of the run in {run} is {format_bytes(wanted)} from now on.")


def _change(command: Literal["pause", "resume", "cancel"], run: Path, job: str | None) -> None:
    said, states = _CHANGES[command]
    if job is not None:
        ask(run, Request(command, job))
        click.echo(f"{job} {said}.")
        return
    jobs = ask_status(run).jobs
    meant = [one.name for one in jobs if one.state in states]
    refusals: list[str] = []
    for name in meant:
        try:
            ask(run, Request(command, name))
            click.echo(f"{name} {said}.")
        except Refusal as error:  # the job may have ended since; the command goes on with the others
            refusals.append(error.message)
    if refusals:
        raise Refusal(" ".join(refusals))
    if not meant:
        ended = jobs and all(one.state in FINAL for one in jobs)
        why = "all of them have ended" if ended else f"none is {', '.join(sorted(states))}"
        click.echo(f"There is no job to {command}: {why}.", err=True)
