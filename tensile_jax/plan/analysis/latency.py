"""Predicts, from a device profile, how long each operator of a step takes on a device.

    kernel_latency(w)   = max(w + kernel_us, host_kernel_us)
                        A kernel with w microseconds of work. kernel_us is what the kernel takes on the device beside its work.
                        host_kernel_us is what the host takes to issue it. The device waits for the host if that is longer.
    operator_latency(o) = kernel_latency(max(flops(o) / flops_per_us, nbytes(o) / bytes_per_us, least_us(o), link_us(o)))
                          + exchange_us(o)
                        Operator o by itself, which computes flops(o) operations, and reads and writes nbytes(o) bytes. The
                        first two terms of `max` are a roofline: the longer of computing and of moving bytes. If all
                        floating-point operands have 16 bits, operations take 1 / half_speedup of the time. least_us(o) is the
                        predicted time of a loop that runs under a plan of its own, and 0 for other operators. link_us(o) is the
                        time of the step's own copies between device and host memory, in the slower direction. exchange_us(o) is
                        the time in which a device sends exchanged(o) bytes to other devices for o:
                        exchanged(o) / interconnect_bytes_per_us
    own_latencies       what the latency model of the device predicts for heavy operators, and the roofline for all others

XLA runs *heavy* operators, such as matrix products, as kernels of their own. In an executable, XLA fuses *light* operators into
the operators that use them. The fused operators then cost only the memory traffic that they add. A *segment* is a stretch of
operators that is compiled as one executable.

    fused_latencies     An operator within its executable. A heavy operator or a reduction takes as long as by itself. A light
                        operator takes the time of moving twice the bytes that XLA writes for it (they are written, then read),
                        but never longer than moving nbytes(o). `kernel_latency` is applied to this time, or the time is zero if
                        XLA writes nothing. A sum of outer products s (`trace/rewrites/outer_products.py`) also adds delay(s)
    rerun_latencies     An operator that a segment runs again, because the segment needs its outputs again. A heavy operator
                        takes as long as the first time. Any other operator takes the time of moving reread(o) + 2 * again(o)
                        bytes (`fusion.py`): what it reads in addition, and what XLA writes and then reads. A reduction whose
                        result is stored also moves nbytes(o). No such operator takes longer than moving 4 * nbytes(o).
                        `kernel_latency` is applied to this time, or the time is zero if nothing is moved. A sum of outer
                        products s adds delay(s)
    delay(s)            XLA fuses the sum s into the kernel that updates a parameter. This kernel computes s while it moves the
                        bytes of the update, which are at least 4 * nbytes(s). It computes at an eighth of flops_per_us.
                        delay(s) is the time by which computing s takes longer than moving 4 * nbytes(s)

fused_latencies and rerun_latencies include exchange_us(o).

Difference from the paper: TENSILE (section IV-A) trains an MLP for each kind of operator and GPU. Here MLPs predict only heavy
operators (`latency_model.py`), and only on a device that was calibrated. A light operator never runs alone, so the time that it
would take alone is of no use. Latencies are in microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensile_jax.ir import OUTER_PRODUCTS, Graph, Operator
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.liveness import Liveness

_FUSED_PRODUCTS = 1 / 8  # of `flops_per_us`: the rate in a kernel of light operators; fitted on a CPU, not measured on a GPU
_UPDATE = 4  # an update reads and writes at least so many times the bytes of a gradient, while its kernel computes


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """A device profile, and for every place the microseconds of its operator: where it runs first, and where it runs again."""

    profile: DeviceProfile
    latencies: tuple[float, ...]
    rerun_us: tuple[float, ...]


def kernel_latency(work_us: float, profile: DeviceProfile) -> float:
    """Microseconds of a kernel with `work_us` of computing, reading and writing."""
    return max(work_us + profile.kernel_us, profile.host_kernel_us)


def kernel_latencies(work_us: np.ndarray, profile: DeviceProfile) -> np.ndarray:
    """The same of several kernels."""
    return np.maximum(work_us + profile.kernel_us, profile.host_kernel_us)


def operator_latency(operator: Operator, profile: DeviceProfile, *, half: bool = False) -> float:
    """Microseconds that the operator takes by itself; `half` says that its floating-point operands have 16 bits."""
    flops_per_us = profile.flops_per_us * (profile.half_speedup if half else 1.0)
    link_us = max(copy_out_us(operator.bytes_out, profile), copy_in_us(operator.bytes_in, profile))
    work_us = max(operator.flops / flops_per_us, operator.nbytes / profile.bytes_per_us, operator.least_us, link_us)
    return kernel_latency(work_us, profile) + exchange_us(operator, profile)


def exchange_us(operator: Operator, profile: DeviceProfile) -> float:
    """Microseconds that devices take to exchange what the operator needs of other devices."""
    return operator.exchanged / profile.interconnect_bytes_per_us


def fused_products_us(operator: Operator, profile: DeviceProfile) -> float:
    """Microseconds by which a sum of outer products delays the kernel into which it is fused; 0 for other operators."""
    if operator.primitive != OUTER_PRODUCTS:
        return 0.0
    moving_us = _UPDATE * operator.nbytes / profile.bytes_per_us
    return max(0.0, operator.flops / (_FUSED_PRODUCTS * profile.flops_per_us) - moving_us)


def own_latencies(operators: Sequence[Operator], profile: DeviceProfile, half: Sequence[bool] | None = None) -> np.ndarray:
    """Microseconds that each operator takes by itself, from the profile's latency model if that knows such operators, otherwise
    from the roofline.

    Args:
        half: for each operator, whether its floating-point operands have 16 bits; by default, false for all.
    """
    half = half or [False] * len(operators)
    rooflines = np.array([operator_latency(op, profile, half=its) for op, its in zip(operators, half, strict=True)], float)
    if profile.latency_model is None or not operators:
        return rooflines
    predicted = profile.latency_model.predict(operators)
    least = np.array([max(op.least_us, profile.host_kernel_us) for op in operators], float)
    exchanges = np.array([exchange_us(op, profile) for op in operators], float)
    return np.where(np.isnan(predicted), rooflines, np.maximum(predicted, least) + exchanges)


def _of_halves(graph: Graph) -> list[bool]:
    """For each operator, whether it has floating-point operands and all of them have 16 bits."""
    floats = [[dtype for t in op.inputs if "float" in (dtype := graph.tensors[t].dtype)] for op in graph.operators]
    return [bool(dtypes) and all(dtype in ("bfloat16", "float16") for dtype in dtypes) for dtypes in floats]


def rewriting_us(liveness: Liveness, profile: DeviceProfile) -> float:
    """Microseconds that plain `jax.jit` takes for copying updates into the memory of donated state, if XLA writes them elsewhere
    first.
    """
    nbytes = liveness.nbytes
    return sum(kernel_latency(2 * float(nbytes[t]) / profile.bytes_per_us, profile) for t in sorted(liveness.rewritten))


def fused_latencies(liveness: Liveness, fusion: Fusion, profile: DeviceProfile) -> tuple[float, ...]:
    """Microseconds of every operator where it runs first, by place."""
    tensors = liveness.graph.tensors
    found: list[float] = []
    operators = liveness.graph.operators
    own = own_latencies(operators, profile, _of_halves(liveness.graph)).tolist()
    for op, own_us in zip(operators, own, strict=True):
        if op.kind == "light":
            written = sum(2 * tensors[t].nbytes for t in op.outputs if fusion.materialised[t])
            here = kernel_latency(min(written, op.nbytes) / profile.bytes_per_us, profile) if written else 0.0
            found.append(here + fused_products_us(op, profile) + exchange_us(op, profile))
        else:
            found.append(own_us)
    return tuple(found)


def rerun_latencies(liveness: Liveness, fusion: Fusion, profile: DeviceProfile) -> np.ndarray:
    """Microseconds that a segment takes longer if it runs the operator again, for each operator by place."""
    heavy = own_latencies(liveness.graph.operators, profile, _of_halves(liveness.graph))
    virtual = liveness.makes.sums(np.array(fusion.virtual, dtype=np.int64)) > 0
    extra = np.array(fusion.reread) + np.where((liveness.kinds == "reduction") & ~virtual, liveness.touched, 0.0)
    extra += 2 * fusion.again
    beside = [exchange_us(op, profile) + fused_products_us(op, profile) for op in liveness.graph.operators]
    work_us = np.minimum(extra, 4 * liveness.touched) / profile.bytes_per_us
    again = np.where(work_us > 0, kernel_latencies(work_us, profile), 0.0) + np.array(beside, float)
    return np.where(liveness.kinds == "heavy", heavy, again)
