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

from benchmarks.paper import measured, shared, single
from benchmarks.paper.cases import Cases
from benchmarks.paper.draw import draw as draw_all
from benchmarks.paper.largest import largest
from benchmarks.paper.published import MODELS
from benchmarks.paper.steps import DEVICES

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
@click.option(
    "--experiment",
    "experiments",
    multiple=True,
    type=click.Choice([*measured.OF_A_MODEL, *measured.OF_A_DEVICE]),
    help="Only these; others stay.",
)
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Only these; the others' figures stay.")
@click.option("--at-once", type=click.IntRange(1), default=1, help="How many processes compile at a time; one is timed.")
@click.option("--compile-only", is_flag=True, help="Compile for a run with the same --folder, and time nothing.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where what is compiled is kept, and for --at-once, every row.")
def measure(experiments: tuple[str, ...], models: tuple[str, ...], at_once: int, compile_only: bool, folder: Path | None) -> None:
    """Run everything on the first device that jax sees."""
    if compile_only and (at_once == 1 or folder is None):
        raise click.UsageError("--compile-only is for --at-once 2 or more with a --folder, in which a later run finds it.")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process needs none of the device's memory
    name = jax.devices()[0].device_kind.lower().replace(" ", "-")
    cores = f", {os.cpu_count()} cores" if measured.kind() == "cpu" else ""
    record = Recorder(
        _RESULTS / f"measured-{name}.json",
        {"measured_on": f"{name}{cores}", "command": "make paper", "sizes": {m: measured.sizes_of(m) for m in (*MODELS, "bert")}},
    )
    runs: list[tuple[str, str | None, Callable[[Cases], Any]]] = []
    for experiment in experiments or (*measured.OF_A_MODEL, *measured.OF_A_DEVICE):
        if experiment in measured.OF_A_DEVICE:
            runs.append((experiment, None, measured.OF_A_DEVICE[experiment]))
        else:
            runs += [(experiment, m, partial(measured.OF_A_MODEL[experiment], m)) for m in models or MODELS]
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = stack.enter_context(Cases(where, at_once, compile_only=compile_only))
        threads = stack.enter_context(ThreadPoolExecutor(len(runs) if at_once > 1 else 1))
        how = run_alone if compile_only else record
        for done in as_completed([threads.submit(how, e, m, partial(run, cases)) for e, m, run in runs]):
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
            document: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
            document |= {**self.about, "jax": jax.__version__}
            document.setdefault("made", {})[experiment] = datetime.now(UTC).isoformat(timespec="seconds")
            if model is None:
                document[experiment] = found
            else:
                document.setdefault(experiment, {})[model] = found
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(document, indent=1) + "\n")


def run_alone(experiment: str, model: str | None, run: Callable[[], Any]) -> Any:
    """Run one experiment of one model, or of all if there is none; say how long it took."""
    began = time.perf_counter()
    found = run()
    print(f"{experiment} {model or ''}: {time.perf_counter() - began:.1f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
