"""The stages of a calibration: each measures one property of a device.

    launch      executables that do nearly nothing, one after another; and others with many arguments, which they return in the
                same memory
    kernels     on a GPU, a training step of many tiny kernels: issuing them takes the host longer than they take to run
    out, into   copies between device memory and pinned host memory, by size: the first of its size (cold), and the fastest (warm)
    both        copies in both directions at once
    memory      an elementwise operator on large arrays, which reads and writes every byte
    products    products and convolutions of the sizes that training steps have, with the two products of their gradients
    beside      the same products while copies run in both directions

Each stage has a share of the time limit, and repeats its measurements until that share is used up. The least time counts,
because other work on the machine only adds to it. On a GPU, several pieces of work are issued before any of them is waited for.
Rates of memory and of copies are extra bytes / extra time between the two largest sizes, so a constant cost for each call drops
out. (On a CPU, they are the median of bytes / time over the large sizes.) If the device has no memory for a size, this size and
all larger ones are left out. Times are in microseconds.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tensile_jax.device_profiles import shipped_profile
from tensile_jax.device_profiles.calibrations import Sample
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.transfer import Device, Transfer
from tensile_jax.plan.analysis.fusion import find_fusion
from tensile_jax.plan.analysis.latency import fused_latencies
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.trace import trace_step

_MIB = 2**20
_COPIED = (_MIB // 16, _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)  # bytes
_TOUCHED = (8 * _MIB, 64 * _MIB, 256 * _MIB)
_LAUNCHES = 200
_FEW, _MANY = 8, 64  # arguments of a launch, and results; a segment of ResNet-50 has 12 to 370 of each
_AT_ONCE = 8  # pieces of work that a GPU is given before they are waited for
_BLOCKS = 6  # of the step with many kernels, which are those of a ResNet-50 on images of 7 x 7
_LEAST_US = 1e-3  # what the clock cannot tell from nothing
_FEWEST = 2  # repetitions, whatever time they take


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return max((time.perf_counter() - began) * 1e6, _LEAST_US)


def _least(run: Callable[[], Any], seconds: float, *, at_once: int = 1) -> float:
    """The time of one run in microseconds: the least of several measurements, each of several runs. The first measurement does
    not count.
    """
    several = run if at_once == 1 else lambda: [run() for _ in range(at_once)]
    _timed(several)
    end = time.perf_counter() + seconds
    least, times = float("inf"), 0
    while times < _FEWEST or time.perf_counter() < end:
        least, times = min(least, _timed(several)), times + 1
    return least / at_once


def _at_once(device: Device) -> int:
    return 1 if device.platform == "cpu" else _AT_ONCE


def _as_far_as_memory_goes(sizes: Sequence[int], measure: Callable[[int], Iterator[Sample]]) -> Iterator[Sample]:
    for nbytes in sizes:
        try:
            yield from measure(nbytes)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error, effectful=False):
                raise
            return


def _array(device: Device, nbytes: int) -> jax.Array:
    return jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), device)


def _ones(device: Device, *shape: int) -> jax.Array:
    return jax.device_put(jnp.ones(shape, jnp.float32), device)


def launches(device: Device, seconds: float) -> Iterator[Sample]:
    """The time of one of many launches. On a CPU, each launch waits for the one before it."""
    yield Sample("launch", _FEW, _launched(device, _FEW, seconds / 2, lambda *several: tuple(x + 1 for x in several)))
    yield Sample("launch", _MANY, _launched(device, _MANY, seconds / 2, lambda *several: several, donates=True))


def _launched(device: Device, count: int, seconds: float, function: Callable[..., Any], *, donates: bool = False) -> float:
    """The time of one of many launches, each of which takes the arrays that the one before has returned."""
    values: Any = [_array(device, 64) for _ in range(count)]
    donated = tuple(range(count)) if donates else ()
    call = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*values).compile()

    def run() -> Any:
        nonlocal values
        for _ in range(_LAUNCHES):
            values = call(*values)
            if device.platform == "cpu":
                jax.block_until_ready(values)
        return values

    return _least(run, seconds) / _LAUNCHES


def kernels(device: Device, seconds: float) -> Iterator[Sample]:
    """The time of a kernel of a step in which each has next to no work; nothing on a CPU."""
    if device.platform == "cpu":
        return
    images = _ones(device, 2, 7, 7, 256)
    weights = [_ones(device, *shape) for _ in range(_BLOCKS) for shape in ((1, 1, 256, 64), (3, 3, 64, 64), (1, 1, 64, 256))]

    def loss(weights: Sequence[Any], images: Any) -> Any:
        for weight in weights:
            images = lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            images = jax.nn.relu((images - images.mean((0, 1, 2))) * lax.rsqrt(images.var((0, 1, 2)) + 1e-3))
        return jnp.sum(images**2)

    def step(weights: Sequence[Any], images: Any) -> Any:
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, images), strict=True)]

    traced = trace_step(jax.jit(step), step, (weights, images), {})
    liveness, profile = find_liveness(traced.graph), shipped_profile(device.device_kind)
    fusion = find_fusion(liveness, fused_reductions=profile.fused_reductions)
    count = sum(us > 0 for us in fused_latencies(liveness, fusion, profile))
    call = jax.jit(step).lower(weights, images).compile()

    def run() -> Any:
        values: Any = weights
        for _ in range(_AT_ONCE):
            values = call(values, images)
        return values

    yield Sample("kernel", count, _least(run, seconds) / _AT_ONCE / count)


def copies_out(device: Device, seconds: float) -> Iterator[Sample]:
    transfer = Transfer(device)

    def measure(nbytes: int) -> Iterator[Sample]:
        array = _array(device, nbytes).block_until_ready()
        yield Sample("out, cold", nbytes, _timed(lambda: transfer.out(array)))
        yield Sample("out", nbytes, _least(lambda: transfer.out(array), seconds / len(_COPIED)))

    yield from _as_far_as_memory_goes(_COPIED, measure)


def copies_into(device: Device, seconds: float) -> Iterator[Sample]:
    transfer = Transfer(device)

    def measure(nbytes: int) -> Iterator[Sample]:
        array = transfer.out(_array(device, nbytes)).block_until_ready()
        yield Sample("into, cold", nbytes, _timed(lambda: transfer.into(array)))
        yield Sample("into", nbytes, _least(lambda: transfer.into(array), seconds / len(_COPIED)))

    yield from _as_far_as_memory_goes(_COPIED, measure)


def copies_both_ways(device: Device, seconds: float) -> Iterator[Sample]:
    transfer = Transfer(device)

    def measure(nbytes: int) -> Iterator[Sample]:
        here = _array(device, nbytes).block_until_ready()
        there = transfer.out(here).block_until_ready()
        yield Sample("both", nbytes, _least(lambda: (transfer.out(here), transfer.into(there)), seconds / 2))

    yield from _as_far_as_memory_goes(_COPIED[2:4], measure)


def memory(device: Device, seconds: float) -> Iterator[Sample]:
    def measure(nbytes: int) -> Iterator[Sample]:
        array = _array(device, nbytes).block_until_ready()
        twice = jax.jit(lambda x: x * 2).lower(array).compile()
        yield Sample(
            "read and write", 2 * nbytes, _least(lambda: twice(array), seconds / len(_TOUCHED), at_once=_at_once(device))
        )

    yield from _as_far_as_memory_goes(_TOUCHED, measure)


def _with_gradients(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A product and its gradients: three products, each with other operands in other layouts."""
    return jax.grad(lambda left, right: jnp.sum(product(left, right) ** 2), argnums=(0, 1))


