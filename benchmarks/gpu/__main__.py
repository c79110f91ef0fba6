"""The commands of the runs: `python -m benchmarks.gpu results`, `times` or `peaks`."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from benchmarks.cases import Cases
from benchmarks.gpu import peaks, results, times
from benchmarks.gpu.rows import about_this_machine, record

_RESULTS = Path(__file__).parents[1] / "results"
_RUNS = {"results": results.run_of, "times": times.run_of, "peaks": peaks.run_of}
_KEPT_FREE = 4  # cores, for the process that is timed


@click.command()
@click.argument("name", type=click.Choice(list(_RUNS)), metavar="RUN")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; what is measured by then is in the file.")
@click.option("--only", "parts", multiple=True, help="Only rows whose printed names have this part, or all of several.")
@click.option("--small", is_flag=True, help="Small sizes, on a CPU too, to try the run out.")
@click.option(
    "--at-once", type=click.IntRange(1), help="How many processes compile at a time. Default: 4 fewer than there are cores."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Where what is compiled is kept, for the next run.")
@click.option("--commit", help="The version of this code, where there is no repository.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The JSON file. Default: RUN.json in benchmarks/results/<GPU>."
)
def main(
    name: str,
    seconds: float | None,
    parts: tuple[str, ...],
    small: bool,
    at_once: int | None,
    folder: Path | None,
    commit: str | None,
    output: Path | None,
) -> None:
    """Measure one of the runs: results, times or peaks."""
    if small and output is None:
        raise click.UsageError("--small needs --output: its figures are not among the results.")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    processes = at_once or max((os.cpu_count() or 1) - _KEPT_FREE, 1)
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = stack.enter_context(Cases(where, processes, seconds=seconds))
        about = about_this_machine(f"make gpu-{name}", commit)
        if not small and about["platform"] == "cpu":
            raise click.UsageError(
                "jax sees no GPU here. Install the extra cuda12 or cuda13, or pass --small to try the run out."
            )
        file = output or _RESULTS / about["device"].lower().replace(" ", "-") / f"{name}.json"
        left = record(file, about, _RUNS[name](small=small).only(parts), cases)
    click.echo(f"written {file}" if file.exists() else "nothing was measured")
    if left:
        click.echo(f"The time was up: {left} rows are missing. Run the command again for them.")


if __name__ == "__main__":
    main()
