"""`tensile status`, `pause`, `resume`, `cancel`, `budget`: show or change a run from another terminal, without JAX.

Except for `budget`, these commands also work for the jobs of a Ray cluster: give `--ray ADDRESS` instead of the run's folder.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Literal, TypeVar

import click
import msgspec

from tensile_jax.budget import parse_budget
from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import readable_console
from tensile_jax.cli.run.control import NoRunAlive, Request, ask, ask_status
from tensile_jax.cli.run.ended_run import ended_run, has_begun, how_it_ended, last_status
from tensile_jax.cli.run.live_view import StatusView
from tensile_jax.cli.run.report import JobOutcome, jobs_lines, jobs_table
from tensile_jax.errors import BudgetError
from tensile_jax.runtime_records import FINAL, JobState, JobStatus, Status
from tensile_jax.units import format_bytes

_READABLE_WIDTH = 170

_Named = TypeVar("_Named", JobStatus, JobOutcome)

# For each command: the words printed of a changed job; the states of the jobs that it changes if no job is named.
_CHANGES: dict[Literal["pause", "resume", "cancel"], tuple[str, frozenset[JobState]]] = {
    "pause": ("will pause", frozenset({"preparing", "queued", "running"})),
    "resume": ("goes on", frozenset({"paused"})),
    "cancel": ("is cancelled", frozenset({"preparing", "queued", "running", "paused"})),
}

_run_argument = click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))


@dataclass(frozen=True, slots=True)
class _Steered:
    """What a command looks at and changes: a run in a folder, or the jobs of a cluster. `name` is for messages.

    `folder` is None for a cluster.
    """

    name: str
    folder: Path | None
    job: str | None
    status: Callable[[], Status]
    change: Callable[[Literal["pause", "resume", "cancel"], str], None]


def _steers(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments RUN and JOB, or with `--ray` only JOB, as `steered`."""

    @click.argument("words", metavar="RUN [JOB]", nargs=-1)
    @click.option("--ray", "address", metavar="ADDRESS", help="The jobs of this Ray cluster, instead of RUN.")
    @wraps(command)
    def with_arguments(words: tuple[str, ...], address: str | None, **options: bool) -> None:
        most = 2 if address is None else 1
        if len(words) > most:
            raise Refusal(f"there are too many arguments: {' '.join(words[most:])}. Leave them out.")
        if address is not None:
            command(_on_cluster(address, words[0] if words else None), **options)
            return
        if not words:
            raise Refusal("RUN is missing: the folder of a run, or --ray=ADDRESS for a cluster. Name one of them.")
        run = Path(words[0])
        if not run.is_dir():
            raise Refusal(f"Invalid value for 'RUN': Directory '{run}' does not exist. Name the folder of a run.")
        command(_in_folder(run, words[1] if len(words) > 1 else None), **options)

    return with_arguments


def _in_folder(run: Path, job: str | None) -> _Steered:
    def change(command: Literal["pause", "resume", "cancel"], name: str) -> None:
        ask(run, Request(command, name))

    return _Steered(f"the run in {run}", run, job, lambda: ask_status(run), change)


def _on_cluster(address: str, job: str | None) -> _Steered:
    from tensile_jax.cli.commands.submit import as_option
    from tensile_jax.ray import attach  # imports Ray

    try:
        cluster = attach(address)
    except ValueError as error:
        raise Refusal(as_option(str(error))) from error
    steer = {"pause": cluster.pause, "resume": cluster.resume, "cancel": cluster.cancel}

    def change(command: Literal["pause", "resume", "cancel"], name: str) -> None:
        try:
            steer[command](name)
        except ValueError as error:
            raise Refusal(str(error)) from error

    return _Steered(f"the cluster at {address}", None, job, lambda: cluster.status().merged(), change)


@click.command(short_help="Show the state of a run of several jobs.")
@_steers
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def status(steered: _Steered, as_json: bool) -> None:
    """Show the state of all jobs of the run in the folder RUN, or of one; with --ray, of the jobs of a cluster.

    If the run has ended, show how, and the command that continues it.
    """
    try:
        found = steered.status()
    except NoRunAlive:
        if steered.folder is None or not has_begun(steered.folder):
            raise
        _show_ended(steered.folder, steered, as_json=as_json)
        return
    found = replace(found, jobs=_asked_for(steered, found.jobs))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        readable_console(_READABLE_WIDTH).print(StatusView(found))


def _show_ended(folder: Path, steered: _Steered, *, as_json: bool) -> None:
    outcome = ended_run(folder)
    shown = replace(outcome, jobs=_asked_for(steered, outcome.jobs))
    if as_json:
        click.echo(msgspec.json.encode(last_status(shown, folder)))
        return
    click.echo(how_it_ended(outcome))
    readable_console(_READABLE_WIDTH).print(jobs_table(shown))
    for line in jobs_lines(shown):
        click.echo(line)


def _asked_for(steered: _Steered, jobs: tuple[_Named, ...]) -> tuple[_Named, ...]:
    """Those of the jobs that the command asks for: all, or the one that was named."""
    known = [one.name for one in jobs]
    if steered.job is not None and steered.job not in known:
        raise Refusal(f"JOB={steered.job}: {steered.name} has no such job. It has: {', '.join(known) or 'none yet'}.")
    return tuple(one for one in jobs if steered.job in (None, one.name))


@click.command(short_help="Pause a job of a run, or all of them.")
@_steers
def pause(steered: _Steered) -> None:
    """Pause JOB of the run in the folder RUN after its present step; without JOB, all jobs that have not ended."""
    _change("pause", steered)


@click.command(short_help="Continue a paused job of a run, or all of them.")
@_steers
def resume(steered: _Steered) -> None:
    """Continue the paused JOB of the run in the folder RUN; without JOB, all paused jobs."""
    _change("resume", steered)


@click.command(short_help="Cancel a job of a run, or all of them.")
@_steers
def cancel(steered: _Steered) -> None:
    """End JOB of the run in the folder RUN before its last step; without JOB, all jobs that have not ended."""
    _change("cancel", steered)


@click.command(short_help="Change the device-memory budget of a run.")
@_run_argument
@click.argument("nbytes", metavar="BYTES")
def budget(run: Path, nbytes: str) -> None:
    """Change the device memory that the jobs of the run in the folder RUN share to BYTES: a number, or "8GiB"."""
    try:
        wanted = parse_budget(nbytes).nbytes
    except BudgetError as error:
        raise Refusal(f"BYTES: {error}") from error
    if wanted is None:
        raise Refusal(f'BYTES={nbytes}: a share is taken when a run begins. Give a number of bytes, or a size such as "8GiB".')
    ask(run, Request("budget", budget_bytes=wanted))
    click.echo(f"The budget of the run in {run} is {format_bytes(wanted)} from now on.")


def _change(command: Literal["pause", "resume", "cancel"], steered: _Steered) -> None:
    said, states = _CHANGES[command]
    if steered.job is not None:
        steered.change(command, steered.job)
        click.echo(f"{steered.job} {said}.")
        return
    jobs = steered.status().jobs
    meant = [one.name for one in jobs if one.state in states]
    refusals: list[str] = []
    for name in meant:
        try:
            steered.change(command, name)
            click.echo(f"{name} {said}.")
        except Refusal as error:  # the job may have ended since; the command goes on with the others
            refusals.append(error.message)
    if refusals:
        raise Refusal(" ".join(refusals))
    if not meant:
        ended = jobs and all(one.state in FINAL for one in jobs)
        why = "all of them have ended" if ended else f"none is {', '.join(sorted(states))}"
        click.echo(f"There is no job to {command}: {why}.", err=True)
