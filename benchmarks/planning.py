"""`make bench-planning`: how fast plans are and how long they take to make, for an H200 in simulation. Nothing is compiled.

For each model, budget and placement of state: the predicted time of the plan beside that of the step as one executable (EOR), the
bound that no plan can beat, and the seconds of CPU time that planning took. Budgets are shares of the predicted peak of the step
as one executable. Writes `benchmarks/results/planning.json`, and a table to the terminal.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click
import jax
from rich.console import Console
from rich.table import Table

from tensile_jax.device_profiles import load_profile
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes, Goal
from tensile_jax.plan.planner import Planner
from tensile_jax.trace import trace_step

_FILE = Path(__file__).parent / "results" / "planning.json"
_MODELS = {"resnet50": 16, "vgg16": 16, "inceptionv3": 16, "inceptionv4": 16, "densenet121": 16, "gpt": 64}
_SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
_PLACES: tuple[Literal["device", "any"], ...] = ("device", "any")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan; without one, `eor` is None."""

    model: str
    batch_size: int
    state_memory: str
    share: float
    eor: float | None
    bound_eor: float | None
    segments: int
    recomputed_us: float
    swapped_bytes: int
    planning_s: float


@click.command()
@click.option("--model", "names", multiple=True, type=click.Choice(list(_MODELS)), help="Only these; the others' rows stay.")
def main(names: tuple[str, ...]) -> None:
    """Plan every model under every budget."""
    rows: list[Row] = []
    table = Table("model", "state", "budget", "EOR", "bound", "segments", "planning")
    for name in names or _MODELS:
        for place in _PLACES:
            for row in _rows(name, place):
                rows.append(row)
                print(f"{name} {place} {row.share:.0%}: EOR {_figure(row.eor)}, {row.planning_s:.1f} s", flush=True)
                table.add_row(
                    name, place, f"{row.share:.0%}", _figure(row.eor), _figure(row.bound_eor), str(row.segments or "-"),
                    f"{row.planning_s:.1f} s",
                )  # fmt: skip
    Console().print(table)
    before: dict[str, Any] = json.loads(_FILE.read_text()) if names else {"made": {}, "rows": []}
    made = {**before["made"], **dict.fromkeys(names or _MODELS, datetime.now(UTC).isoformat(timespec="seconds"))}
    measured = {(row["model"], row["state_memory"], row["share"]): row for row in (*before["rows"], *map(asdict, rows))}
    document = {
        "made": made,
        "jax": jax.__version__,
        "command": "make bench-planning",
        "measured_on": "simulation with the device profile h200",
        "rows": list(measured.values()),
    }
    _FILE.write_text(json.dumps(document, indent=1) + "\n")


def _rows(name: str, place: Literal["device", "any"]) -> Iterator[Row]:
    model, nothing = MODELS[name](batch_size=_MODELS[name]), CompiledSizes()
    step = trace_step(jax.jit(model.step, donate_argnums=0), model.step, (model.state_shape, model.batch_shape), {})
    for share in _SHARES:
        began = time.process_time()
        planner = Planner(step.graph, load_profile("h200"), state_memory=place)  # a new one remembers nothing
        limit = share * planner.whole_peak_bytes(nothing)
        found = planner.plan(Goal(limit), nothing)
        seconds = time.process_time() - began
        bound = planner.bound_us(limit, nothing) / planner.model.whole_us
        bound_eor = round(bound, 4) if bound < float("inf") else None
        if found is None:
            yield Row(name, _MODELS[name], place, share, None, bound_eor, 0, 0.0, 0, round(seconds, 2))
            continue
        plan = found.plan
        eor = round(plan.step_us / planner.model.whole_us, 4)
        swapped = plan.swapped_out_bytes + plan.swapped_in_bytes
        segments = len(plan.segments)
        yield Row(
            name, _MODELS[name], place, share, eor, bound_eor, segments, plan.recomputed_us, swapped, round(seconds, 2)
        )  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
