"""Measures several jobs under one budget, and the same jobs under plain jit, in a process of its own. Prints one JSON object.

    python -m benchmarks.jobs_case resnet50:4 gpt:8 --budget 0.5 --seconds 20

Of plain jit, the peak of the compiled step and the time of a step are measured. The time is the mean of two measurements, right
before and right after each round of the runtime. It includes neither loading batches nor compiling.

In a round of the runtime, all jobs are planned and paused, and then resumed at once. The measured time begins when each job has
done a step, and lasts `--seconds`. With the steps that each job does in the measured time:

    throughput = sum over jobs of (steps) x (plain jit's step time) / (measured time)

`cpu_throughput` is the same, with the CPU time of this process instead of elapsed time; other processes on the machine
disturb it less. `computing` is the part of the measured time in which a segment ran.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import jax

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS, Model
from tensile_jax.plan import PolicyName
from tensile_jax.runtime_records import JobEvent

_PLAIN_S = 3.0  # how long each measurement of plain jit takes at least
_GOOD = 0.75  # of plain jit's throughput; `--lowest` looks for the lowest budget that gives as much
_GPT = {"sequence_length": 256}


@dataclass(slots=True)
class Alone:
    """A model, its batches, and its step compiled by plain jit."""

    name: str
    model: Model
    batches: list[Any]
    jit: Any
    peak_bytes: int
    plain_s: float = _PLAIN_S

    def measure(self) -> tuple[float, float]:
        """The time of a step, after one that is not counted: elapsed microseconds, and microseconds of CPU time."""
        state: Any = self.model.init()
        state, _ = jax.block_until_ready(self.jit(state, self.batches[0]))
        steps, began, cpu = 0, time.perf_counter(), time.process_time()
        while not steps or time.perf_counter() - began < self.plain_s:
            state, _ = self.jit(state, self.batches[steps % len(self.batches)])
            jax.block_until_ready(state)
            steps += 1
        return (time.perf_counter() - began) * 1e6 / steps, (time.process_time() - cpu) * 1e6 / steps


def build(spec: str, sizes: dict[str, Any] | None = None, *, plain_s: float = _PLAIN_S) -> Alone:
    """Build and compile the model of a text such as `resnet50:4`, which names the model and the batch size."""
    name, _, size = spec.partition(":")
    usual = _GPT if name == "gpt" else {"image_size": 32} if name == "cnn" else {}
    model = MODELS[name](batch_size=int(size), **(usual if sizes is None else sizes))
    feed = model.batches()
    batches = [next(feed) for _ in range(4)]
    jit = jax.jit(model.step, donate_argnums=0).lower(model.state_shape, batches[0]).compile()
    return Alone(spec, model, batches, jit, peak_of(jit), plain_s)


def _forever(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


@dataclass(slots=True)
class Together:
    """Jobs that are planned and paused in a runtime, and run in rounds. Made by `together`.

    Attributes:
        too_small: the floors of those jobs that do not fit, None for others; None if all fit.
    """

    jobs: list[tensile.Job]
    runtime: tensile.Runtime
    events: Iterator[JobEvent]
    too_small: list[int | None] | None

    def round(self, seconds: float, order: Sequence[int] | None = None, apart_s: float | None = None) -> dict[str, Any]:
        """Resume all jobs, run them for about `seconds`, measure, and pause them again.

        Args:
            order: in which they are resumed.
            apart_s: they are resumed one after another, so many seconds apart, and what is measured begins with the first one's
                first step. Without it, they begin together, and what is measured begins when each has done a step.
        """
        runtime, jobs = self.runtime, self.jobs
        waiting = [jobs[k] for k in order or range(len(jobs))]
        for job in waiting[: None if apart_s is None else 1]:
            job.resume()
        waiting, next_at = ([] if apart_s is None else waiting[1:]), 0.0
        seen = {job.name: 0 for job in jobs}
        parks, begun, last, cpu = 0, None, 0.0, 0.0
        decided, launches = 0.0, 0
        before = dict(seen)
        for event in self.events:
            parks += event.kind == "parked" and begun is not None
            if event.kind != "step":
                continue
            seen[event.job] += 1
            last = event.time_s
            if begun is None and (waiting or all(seen.values())):
                begun, before, cpu = last, dict(seen), time.process_time()
                decided, launches = runtime.controller_us
                next_at = begun + (apart_s or 0.0)
            elif begun is not None and last >= next_at and waiting:
                waiting.pop(0).resume()
                next_at = last + (apart_s or 0.0)
            elif begun is not None and last - begun >= seconds and not waiting and all(seen.values()):
                break
        assert begun is not None
        cpu = time.process_time() - cpu
        decided, launches = runtime.controller_us[0] - decided, runtime.controller_us[1] - launches
        self._pause()
        done = [seen[job.name] - before[job.name] for job in jobs]
        spans = [s for s in runtime.record().spans if s.lane == "compute" and begun <= s.end_us / 1e6 <= last]
        planned = [job.status.planned_bytes for job in jobs]
        return {
            "peak_bytes": runtime.peak_bytes,
            "planned_peaks_bytes": planned,
            "peak_over_planned_sum": runtime.peak_bytes / sum(planned),
            "clocked_s": last - begun,
            "cpu_s": cpu,
            "computing": sum(s.end_us - s.begin_us for s in spans) / 1e6 / (last - begun),
            "steps": done,
            "parks": parks,
            "controller_us_per_launch": decided / max(launches, 1),
            "segments": [len(job.plan.segments) if job.plan else 0 for job in jobs],
            "swapped_bytes": [job.status.swapped_bytes for job in jobs],
        }

    def _pause(self) -> None:
        running = {job.name for job in self.jobs}
        for job in self.jobs:
            job.pause()
        while running:
            event = next(self.events)
            if event.kind == "paused":
                running.discard(event.job)


@contextmanager
def together(
    alone: Sequence[Alone], budget: int, *, policy: PolicyName = "auto", caps: Sequence[int | None] = ()
) -> Iterator[Together]:
    """Jobs that are planned together in a runtime; `caps` are the budgets of the jobs alone."""
    with tensile.Runtime(budget, look="always") as runtime:
        jobs: list[tensile.Job] = []
        for k, one in enumerate(alone):
            job = runtime.submit(
                one.model.step,
                one.model.init(),
                lambda one=one: _forever(one.batches),
                steps=10**6,
                name=f"{one.name}-{k}",
                policy=policy,
                budget=caps[k] if caps else None,
            )
            job.pause()
            jobs.append(job)
        while not all(job.status.state in ("paused", "failed") for job in jobs):
            time.sleep(0.05)
        failed = [job for job in jobs if job.status.state == "failed"]
        floors = [getattr(job.exception(), "floor_bytes", None) if job in failed else None for job in jobs] if failed else None
        try:
            yield Together(jobs, runtime, runtime.events(), floors)
        finally:
            runtime.stop()


def compare(found: dict[str, Any], before: list[tuple[float, float]], after: list[tuple[float, float]]) -> None:
    """Add the throughput relative to plain jit, which was measured right before and right after."""
    step_us = [(b + a) / 2 for (b, _), (a, _) in zip(before, after, strict=True)]
    cpu_us = [(b + a) / 2 for (_, b), (_, a) in zip(before, after, strict=True)]
    found["jit_step_us"] = step_us
    found["jit_step_us_after_over_before"] = [a / b for (b, _), (a, _) in zip(before, after, strict=True)]
    found["throughput"] = sum(n * us / 1e6 for n, us in zip(found["steps"], step_us, strict=True)) / found["clocked_s"]
    found["cpu_throughput"] = sum(n * us / 1e6 for n, us in zip(found["steps"], cpu_us, strict=True)) / found["cpu_s"]


@click.command()
@click.argument("specs", nargs=-1, required=True)
@click.option("--budget", "budgets", type=float, multiple=True, help="Parts of the sum of plain jit's peaks.", default=(0.5,))
@click.option("--rounds", default=2, help="Of plain jit and the runtime, alternating, at the first budget.")
@click.option("--lowest", is_flag=True, help="Go down by 0.05 until the throughput is below 0.75.")
@click.option("--seconds", default=20.0, help="How long the clock runs in each round.")
def main(specs: tuple[str, ...], budgets: tuple[float, ...], rounds: int, lowest: bool, seconds: float) -> None:
    alone = [build(spec) for spec in specs]
    whole = sum(one.peak_bytes for one in alone)
    measured: dict[float, list[dict[str, Any]]] = {}

    def round_at(part: float) -> dict[str, Any]:
        before = [one.measure() for one in alone]
        with together(alone, int(part * whole)) as jobs:
            found: dict[str, Any] = {"too_small": jobs.too_small} if jobs.too_small else jobs.round(seconds)
        found["budget_bytes"] = int(part * whole)
        if "too_small" not in found:
            compare(found, before, [one.measure() for one in alone])
        measured.setdefault(part, []).append(found)
        said = {k: round(v, 3) for k, v in found.items() if isinstance(v, float)}
        print(f"{part:.2f}", said or found, file=sys.stderr, flush=True)
        return found

    for part in budgets:
        for _ in range(rounds):
            if "too_small" in round_at(part):
                break
    part = min(budgets)
    while lowest and measured[part][0].get("throughput", 0.0) >= _GOOD and part > 0.06:
        part = round(part - 0.05, 2)
        round_at(part)
    result = {
        "jobs": list(specs),
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "jit_peaks_bytes": [one.peak_bytes for one in alone],
        "budgets": [_median(part, whole, rounds_) for part, rounds_ in measured.items()],
    }
    print(json.dumps(result))


def _median(part: float, whole: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [one for one in rounds if "throughput" in one]
    if not ran:
        return {"budget": part, **rounds[0]}
    return {
        "budget": part,
        "peak_ratio": max(one["peak_bytes"] for one in ran) / whole,
        "peak_over_planned_sum": max(one["peak_over_planned_sum"] for one in ran),
        "throughput": statistics.median(one["throughput"] for one in ran),
        "cpu_throughput": statistics.median(one["cpu_throughput"] for one in ran),
        "computing": statistics.median(one["computing"] for one in ran),
        "parks": statistics.median(one["parks"] for one in ran),
        "controller_us_per_launch": statistics.median(one["controller_us_per_launch"] for one in ran),
        "rounds": ran,
    }


if __name__ == "__main__":
    main()
