"""What is measured of a job while it runs, and which of its metrics are numbers that a user follows."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RECENT_STEPS = 16  # over which the speed is taken
_TIMED_STEPS = 200  # whose times are kept


@dataclass(slots=True)
class Measured:
    """What was measured of one job so far. The dispatcher's threads write it, and anyone may read it.

    Attributes:
        peak_bytes: the most bytes of the job's own at a launch whose live bytes were read.
        stall_us: waiting for copies, in all.
        loss: of the last step; None where there is none.
        step_us: of the last steps, from the begin of an iteration to its end.
        step_ends: when the last steps ended, in seconds.
    """

    peak_bytes: int = 0
    stall_us: float = 0.0
    loss: float | None = None
    step_us: deque[float] = field(default_factory=lambda: deque[float](maxlen=_TIMED_STEPS))
    step_ends: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT_STEPS))

    def add_step(self, us: float, values: Mapping[str, float]) -> None:
        """A step has ended; `values` are its metrics that are numbers."""
        self.step_ends.append(time.perf_counter())
        self.step_us.append(us)
        self.loss = values.get("loss", self.loss)

    @property
    def steps_per_s(self) -> float | None:
        """Over the last steps; None before the second."""
        ends = self.step_ends.copy()
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else None


def numbers_of(metrics: Any) -> dict[str, float]:
    """The metrics that are single numbers, by their paths."""
    found: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if getattr(leaf, "size", 0) == 1 and _is_real(leaf.dtype):
            name = ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
            found[name or "loss"] = float(leaf)
    return found


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))  # bfloat16 as well
