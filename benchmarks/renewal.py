"""`make bench-renewal`: how a plan follows a machine whose load changes, and what that costs.

Calibrates this machine in a folder of its own (`--calibrate-s` seconds), and then measures on the model `gpt`:

    first       in a process of its own, with the calibration cached: the first iteration, without planning and compiling, over
                the median of later ones; for plain jit too
    tracking    200 steps of a plan that is followed and never renewed, over 200 steps of the same plan that is not followed
    load        other processes take away compute (`_LOADS`), one load after another. After how many iterations the plan is
                renewed, the peaks and the time of a step, beside a plan that was made from scratch under the same load

Losses are compared with plain jit's at the end. Writes `benchmarks/results/renewal.json`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from rich.console import Console

import tensile_jax as tensile
from tensile_jax.exec.calibration.calibrate import calibrate
from tensile_jax.installed_models import MODELS

_RESULTS = Path(__file__).parent / "results" / "renewal.json"
_SIZES = {"batch_size": 16, "sequence_length": 256, "width": 256}
_BUDGET = "50%"
_LOADS = (os.cpu_count() or 1, 0, (os.cpu_count() or 1) * 2)  # processes that burn a core: half of the compute, none, two thirds
_MOST = 200  # iterations in which the plan must follow
_STEADY = 20  # iterations of which the median counts
_TRACKED = 200
_PROCESSES = 3
_FIRST = {
    "gpt": _SIZES,
    "resnet50": {"batch_size": 16, "image_size": 96},
    "gpt_scan": {"batch_size": 16, "sequence_length": 256, "width": 256},
}
_BURN = "while True: pass"


def made(name: str, sizes: dict[str, int], **options: Any) -> tuple[Any, Any, Callable[[int], Any], tensile.PlannedFunction]:
    """The model, its first state, its batches by number, and its step under the budget."""
    model = MODELS[name](**sizes)
    feed = model.batches()
    some = [jax.tree.map(jax.numpy.asarray, next(feed)) for _ in range(8)]
    function = tensile.jit(model.step, budget=_BUDGET, donate_argnums=0, **options)
    return model, model.init(), lambda i: some[i % len(some)], function


def timed(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, Any, float]:
    """One step: state, metrics and seconds."""
    began = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, metrics, time.perf_counter() - began


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes, each of which keeps a core busy."""
    burning = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(processes)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


# -- the first iteration ------------------------------------------------------------------------------------------------------


def first_iteration(name: str) -> dict[str, Any]:
    """In a process of its own: the first iteration of a planned job and of plain jit, over later ones."""
    model, state, batch, function = made(name, _FIRST[name])
    for i in range(_STEADY + 1):
        state, _, _ = timed(function, state, batch(i))
    report = function.report()
    assert report.watched_step_us is not None
    jitted = jax.jit(model.step, donate_argnums=0)
    state = model.init()
    compiled = jitted.lower(state, batch(0)).compile()
    plain: list[float] = []
    for i in range(_STEADY + 1):
        state, _, seconds = timed(compiled, state, batch(i))
        plain.append(seconds)
    plan = function.plan(state, batch(0))
    return {
        "model": name, **_FIRST[name], "first_ms": report.first_step_us / 1e3, "steady_ms": report.watched_step_us / 1e3,
        "first_over_steady": report.first_step_us / report.watched_step_us, "segments": report.segments,
        "predicted_ms": plan.step_us / 1e3, "plain_first_over_steady": plain[0] / statistics.median(plain[1:]),
        "steady_over_plain": report.watched_step_us / 1e6 / statistics.median(plain[1:]),
    }  # fmt: skip


def measure_first() -> list[dict[str, Any]]:
    """The same of each model: medians over `_PROCESSES` processes."""
    rows: list[dict[str, Any]] = []
    for name in _FIRST:
        found: list[dict[str, Any]] = []
        for _ in range(_PROCESSES):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.renewal", "--first", name], check=True, capture_output=True, text=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
        measured = {key for key, value in found[0].items() if isinstance(value, float)}
        rows.append(found[0] | {key: statistics.median(one[key] for one in found) for key in measured})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# -- what following costs -----------------------------------------------------------------------------------------------------


