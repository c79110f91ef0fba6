"""Measures the Python time of the loop that carries out a plan, with arrays and executables that do nothing."""

import time
from collections.abc import Callable
from typing import Any

from tensile_jax.api import PlannedFunction
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.running.executor import Executor
from tensile_jax.exec.running.instructions import FinishSwapIn, instructions_of

_ITERATIONS = 20


class _Nothing:
    """A substitute for an array."""

    nbytes = 0

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None: ...

    def delete(self) -> None: ...


class _NoTransfer:
    """A substitute for the link, which copies nothing."""

    def out(self, arrays: list[Any]) -> list[Any]:
        return arrays

    def into(self, arrays: list[Any]) -> list[Any]:
        return arrays

    def copy_into(self, array: Any) -> Any:
        return array


def compiled_plan(step: PlannedFunction, *args: Any) -> CompiledPlan:
    """The plan with its executables under which a call with these arguments runs; nothing runs yet."""
    calls = step._calls  # pyright: ignore[reportPrivateUsage] # the one place outside that needs it
    return calls.planned(calls.read(args, {}), args, {}).runner.compiled  # pyright: ignore[reportArgumentType] # called outermost


def loop_us_per_segment(step: PlannedFunction, *args: Any) -> float:
    """Microseconds of Python for each segment of the plan in use, calls of executables and of `device_put` excluded."""
    plan = step.plan(*args)
    if plan.whole:
        return 0.0
    graph = compiled_plan(step, *args).step.graph
    nothing = _Nothing()

    def call_of(outputs: int) -> Callable[..., Any]:
        made = tuple(nothing for _ in range(outputs))
        return lambda *_: made

    instructions = instructions_of(plan, graph, [call_of(len(s.outputs)) for s in plan.segments])
    constants = [nothing for _ in instructions.constants]
    executor = Executor(instructions, constants, _NoTransfer(), run_ahead=False)  # pyright: ignore[reportArgumentType] # a stand-in
    arguments = [nothing for _ in instructions.inputs]
    best = float("inf")
    for _ in range(_ITERATIONS):
        iteration = executor.begin(arguments)
        began = time.perf_counter()
        for instruction in executor.code:
            if type(instruction) is not FinishSwapIn:
                iteration.perform(instruction)
        best = min(best, time.perf_counter() - began)
    return best / len(plan.segments) * 1e6
