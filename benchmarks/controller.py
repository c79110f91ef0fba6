"""`make bench-controller`: measures the time of the controller's decisions, and how well it shares the device, without a device.

A discrete-event simulation drives the real controller (`tensile_jax.exec.controller.machine`). The simulated device has a compute
lane, a lane to the host, and a lane from the host. The jobs have 20 segments with copies, and mixed sizes, speeds and weights; if
there are more than two jobs, one of them has slow batches. The durations of launches and copies are part of the simulated jobs.
Only the controller is measured: each simulation is run `--repetitions` times, and of each decision the least time counts. Writes
`benchmarks/results/controller.json`.

    us_per_launch      time in the function `step`, summed over all events, divided by the number of launches
    us_per_launch_99   99th percentile of the time that led to a single launch
    longest_us         the longest single call of `step`
    wait_rounds        the longest time that a job with a batch waited to begin an iteration, divided by the time of a round, in
                       which each job runs one iteration
    parks              number of times that a job was parked
    shared_peak        the most bytes held at once, divided by the sum of the jobs' peaks
    utilisation        part of the time in which the compute lane was busy
"""

import heapq
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tensile_jax.exec.controller.machine import step
from tensile_jax.exec.controller.messages import (
    BatchLoaded,
    Event,
    Issue,
    Park,
    Prepared,
    RunEnded,
    StateMoved,
    Unpark,
    WaitEnded,
)
from tensile_jax.exec.controller.state import JobId, JobRecord, State
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile

_RESULTS = Path(__file__).parent / "results" / "controller.json"
_SHARES = {1: 1.0, 2: 0.75, 4: 0.5, 8: 0.5, 16: 0.4, 64: 0.3}  # number of jobs, budget over the sum of their peaks
_DEPTHS = (1, 2)
_LAUNCHES = 20_000
_SEGMENTS = 20
_MB = 1_000_000
_LINK_BYTES_PER_US = 50_000.0
_COMPUTED_BYTES_PER_US = 10_000.0  # of a tensor, by a segment: so that most copies can hide behind launches
_AHEAD = 2  # batches that a job loads ahead


@dataclass(frozen=True, slots=True)
class Work:
    """A job. Move i takes `us[i]` microseconds: a launch on the compute lane, a copy on the lane `lanes[i]`."""

    memory: MemoryProfile
    us: tuple[float, ...]
    lanes: tuple[str, ...]
    weight: float
    load_us: float


class _Moves:
    """The moves of one iteration, while they are collected."""

    def __init__(self, held: int) -> None:
        self.kinds: list[int] = []
        self.needs: list[int] = []
        self.holds = [held]
        self.us: list[float] = []
        self.lanes: list[str] = []

    def add(self, kind: int, more: int, *, work: int = 0, us: float = 0.0, lane: str = "") -> None:
        """Add a move. After it, `more` bytes more are held; during it, `work` bytes are needed in addition."""
        before = self.holds[-1]
        self.kinds.append(kind)
        self.holds.append(before + more)
        self.needs.append(max(before, before + more) + work)
        self.us.append(us)
        self.lanes.append(lane)


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
    for k in range(half):
        moves.add(LAUNCH, stored[k], work=size, us=speed * rng.uniform(0.5, 1.5))
        if k in swapped:
            moves.add(INSTANT, 0, us=stored[k] / _LINK_BYTES_PER_US, lane="out")
        if k - 2 in swapped:
            moves.add(WAIT, -stored[k - 2], lane="out")
    for k in reversed(range(half)):
        if k in swapped:
            moves.add(WAIT, 0, lane="into")
        if k - 1 in swapped:
            moves.add(INSTANT, stored[k - 1], us=stored[k - 1] / _LINK_BYTES_PER_US, lane="into")
        moves.add(LAUNCH, -stored[k], work=2 * size, us=speed * rng.uniform(1.0, 3.0))
    moves.add(INSTANT, -size)
    switch_us = 2 * state / _LINK_BYTES_PER_US
    step_us = sum(us for us, kind in zip(moves.us, moves.kinds, strict=True) if kind == LAUNCH)
    memory = MemoryProfile(
        tuple(moves.kinds), tuple(moves.needs), tuple(moves.holds), 0, state, state + sum(stored), step_us, switch_us
    )  # fmt: skip
    load_us = step_us * (40.0 if slow_batches else rng.uniform(0.1, 0.5))
    return Work(memory, tuple(moves.us), tuple(moves.lanes), rng.choice((1.0, 1.0, 2.0, 4.0)), load_us)


@dataclass(slots=True)
class Run:
    """The results of one simulation. `decisions` has, for every call of `step`, its seconds and the launches that it ordered."""

    decisions: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    elapsed_us: float = 0.0
    busy_us: float = 0.0
    peak_bytes: int = 0
    parks: int = 0
    longest_wait_us: float = 0.0
    deadlocks: int = 0


