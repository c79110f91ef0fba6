"""Defines `PlannerElsewhere`: a planner that searches in another process, while this process goes on training.

What takes long is asked of the planning process (`planning_process.py`): plans, repairs and bounds. The rest is computed here,
such as the plan of a choice that was made. Once the planning process has ended, everything is computed here.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from tensile_jax.exec.fitting.planning_process import PlanningProcess
from tensile_jax.plan import Choice, CompiledSizes, Goal, Planned, Planner
from tensile_jax.plan_format import Plan

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class PlannerElsewhere(Planner):
    """A `Planner` that searches in `process`. The other arguments are those of a `Planner`.

    All methods raise `TensileError` if the process fails.
    """

    def __init__(self, process: PlanningProcess, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._process = process

    def _asked(
        self,
        method: Callable[Concatenate[Planner, _Parameters], _Result],
        *arguments: _Parameters.args,
        **named: _Parameters.kwargs,
    ) -> _Result:
        if not self._process.is_open:
            return method(self, *arguments, **named)
        return self._process.call(method, self, *arguments, **named)

    def plan(self, goal: Goal, measured: CompiledSizes) -> Planned | None:
        return self._asked(Planner.plan, goal, measured)

    def quick_plan(self, goal: Goal, measured: CompiledSizes) -> Planned | None:
        return self._asked(Planner.quick_plan, goal, measured)

    def has_choice(self, limit: float, measured: CompiledSizes) -> bool:
        return self._asked(Planner.has_choice, limit, measured)

    def revise(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        return self._asked(Planner.revise, choice, goal, measured)

    def improve(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        return self._asked(Planner.improve, choice, goal, measured)

    def adapt(self, choice: Choice, goal: Goal, measured: CompiledSizes) -> Planned | None:
        return self._asked(Planner.adapt, choice, goal, measured)

    def quick_us(self, limit: float, measured: CompiledSizes, upper: float = float("inf")) -> float:
        return self._asked(Planner.quick_us, limit, measured, upper)

    def bound_us(self, limit: float, measured: CompiledSizes) -> float:
        return self._asked(Planner.bound_us, limit, measured)

    def least_limit(self, max_slowdown: float, measured: CompiledSizes) -> float:
        return self._asked(Planner.least_limit, max_slowdown, measured)

    def lowest_choice(self, measured: CompiledSizes) -> Choice:
        return self._asked(Planner.lowest_choice, measured)

    def least_choice(self, measured: CompiledSizes) -> Choice:
        return self._asked(Planner.least_choice, measured)

    def least_plan(self, measured: CompiledSizes) -> Plan:
        return self._asked(Planner.least_plan, measured)

    def floor_bytes(self, measured: CompiledSizes) -> int:
        return self._asked(Planner.floor_bytes, measured)

    def quick_floor(self, measured: CompiledSizes) -> int:
        return self._asked(Planner.quick_floor, measured)

    def remember_floor(self, measured: CompiledSizes, floor_bytes: int) -> None:
        self._asked(Planner.remember_floor, measured, floor_bytes)
