"""`python -m benchmarks.paper simulate --device h200`: runs the experiments, and adds their figures to a JSON file."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax

from benchmarks.paper import shared, single
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
    file = _RESULTS / f"simulated-{device}.json"
    for experiment in experiments or (*_OF_A_MODEL, *_OF_A_DEVICE):
        if experiment in _OF_A_DEVICE:
            _record(file, device, experiment, None, lambda e=experiment: _OF_A_DEVICE[e](device))
            continue
        for model in models or MODELS:
            _record(file, device, experiment, model, lambda e=experiment, m=model: _OF_A_MODEL[e](m, device))


def _record(file: Path, device: str, experiment: str, model: str | None, run: Callable[[], Any]) -> None:
    """Run one experiment, and add its figures to the file, whose other figures stay."""
    began = time.perf_counter()
    found = run()
    document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    document |= {
        "measured_on": f"simulation with the device profile {device}",
        "command": f"python -m benchmarks.paper simulate --device {device}",
        "jax": jax.__version__,
    }
    made = document.setdefault("made", {})
    made[experiment] = datetime.now(UTC).isoformat(timespec="seconds")
    if model is None:
        document[experiment] = found
    else:
        document.setdefault(experiment, {})[model] = found
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{device} {experiment} {model or ''}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