class Simulation:
    """Simulated jobs on one device. It executes the controller's orders, which take simulated time."""

    def __init__(self, works: Sequence[Work], budget_bytes: int, depth: int) -> None:
        self.works = works
        self.run = Run()
        self.now = 0.0
        self.free = {"compute": 0.0, "out": 0.0, "into": 0.0}
        self.copied = [0.0] * len(works)  # when the job's last copy is over
        self.wants_since = [-1.0] * len(works)
        self.batches = [0] * len(works)
        self.launches = 0
        self.events: list[tuple[float, int, Event]] = []
        self.state = State(budget_bytes, float("inf"), depth=depth)
        for k, work in enumerate(works):
            self.tell(Prepared(JobRecord(JobId(k), work.memory, work.weight, steps_left=10**9)))
            self.after(work.load_us, BatchLoaded(JobId(k)))

    def after(self, us: float, event: Event) -> None:
        """Let `event` happen in `us` microseconds."""
        heapq.heappush(self.events, (self.now + us, len(self.run.decisions) * 1000 + len(self.events), event))

    def tell(self, event: Event) -> None:
        """Pass an event to the controller, and execute its orders."""
        launches = self.launches
        began = time.perf_counter()
        self.state, orders = step(self.state, event)
        took = time.perf_counter() - began
        for order in orders:
            if isinstance(order, Issue):
                self.do(order)
            elif isinstance(order, Park | Unpark):
                state_us = self.works[order.job].memory.switch_us / 2
                lane = "out" if isinstance(order, Park) else "into"
                self.after(self.occupy(lane, state_us) - self.now, StateMoved(order.job))
                self.run.parks += isinstance(order, Park)
        self.run.decisions.append((took, self.launches - launches))
        self.run.peak_bytes = max(self.run.peak_bytes, self.state.held_bytes)

    def occupy(self, lane: str, us: float, *, since: float = 0.0) -> float:
        """Occupy the lane for `us` microseconds after its present work, not before `since`, and return when that ends."""
        self.free[lane] = max(self.free[lane], self.now, since) + us
        return self.free[lane]

    def do(self, order: Issue) -> None:
        """Execute a run of the job's moves. A copy begins when the launches before it in the run are over."""
        job, begin, end = order
        work = self.works[job]
        kinds = work.memory.kinds[begin:end]
        if begin == 0:
            self.run.longest_wait_us = max(self.run.longest_wait_us, self.now - self.wants_since[job])
        compute_us = 0.0
        for move, kind in enumerate(kinds, start=begin):
            if kind == LAUNCH:
                self.launches += 1
                compute_us += work.us[move]
            elif kind == INSTANT and work.lanes[move]:
                copied = max(self.free["compute"], self.now) + compute_us if compute_us else self.now
                self.copied[job] = self.occupy(work.lanes[move], work.us[move], since=copied)
        if LAUNCH in kinds:
            self.run.busy_us += compute_us
            self.after(self.occupy("compute", compute_us) - self.now, RunEnded(job, compute_us))
        elif WAIT in kinds:
            self.after(max(self.copied[job] - self.now, 0.0), WaitEnded(job))
        if end == len(work.us):
            self.batches[job] -= 1
            self.wants_since[job] = self.now
            if self.batches[job] == _AHEAD - 1:
                self.after(work.load_us, BatchLoaded(job))

    def until(self, launches: int) -> Run:
        """Run until so many launches were issued, or nothing more can happen."""
        while self.launches < launches:
            if not self.events:
                self.run.deadlocks += 1
                break
            self.now, _, event = heapq.heappop(self.events)
            if isinstance(event, BatchLoaded):
                job = event.job
                self.batches[job] += 1
                if self.batches[job] == 1:
                    self.wants_since[job] = self.now
                if self.batches[job] < _AHEAD:
                    self.after(self.works[job].load_us, BatchLoaded(job))
            self.tell(event)
        self.run.elapsed_us = self.now
        for job in range(len(self.works)):  # those that wait still
            record = self.state.record(JobId(job))
            if record is not None and not record.position and self.batches[job]:
                self.run.longest_wait_us = max(self.run.longest_wait_us, self.now - self.wants_since[job])
        return self.run


def measure(jobs: int, depth: int, *, launches: int, repetitions: int) -> dict[str, Any]:
    """Measure one case."""
    rng = random.Random(jobs)
    works = [make_work(rng, slow_batches=jobs > 2 and k == 1) for k in range(jobs)]
    peaks = sum(w.memory.peak_bytes for w in works)
    budget = max(int(_SHARES[jobs] * peaks), *(w.memory.peak_bytes for w in works), 0)
    runs = [Simulation(works, budget, depth).until(launches) for _ in range(repetitions)]
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
