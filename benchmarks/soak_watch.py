"""Measures the bytes on the device at each launch, from JAX's own list of live arrays and not from the runtime's ledger.

measured = live arrays + workspace of the executable that is launched
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import jax

from tensile_jax.exec.running.executor import Iteration
from tensile_jax.exec.running.instructions import Instruction, Launch
from tensile_jax.exec.transfer import DEVICE


def live_bytes(kind: str) -> int:
    """The bytes of all live arrays in that kind of memory."""
    return sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted() and a.sharding.memory_kind == kind)


@dataclass
class Watch:
    """Measures inside a `with` block, in which it patches the executor. `budget` gives the budget of the moment."""

    budget: Callable[[], int]
    baseline: int = 0
    launches: int = 0
    most: float = 0.0
    worst: str = ""

    def __enter__(self) -> "Watch":
        gc.collect()
        self.baseline = live_bytes(DEVICE)
        performed = Iteration.perform

        def perform(iteration: Iteration, instruction: Instruction) -> None:
            performed(iteration, instruction)
            if isinstance(instruction, Launch):
                self._seen(instruction.workspace_bytes)

        self._patched = patch.object(Iteration, "perform", perform)
        self._patched.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.stop()

    def _seen(self, beside: int) -> None:
        measured, budget = live_bytes(DEVICE) - self.baseline + beside, self.budget()
        self.launches += 1
        self.most = max(self.most, measured / budget)
        if measured > budget and not self.worst:
            self.worst = f"{measured} bytes under a budget of {budget}"
