"""`make soak`: a long random test of one runtime, with many jobs, pauses, cancellations, failures and changes of the budget.

The test consists of phases. In a phase, random actions are done for `_PHASE_S` seconds, and then all jobs run to their ends.
Three things are asserted. At each launch, the bytes on the device are within the budget. After a phase, no byte is left on the
device or in pinned host memory. The state of every job equals, bit for bit, that of its *replay*: a run of the same job alone
under the same plans.

Writes `benchmarks/results/soak.json`. The same seed gives the same choices, but not at the same times.
"""

import gc
import json
import os
import platform
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax

import tensile_jax as tensile
from benchmarks.soak_watch import Watch, live_bytes
from benchmarks.soak_work import Kind, Replay, equal, kinds
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.transfer import DEVICE, HOST
from tensile_jax.runtime_records import FINAL

_RESULTS = Path(__file__).parent / "results" / "soak.json"
_BUDGETS = (4 << 20, 13 << 19, 8 << 20, 20 << 20, 20 << 20)  # under the smaller ones many plans must be renewed
_MOST_JOBS = 6
_PHASE_S = 90.0
_BUDGET_S = 25.0  # between two changes: a plan for another budget takes some seconds, and should be used for a while
_STARVED_S = 60.0  # a running job does a step within this time, even while another job is planned on both cores


@dataclass
class Counts:
    """Counts of what happened."""

    jobs: int = 0
    equal: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    events: Counter[str] = field(default_factory=Counter[str])
    renewed_jobs: int = 0
    longest_wait_s: float = 0.0


