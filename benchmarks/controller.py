"""`make bench-controller`: measures the time of the controller's decisions, and how well it shares the device, without a device.

A discrete-event simulation drives the real controller (`device_simulation.py`). The jobs have 20 segments with copies, and mixed
sizes, speeds and weights; if there are more than two jobs, one of them has slow batches. Only the controller is measured: each
simulation is run `--repetitions` times, and of each decision the least time counts. Writes `benchmarks/results/controller.json`.

    us_per_launch      time in the function `step`, summed over all events, divided by the number of launches
    us_per_launch_99   99th percentile of the time that led to a single launch
    longest_us         the longest single call of `step`
    wait_rounds        the longest time that a job with a batch waited to begin an iteration, divided by the time of a round, in
                       which each job runs one iteration
    parks              number of times that a job was parked
    shared_peak        the most bytes held at once, divided by the sum of the jobs' peaks
    utilisation        part of the time in which the compute lane was busy
"""

import json
import platform
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.device_simulation import Simulation, Work
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile

_RESULTS = Path(__file__).parent / "results" / "controller.json"
_SHARES = {1: 1.0, 2: 0.75, 4: 0.5, 8: 0.5, 16: 0.4, 64: 0.3}  # number of jobs, budget over the sum of their peaks
_DEPTHS = (1, 2)
_LAUNCHES = 20_000
_SEGMENTS = 20
_MB = 1_000_000
_LINK_BYTES_PER_US = 50_000.0
_COMPUTED_BYTES_PER_US = 10_000.0  # of a tensor, by a segment: so that most copies can hide behind launches


class _Moves:
    """The moves of one iteration, while they are collected."""

    def __init__(self, held: int) -> None:
        self.kinds: list[int] = []
        self.needs: list[int] = []
        self.holds = [held]
        self.us: list[float] = []
        self.lanes: list[str] = []
        self.waits: list[tuple[int, ...]] = []

    def add(self, kind: int, more: int, *, work: int = 0, us: float = 0.0, lane: str = "", waits: tuple[int, ...] = ()) -> int:
        """Add a move, and return which one it is. After it, `more` bytes more are held; during it, `work` bytes are needed in
        addition."""
        before = self.holds[-1]
        self.kinds.append(kind)
        self.holds.append(before + more)
        self.needs.append(max(before, before + more) + work)
        self.us.append(us)
        self.lanes.append(lane)
        self.waits.append(waits)
        return len(self.kinds) - 1


def make_work(rng: random.Random, *, slow_batches: bool) -> Work:
    """A job of random size and speed: half of its segments store something, of which a third is swapped out and back in."""
    size = rng.choice((4, 10, 25)) * _MB
    speed = size / _COMPUTED_BYTES_PER_US * rng.uniform(0.5, 2.0)
    state = rng.randint(3, 25) * size
    half = _SEGMENTS // 2
    stored = [rng.randint(1, 3) * size for _ in range(half)]
    swapped = {k for k in range(half - 3) if k % 3 == 0}
    moves = _Moves(state)
    moves.add(INSTANT, size)  # the batch
    out: dict[int, int] = {}
    into: dict[int, int] = {}
    for k in range(half):
        moves.add(LAUNCH, stored[k], work=size, us=speed * rng.uniform(0.5, 1.5))
        if k in swapped:
            out[k] = moves.add(INSTANT, 0, us=stored[k] / _LINK_BYTES_PER_US, lane="out")
        if k - 2 in swapped:
            moves.add(WAIT, -stored[k - 2], waits=(out[k - 2],))
    for k in reversed(range(half)):
        if k in swapped:
            moves.add(WAIT, 0, waits=(into[k],) if k in into else ())
        if k - 1 in swapped:
            into[k - 1] = moves.add(INSTANT, stored[k - 1], us=stored[k - 1] / _LINK_BYTES_PER_US, lane="into")
        moves.add(LAUNCH, -stored[k], work=2 * size, us=speed * rng.uniform(1.0, 3.0))
    moves.add(INSTANT, -size)
    switch_us = 2 * state / _LINK_BYTES_PER_US
    step_us = sum(us for us, kind in zip(moves.us, moves.kinds, strict=True) if kind == LAUNCH)
    memory = MemoryProfile(
        tuple(moves.kinds), tuple(moves.needs), tuple(moves.holds), 0, state, state + sum(stored), step_us, switch_us
    )  # fmt: skip
    load_us = step_us * (40.0 if slow_batches else rng.uniform(0.1, 0.5))
    weight = rng.choice((1.0, 1.0, 2.0, 4.0))
    return Work(memory, tuple(moves.us), tuple(moves.lanes), tuple(moves.waits), weight, load_us)


def measure(jobs: int, depth: int, *, launches: int, repetitions: int) -> dict[str, Any]:
    """Measure one case."""
    rng = random.Random(jobs)
    works = [make_work(rng, slow_batches=jobs > 2 and k == 1) for k in range(jobs)]
    peaks = sum(w.memory.peak_bytes for w in works)
    budget = max(int(_SHARES[jobs] * peaks), *(w.memory.peak_bytes for w in works), 0)
    runs = [Simulation(works, budget, depth).until_launches(launches) for _ in range(repetitions)]
    run = runs[0]
    least = [min(one) * 1e6 for one in zip(*([took for took, _ in r.decisions] for r in runs), strict=True)]
    single: list[float] = []  # what led to each launch
    since = 0.0
    for took, (_, issued) in zip(least, run.decisions, strict=True):
        since += took
        if issued:
            single += [since / issued] * issued
            since = 0.0
    single.sort()
    round_us = sum(w.memory.step_us for w in works)
    return {
        "jobs": jobs,
        "depth": depth,
        "launches": len(single),
        "decisions": len(least),
        "budget_over_peaks": round(budget / peaks, 3),
        "us_per_launch": round(sum(least) / len(single), 2),
        "us_per_launch_99": round(single[len(single) * 99 // 100], 2),
        "longest_us": round(max(least), 1),
        "deadlocks": run.deadlocks,
        "wait_rounds": round(run.longest_wait_us / round_us, 2),
        "parks": run.parks,
        "shared_peak": round(run.peak_bytes / peaks, 3),
        "over_budget": run.peak_bytes > budget,
        "utilisation": round(run.busy_us / run.elapsed_us, 3),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="the controller, driven by a simulation of jobs of 20 segments with copies")
    columns = {
        "jobs": "jobs", "depth": "depth", "us_per_launch": "us / launch", "us_per_launch_99": "99 %", "longest_us": "longest us",
        "deadlocks": "deadlocks", "wait_rounds": "longest wait, rounds", "parks": "parks",
        "budget_over_peaks": "budget / peaks", "shared_peak": "shared peak", "utilisation": "utilisation",
    }  # fmt: skip
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    return table


@click.command()
@click.option("--launches", default=_LAUNCHES, show_default=True, help="Of each case.")
@click.option("--repetitions", default=5, show_default=True, help="Of each case; of every decision the least time counts.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS, help="Where to write the JSON.")
def main(launches: int, repetitions: int, output: Path) -> None:
    """Simulate 1 to 64 jobs."""
    rows = [measure(n, depth, launches=launches, repetitions=repetitions) for n in _SHARES for depth in _DEPTHS]
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "command": "make bench-controller",
        "cases": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    Console(width=150).print(table_of(rows))


if __name__ == "__main__":
    main()
