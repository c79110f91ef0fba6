"""`make bench-checkpointing`: `jax.checkpoint` placed by hand beside budgets of the same bytes, on this CPU.

    python -m benchmarks.checkpointing
    python -m benchmarks.checkpointing --only decoder --rounds 3 -o one.json

For each network of `benchmarks/blocks.py`, in one process: plain `jax.jit`; the same network written in each way by hand, with
`jax.checkpoint` around its blocks, which stand one after another or are the body of a `lax.scan`; and `tensile_jax.jit` of the
plain step, whose budget in bytes is the peak that XLA states for each of these ways. For each: the peak, the seconds of the first
call, the median time of a step, and how far losses and gradients are from plain jit's. `cpu_ratio` is the processor's time in
place of the clock's. `flops_ratio` counts operations in XLA's executable: above 1, XLA computes blocks again. (It counts the body
of a loop once, so loops have none.) A way whose peak is not below plain jit's, by `_SAVES`, is not timed. `floor_bytes` is the
smallest budget that an error names. Steps are timed in rounds: one step of each, in an order that rotates.

Writes `benchmarks/results/checkpointing-cpu.json`. `note` says what else ran on the machine, and `load` is its load before and
after.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

import tensile_jax as tensile
from benchmarks.blocks import CHAINS, PLAIN, WAYS, Chain, Way
from benchmarks.workloads import Workload
from benchmarks.workloads.case import copied, timed
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of

_RESULTS = Path(__file__).parent / "results" / "checkpointing-cpu.json"
_COMPARED = 4  # steps whose losses are compared; under a budget, these are the steps that are watched
_WARM_UP = 3  # further steps before the clock starts
_ROUNDING = 1e-3  # of losses: rounding grows over the compared steps
_SAVES = 0.99  # of a peak: one that is not below this is the same


@dataclass(frozen=True, eq=False)
class Contender:
    """A compiled step in training. `held` is its state, which each step replaces.

    `seconds` are those of its timed steps, and `cpu_s` the processor's seconds in all threads, which other work changes less.
    """

    figures: dict[str, Any]
    call: Callable[[Any, Any], tuple[Any, Any]]
    held: list[Any]
    losses: list[float]
    moments: Any
    seconds: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])

    def step(self, batch: Any) -> tuple[float, float]:
        """Run one step; returns its seconds, and the processor's."""
        began = time.process_time()
        (state, _), seconds = timed(self.call, self.held.pop(), batch)
        self.held.append(state)
        return seconds, time.process_time() - began


def begun(workload: Workload, compiled: Callable[[], Any], figures: Callable[[Any, Any], dict[str, Any]]) -> Contender:
    """The step, compiled and run for the first steps. `figures` takes the step and a state."""
    state, batch = workload.init(), workload.batch(0)
    call, compile_s = timed(compiled)
    (state, loss), run_s = timed(call, state, batch)
    moments = copied(state[2][0].mu)  # after one step of Adam: a tenth of the gradients
    losses = [float(loss)]
    for number in range(1, _COMPARED):
        state, loss = call(state, workload.batch(number))
        losses.append(float(loss))
    return Contender({**figures(call, state), "first_call_s": compile_s + run_s}, call, [state], losses, moments)


def by_jit(chain: Chain, way: Way) -> Contender:
    """The step under `jax.jit`, written in this way."""
    workload = chain.workload(way)
    shapes = jax.eval_shape(workload.init), jax.eval_shape(lambda: workload.batch(0))

    def figures(call: Any, _: Any) -> dict[str, Any]:
        counted = {} if way.scan else {"flops": call.cost_analysis()["flops"]}
        return {"how": way.name, "peak_bytes": peak_of(call), **counted}

    return begun(workload, lambda: jax.jit(workload.step, donate_argnums=0).lower(*shapes).compile(), figures)


def by_budget(budget: int, workload: Workload) -> Contender:
    """The step under a budget.

    Raises:
        BudgetTooSmall: no plan keeps it.
    """

    def figures(call: Any, state: Any) -> dict[str, Any]:
        plan, report = call.plan(state, workload.batch(0)), call.report()
        return {
            "how": "budget",
            "budget_bytes": budget,
            "peak_bytes": plan.peak_bytes,
            "predicted_ratio": plan.step_us / plan.jit_step_us if plan.jit_step_us else None,
            "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
            "recomputed_us": plan.recomputed_us,
            "segments": report.segments,
            "plan_s": report.plan_s,
        }

    return begun(workload, lambda: tensile.jit(workload.step, budget=budget, donate_argnums=0), figures)