class Soak:
    """One runtime, and the random actions on it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.kinds = kinds()
        self.folder = folder
        self.counts = Counts()
        self.replay = Replay()
        self.changed = time.monotonic()
        self.live: dict[str, tuple[Job, Kind, bool]] = {}
        self.ended: list[tuple[Job, Kind, bool]] = []
        self.moved: dict[str, tuple[Any, float]] = {}
        self.runtime = tensile.Runtime(
            _BUDGETS[-1], look="always", device_profile=self._fast_link(), checkpoints=folder / "checkpoints"
        )

    def _fast_link(self) -> str:
        """A profile under which swapping pays."""
        fast = replace(load_profile("cpu"), name="soak", device_to_host_bytes_per_us=1e6, host_to_device_bytes_per_us=1e6)
        path = self.folder / "soak.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(fast).items()))
        return str(path)

    def deed(self) -> None:
        """Do a random action."""
        chance = self.chance
        what = chance.choices(("arrive", "pause", "resume", "cancel", "budget", "wait"), (6, 4, 6, 1, 1, 6))[0]
        if what == "arrive" and len(self.live) < _MOST_JOBS:
            self._submit()
        elif what == "budget" and time.monotonic() - self.changed > _BUDGET_S:
            self.changed = time.monotonic()
            self.runtime.set_budget(chance.choice(_BUDGETS))
        elif what == "cancel":
            begun = [name for name in sorted(self.live) if self.live[name][0].status.step or chance.random() < 0.05]
            if begun and chance.random() < 0.3:
                self._wish(chance.choice(begun), what)
        elif what in ("pause", "resume") and self.live:
            self._wish(chance.choice(sorted(self.live)), what)

    def _submit(self) -> None:
        chance = self.chance
        kind = chance.choice(self.kinds)
        steps, fails = chance.randint(2, 600), chance.random() < 0.12
        fails_after = chance.randrange(steps) if fails else None
        name = f"{kind.model.name}-{self.counts.jobs}"
        job = self.runtime.submit(
            kind.model.step,
            kind.fresh(),
            lambda: kind.feed(fails_after=fails_after),
            steps=steps,
            name=name,
            priority=chance.choice((0.5, 1, 1, 3)),
            budget=chance.choice((None, None, None, 5 << 20)),
            checkpoint_every=chance.choice((None, None, 7)),
        )
        self.live[name] = job, kind, fails
        self.counts.jobs += 1

    def _wish(self, name: str, wish: str) -> None:
        job = self.live[name][0]
        try:
            getattr(job, wish)()
        except ValueError:
            assert job.wait(0), f"{name} refused to {wish}"

    def look(self) -> None:
        """Move jobs that have ended to `ended`, and assert that each running job makes progress."""
        now = time.monotonic()
        for name, (job, kind, fails) in list(self.live.items()):
            status = job.status
            if status.state in FINAL:
                del self.live[name]
                self.moved.pop(name, None)
                self.ended.append((job, kind, fails))
                continue
            seen = (status.step, status.state)
            before, since = self.moved.setdefault(name, (seen, now))
            if before != seen or status.state != "running":
                self.moved[name] = seen, now
                continue
            self.counts.longest_wait_s = max(self.counts.longest_wait_s, now - since)
            assert now - since < _STARVED_S, (
                f"{name} has stood still for {_STARVED_S} s: {status}; {self.runtime._dispatcher.state}"
            )

    def drain(self) -> None:
        """Let all jobs end, assert that no memory is left, and compare each job with its replay alone."""
        self.runtime.set_budget(_BUDGETS[-1])
        while self.live:
            for name in list(self.live):
                self._wish(name, "resume")
            self.look()
            time.sleep(0.05)
        self._forget()
        state = self.runtime._dispatcher.state
        assert not state.records and not state.pending and state.held_bytes == 0, state
        for job, kind, fails in self.ended:
            self._settle(job, kind, fails)
        job = kind = None
        self.ended.clear()
        gc.collect()
        assert live_bytes(DEVICE) == 0, f"{live_bytes(DEVICE)} bytes are left on the device"
        assert live_bytes(HOST) == 0, f"{live_bytes(HOST)} bytes are left in pinned host memory"

    def _forget(self) -> None:
        for job in self.runtime.jobs:
            while not job._stored.life.is_over:
                time.sleep(0.01)
            self.runtime.forget(job.name)

    def _settle(self, job: Job, kind: Kind, fails: bool) -> None:
        """Assert that the state of the job equals the state of its replay alone."""
        status = job.status
        try:
            state = job.result()
        except tensile.JobFailed as error:
            state = error.state
        refused = status.step == 0 and isinstance(job.exception(), tensile.BudgetTooSmall)
        self.counts.ends["refused" if refused else status.state] += 1
        assert status.state != "failed" or fails or refused, f"{job.name} failed: {status.note}"
        if state is None:  # what failed gives no state back
            assert status.state == "failed", status
            return
        self.counts.renewed_jobs += len(job.plans) > 1
        alone = self.replay.state(kind, job.plans, status.step) if status.step else kind.state
        assert equal(state, alone), f"{job.name} differs from its lonely replay after {status.step} steps: {job.plans}"
        self.counts.equal += 1

    def count_events(self) -> None:
        """Count the events until the runtime is closed. Runs in a thread of its own."""
        self.counts.events.update(event.kind for event in self.runtime.events(until_closed=True))


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Run the test, and return its figures. Raises AssertionError."""
    before = {t for t in threading.enumerate()}
    with tempfile.TemporaryDirectory() as folder:
        one = Soak(seed, Path(folder))
        gc.collect()
        with one.runtime as runtime, Watch(lambda: runtime._dispatcher.state.budget_bytes) as watch:
            counting = threading.Thread(target=one.count_events)
            counting.start()
            began, phases = time.monotonic(), 0
            while time.monotonic() - began < 60 * minutes:
                end = min(time.monotonic() + _PHASE_S, began + 60 * minutes)
                while time.monotonic() < end:
                    one.deed()
                    one.look()
                    time.sleep(one.chance.uniform(0.01, 0.15))
                one.drain()
                assert not watch.worst, watch.worst
                phases += 1
        counting.join()
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("tensile-")]
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:  # feeds end by themselves
        time.sleep(0.05)
        left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("tensile-")]
    assert not left, f"threads are left: {left}"
    counts, decided = one.counts, runtime.controller_us
    return {
        "minutes": round((time.monotonic() - began) / 60, 2),
        "seed": seed,
        "phases": phases,
        "jobs": counts.jobs,
        "ends": dict(counts.ends),
        "equal_to_lonely_replay": counts.equal,
        "jobs_with_renewed_plans": counts.renewed_jobs,
        "events": dict(sorted(counts.events.items())),
        "launches": watch.launches,
        "most_of_budget": watch.most,
        "bytes_left": 0,
        "longest_wait_s": round(counts.longest_wait_s, 1),
        "controller_us_per_launch": decided[0] / max(decided[1], 1),
    }


@click.command()
@click.option("--minutes", default=30.0)
@click.option("--seed", type=int, help="By default another one each time.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(minutes: float, seed: int | None, output: Path) -> None:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {seed}", flush=True)
    result = soak(minutes, seed)
    made = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}",
        "command": "make soak",
    }
    output.write_text(json.dumps(made | result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
