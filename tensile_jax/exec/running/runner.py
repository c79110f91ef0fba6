"""Runs the iterations of one step under a plan. After the device has run out of memory, the next plan needs less.

Calls of `tensile_jax.jit` run this way, and so do the iterations of *driven loops*. A driven loop is a loop inside a step, and
the body of the loop has a plan of its own, under which each iteration of the loop runs (`driven_loop.py`). The jobs of a
`Runtime` run in another way, since no thread may wait for an iteration: the job's actor (`exec/actor/local_actor.py`) issues
the plan's instructions (launches, copies, waits) in groups, when the controller (`exec/controller/machine.py`) says so.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.experimental.layout import Layout

from tensile_jax.exec.compiling.step import CompiledPlan, ForLess
from tensile_jax.exec.running.executor import Executor, Observation
from tensile_jax.exec.running.instructions import instructions_of
from tensile_jax.exec.transfer import Transfer
from tensile_jax.plan_format import Plan


class Runner:
    """The plan in use of one step, its executor, and what was observed of it.

    Args:
        compiled: the first plan.
        for_less: makes the plan that replaces one under which the device was out of memory.

    Attributes:
        compiled: the plan in use.
        executor: what runs it.
        plans: all plans so far, each with the number of iterations that had begun before it.
        iterations: how many iterations have begun, under all plans.
        observations: what was measured in the watched iterations of the plan in use.
    """

    def __init__(self, compiled: CompiledPlan, for_less: ForLess) -> None:
        self.compiled = compiled
        self.executor = executor_of(compiled)
        self.plans = [(0, compiled.plan)]
        self.iterations = 0
        self.observations: list[Observation] = []
        self._for_less = for_less
        self._out_of_memory = 0  # under earlier plans
        self._is_lowest = False  # whether no plan is known that needs less memory

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.compiled.plan

    @property
    def out_of_memory(self) -> int:
        """How often the device refused an allocation, under all plans."""
        return self._out_of_memory + self.executor.out_of_memory

    @property
    def needs_less(self) -> bool:
        """Whether the device was out of memory in an iteration, and no plan for less was sought since."""
        return self.executor.needs_lower_budget

    @property
    def iteration(self) -> int:
        """The number of the latest iteration among those that have begun under the plan in use, counted from one."""
        return self.iterations - self.plans[-1][0]

    def begin(self) -> int:
        """One more iteration begins: its number, as `iteration`."""
        self.iterations += 1
        return self.iteration

    def run(self, arguments: Sequence[Any], watch: Observation | None = None) -> list[Any]:
        """The results of an iteration on `arguments`, both flat. Donated arguments are deleted afterwards.

        Raises:
            OutOfMemory: the device has no memory for one segment alone.
        """
        began = time.perf_counter()
        results = self.executor.run(arguments, watch)
        if watch is not None:
            self.observations.append(replace(watch, step_us=(time.perf_counter() - began) * 1e6))
        return results

    def use(self, compiled: CompiledPlan) -> None:
        """Run the next iterations under this plan."""
        self._out_of_memory = self.out_of_memory
        self.compiled, self.executor = compiled, executor_of(compiled)
        self.plans.append((self.iterations, compiled.plan))
        self.observations = []
        self._is_lowest = False

    def use_less(self, *, refused: int = 0) -> bool:
        """Run the next iterations under a plan that needs less than the one in use, under which the device was out of memory.

        Args:
            refused: how often the device refused an allocation that did not come from the executor.

        Returns whether there is one. If not, the plan in use goes on, which has just recovered; no other is sought then.
        """
        self._out_of_memory += refused
        self.executor.forgive()
        lower = None if self._is_lowest else self._for_less(self.compiled)
        if lower is None:
            self._is_lowest = True
            return False
        self.use(lower)
        return True


def executor_of(compiled: CompiledPlan, transfer: Transfer | None = None, *, run_ahead: bool | None = None) -> Executor:
    """What runs a compiled plan.

    Args:
        transfer: what copies between the memories; by default, one that commits as the executables do.
        run_ahead: whether a launch does not wait for the launch before it; by default, where the device allows for that.
    """
    step, executables = compiled.step, compiled.executables
    assert executables is not None  # it is compiled, not predicted
    device = step.compiler.device
    layouts = {one.tensor: Layout(one.major_to_minor) for one in compiled.plan.layouts or ()}
    return Executor(
        instructions_of(compiled.launched, compiled.graph, [e.call for e in executables], layouts),
        () if compiled.plan.whole else step.constants(),
        transfer or Transfer(device, committed=step.compiler.committed),
        run_ahead=device.platform != "cpu" if run_ahead is None else run_ahead,
    )
