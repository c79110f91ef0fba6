"""Runs the experiments, and adds their figures to a JSON file in `benchmarks/results/paper/`.

python -m benchmarks.paper simulate --device h200       predicted for a device profile
python -m benchmarks.paper compile                      memory of programs compiled for an H200, predicted times
python -m benchmarks.paper measure                      measured on this machine's device
python -m benchmarks.paper draw                         tables and figures, in `benchmarks/README.md`
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import click
import jax

from benchmarks.cases import Cases
from benchmarks.paper import measured, shared, single
from benchmarks.paper.draw import draw as draw_all
from benchmarks.paper.largest import largest
from benchmarks.paper.published import MODELS
from benchmarks.paper.steps import DEVICES
from benchmarks.run import TIME_IS_UP
from tensile_jax.atomic_file import write_whole

_RESULTS = Path(__file__).parent.parent / "results" / "paper"
_OF_A_MODEL: dict[str, Callable[[str, str], Any]] = {
    "single": single.single,
    "first": single.first,
    "phases": single.phases,
    "curve": single.curve,
    "overhead": shared.overhead,
    "scalability": shared.scalability,
    "batch": single.batch,
}
_OF_A_DEVICE: dict[str, Callable[[str], Any]] = {"mixed": shared.mixed, "largest": largest}


@click.group()
def main() -> None:
    """Run the paper's experiments."""


