"""Measures the latency of as many heavy operators (convolutions, matrix products and the like) as there is time for.

The operators are those of random layers (`random_layers.py`) and of their gradients, traced as a user's step is. Part of the time
is spent on compiling them, each as an executable of its own. In the rest of the time, each executable runs alone. Some run again
while other threads keep the device busy, which shows how much a load slows them down. In each case, the least of several times
counts. On a GPU, a launch takes longer than most operators, so an executable repeats its operator several times in sequence.
"""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensile_jax.device_profiles.calibrations import OperatorSample
from tensile_jax.exec.calibration.random_layers import random_layer
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.transfer import Device
from tensile_jax.trace import Equation, Nested, Program
from tensile_jax.trace.cost.features import features_of
from tensile_jax.trace.cost.flops import flops_of
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.cost.traffic import bytes_touched
from tensile_jax.trace.reading.flatten import flatten

_AHEAD = 12  # operators that wait to be compiled
_RUN_S = 0.005  # for how long an operator is run
_FEWEST = 3  # runs of each
_COMPILING = 0.4  # of the time
_TIMES, _AT_ONCE = 8, 2  # on a GPU: in an executable, and executables that are issued before they are waited for
_ALONE = 0.85  # of the running time; in the rest, the device has other work
_LOADS = (0.5, 1.0)  # the parts of the device that the other work takes


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """An operator as an executable of its own, and the abstract values of its operands."""

    primitive: str
    features: tuple[float, ...]
    flops: int
    nbytes: int
    avals: tuple[Any, ...]
    call: Any


def measured_operators(device: Device, seconds: float, *, seed: int = 0) -> Iterator[OperatorSample]:
    """Samples of random operators. The first comes when all are compiled."""
    compiled = _compiled_operators(device, _COMPILING * seconds, random.Random(seed))
    began, running_s = time.perf_counter(), (1 - _COMPILING) * seconds
    done: list[_Compiled] = []
    for operator in compiled:
        if time.perf_counter() - began > _ALONE * running_s:
            break
        sample = _sample(device, operator, 0.0)
        if sample is not None:
            done.append(operator)
            yield sample
    for load in _LOADS:
        end = time.perf_counter() + (1 - _ALONE) * running_s / len(_LOADS)
        with _busy(device, load):
            for operator in done:
                if time.perf_counter() > end:
                    break
                sample = _sample(device, operator, load)
                if sample is not None:
                    yield sample


def samples_of(device: Device, program: Program, equations: Sequence[Equation]) -> list[OperatorSample | None]:
    """A sample of each of these equations of a program, run alone; None for one that cannot be measured by itself.

    Each is measured twice, far apart in time: whatever else runs on the machine disturbs neighbours alike.
    """
    keys = [(equation.primitive.name, features_of(program, equation)) for equation in equations]
    different = {key: e for key, e in zip(keys, equations, strict=True) if _can_run(program, e)}
    compiled = {key: _compiled(program, e, _lowered(program, e, device).compile()) for key, e in different.items()}
    known: dict[Any, OperatorSample] = {}
    for _ in range(2):
        for key, operator in compiled.items():
            sample = _sample(device, operator, 0.0)
            if sample is not None:
                known[key] = _faster(sample, known.get(key))
    return [known.get(key) for key in keys]


def _faster(one: OperatorSample, other: OperatorSample | None) -> OperatorSample:
    return one if other is None or one.us <= other.us else other


def _compiled_operators(device: Device, seconds: float, choice: random.Random) -> list[_Compiled]:
    """As many different operators as can be compiled in this time."""
    end = time.perf_counter() + seconds
    seen: set[Any] = set()
    found: list[_Compiled] = []
    waiting: list[tuple[Program, Equation, Future[Any]]] = []
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tensile-calibrate")
    try:
        while time.perf_counter() < end:
            function, shapes = random_layer(choice, device.platform)
            program = flatten(Nested(jax.make_jaxpr(function)(*shapes)))
            for equation in program.equations:
                key = equation.primitive.name, features_of(program, equation)
                if kind_of(equation) == "heavy" and key not in seen and _can_run(program, equation):
                    seen.add(key)
                    waiting.append((program, equation, pool.submit(_lowered(program, equation, device).compile)))
            while len(waiting) > _AHEAD:
                program, equation, future = waiting.pop(0)
                found.append(_compiled(program, equation, future.result()))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _can_run(program: Program, equation: Equation) -> bool:
    """Whether the equation can be measured by itself: it has features, no effect, and numbers as operands."""
    avals = [program.avals[v] for v in equation.inputs if isinstance(v, int)]
    numbers = all(jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == bool for aval in avals if hasattr(aval, "dtype"))
    return bool(features_of(program, equation)) and not equation.effectful and numbers


def _lowered(program: Program, equation: Equation, device: Device) -> Any:
    """The equation as a function of its operands that are variables, lowered. On a GPU, it is computed `_TIMES` times."""
    given = {i: program.avals[v] for i, v in enumerate(equation.inputs) if isinstance(v, int)}
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given.values()]

    def run(*operands: Any) -> Any:
        values: list[Any] = [None if isinstance(v, int) else v.value for v in equation.inputs]
        for i, operand in zip(given, operands, strict=True):
            values[i] = operand
        return equation.run(values)

    def again_and_again(*operands: Any) -> Any:
        firsts: list[Any] = []  # a number of each result, so that none is left out
        for _ in range(_TIMES):
            operands, made = jax.lax.optimization_barrier((operands, run(*operands)))
            firsts += [x.ravel()[:1] for x in jax.tree.leaves(made)]
        return firsts

    return jax.jit(run if device.platform == "cpu" else again_and_again).lower(*shapes)


def _compiled(program: Program, equation: Equation, call: Any) -> _Compiled:
    return _Compiled(
        equation.primitive.name,
        features_of(program, equation),
        flops_of(program, equation),
        bytes_touched(program, equation),
        tuple(program.avals[v] for v in equation.inputs if isinstance(v, int)),
        call,
    )


def _sample(device: Device, operator: _Compiled, load: float) -> OperatorSample | None:
    """The least time of several runs; None if the device has no memory for the operator."""
    at_once, times = (1, 1) if device.platform == "cpu" else (_AT_ONCE, _TIMES)
    try:
        operands = [jax.device_put(np.ones(a.shape, a.dtype), device) for a in operator.avals]
        jax.block_until_ready(operator.call(*operands))
        least, runs, end = float("inf"), 0, time.perf_counter() + _RUN_S
        while runs < _FEWEST or time.perf_counter() < end:
            began = time.perf_counter()
            jax.block_until_ready([operator.call(*operands) for _ in range(at_once)])
            least, runs = min(least, (time.perf_counter() - began) * 1e6 / at_once / times), runs + 1
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error, effectful=False):
            raise
        return None
    return OperatorSample(operator.primitive, operator.features, operator.flops, operator.nbytes, load, max(least, 1e-3))


@contextmanager
def _busy(device: Device, load: float) -> Iterator[None]:
    """Other threads launch products on the device: on a CPU as many as take this part of its cores, elsewhere one."""
    cores = os.cpu_count() or 1
    threads = max(1, round(load * cores)) if device.platform == "cpu" else 1
    over = threading.Event()
    matrix = jax.device_put(jnp.ones((512, 512), jnp.float32), device)
    product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()

    def work() -> None:
        while not over.is_set():
            began = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            if device.platform != "cpu" and load < 1:
                over.wait((time.perf_counter() - began) * (1 / load - 1))

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()