def measure_tracking() -> dict[str, Any]:
    """200 steps with and 200 without following, ten at a time in turns."""
    _, state, batch, followed = made("gpt", _SIZES, renew_above=1e9)
    plain = made("gpt", _SIZES)[3]
    both = {"followed": followed, "not_followed": plain}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for function in both.values():
        for i in range(4):
            state, _, _ = timed(function, state, batch(i))
    for block in range(_TRACKED // 10):
        for name, function in both.items() if block % 2 else reversed(both.items()):
            for i in range(10):
                state, _, took = timed(function, state, batch(i))
                seconds[name].append(took)
    total = {name: sum(several) for name, several in seconds.items()}
    blocks = [
        sum(seconds["followed"][k : k + 10]) / sum(seconds["not_followed"][k : k + 10]) for k in range(0, _TRACKED, 10)
    ]  # fmt: skip
    return {
        "steps": _TRACKED, "followed_s": total["followed"], "not_followed_s": total["not_followed"],
        "ratio": total["followed"] / total["not_followed"], "median_ratio_of_ten_steps": statistics.median(blocks),
        "measured_drift": followed.report().drift,
    }  # fmt: skip


# -- a load that changes ------------------------------------------------------------------------------------------------------


class Training:
    """A training under a plan that is followed. Every loss and every peak is kept."""

    def __init__(self) -> None:
        self.model, self.state, self.batch, self.function = made("gpt", _SIZES, renew_above=0.3)
        self.losses: list[float] = []

    def step(self) -> float:
        self.state, metrics, seconds = timed(self.function, self.state, self.batch(len(self.losses)))
        self.losses.append(float(metrics["loss"] if isinstance(metrics, dict) else metrics))
        return seconds

    @property
    def plans(self) -> int:
        return self.function.report().plans

    def until_settled(self) -> None:
        """Until the plan says what is measured."""
        for i in range(_MOST):
            self.step()
            drift = self.function.report().drift
            if i > 4 and drift is not None and drift < 0.3:
                return


def measure_load(processes: int, training: Training) -> dict[str, Any]:
    """What the training does when the load changes; and a plan from scratch under that load."""
    with load(processes):
        before, first = training.plans, len(training.losses)
        began = time.perf_counter()
        slow: list[float] = []
        while training.plans == before and len(slow) < _MOST:
            slow.append(training.step())
        follows_s = time.perf_counter() - began
        renewed = training.plans > before
        plan = training.function.plan(training.state, training.batch(0))
        scratch = Training()
        scratch.until_settled()
        steady: dict[str, list[float]] = {"renewed": [], "scratch": []}
        for _ in range(_STEADY // 5):
            for name, one in (("renewed", training), ("scratch", scratch)):
                steady[name] += [one.step() for _ in range(5)]
        report = training.function.report()
    assert plan.budget_bytes is not None
    medians = {name: statistics.median(several) for name, several in steady.items()}
    return {
        "burning_processes": processes, "renewed": renewed, "iterations_until_renewed": len(slow) if renewed else None,
        "seconds_until_renewed": follows_s, "step_ms_before_renewal": statistics.median(slow) * 1e3,
        "reason": plan.reason, "predicted_ms": plan.step_us / 1e3, "segments": len(plan.segments),
        "budget_bytes": plan.budget_bytes, "peak_bytes": report.peak_bytes, "kept_budget": report.peak_bytes <= plan.budget_bytes,
        "first_iteration": first, "steady_ms": medians["renewed"] * 1e3, "scratch_ms": medians["scratch"] * 1e3,
        "over_scratch": medians["renewed"] / medians["scratch"],
    }  # fmt: skip


def measure_loads() -> dict[str, Any]:
    """The loads one after another, and the losses beside plain jit's."""
    training = Training()
    training.until_settled()
    rows: list[dict[str, Any]] = []
    for processes in _LOADS:
        rows.append(measure_load(processes, training))
        print(json.dumps(rows[-1]), flush=True)
    state, jitted = training.model.init(), jax.jit(training.model.step, donate_argnums=0)
    expected: list[float] = []
    for i in range(len(training.losses)):
        state, metrics = jitted(state, training.batch(i))
        expected.append(float(metrics["loss"] if isinstance(metrics, dict) else metrics))
    apart = np.abs(np.array(training.losses) / np.array(expected) - 1)
    return {
        "loads": rows, "iterations": len(expected), "plans": training.plans,
        "loss": training.losses[-1], "loss_of_plain_jit": expected[-1], "most_relative_difference": float(apart.max()),
    }  # fmt: skip


@click.command()
@click.option("--first", type=click.Choice(list(_FIRST)), help="Only the first iteration of this model, in this process.")
@click.option("--calibrate-s", default=60.0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(first: str | None, calibrate_s: float, output: Path) -> None:
    """Calibrate, measure, and write the figures."""
    if first is not None:
        print(json.dumps(first_iteration(first)))
        return
    os.environ["TENSILE_CACHE_DIR"] = tempfile.mkdtemp()
    calibrate(jax.devices()[0], quick=calibrate_s < 30)
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make bench-renewal",
        "measured_on": f"CPU, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "budget": _BUDGET,
        "first": measure_first(),
        "tracking": measure_tracking(),
        **measure_loads(),
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    Console(width=130).print_json(data={k: v for k, v in document.items() if k != "first"})


if __name__ == "__main__":
    main()
