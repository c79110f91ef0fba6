"""Train a step on its input: the loop that `run` and `demo` share, for planned steps and plain ones alike."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from tensile_jax.cli.interrupt import Interrupt

Watch = Callable[[int, float, float], None]
"""Told after each step: steps done, its loss, its time in microseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The last state, and the loss and time (microseconds) of each step."""

    state: Any
    losses: tuple[float, ...]
    times_us: tuple[float, ...]

    @property
    def step_us(self) -> float | None:
        """The median without the first step, in which things are compiled and touched for the first time."""
        return statistics.median(self.times_us[1:]) if len(self.times_us) > 1 else None


def train(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    watch: Watch,
    interrupt: Interrupt | None = None,
) -> Training:
    """`steps` steps from `state`, which is donated; fewer if interrupted. Each is waited for, so that its time is its own."""
    losses: list[float] = []
    times_us: list[float] = []
    for done, batch in zip(range(1, steps + 1), batches, strict=False):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        times_us.append((time.perf_counter() - began) * 1e6)
        losses.append(float(metrics["loss"]))
        if interrupt is not None:
            interrupt.worth_waiting = True
        watch(done, losses[-1], times_us[-1])
        if interrupt is not None and interrupt.requested:
            break
    return Training(state, tuple(losses), tuple(times_us))
