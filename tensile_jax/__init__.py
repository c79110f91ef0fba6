"""Training steps under a budget of device memory: `jax.jit` that plans what to swap, recompute and release.

    import tensile_jax as tensile

    @tensile.jit(budget="1.2GiB", donate_argnums=0)
    def train_step(state, batch): ...

After TENSILE (Zhang et al., "A Tensor granularity dynamic GPU memory scheduling method toward multiple dynamic workloads
system").
"""

from tensile_jax.api import PlannedFunction, Report, jit
from tensile_jax.errors import (
    BudgetError,
    BudgetTooSmall,
    InvalidPlan,
    OutOfMemory,
    PlanFileError,
    TensileError,
    TraceError,
)
from tensile_jax.exec.transfer import to_device
from tensile_jax.schedule import Plan

__all__ = [
    "BudgetError", "BudgetTooSmall", "InvalidPlan", "OutOfMemory", "Plan", "PlanFileError", "PlannedFunction", "Report",
    "TensileError", "TraceError", "jit", "to_device",
]  # fmt: skip