@main.command()
@click.option("--device", type=click.Choice(list(DEVICES)), required=True, help="The device profile.")
@click.option(
    "--experiment",
    "experiments",
    multiple=True,
    type=click.Choice([*_OF_A_MODEL, *_OF_A_DEVICE]),
    help="Only these; others stay.",
)
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Only these; the others' figures stay.")
def simulate(device: str, experiments: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Predict every figure for a device. Nothing is compiled, and nothing runs."""
    about = {
        "measured_on": f"simulation with the device profile {device}",
        "command": f"python -m benchmarks.paper simulate --device {device}",
    }
    record = Recorder(_RESULTS / f"simulated-{device}.json", about)
    for experiment in experiments or (*_OF_A_MODEL, *_OF_A_DEVICE):
        if experiment in _OF_A_DEVICE:
            record(experiment, None, lambda e=experiment: _OF_A_DEVICE[e](device))
            continue
        for model in models or MODELS:
            record(experiment, model, lambda e=experiment, m=model: _OF_A_MODEL[e](m, device))


@main.command("compile")
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Only these; the others' figures stay.")
def compile_for_h200(models: tuple[str, ...]) -> None:
    """Compile for an H200, without one, and predict the times. Nothing runs."""
    from benchmarks.paper import compiled

    about = {
        "measured_on": "compiled for an H200; times: simulation with the device profile h200",
        "command": "make paper-compiled",
    }
    record = Recorder(_RESULTS / "compiled-h200.json", about)
    for model in models or MODELS:
        record("single", model, lambda m=model: compiled.single(m))
        record("within", model, lambda m=model: compiled.within(m))


@main.command()
@click.option("--experiment", "experiments", multiple=True, type=click.Choice(measured.IN_ORDER), help="Only these; others stay.")
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Only these; the others' figures stay.")
@click.option("--missing", is_flag=True, help="Leave out the experiments of which the file has all figures.")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; what is measured by then is in the file.")
@click.option("--small", is_flag=True, help="What a GPU measures, in small sizes, on a CPU too, to try it out.")
@click.option("--at-once", type=click.IntRange(1), default=1, help="How many processes compile at a time; one is timed.")
@click.option("--compile-only", is_flag=True, help="Compile for a run with the same --folder, and time nothing.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where what is compiled is kept, and for --at-once, every row.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The JSON file, if not that of the results.")
def measure(
    experiments: tuple[str, ...],
    models: tuple[str, ...],
    missing: bool,
    seconds: float | None,
    small: bool,
    at_once: int,
    compile_only: bool,
    folder: Path | None,
    output: Path | None,
) -> None:
    """Run everything on the first device that jax sees, those experiments first that matter most."""
    if compile_only and (at_once == 1 or folder is None):
        raise click.UsageError("--compile-only is for --at-once 2 or more with a --folder, in which a later run finds it.")
    if small and output is None:
        raise click.UsageError("--small needs --output: its figures are not among the results.")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process needs none of the device's memory
    device = jax.devices()[0]
    extent: measured.Extent = "small" if small else "cpu" if device.platform == "cpu" else "gpu"
    name = device.device_kind.lower().replace(" ", "-")
    cores = f", {os.cpu_count()} cores" if extent == "cpu" else ""
    sizes = {m: measured.sizes_of(m, extent) for m in (*MODELS, "bert")}
    about = {"measured_on": f"{name}{cores}", "command": "make paper", "sizes": sizes}
    record = Recorder(output or _RESULTS / f"measured-{name}.json", about)
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = stack.enter_context(Cases(where, at_once, compile_only=compile_only, seconds=seconds))
        on = measured.Measured(cases, extent)
        runs: list[tuple[str, str | None, Callable[[], Any]]] = []
        for experiment in (e for e in measured.IN_ORDER if e in experiments or not experiments):
            if experiment in measured.OF_A_DEVICE:
                runs.append((experiment, None, partial(measured.OF_A_DEVICE[experiment], on)))
            else:
                of_a_model = measured.OF_A_MODEL[experiment]
                runs += [(experiment, m, partial(of_a_model, m, on)) for m in models or measured.MODELS[extent]]
        if missing:
            runs = [(e, m, run) for e, m, run in runs if not measured.is_complete(e, m, record.figures(e, m), extent)]
        threads = stack.enter_context(ThreadPoolExecutor(max(len(runs), 1) if at_once > 1 else 1))
        how = run_alone if compile_only else record

        def in_time(experiment: str, model: str | None, run: Callable[[], Any]) -> None:
            if cases.seconds_left() == 0.0:
                print(f"{experiment} {model or ''}: the time was up", flush=True)
            else:
                how(experiment, model, run)

        for done in as_completed([threads.submit(in_time, *one) for one in runs]):
            done.result()


@main.command()
def draw() -> None:
    """Write `benchmarks/README.md` and its pictures from the figures that there are."""
    draw_all(_RESULTS)


class Recorder:
    """Runs experiments, and adds the figures of each to a JSON file, whose other figures stay."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self.about = file, about
        self._writing = Lock()

    def __call__(self, experiment: str, model: str | None, run: Callable[[], Any]) -> None:
        """Run one experiment of one model, or of all if there is none."""
        found = run_alone(experiment, model, run)
        with self._writing:
            document = self._document()
            found = merged(self.figures(experiment, model), found)
            document |= {**self.about, "jax": jax.__version__}
            document.setdefault("made", {})[experiment] = datetime.now(UTC).isoformat(timespec="seconds")
            if model is None:
                document[experiment] = found
            else:
                document.setdefault(experiment, {})[model] = found
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, (json.dumps(document, indent=1) + "\n").encode())

    def figures(self, experiment: str, model: str | None) -> Any:
        """The figures that the file has of an experiment, of this model if it is one of a model; None if it has none."""
        found = self._document().get(experiment)
        return found if found is None or model is None else found.get(model)

    def _document(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}


def merged(before: Any, found: Any) -> Any:
    """The new figures; earlier ones stay where the time was up before there was a new one."""
    if isinstance(found, list) and all(isinstance(row, dict) for row in found):
        rows = {_key(row): row for row in before} if isinstance(before, list) else {}
        return [merged(rows.get(_key(row)), row) for row in found]
    if not isinstance(found, dict):
        return found
    if found.get("error") == TIME_IS_UP:
        return found if before is None else before
    old = before if isinstance(before, dict) else {}
    return {key: merged(old.get(key), value) for key, value in found.items()}


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    """What tells a row in a list from the others."""
    return row.get("share"), row.get("batch_size")


def run_alone(experiment: str, model: str | None, run: Callable[[], Any]) -> Any:
    """Run one experiment of one model, or of all if there is none; say how long it took."""
    began = time.perf_counter()
    found = run()
    print(f"{experiment} {model or ''}: {time.perf_counter() - began:.1f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
