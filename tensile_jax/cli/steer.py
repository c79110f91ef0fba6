"""`tensile pause`, `resume`, `cancel`, `budget`: change a run from another terminal. Needs no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from tensile_jax.budget import parse_budget
from tensile_jax.cli.control_client import ask, ask_status
from tensile_jax.cli.control_wire import Request
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.status import job_argument, run_argument
from tensile_jax.errors import BudgetError
from tensile_jax.plan_format import format_bytes
from tensile_jax.runtime_records import FINAL, JobState


@dataclass(frozen=True, slots=True)
class _Deed:
    """`states`: of the jobs that it is done to where none is named."""

    done: str
    states: frozenset[JobState]


_DEEDS: Mapping[Literal["pause", "resume", "cancel"], _Deed] = {
    "pause": _Deed("will pause", frozenset({"preparing", "queued", "running"})),
    "resume": _Deed("goes on", frozenset({"paused"})),
    "cancel": _Deed("is cancelled", frozenset({"preparing", "queued", "running", "paused"})),
}


@click.command(short_help="Pause a job of a run, or all of them.")
@run_argument
@job_argument
def pause(run: Path, job: str | None) -> None:
    """Let JOB of the run in the folder RUN stop after its present step; without JOB, all that have not ended."""
    _do("pause", run, job)


@click.command(short_help="Let a paused job of a run go on, or all of them.")
@run_argument
@job_argument
def resume(run: Path, job: str | None) -> None:
    """Let the paused JOB of the run in the folder RUN go on; without JOB, all that are paused."""
    _do("resume", run, job)


@click.command(short_help="Cancel a job of a run, or all of them.")
@run_argument
@job_argument
def cancel(run: Path, job: str | None) -> None:
    """End JOB of the run in the folder RUN before its last step; without JOB, all that have not ended."""
    _do("cancel", run, job)


@click.command(short_help="Give a run another budget of device memory.")
@run_argument
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


def _do(command: Literal["pause", "resume", "cancel"], run: Path, job: str | None) -> None:
    deed = _DEEDS[command]
    if job is not None:
        ask(run, Request(command, job))
        click.echo(f"{job} {deed.done}.")
        return
    jobs = ask_status(run).jobs
    meant = [one.name for one in jobs if one.state in deed.states]
    refusals: list[str] = []
    for name in meant:
        try:
            ask(run, Request(command, name))
            click.echo(f"{name} {deed.done}.")
        except Refusal as error:  # it may have ended since; the others are asked all the same
            refusals.append(error.message)
    if refusals:
        raise Refusal(" ".join(refusals))
    if not meant:
        states = ", ".join(sorted(deed.states))
        ended = "all of them have ended" if jobs and all(one.state in FINAL for one in jobs) else f"none is {states}"
        click.echo(f"There is no job to {command}: {ended}.", err=True)
