"""How long it takes to run an operator once more, as a part of a segment that needs its outputs again.

A heavy operator takes as long as it did the first time. A light one, or a reduction, is fused by XLA into the operator that uses
it, and costs what that adds to the memory traffic: the bytes that it reads once more, and its outputs where XLA writes them to
device memory. It never costs more than four times the bytes that it touches.

Latencies are in microseconds.
"""

import numpy as np

from tensile_jax.plan.analysis.fusion import Traffic
from tensile_jax.plan.analysis.latency import DeviceProfile, operator_latency
from tensile_jax.plan.analysis.liveness import Activity
from tensile_jax.plan.analysis.retention import Retention


def rerun_latencies(activity: Activity, traffic: Traffic, profile: DeviceProfile) -> np.ndarray:
    """`rerun_latency` of every operator, by place."""
    heavy = np.maximum(activity.flops / profile.flops_per_us, activity.touched / profile.bytes_per_us)
    extra = np.array(traffic.reread) + np.where(activity.kinds == "reduction", activity.touched, 0.0)
    extra += 2 * activity.makes.sums(activity.nbytes * traffic.written)
    return np.where(activity.kinds == "heavy", heavy, np.minimum(extra, 4 * activity.touched) / profile.bytes_per_us)


def rerun_latency(place: int, retention: Retention, traffic: Traffic, profile: DeviceProfile) -> float:
    """Microseconds that it adds to a segment to run the operator at `place` again."""
    graph = retention.activity.graph
    operator = graph.operators[place]
    if operator.kind == "heavy":
        return operator_latency(operator, profile)
    extra = traffic.reread[place]
    if operator.kind == "reduction":
        extra += operator.nbytes
    extra += sum(2 * graph.tensors[t].nbytes for t in operator.outputs if traffic.materialised[t])
    return min(extra, 4 * operator.nbytes) / profile.bytes_per_us
