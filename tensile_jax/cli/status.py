"""`tensile status`: how a run in another terminal stands. Needs no JAX."""

from dataclasses import replace
from pathlib import Path

import click
import msgspec

from tensile_jax.cli.control_client import ask_status
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.status_view import status_view
from tensile_jax.cli.tables import readable_console
from tensile_jax.runtime_records import Status

_READABLE_WIDTH = 170  # for a pipe or a file, of which rich knows nothing and says 80

run_argument = click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
job_argument = click.argument("job", metavar="[JOB]", required=False)


@click.command(short_help="Show how a run of several jobs stands.")
@run_argument
@job_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def status(run: Path, job: str | None, as_json: bool) -> None:
    """Show how the jobs of the run in the folder RUN stand, or one of them."""
    found = ask_status(run)
    if job is not None:
        check_job(found, job, run)
        found = replace(found, jobs=tuple(one for one in found.jobs if one.name == job))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        readable_console(_READABLE_WIDTH).print(status_view(found))


def check_job(status: Status, job: str, run: Path) -> None:
    """Raises: Refusal: the run has no such job."""
    known = [one.name for one in status.jobs]
    if job not in known:
        raise Refusal(f"JOB={job}: the run in {run} has no such job. It has: {', '.join(known) or 'none yet'}.")
