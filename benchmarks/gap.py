"""`make bench-gap`: measures how far the plans of policy `auto` are from the best possible plans, on small random train steps.

The oracle (`tests/plan/oracle.py`) searches the whole space of plans, in the planner's own model of time and memory.

    gap       = step time of auto / step time of the oracle - 1, at limits from the oracle's floor to the peak of the whole step
    floor gap = least peak of auto / least peak of the oracle - 1

Nothing is compiled. Writes `benchmarks/results/gap.json`.
"""

import json
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.policies.registry import lowest
from tensile_jax.plan.search.choice import peak_of, step_us
from tests.plan.oracle import Oracle
from tests.plan.small_steps import small_step

_RESULTS = Path(__file__).parent / "results" / "gap.json"
PARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
_ROUNDED_US = 0.02  # times of plans are sums of rounded ones
_WORST = 10  # cases that the report names


@dataclass(frozen=True, slots=True)
class Compared:
    """One small step: floors in bytes, and (limit, microseconds of the oracle, of auto or None) for each limit."""

    seed: int
    operators: int
    floor_bytes: int
    auto_floor_bytes: int
    steps: tuple[tuple[int, float, float | None], ...]

    @property
    def gaps(self) -> list[float]:
        """The gap at each limit for which auto has a plan."""
        return [auto / best - 1 for _, best, auto in self.steps if auto is not None]


def compare(seed: int, *, most: int, state_memory: Literal["device", "any"] = "device") -> Compared:
    """Auto and the oracle on the small step of that seed, with at most so many operators."""
    graph, profile = small_step(seed, most=most)
    oracle = Oracle(graph, profile, state_memory=state_memory)
    step, nothing, auto = oracle.step, CompiledSizes(), POLICIES["auto"]
    floor = oracle.least_peak()
    auto_floor = peak_of(step, lowest(step, nothing, auto), nothing)
    limits = {int(floor + part * (oracle.whole_peak - floor)) for part in PARTS} | {auto_floor}
    steps: list[tuple[int, float, float | None]] = []
    for limit in sorted(limits):
        choice = auto(step, limit, nothing)
        auto_us = None if choice is None else step_us(step, choice, nothing)
        best = oracle.fastest(limit)
        assert best is not None
        if best.layout is not None:
            plan = oracle.plan(best.layout)
            assert plan.peak_bytes <= limit and abs(plan.step_us - best.step_us) < _ROUNDED_US
        steps.append((limit, best.step_us, auto_us))
    return Compared(seed, len(graph.operators), floor, auto_floor, tuple(steps))


def figures(compared: list[Compared]) -> dict[str, Any]:
    """Median, 95th percentile and worst of the gaps and of the floors' gaps."""
    gaps = [gap for c in compared for gap in c.gaps]
    floors = [c.auto_floor_bytes / c.floor_bytes - 1 for c in compared]
    none = sum(auto is None for c in compared for _, _, auto in c.steps)

    def spread(values: list[float]) -> dict[str, float]:
        return {
            "median": float(np.median(values)),
            "mean": float(np.mean(values)),
            "95th_percentile": float(np.percentile(values, 95)),
            "worst": max(values),
        }

    return {"graphs": len(compared), "plans": len(gaps), "no_plan": none, "gap": spread(gaps), "floor_gap": spread(floors)}


def worst(compared: list[Compared]) -> list[dict[str, Any]]:
    """The cases with the greatest gaps; limits without a plan come first."""
    cases = [
        (float("inf") if auto is None else auto / best - 1, c.seed, limit) for c in compared for limit, best, auto in c.steps
    ]
    cases.sort(key=lambda case: (-case[0], case[1:]))
    return [{"seed": seed, "limit": limit, "gap": gap if gap < float("inf") else None} for gap, seed, limit in cases[:_WORST]]


@click.command()
@click.option("--graphs", default=200, show_default=True)
@click.option("--most", default=8, show_default=True, help="Operators of a step.")
@click.option("--state-memory", type=click.Choice(["device", "any"]), default="device", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS, help="Where to write the JSON.")
def main(graphs: int, most: int, state_memory: Literal["device", "any"], output: Path) -> None:
    """Compare on the small steps 0 to GRAPHS - 1."""
    compared = [compare(seed, most=most, state_memory=state_memory) for seed in range(graphs)]
    found = figures(compared)
    cases = worst(compared)
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {version('numpy')}",
        "command": "make bench-gap",
        "most_operators": most,
        "state_memory": state_memory,
        **found,
        "worst": cases,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    for name in ("gap", "floor_gap"):
        print(f"{name:10}", "  ".join(f"{key} {value:.2%}" for key, value in found[name].items()))
    print(f"{found['plans']} plans of {graphs} graphs; auto has none where the oracle has one: {found['no_plan']}")
    for case in cases:
        gap = "no plan" if case["gap"] is None else f"{case['gap']:.2%}"
        print(f"seed {case['seed']:4}  limit {case['limit']:8}  {gap}")


if __name__ == "__main__":
    main()
