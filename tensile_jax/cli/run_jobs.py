"""`tensile run JOBS.toml` and `tensile run --resume RUN`: several jobs under one budget.

Exit codes: 0 no job failed, 1 one did or the run folder could not take all of it, 130 interrupted (143 by SIGTERM).
"""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tensile_jax.cli.jobs_file import read_jobs_file
from tensile_jax.cli.jobs_outcome import JobsOutcome, end_lines, jobs_table
from tensile_jax.cli.progress import stderr_console
from tensile_jax.cli.refusal import Failure
from tensile_jax.cli.run_config import read_config
from tensile_jax.cli.stop_signals import exit_code
from tensile_jax.cli.tables import readable_console

if TYPE_CHECKING:  # at run time this would import JAX
    from tensile_jax.cli.jobs_session import JobsDone

_READABLE_WIDTH = 130
_RUNS = Path("runs")


def run_jobs(file: Path, output: Path | None, *, compile_cache: Path | None, as_json: bool) -> None:
    """Run the jobs of the file in a new run folder."""
    jobs = read_jobs_file(file)
    from tensile_jax.cli.jobs_session import begin_jobs  # imports JAX

    _keep_compiled(compile_cache)
    folder = output or _RUNS / f"{file.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    _end(begin_jobs(jobs, folder, stderr_console()), as_json=as_json)


def resume_run(folder: Path, *, compile_cache: Path | None, as_json: bool) -> None:
    """Go on with the run in the folder, as it was configured."""
    config = read_config(folder)
    from tensile_jax.cli.jobs_session import resume_jobs  # imports JAX

    _keep_compiled(compile_cache)
    _end(resume_jobs(config, folder, stderr_console()), as_json=as_json)


def _end(done: "JobsDone", *, as_json: bool) -> None:
    outcome = done.outcome
    try:
        report(outcome, as_json=as_json)
    except OSError:
        if not outcome.interrupted:  # else the terminal may be gone; the run folder has it all
            raise
    if outcome.interrupted:
        click.get_current_context().exit(exit_code())
    refuse_troubles(outcome)
    if outcome.failed:
        click.get_current_context().exit(1)


def refuse_troubles(outcome: JobsOutcome) -> None:
    """Raises: Failure: the run folder could not take all of it. The outcome, as far as it could be written, names all files."""
    if outcome.troubles:
        more = len(outcome.troubles) - 1
        raise Failure(outcome.troubles[0] + (f"; nor could {more} other files." if more else "."))


def report(outcome: JobsOutcome, *, as_json: bool) -> None:
    """The outcome on stdout; below a table, what else there is to say."""
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    else:
        readable_console(_READABLE_WIDTH).print(jobs_table(outcome))
    for line in end_lines(outcome):
        click.echo(line, err=as_json)


def _keep_compiled(folder: Path | None) -> None:
    if folder is not None:
        from tensile_jax.cli.session import keep_compiled  # imports JAX

        keep_compiled(folder)
