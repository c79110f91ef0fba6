"""Measures one job while it runs: its speed, its peak, the time that it waited for copies, and its last loss.

`numbers_of` picks the metrics of a step that are single numbers. They are reported to the user.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RECENT_STEPS = 16  # the speed is that of this many last steps
_TIMED_STEPS = 200  # this many step times are kept


@dataclass(slots=True)
class JobMeasurements:
    """What was measured of one job so far. The dispatcher's threads write it; any thread may read it.

    Attributes:
        peak_bytes: the most device memory of this job in the iterations in which it was read: live arrays and workspace.
        stall_us: the time that the job has waited for copies, in total.
        loss: the loss of the last step; None if the step returns none.
        step_us: for each of the last steps, the time from the begin of the iteration to its end.
        step_ends: for each of the last steps, when its metrics had been read, in seconds of `time.perf_counter`.
    """

    peak_bytes: int = 0
    stall_us: float = 0.0
    loss: float | None = None
    step_us: deque[float] = field(default_factory=lambda: deque[float](maxlen=_TIMED_STEPS))
    step_ends: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT_STEPS))

    def add_step(self, us: float, values: Mapping[str, float]) -> None:
        """Add a step that has ended; `values` are those of its metrics that are numbers."""
        self.step_ends.append(time.perf_counter())
        self.step_us.append(us)
        self.loss = values.get("loss", self.loss)

    def add_stall(self, us: float) -> None:
        """Add a time for which the job has waited for copies."""
        self.stall_us += us

    @property
    def steps_per_s(self) -> float | None:
        """The speed over the last steps; None before the second step has ended."""
        ends = self.step_ends.copy()
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else None


def numbers_of(metrics: Any) -> dict[str, float]:
    """The metrics that are single numbers: their values by their paths in the tree. A metric without a path is the loss."""
    found: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if getattr(leaf, "size", 0) == 1 and _is_real(leaf.dtype):
            name = ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
            found[name or "loss"] = float(leaf)
    return found


def _is_real(dtype: Any) -> bool:
    # `jnp.issubdtype`, unlike that of NumPy, counts bfloat16 as floating
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
