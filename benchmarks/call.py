"""Measures the overhead of one call of a planned function, and of plain `jax.jit`, on a step that computes next to nothing.

    python -m benchmarks.call

The state has 300 arrays and is donated. The step returns the state unchanged. Three times are measured: reading the signature of
the call, the whole call under plain `jax.jit`, and the whole call under `tensile_jax.jit`. They are the CPU time of the thread in
microseconds per call, the least of 25 rounds, and are written to `benchmarks/results/call.json`.
"""

import json
import platform
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tensile_jax
from tensile_jax.exec.call.signature import SignatureReader

_ARRAYS = 300
_ROUNDS, _CALLS = 25, 40
_RESULTS = Path(__file__).parent / "results" / "call.json"


def step(state: dict[str, Any], batch: Any) -> Any:
    """The state unchanged, and a number."""
    return state, batch.sum()


def least_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call, the least of several rounds."""
    call()
    return min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS, timer=time.thread_time)) / _CALLS * 1e6


def call_us(jitted: Callable[..., Any], state: dict[str, Any], batch: Any) -> float:
    """Microseconds of one call in a training loop."""
    held = [jax.tree.map(jnp.copy, state)]

    def one() -> None:
        held[0], _ = jitted(held[0], batch)

    for _ in range(5):  # those in which plans are watched
        one()
    return least_us(one)


def main() -> None:
    """Measure, print and write."""
    state = {f"layer_{i}": jnp.full((8, 8), float(i)) for i in range(_ARRAYS)}
    batch = jnp.ones((4, 8))
    reader = SignatureReader(step)
    figures = {
        "arrays": _ARRAYS,
        "signature_us": least_us(lambda: reader.read((state, batch), {})),
        "jit_us": call_us(jax.jit(step, donate_argnums=0), state, batch),
        "whole_us": call_us(tensile_jax.jit(step, donate_argnums=0), state, batch),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}",
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(figures, indent=2))
    _RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
