"""Train a step on its input: the loop that `run` and `demo` share, for planned steps and plain ones alike."""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from tensile_jax.cli.stop_signals import Stopping, stopping_on_signals

Watch = Callable[[int, float, float], None]
"""Told after each step: steps done, its loss, its time in microseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The last state, and the loss and time (microseconds) of each step; `interrupted`: a signal has asked for an end."""

    state: Any
    losses: tuple[float, ...]
    times_us: tuple[float, ...]
    interrupted: bool

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
    interruptible: bool = False,
) -> Training:
    """`steps` steps from `state`, which is donated. Each is waited for, so that its time is its own.

    `interruptible`: from the end of the first step on, the first Ctrl-C or SIGTERM ends the training after the step that is under
    way. Before that there is nothing to keep, and a signal ends the process at once, as it always does without it.
    """
    losses: list[float] = []
    times_us: list[float] = []
    stopping = Stopping()
    with ExitStack() as listening:
        for done, batch in zip(range(1, steps + 1), batches, strict=False):
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, batch))
            times_us.append((time.perf_counter() - began) * 1e6)
            losses.append(float(metrics["loss"]))
            if interruptible and done == 1:
                stopping = listening.enter_context(stopping_on_signals())
            watch(done, losses[-1], times_us[-1])
            if stopping.asked:
                break
    return Training(state, tuple(losses), tuple(times_us), stopping.asked)