def measured(chain: Chain, rounds: int) -> list[dict[str, Any]]:
    """The figures of one network: plain jit, each way by hand, and each budget."""
    plain, untimed = by_jit(chain, PLAIN), list[dict[str, Any]]()
    contenders, most = [plain], _SAVES * plain.figures["peak_bytes"]
    for way in filter(chain.fits, WAYS):
        try:
            made = by_jit(chain, way)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:  # a policy that XLA for CPUs refuses
            untimed.append({"how": way.name, "error": str(error).splitlines()[0][:200]})
            continue
        if made.figures["peak_bytes"] < most:
            contenders.append(made)
        else:
            untimed.append(figures_of(made, plain, chain.stacked if way.scan else None))
    workload = chain.workload(PLAIN)
    for budget in apart(one.figures["peak_bytes"] for one in contenders[1:]):
        try:
            contenders.append(by_budget(budget, workload))
        except BudgetTooSmall as error:
            untimed.append({"how": "budget", "budget_bytes": budget, "floor_bytes": int(error.floor_bytes)})
    untimed.append({"how": "the least budget", "floor_bytes": floor_of(workload)})
    batch = workload.batch(0)
    for number in range(_WARM_UP + rounds):
        start = number % len(contenders)
        for one in (*contenders[start:], *contenders[:start]):
            seconds, cpu_s = one.step(batch)
            if number >= _WARM_UP:
                one.seconds.append(seconds)
                one.cpu_s.append(cpu_s)
    scanned = {way.name for way in WAYS if way.scan}
    timed_ones = [figures_of(one, plain, chain.stacked if one.figures["how"] in scanned else None) for one in contenders]
    return [*timed_ones, *untimed]


def apart(peaks: Iterable[int]) -> list[int]:
    """The peaks without those that exceed another one by less than 1 %: a plan for the lower one keeps both.

    >>> apart([1000, 500, 502])
    [500, 1000]
    """
    kept: list[int] = []
    for peak in sorted(peaks):
        if not kept or kept[-1] < _SAVES * peak:
            kept.append(peak)
    return kept


def floor_of(workload: Workload) -> int:
    """The smallest budget that can be kept, as the error for a budget of one byte names it."""
    try:
        tensile.jit(workload.step, budget=1, donate_argnums=0).plan(workload.init(), workload.batch(0))
    except BudgetTooSmall as error:
        return int(error.floor_bytes)
    raise AssertionError("no step needs less than two bytes")


def figures_of(one: Contender, plain: Contender, like: Callable[[Any], Any] | None) -> dict[str, Any]:
    """What is written of a contender. `like` gives plain jit's parameters the form of the contender's.

    Raises:
        ValueError: it does not compute what plain jit computes.
    """
    losses = max(abs(a - b) / abs(b) for a, b in zip(one.losses, plain.losses, strict=True))
    if not losses < _ROUNDING:
        raise ValueError(f"{one.figures} has the losses {one.losses}, and plain jit {plain.losses}.")
    found = {
        **one.figures,
        "peak_ratio": one.figures["peak_bytes"] / plain.figures["peak_bytes"],
        "loss_difference": losses,
        "gradient_difference": _distance(one.moments, like(plain.moments) if like else plain.moments),
    }
    if one.seconds:
        found["step_s"] = statistics.median(one.seconds)
        found["time_ratio"] = found["step_s"] / statistics.median(plain.seconds)
        found["quickest_ratio"] = min(one.seconds) / min(plain.seconds)
        found["cpu_ratio"] = statistics.median(one.cpu_s) / statistics.median(plain.cpu_s)
    if "flops" in found:
        found["flops_ratio"] = found["flops"] / plain.figures["flops"]
    return found


def _distance(a: Any, b: Any) -> float:
    """The norm of the difference of two trees over the norm of the second one."""

    def norm(tree: Any) -> float:
        return float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))))

    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(b)


def _line(figures: dict[str, Any]) -> str:
    if "peak_ratio" not in figures:
        return json.dumps(figures)
    parts = [f"{figures['how']:40} peak {figures['peak_ratio']:.3f}  first call {figures['first_call_s']:.1f} s"]
    for name in ("time_ratio", "quickest_ratio", "cpu_ratio", "flops_ratio", "budget_bytes", "segments", "predicted_ratio"):
        if figures.get(name) is not None:
            parts.append(f"{name.removesuffix('_ratio')} {figures[name]:.4g}")
    return "  ".join([*parts, f"losses {figures['loss_difference']:.0e}  gradients {figures['gradient_difference']:.0e}"])


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(CHAINS)), help="These networks only.")
@click.option("--rounds", type=click.IntRange(min=1), default=21, show_default=True, help="Timed steps of each.")
@click.option("--note", default="", help="What a reader of the figures must know, such as what else ran.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(only: Sequence[str], rounds: int, note: str, output: Path) -> None:
    """Run every network and write the figures."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))  # JAX's own first call of anything
    networks: dict[str, Any] = {}
    load = os.getloadavg()
    began = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TENSILE_CACHE_DIR"] = cache  # as on a machine that was not calibrated
        for name in only or CHAINS:
            networks[name] = measured(CHAINS[name](), rounds)
            print(name, *map(_line, networks[name]), sep="\n  ", flush=True)
            document = {
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "versions": {name: version(name) for name in ("tensile_jax", "jax", "jaxlib", "flax", "optax")},
                "command": " ".join(["python -m benchmarks.checkpointing", *sys.argv[1:]]),
                "note": note,
                "rounds": rounds,
                "load": [load, os.getloadavg()],
                "seconds": (datetime.now(UTC) - began).total_seconds(),
                "networks": networks,
            }
            output.write_text(json.dumps(document, indent=1) + "\n")  # after each network


if __name__ == "__main__":
    main()
