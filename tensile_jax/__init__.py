"""Runs training steps within a budget of device memory: a `jax.jit` that plans which tensors to swap, recompute and release.

    import tensile_jax as tensile

    @tensile.jit(budget="1.2GiB", donate_argnums=0)
    def train_step(state, batch): ...

The package follows TENSILE (Zhang et al., "A Tensor granularity dynamic GPU memory scheduling method toward multiple dynamic
workloads system").

This file imports only the exceptions at once. It imports every other name at the name's first use. So reading a plan and `tensile
--help` do not wait for JAX, and the command line can install its signal handlers before it imports anything large.
"""

from importlib import import_module

from tensile_jax.errors import (
    BudgetError,
    BudgetTooSmall,
    CheckpointError,
    ClusterError,
    DistributedError,
    InvalidPlan,
    JobFailed,
    JobsFileError,
    OutOfMemory,
    PlanFileError,
    ProcessDied,
    TensileError,
    TraceError,
)

TYPE_CHECKING = False  # type checkers know the name; the module `typing` takes a while to be imported
if TYPE_CHECKING:
    from tensile_jax import nnx, ray
    from tensile_jax.api import PlannedFunction, Report, jit
    from tensile_jax.checking.check import check
    from tensile_jax.checking.report import CheckReport
    from tensile_jax.exec.actor.entrypoint import Entrypoint
    from tensile_jax.exec.runtime.job import Job
    from tensile_jax.exec.runtime.runtime import Runtime
    from tensile_jax.exec.transfer import to_device
    from tensile_jax.memory_report.assert_peak import assert_peak
    from tensile_jax.memory_report.largest_batch import LargestBatch, max_batch
    from tensile_jax.memory_report.memory import memory
    from tensile_jax.memory_report.out_of_memory import explain_out_of_memory
    from tensile_jax.memory_report.report import MemoryReport
    from tensile_jax.plan_format import Plan

__all__ = [
    "BudgetError", "BudgetTooSmall", "CheckReport", "CheckpointError", "ClusterError", "DistributedError", "Entrypoint",
    "InvalidPlan", "Job", "JobFailed", "JobsFileError", "LargestBatch", "MemoryReport", "OutOfMemory", "Plan", "PlanFileError",
    "PlannedFunction", "ProcessDied", "Report", "Runtime", "TensileError", "TraceError", "assert_peak", "check",
    "explain_out_of_memory", "jit", "max_batch", "memory", "nnx", "ray", "to_device",
]  # fmt: skip

_ROOMS = ("nnx", "ray")  # packages, which need Flax and Ray as well
_ELSEWHERE = {
    "CheckReport": "tensile_jax.checking.report",
    "PlannedFunction": "tensile_jax.api",
    "Report": "tensile_jax.api",
    "Entrypoint": "tensile_jax.exec.actor.entrypoint",
    "Job": "tensile_jax.exec.runtime.job",
    "MemoryReport": "tensile_jax.memory_report.report",
    "LargestBatch": "tensile_jax.memory_report.largest_batch",
    "Plan": "tensile_jax.plan_format",
    "Runtime": "tensile_jax.exec.runtime.runtime",
    "assert_peak": "tensile_jax.memory_report.assert_peak",
    "check": "tensile_jax.checking.check",
    "explain_out_of_memory": "tensile_jax.memory_report.out_of_memory",
    "jit": "tensile_jax.api",
    "max_batch": "tensile_jax.memory_report.largest_batch",
    "memory": "tensile_jax.memory_report.memory",
    "to_device": "tensile_jax.exec.transfer",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"tensile_jax.{name}")
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ELSEWHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ELSEWHERE, *_ROOMS})