def _products(device: Device) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Name, operations and run of each product with its gradients."""
    on_cpu = device.platform == "cpu"
    small, large = (
        ((256, 512, 512), (512, 1024, 1024), (2048, 512, 512)),
        ((8192, 768, 3072), (8192, 2048, 2048), (32768, 512, 512)),
    )
    for rows, inner, columns in small if on_cpu else large:
        left, right = _ones(device, rows, inner), _ones(device, inner, columns)
        run = jax.jit(_with_gradients(jnp.matmul)).lower(left, right).compile()
        yield f"product {rows}x{inner}x{columns}", 6.0 * rows * inner * columns, lambda r=run, a=left, b=right: r(a, b)
    for side, channels, window in ((28, 128, 3), (56, 64, 3), (14, 256, 1)):
        image = _ones(device, 4 if on_cpu else 128, side, side, channels)
        kernel = _ones(device, window, window, channels, channels)

        def convolve(image: Any, kernel: Any) -> Any:
            return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        run = jax.jit(_with_gradients(convolve)).lower(image, kernel).compile()
        flops = 6.0 * image.size * channels * window**2
        yield f"convolution {side}x{side}x{channels}, {window}x{window}", flops, lambda r=run, a=image, b=kernel: r(a, b)


def products(device: Device, seconds: float) -> Iterator[Sample]:
    for name, flops, run in _products(device):
        yield Sample(name, flops, _least(run, seconds / 6, at_once=_at_once(device)))


def beside_copies(device: Device, seconds: float) -> Iterator[Sample]:
    """Products alone and with copies beside them: how long the copies take, and how much longer the products."""
    transfer = Transfer(device)
    runs = [run for _, _, run in _products(device)]
    nbytes = (16 if device.platform == "cpu" else 64) * _MIB
    here = _array(device, nbytes).block_until_ready()

    def compute() -> Any:
        return [run() for run in runs]

    ahead = 0 if device.platform == "cpu" else 1  # while it runs, the host issues the copy

    def both() -> Any:
        made = [run() for run in runs[:ahead]]
        copy = transfer.out(here)
        made += [run() for run in runs[ahead:]]
        jax.block_until_ready(made)
        return copy

    copying, alone = _least(lambda: transfer.out(here), seconds / 6), _least(compute, seconds / 6)
    together: list[float] = []
    end = time.perf_counter() + seconds / 3
    while len(together) < _FEWEST or time.perf_counter() < end:
        together.append(_timed(both))
    yield Sample("copy", nbytes, copying)
    yield Sample("products alone", 1, alone)
    yield Sample("products and a copy", 1, median(together))


STAGES: dict[str, Callable[[Device, float], Iterator[Sample]]] = {
    "launch": launches,
    "kernels": kernels,
    "out": copies_out,
    "into": copies_into,
    "both": copies_both_ways,
    "memory": memory,
    "products": products,
    "beside": beside_copies,
}


def rates_of(stages: Mapping[str, Sequence[Sample]], platform: str) -> dict[str, float]:
    """The rates of a device profile that follow from the samples of all stages.

    Of a GPU they do not say what a kernel or a launch takes on the device itself.
    """

    def rate(stage: str, what: str) -> float:
        large = sorted((s.amount, s.us) for s in stages[stage] if s.what == what and s.amount >= 8 * _MIB)
        if platform == "cpu":  # the middle one of the rates: small amounts lie in its caches
            return median(amount / us for amount, us in large)
        (less, less_us), (more, more_us) = large[-2:] if len(large) > 1 else ((0.0, 0.0), large[-1])
        return (more - less) / (more_us - less_us) if more_us > less_us else more / more_us

    copy, alone, together = (s.us for s in stages["beside"])
    products = stages["products"]
    rates = {
        "flops_per_us": sum(s.amount for s in products) / sum(s.us for s in products),
        "bytes_per_us": rate("memory", "read and write"),
        "device_to_host_bytes_per_us": rate("out", "out"),
        "host_to_device_bytes_per_us": rate("into", "into"),
        "copy_share": min(max((together - alone) / copy, 0.0), 1.0),
    }
    few, many = (s.us for s in stages["launch"])
    if platform == "cpu":
        return rates | {"launch_us": few}
    return rates | {"host_launch_us": many, "host_kernel_us": stages["kernels"][0].us}
