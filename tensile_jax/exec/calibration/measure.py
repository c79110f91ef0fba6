"""The stages of a calibration: each measures one property of a device.

    launch      executables that do nearly nothing, one after another
    out, into   copies between device memory and pinned host memory, by size: the first of its size (cold), and the fastest (warm)
    both        copies in both directions at once
    memory      an elementwise operator on large arrays, which reads and writes every byte
    products    products and convolutions of the sizes that training steps have, with the two products of their gradients
    beside      the same products while copies run in both directions

A measurement is repeated while its share of the time lasts, and the least time counts: everything else on the machine only adds
to it. Times are in microseconds. If the device has no memory for a size, larger sizes are left out.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tensile_jax.device_profiles.calibrations import Sample
from tensile_jax.exec.step.out_of_memory import is_out_of_memory
from tensile_jax.exec.step.transfer import Device, Transfer

_MIB = 2**20
_COPIED = (_MIB // 16, _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)  # bytes
_TOUCHED = (8 * _MIB, 64 * _MIB, 256 * _MIB)
_LAUNCHES = 200
_LEAST_US = 1e-3  # what the clock cannot tell from nothing
_FEWEST = 2  # repetitions, whatever time they take


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return max((time.perf_counter() - began) * 1e6, _LEAST_US)


def _least(run: Callable[[], Any], seconds: float) -> float:
    """The least microseconds of several runs, the first of which does not count."""
    _timed(run)
    end = time.perf_counter() + seconds
    least, runs = float("inf"), 0
    while runs < _FEWEST or time.perf_counter() < end:
        least, runs = min(least, _timed(run)), runs + 1
    return least


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


def launches(device: Device, seconds: float) -> Iterator[Sample]:
    """The time of one launch of many, each of which waits for the one before it on a CPU."""
    few = [_array(device, 64) for _ in range(8)]
    nothing = jax.jit(lambda *several: tuple(x + 1 for x in several)).lower(*few).compile()

    def run() -> Any:
        values: Any = few
        for _ in range(_LAUNCHES):
            values = nothing(*values)
            if device.platform == "cpu":
                jax.block_until_ready(values)
        return values

    yield Sample("launch", 1, _least(run, seconds) / _LAUNCHES)


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
        yield Sample("read and write", 2 * nbytes, _least(lambda: twice(array), seconds / len(_TOUCHED)))

    yield from _as_far_as_memory_goes(_TOUCHED, measure)


def _with_gradients(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A product and its gradients: three products, each with other operands in other layouts."""
    return jax.grad(lambda left, right: jnp.sum(product(left, right) ** 2), argnums=(0, 1))


def _products(device: Device) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Name, operations and run of each product with its gradients."""
    scale = 1 if device.platform == "cpu" else 4

    def place(*shape: int) -> jax.Array:
        return jax.device_put(jnp.ones(shape, jnp.float32), device)

    for rows, inner, columns in ((256 * scale, 512, 512), (512 * scale, 1024, 1024), (2048 * scale, 512, 512)):
        left, right = place(rows, inner), place(inner, columns)
        run = jax.jit(_with_gradients(jnp.matmul)).lower(left, right).compile()
        yield f"product {rows}x{inner}x{columns}", 6.0 * rows * inner * columns, lambda r=run, a=left, b=right: r(a, b)
    for side, channels, window in ((28, 128, 3), (56, 64, 3), (14, 256, 1)):
        image, kernel = place(4 * scale, side, side, channels), place(window, window, channels, channels)

        def convolve(image: Any, kernel: Any) -> Any:
            return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        run = jax.jit(_with_gradients(convolve)).lower(image, kernel).compile()
        flops = 6.0 * image.size * channels * window**2
        yield f"convolution {side}x{side}x{channels}, {window}x{window}", flops, lambda r=run, a=image, b=kernel: r(a, b)


def products(device: Device, seconds: float) -> Iterator[Sample]:
    for name, flops, run in _products(device):
        yield Sample(name, flops, _least(run, seconds / 6))


def beside_copies(device: Device, seconds: float) -> Iterator[Sample]:
    """Products alone and with copies beside them: how long the copies take, and how much longer the products."""
    transfer = Transfer(device)
    runs = [run for _, _, run in _products(device)]
    here = _array(device, 16 * _MIB).block_until_ready()

    def compute() -> Any:
        return [run() for run in runs]

    def both() -> Any:
        copy = transfer.out(here)
        made = compute()
        jax.block_until_ready(made)
        return copy

    copying, alone = _least(lambda: transfer.out(here), seconds / 6), _least(compute, seconds / 6)
    together: list[float] = []
    end = time.perf_counter() + seconds / 3
    while len(together) < _FEWEST or time.perf_counter() < end:
        together.append(_timed(both))
    yield Sample("copy", 16 * _MIB, copying)
    yield Sample("products alone", 1, alone)
    yield Sample("products and a copy", 1, median(together))


STAGES: dict[str, Callable[[Device, float], Iterator[Sample]]] = {
    "launch": launches,
    "out": copies_out,
    "into": copies_into,
    "both": copies_both_ways,
    "memory": memory,
    "products": products,
    "beside": beside_copies,
}


def rates_of(stages: dict[str, Sequence[Sample]]) -> dict[str, float]:
    """The rates of a device profile that follow from the samples of all stages."""

    def rate(stage: str, what: str) -> float:
        """The middle one of the rates of large amounts: small ones lie in the caches of a CPU."""
        return median(s.amount / s.us for s in stages[stage] if s.what == what and s.amount >= 8 * _MIB)

    copy, alone, together = (s.us for s in stages["beside"])
    products = stages["products"]
    return {
        "flops_per_us": sum(s.amount for s in products) / sum(s.us for s in products),
        "bytes_per_us": rate("memory", "read and write"),
        "device_to_host_bytes_per_us": rate("out", "out"),
        "host_to_device_bytes_per_us": rate("into", "into"),
        "launch_us": stages["launch"][0].us,
        "copy_share": min(max((together - alone) / copy, 0.0), 1.0),
    }
