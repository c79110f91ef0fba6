"""`make bench-training`: trains models on their real input under a budget and with plain jit, from the same state.

Every step of the two trainings has the same batch. With `--one-call`, all steps are one call of one function, whose loop over the
batches runs under a plan of its body. Prints the losses as they come, and writes `benchmarks/results/training.json`: losses, the
largest difference between them, peaks, and the seconds that the steps took after the first, without compiling.
"""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from jax import lax

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS

_RESULTS = Path(__file__).parent / "results" / "training.json"
_PRINTED = 20  # steps from one line to the next


@click.command()
@click.option("--model", "models", multiple=True, default=("gpt_scan",), show_default=True)
@click.option("--batch-size", type=int, default=16, show_default=True)
@click.option("--budget", default=0.4, show_default=True, help="As a share of plain jit's peak.")
@click.option("--steps", type=int, default=300, show_default=True)
@click.option("--one-call", type=int, default=200, show_default=True, help="Steps of the training in one call; 0 leaves it out.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(models: tuple[str, ...], batch_size: int, budget: float, steps: int, one_call: int, output: Path) -> None:
    """Train every model and write the figures."""
    rows: list[dict[str, Any]] = []
    for model in models:
        rows.append(_step_by_step(model, batch_size, budget, steps))
        if one_call:
            rows.append(_in_one_call(model, batch_size, budget, one_call))
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
        "command": "make bench-training",
        "trainings": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")


def _step_by_step(model: str, batch_size: int, budget: float, steps: int) -> dict[str, Any]:
    built = MODELS[model](batch_size=batch_size)
    mine: Any = built.init()
    theirs = _copy(mine)
    batch = next(_arrays(built.batches()))
    plain = jax.jit(built.step, donate_argnums=0).lower(mine, batch).compile()
    peak_bytes = peak_of(plain)
    step = tensile.jit(built.step, budget=int(budget * peak_bytes), donate_argnums=0)
    losses: list[tuple[float, float]] = []
    own_s = plain_s = 0.0
    for i, batch in zip(range(steps), _arrays(built.batches()), strict=False):
        began = time.perf_counter()
        mine, metrics = jax.block_until_ready(step(mine, batch))
        between = time.perf_counter()
        theirs, expected = jax.block_until_ready(plain(theirs, batch))
        if i:
            own_s, plain_s = own_s + between - began, plain_s + time.perf_counter() - between
        losses.append((float(metrics["loss"]), float(expected["loss"])))
        if i % _PRINTED == 0:
            print(f"{model} step {i}: loss {losses[-1][0]:.6f}, plain jit {losses[-1][1]:.6f}", flush=True)
    report = step.report()
    return _row(
        model, batch_size, budget, losses, report.peak_bytes, step.plan(mine, batch).peak_bytes, peak_bytes, own_s, plain_s
    ) | {"form": "step by step"}


def _in_one_call(model: str, batch_size: int, budget: float, steps: int) -> dict[str, Any]:
    built = MODELS[model](batch_size=batch_size)
    state: Any = built.init()
    feed = _arrays(built.batches())
    batches = jax.tree.map(lambda *several: jnp.stack(several), *[next(feed) for _ in range(steps)])

    def training(state: Any, batches: Any) -> Any:
        return lax.scan(built.step, state, batches)

    plain = jax.jit(training, donate_argnums=0).lower(state, batches).compile()
    peak_bytes = peak_of(plain)
    function = tensile.jit(training, budget=int(budget * peak_bytes), donate_argnums=0)
    function(_copy(state), batches)  # compiles
    own, own_s = _timed(function, _copy(state), batches)
    expected, plain_s = _timed(plain, _copy(state), batches)
    losses = list(zip(map(float, own["loss"]), map(float, expected["loss"]), strict=True))
    plan = function.plan(state, batches)
    print(f"{model} in one call: {plan.loops[0].iterations if plan.loops else 'no'} driven iterations", flush=True)
    return _row(
        model, batch_size, budget, losses, function.report().peak_bytes, plan.peak_bytes, peak_bytes, own_s, plain_s
    ) | {"form": "in one call", "driven": [loop.iterations for loop in plan.loops]}  # fmt: skip


def _timed(function: Callable[..., Any], state: Any, batches: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    _, metrics = jax.block_until_ready(function(state, batches))
    return metrics, time.perf_counter() - began


def _row(
    model: str, batch_size: int, budget: float, losses: list[tuple[float, float]],
    peak_bytes: int, predicted_bytes: int, plain_bytes: int, own_s: float, plain_s: float,
) -> dict[str, Any]:  # fmt: skip
    row = {
        "model": model,
        "batch_size": batch_size,
        "budget_share": budget,
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "largest_difference": max(abs(a / b - 1) for a, b in losses),
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": predicted_bytes,
        "jit_peak_bytes": plain_bytes,
        "peak_ratio": peak_bytes / plain_bytes,
        "time_ratio": own_s / plain_s,
        "losses": [[round(a, 6), round(b, 6)] for a, b in losses[::_PRINTED]],
    }
    print(json.dumps({k: v for k, v in row.items() if k != "losses"}), flush=True)
    return row


def _arrays(feed: Iterator[Any]) -> Iterator[Any]:
    return (jax.tree.map(jnp.asarray, batch) for batch in feed)


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


if __name__ == "__main__":
    main()
