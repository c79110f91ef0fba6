"""A report of any number of operators, each with one tensor, which is made without tracing anything."""

from tensile_jax.memory_report.records import (
    Held,
    HeldRole,
    MissedDonation,
    PeakPoint,
    RoleCurve,
    Tensor,
    UnusedArgument,
)
from tensile_jax.memory_report.report import REPORT_VERSION, MemoryReport

KIB = 1024
LIFE = 50
"""Operators over which a tensor lives."""
_ROLES: tuple[HeldRole, ...] = ("parameter", "activation", "gradient", "optimizer_state")


def report_of(operators: int) -> MemoryReport:
    """Operator i makes `Net/<layer i>`, of (i % 7 + 1) KiB, which lives over 50 operators."""
    tensors = [
        Tensor(
            f"Net/<layer {i}>", _ROLES[i % 4], (i % 7 + 1) * KIB, (i % 7 + 1, 256), "float32", i, min(i + LIFE, operators),
            f"Net/<layer {i}>/dot_general", f"model.py:{i + 1}", "x = layer(x)", "", "train.py:9",
            f"Net/<layer {i + 1}>/add", f"model.py:{i + 2}",
        )
        for i in range(operators)
    ]  # fmt: skip
    tensors.sort(key=lambda t: (-t.nbytes, t.begin))
    curves = tuple(
        RoleCurve(role, tuple(sum(t.nbytes for t in some if t.begin <= q < t.end) for q in range(operators)))
        for role in _ROLES
        for some in [[t for t in tensors if t.role == role]]
    )
    used = [sum(at) for at in zip(*(curve.nbytes for curve in curves), strict=True)]
    at = used.index(max(used))
    held = [Held(t.name, t.role, t.nbytes, t) for t in tensors if t.begin <= at < t.end]
    return MemoryReport(
        REPORT_VERSION, "0", "step <b>", "f", 1, "cpu", None, "cpu", max(used) + KIB, max(used) + 2 * KIB,
        PeakPoint(at, f"Net/<layer {at}>/dot_general", f"model.py:{at + 1}", "x = layer(x)"),
        (*held, Held("packing", "packing", KIB)), tuple(tensors), 1,
        tuple(f"Net/<layer {i}>/dot_general" for i in range(operators)),
        curves, tuple(float(i) for i in range(operators)), float(operators),
        (MissedDonation("state['w']", KIB, "it is not donated", "Pass donate_argnums=0."),), (UnusedArgument("key", 8),),
        (), None, (),
    )  # fmt: skip
