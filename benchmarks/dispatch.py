"""`make bench-dispatch`: measures what a `Runtime` adds to the time of a step, with real executables on this CPU.

Two cases are measured, and written to `benchmarks/results/dispatch.json`:

    near-empty segments   1 to 8 jobs, each an MLP of width 8 whose budget cuts its step into some 20 segments. A segment computes
                          next to nothing, so the time is that of the threads around it. XLA runs it in the thread that calls
                          it (`jax_cpu_enable_async_dispatch` is false), since its own change of threads takes 30 us more
    steps of 25 ms        one job in a `Runtime` beside `tensile_jax.jit` with the same plan, with JAX's own settings; once with a
                          plan of the policy `checkpoint`, which does not swap, and once with a plan that swaps

Other threads of the runtime draw the batches and read the metrics of each step; all of that counts. All jobs of a case begin
a chunk of steps at the same moment, when a gate lets their batches through. A chunk in the runtime and the same steps under
`tensile_jax.jit`, one job after another, take turns, and the medians over the chunks count:

    us_per_launch      wall time of a chunk in the runtime, all threads together, divided by the number of launches
    alone_us           the same under `tensile_jax.jit`: one executor, one thread
    beyond_us          wall time of a chunk, less 40 us for each launch, divided by the number of iterations
    added_us           wall time in the runtime less that under `tensile_jax.jit`, divided by the number of iterations
    ratio              wall time in the runtime divided by that under `tensile_jax.jit`
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import tensile_jax as tensile
from tensile_jax.plan import PolicyName

_RESULTS = Path(__file__).parent / "results" / "dispatch.json"
_JOBS = (1, 2, 4, 8)
_WARM = 6  # steps before the first chunk: those in which plans are watched, and some more
_US_PER_LAUNCH = 40.0  # what a launch may take
_ABOVE_FLOOR = 1.1  # a budget, over the smallest that works
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Network:
    """A multilayer perceptron of equal layers, trained by gradient descent."""

    layers: int
    width: int
    rows: int

    def state(self) -> dict[str, jax.Array]:
        """The same weights at every call."""
        rng = np.random.default_rng(0)
        return {f"layer_{i:02}": jnp.asarray(self._weights(rng)) for i in range(self.layers)}

    def _weights(self, rng: np.random.Generator) -> np.ndarray:
        return (rng.normal(size=(self.width, self.width)) / self.width**0.5).astype(np.float32)

    def batch(self) -> np.ndarray:
        """Ones."""
        return np.ones((self.rows, self.width), np.float32)

    def budget(self, policy: PolicyName) -> int:
        """A little above the smallest budget that works, in bytes: it cuts the step into many segments."""
        try:
            tensile.jit(step, donate_argnums=0, budget=1, policy=policy).plan(self.state(), self.batch())
        except tensile.BudgetTooSmall as error:
            return int(error.floor_bytes * _ABOVE_FLOOR)
        raise AssertionError("a step cannot fit into one byte")


EMPTY = Network(layers=24, width=8, rows=64)
LONG = Network(layers=24, width=256, rows=420)


def step(state: dict[str, jax.Array], batch: Any) -> Any:
    """One step of training: the new weights, and the loss."""
    loss, gradient = jax.value_and_grad(_loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.01 * g, state, gradient), {"loss": loss}


def _loss(state: dict[str, jax.Array], batch: Any) -> Any:
    x = batch
    for layer in sorted(state):
        x = jnp.tanh(x @ state[layer])
    return (x * x).mean()


class Gate:
    """Gives each of several jobs its batches, as many as were let through."""

    def __init__(self, batch: np.ndarray) -> None:
        self._batch = batch
        self._changed = threading.Condition()
        self._let_through = 0

    def open(self, count: int) -> None:
        """Let `count` more batches of each job through."""
        with self._changed:
            self._let_through += count
            self._changed.notify_all()

    def __call__(self) -> Iterator[np.ndarray]:
        given = 0
        while True:
            with self._changed:
                while given == self._let_through:
                    self._changed.wait()
            given += 1
            yield self._batch


class Alone:
    """One job under `tensile_jax.jit`."""

    def __init__(self, network: Network, plan: tensile.Plan) -> None:
        self._function = tensile.jit(step, donate_argnums=0, plan=plan)
        self._state, self._batch = network.state(), network.batch()
        self.seconds(_WARM)

    def seconds(self, steps: int) -> float:
        """The time of so many steps."""
        began = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._function(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))  # pyright: ignore[reportPossiblyUnboundVariable] # there is a step
        return time.perf_counter() - began


def measure(network: Network, jobs: int, *, steps: int, chunks: int, policy: PolicyName = "auto") -> dict[str, Any]:
    """Chunks of `steps` steps of each job, in a runtime and under `tensile_jax.jit` in turn."""
    gate, budget = Gate(network.batch()), network.budget(policy)
    together: list[float] = []
    alone: list[float] = []
    with tensile.Runtime("8GiB") as runtime:
        running = [
            runtime.submit(
                step,
                network.state(),
                gate,
                steps=_WARM + steps * chunks,
                name=f"job{k}",
                budget=budget,
                policy=policy,
            )
            for k in range(jobs)
        ]
        gate.open(_WARM)
        _until_done(running, _WARM)
        plan = running[0].plan
        assert plan is not None
        executor = Alone(network, plan)
        for chunk in range(chunks):
            done = _WARM + chunk * steps
            began = runtime.status().time_s
            gate.open(steps)
            _until_done(running, done + steps)
            ended = max(span.end_us for span in runtime.record().spans if span.lane == "compute") / 1e6
            together.append(ended - began)
            alone.append(executor.seconds(steps * jobs))
    launches, iterations = steps * jobs * len(plan.segments), steps * jobs
    wall_s, alone_s = statistics.median(together), statistics.median(alone)
    return {
        "jobs": jobs,
        "segments": len(plan.segments),
        "swaps": sum(event.kind == "swap_out" for event in plan.events),
        "steps": steps,
        "chunks": chunks,
        "step_us": round(wall_s / iterations * 1e6, 1),
        "us_per_launch": round(wall_s / launches * 1e6, 1),
        "alone_us": round(alone_s / launches * 1e6, 1),
        "beyond_us": round((wall_s - launches * _US_PER_LAUNCH / 1e6) / iterations * 1e6, 1),
        "added_us": round(statistics.median(t - a for t, a in zip(together, alone, strict=True)) / iterations * 1e6, 1),
        "ratio": round(statistics.median(t / a for t, a in zip(together, alone, strict=True)), 4),
    }


def _until_done(jobs: list[tensile.Job], steps: int) -> None:
    while any(job.status.step < steps for job in jobs):
        if any(job.status.state == "failed" for job in jobs):
            raise RuntimeError("a job failed") from next(filter(None, (job.exception() for job in jobs)), None)
        time.sleep(_RETRY_S)


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title=title)
    columns = {
        "jobs": "jobs", "segments": "segments", "swaps": "swaps", "step_us": "us / step", "us_per_launch": "us / launch",
        "alone_us": "alone, us / launch", "beyond_us": "us / step beyond 40 us / launch", "added_us": "us / step beyond alone",
        "ratio": "over alone",
    }  # fmt: skip
    for name in columns.values():
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    return table


def _measure_apart(what: str, jobs: int, *, steps: int, chunks: int) -> dict[str, Any]:
    """One case, in a process of its own, since JAX reads its settings when the CPU is first used."""
    asked = ["--one", what, "--jobs", str(jobs), "--steps", str(steps), "--chunks", str(chunks)]
    found = subprocess.run([sys.executable, "-m", "benchmarks.dispatch", *asked], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(found.stdout)


@click.command()
@click.option("--steps", default=800, show_default=True, help="Of all jobs together, in a chunk of near-empty segments.")
@click.option("--chunks", default=7, show_default=True, help="Of each case.")
@click.option("--long-steps", default=20, show_default=True, help="In a chunk of long steps.")
@click.option("--one", type=click.Choice(["near-empty", "long", "swapping"]), help="Measure one case, and print its JSON.")
@click.option("--jobs", default=1, help="Of the one case.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS, help="Where to write the JSON.")
def main(steps: int, chunks: int, long_steps: int, one: str | None, jobs: int, output: Path) -> None:
    """Measure 1 to 8 jobs of near-empty segments, and one job of long steps."""
    if one is not None:
        if one == "near-empty":
            jax.config.update("jax_cpu_enable_async_dispatch", False)
        network = EMPTY if one == "near-empty" else LONG
        print(json.dumps(measure(network, jobs, steps=steps, chunks=chunks, policy="checkpoint" if one == "long" else "auto")))
        return
    rows = [_measure_apart("near-empty", jobs, steps=max(steps // jobs, 1), chunks=chunks) for jobs in _JOBS]
    long = [_measure_apart(what, 1, steps=long_steps, chunks=chunks) for what in ("long", "swapping")]
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}",
        "load": [round(load, 2) for load in os.getloadavg()],
        "command": "make bench-dispatch",
        "near_empty": rows,
        "long": long,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    console = Console(width=130)
    console.print(table_of("jobs of near-empty segments", rows))
    console.print(table_of("one job of long steps", long))


if __name__ == "__main__":
    main()
