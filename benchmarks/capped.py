"""Trains on a GPU whose memory is capped at a budget: plain jit runs out of memory, and the planned step trains.

    python -m benchmarks.capped gpt --batch-size 8 --budget 50%

Three processes of their own, in turn. The first one compiles plain jit's step, for its peak, and trains with it without a cap,
for its losses. The two others have the budget and `--slack` of it as all of the device's memory (`XLA_CLIENT_MEM_FRACTION`); one
trains with plain jit, and one with the planned step. Prints one JSON object: for each, the losses and the most that the allocator
had in use, or how it failed. What was in use contains the state, the batch, and the memory with which XLA tried kernels while it
compiled.
"""

import json
import os
import subprocess
import sys
from typing import Any

import click
import jax

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS

_DEFAULT_FRACTION = 0.75
_SECONDS = 300


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, required=True)
@click.option("--budget", required=True, help='Such as "50%" of plain jit\'s peak.')
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
@click.option("--steps", type=int, default=5)
@click.option(
    "--slack",
    "slacks",
    type=float,
    multiple=True,
    default=(0.03, 0.1, 0.3),
    help="How much more memory there is than the budget, as a part of it; the next one if the planned step does not train.",
)
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--how", type=click.Choice(["uncapped", "jit", "planned"]), help="Do this here, and start no process.")
def main(
    model: str,
    batch_size: int,
    budget: str,
    sizes: str,
    steps: int,
    slacks: tuple[float, ...],
    cache: str | None,
    how: str | None,
) -> None:
    """Measure one model."""
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
    if how is not None:
        if jax.default_backend() == "cpu":
            raise click.UsageError("a GPU is needed: a CPU's memory cannot be capped")
        print(json.dumps(_trained(model, {"batch_size": batch_size, **json.loads(sizes)}, budget, steps, how)))
        return
    rest = [model, *("--batch-size", str(batch_size)), *("--sizes", sizes), *("--steps", str(steps))]
    rest += ["--cache", cache] if cache else []
    uncapped = _in_a_process(["--how", "uncapped", "--budget", budget, *rest], None)
    found: dict[str, Any] = {"model": model, "batch_size": batch_size, "budget": budget, "sizes": json.loads(sizes)}
    found["uncapped jit"] = uncapped
    if "jit_peak_bytes" in uncapped:
        budget_bytes = round(float(budget.rstrip("%")) / 100 * uncapped["jit_peak_bytes"])
        found["budget_bytes"] = budget_bytes

        def capped(how: str, slack: float) -> dict[str, Any]:
            there = round((1 + slack) * budget_bytes)
            ended = _in_a_process(["--how", how, "--budget", str(budget_bytes), *rest], there / uncapped["device_bytes"])
            return {"memory_bytes": there, **ended}

        found["jit"] = capped("jit", slacks[0])
        found["planned"] = []
        for slack in slacks:
            found["planned"].append(capped("planned", slack))
            if "failed" not in found["planned"][-1]:
                break
    print(json.dumps(found))


def _in_a_process(arguments: list[str], fraction: float | None) -> dict[str, Any]:
    capped = {} if fraction is None else {"XLA_CLIENT_MEM_FRACTION": f"{fraction:.6f}"}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.capped", *arguments],
        env={**os.environ, **capped},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return {
        "failed": next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), f"exit code {ended.returncode}")
    }


def _trained(name: str, sizes: dict[str, Any], budget: str, steps: int, how: str) -> dict[str, Any]:
    model = MODELS[name](**sizes)
    device = jax.devices()[0]
    found: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    batches = model.batches()
    if how == "planned":
        step: Any = tensile.jit(model.step, budget=int(budget), donate_argnums=0)
    else:
        step = jax.jit(model.step, donate_argnums=0)
    if how == "uncapped":
        found["jit_peak_bytes"] = peak_of(step.lower(model.state_shape, model.batch_shape).compile())
        found["device_bytes"] = round((device.memory_stats() or {}).get("bytes_limit", 0) / _DEFAULT_FRACTION)
    state: Any = model.init()
    losses: list[float] = []
    try:
        for _ in range(steps):
            state, metrics = step(state, next(batches))
            losses.append(float(metrics["loss"]))
    except (jax.errors.JaxRuntimeError, tensile.TensileError) as error:
        return {**found, "losses": losses, "failed": str(error).splitlines()[0][:300]}
    found |= {"losses": losses, "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use")}
    if how == "planned":
        report = step.report()
        found |= {"peak_bytes": report.peak_bytes, "launches": report.launches, "segments": report.segments}
        found |= {"swapped_bytes": report.swapped_bytes, "out_of_memory": report.out_of_memory}
    return found


if __name__ == "__main__":
    main()
