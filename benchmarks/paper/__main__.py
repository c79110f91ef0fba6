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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax

from benchmarks.paper import measured, shared, single
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
def measure(experiments: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Run everything on the first device that jax sees."""
    name = jax.devices()[0].device_kind.lower().replace(" ", "-")
    cores = f", {os.cpu_count()} cores" if measured.kind() == "cpu" else ""
    record = Recorder(
        _RESULTS / f"measured-{name}.json",
        {"measured_on": f"{name}{cores}", "command": "make paper", "sizes": {m: measured.sizes_of(m) for m in (*MODELS, "bert")}},
    )
    with tempfile.TemporaryDirectory() as cache_folder:
        for experiment in experiments or (*measured.OF_A_MODEL, *measured.OF_A_DEVICE):
            if experiment in measured.OF_A_DEVICE:
                record(experiment, None, lambda e=experiment: measured.OF_A_DEVICE[e](cache_folder))
                continue
            for model in models or MODELS:
                record(experiment, model, lambda e=experiment, m=model: measured.OF_A_MODEL[e](m, cache_folder))


@main.command()
def draw() -> None:
    """Write `benchmarks/README.md` and its pictures from the figures that there are."""
    draw_all(_RESULTS)


class Recorder:
    """Runs experiments, and adds the figures of each to a JSON file, whose other figures stay."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self.about = file, about

    def __call__(self, experiment: str, model: str | None, run: Callable[[], Any]) -> None:
        """Run one experiment of one model, or of all if there is none."""
        began = time.perf_counter()
        found = run()
        document: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        document |= {**self.about, "jax": jax.__version__}
        document.setdefault("made", {})[experiment] = datetime.now(UTC).isoformat(timespec="seconds")
        if model is None:
            document[experiment] = found
        else:
            document.setdefault(experiment, {})[model] = found
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{self.file.stem} {experiment} {model or ''}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
