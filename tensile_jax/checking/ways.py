"""Runs a step several times in a row, under a plan or as plain `jax.jit`, and donates copies of the user's arguments.

The user's arguments are never donated. Each call gets copies of those that the step donates, in the same memory and committed
in the same way, so each call is like a call in a training loop. A result that replaces an argument in the next call is not
copied, since nobody else refers to it. There is one exception: if the step returns an argument unchanged as this result, the
two may share memory, so the result is copied.

The allocator of a device counts the most bytes that were ever in use in the whole process. Before the calls, all arguments and
some other arrays are in device memory. The calls use only the copies, and those arguments that are not copied. So the peak of
the calls is

    peak = counted peak - bytes in use before + bytes of the arguments that are not copied

If the counted peak was as high before the calls, this is only an upper limit. Sizes are in bytes.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensile_jax.exec.call.planned_calls import PlannedCalls, PlannedStep
from tensile_jax.exec.call.signature import SignatureReader
from tensile_jax.exec.checkpoint.leaves import host_copy
from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.transfer import Device, nbytes_on_a_device, on_host

Run = Callable[[Sequence[Any]], list[Any]]
"""From the flat arguments of a step, without static ones, to its flat results."""


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of a step, and what becomes of them from step to step.

    Attributes:
        reader: tells static arguments from the others.
        args, kwargs: as the user gave them.
        leaves: the arguments that are not static, flat.
        donated: the positions of those that each call deletes.
        fed_back: pairs of positions (argument, result): the result takes the place of the argument in the next step.
        passed_on: the positions of the results that are arguments.
    """

    reader: SignatureReader
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    donated: frozenset[int]
    fed_back: tuple[tuple[int, int], ...]
    passed_on: frozenset[int]

    def first(self) -> list[Any]:
        """The arguments of a first step."""
        return [copy_of(leaf) if place in self.donated else leaf for place, leaf in enumerate(self.leaves)]

    def following(self, results: Sequence[Any]) -> list[Any]:
        """The arguments of the step after the one with these results."""
        after = dict(self.fed_back)
        taken: set[int] = set()
        given: list[Any] = []
        for place, leaf in enumerate(self.leaves):
            made = after.get(place)
            value = leaf if made is None else results[made]
            if place in self.donated:
                is_shared = made is None or made in self.passed_on or id(value) in taken
                taken.add(id(value))
                value = copy_of(value) if is_shared else value
            given.append(value)
        return given

    def called_with(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of a call with these leaves."""
        waiting = iter(leaves)
        return self.reader.map_dynamic(lambda _: next(waiting), self.args, self.kwargs)

    @property
    def copied_bytes(self) -> int:
        """The bytes of the copies on each device."""
        return _device_bytes(self.leaves[place] for place in self.donated)

    @property
    def uncopied_bytes(self) -> int:
        """The bytes on each device of the arguments that are not copied."""
        return _device_bytes(leaf for place, leaf in enumerate(self.leaves) if place not in self.donated)

    def nudged(self) -> "Arguments":
        """The same, with each floating-point number moved to one of its two neighbours."""
        leaves = [nudged(leaf, seed) for seed, leaf in enumerate(self.leaves)]
        return Arguments(self.reader, self.args, self.kwargs, leaves, self.donated, self.fed_back, self.passed_on)


def copy_of(value: Any) -> Any:
    """A copy that shares no memory with the value, in the same memory, committed or not like the value."""
    if isinstance(value, jax.Array):
        return jax.device_put(value, may_alias=False)
    return np.array(value) if isinstance(value, np.ndarray) else value


def nudged(value: Any, seed: int) -> Any:
    """The array with each finite number moved up or down by one unit in its last place, at random; zero stays zero.

    Only arrays of real floating-point numbers are moved.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or not np.size(value):
        return value
    numbers = np.array(value)
    bits = numbers.view(f"u{numbers.dtype.itemsize}")
    up = np.random.default_rng(seed).integers(0, 2, numbers.shape, dtype=bool)
    largest = np.abs(numbers) == jnp.finfo(numbers.dtype).max
    moves = np.isfinite(numbers) & (numbers != 0)
    bits += (moves & up & ~largest).astype(bits.dtype)
    bits -= (moves & ~(up & ~largest)).astype(bits.dtype)
    if not isinstance(value, jax.Array):
        return numbers
    return jax.device_put(numbers, value.sharding if value.committed else None)


def plain_run(step: Step, executable: Any) -> Run:
    """What runs the whole step as an executable of plain jit."""
    call, in_tree, device = step.compiler.whole_call(executable, step.traced), step.traced.in_tree, step.compiler.device

    def run(leaves: Sequence[Any]) -> list[Any]:
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        with jax.default_device(device):
            return jax.tree.leaves(call(*args, **kwargs))

    return run


def planned_run(calls: PlannedCalls, arguments: Arguments) -> Run:
    """What runs the step under its plan. The plan must have been made."""

    def run(leaves: Sequence[Any]) -> list[Any]:
        args, kwargs = arguments.called_with(leaves)
        call = calls.read(args, kwargs)
        assert call is not None  # the first call was one that has a plan
        return jax.tree.leaves(calls.run(calls.planned(call, args, kwargs), call, args, kwargs))

    return run


def plan_first(calls: PlannedCalls, arguments: Arguments) -> PlannedStep:
    """Make the plan for calls with these arguments and compile it. Nothing runs."""
    call = calls.read(arguments.args, arguments.kwargs)
    assert call is not None  # the step was traced for such a call
    return calls.planned(call, arguments.args, arguments.kwargs)


def steps_of(run: Run, arguments: Arguments, count: int) -> Iterator[list[Any]]:
    """The results of so many steps in a row, each complete. The next step may delete those of the one before."""
    results: list[Any] = []
    for number in range(count):
        results = jax.block_until_ready(run(arguments.following(results) if number else arguments.first()))
        yield results
    jax.effects_barrier()


def call_us(run: Run, arguments: Arguments) -> float:
    """The microseconds of one call on copies of the arguments, until its results are complete. Copies and results are freed."""
    leaves = jax.block_until_ready(arguments.first())
    began = time.perf_counter()
    results = jax.block_until_ready(run(leaves))
    us = (time.perf_counter() - began) * 1e6
    del leaves, results
    return us


def timed_in_turn(runs: Sequence[Run], arguments: Arguments, calls: int, tell: Callable[[int], None]) -> list[float]:
    """The median time of each in microseconds. Their calls take turns, so that what else the machine does concerns all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for done in range(calls):
        tell(done)
        for run, us in zip(runs, times, strict=True):
            us.append(call_us(run, arguments))
    tell(calls)
    return [statistics.median(us) for us in times]


def values_of(results: Sequence[Any], places: Sequence[int]) -> dict[int, np.ndarray]:
    """Copies in host memory of the results at these positions; of a key, the numbers that it consists of."""
    return {place: host_copy(results[place]) for place in places}


def is_comparable(info: Any) -> bool:
    """Whether the result has numbers: tokens have none, nor have arrays of `float0`."""
    dtype = getattr(info, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the allocator of a device has counted; None where the backend does not tell."""

    in_use: int
    peak: int

    @staticmethod
    def on(device: Device) -> "Allocated | None":
        """What it has counted until now."""
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" not in stats or "bytes_in_use" not in stats:
            return None
        return Allocated(int(stats["bytes_in_use"]), int(stats["peak_bytes_in_use"]))


def allocator_peak(before: Allocated | None, after: Allocated | None, arguments: Arguments) -> tuple[int | None, bool]:
    """The peak of the calls between the two, by the formula above, and whether it is only an upper limit."""
    if before is None or after is None:
        return None, False
    return max(after.peak - before.in_use + arguments.uncopied_bytes, 0), after.peak <= before.peak


def _device_bytes(leaves: Any) -> int:
    several = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array) and not on_host(leaf)}
    return sum(map(nbytes_on_a_device, several.values()))
