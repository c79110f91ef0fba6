"""A step of which some loops run under plans of their own (`trace/plannable_loops.py`), as a `PreparedStep`.

The planner sees such a loop as an operator that needs so many bytes and so many microseconds. When the step is compiled, the plan
of the loop's body is compiled, too, and its figures replace the predicted ones. A limit of host memory is divided: one half
is for the copies of the body's plan, and one for those of the step around it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tensile_jax.exec.step.compile import Executable
from tensile_jax.exec.step.driven_loop import DrivenLoop, bytes_beside
from tensile_jax.exec.step.prepared_step import Options, PreparedStep, RunningPlan
from tensile_jax.ir import OperatorId
from tensile_jax.plan import Measured
from tensile_jax.plan_format import Plan, PlannedLoop, Segment, unranged
from tensile_jax.trace.plannable_loops import PlannableLoop, with_driven

ForLess = Callable[[RunningPlan], RunningPlan]


def with_half_the_host(options: Options) -> Options:
    """The options of a step with driven loops, and of the bodies of these loops."""
    return replace(options, host_limit=options.host_limit / 2)


@dataclass(slots=True, eq=False)
class Body:
    """The body of a driven loop: its predicted plan, and what prepares that plan to run. `running` is that plan, prepared."""

    loop: PlannableLoop
    prepared: PreparedStep
    plan: Plan
    prepare: Callable[[], RunningPlan]
    running: RunningPlan | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that the loop needs beside its inputs and outputs."""
        return bytes_beside(self.loop, self.prepared.graph, self.plan.peak_bytes)

    @property
    def us(self) -> float:
        """The predicted microseconds of the loop."""
        return self.loop.loop.length * self.plan.step_us


class DrivenStep(PreparedStep):
    """The step of `origin`, of which the loops in `bodies` run under plans of their own.

    Args:
        for_less: makes a plan that needs less than a running one (`variants.prepare_for_less`).
    """

    def __init__(self, origin: PreparedStep, bodies: Mapping[OperatorId, Body], for_less: ForLess) -> None:
        step = with_driven(origin.step, [body.loop.driven(body.nbytes, body.us) for body in bodies.values()])
        super().__init__(step, origin.budget, with_half_the_host(origin.options), origin.compiler)
        self.measured = Measured(whole=origin.measured.whole)
        self.variant_of = origin
        self.bodies = dict(bodies)
        self._for_less = for_less

    @property
    def kind(self) -> object:
        return super().kind, tuple((o, body.nbytes, body.us) for o, body in self.bodies.items())

    def compile(self, plan: Plan) -> list[Executable]:
        alone: dict[int, OperatorId] = {}
        for index, segment in enumerate(plan.segments):
            first = unranged(segment.operators)[0]
            if first in self.bodies:
                alone[index] = first
        for o in alone.values():
            self._prepare(self.bodies[o])
        others = super().compile(replace(plan, segments=tuple(s for i, s in enumerate(plan.segments) if i not in alone)))
        rest = iter(others)
        return [self._loop(self.bodies[alone[i]], s) if i in alone else next(rest) for i, s in enumerate(plan.segments)]

    def _prepare(self, body: Body) -> None:
        """Compile the plan of a body, if that was not done yet."""
        if body.running is None:
            body.running = body.prepare()
            body.plan = body.running.plan
            self.plan_s += body.running.prepared.plan_s
            self.compile_s += body.running.prepared.compile_s + body.running.prepared.origin.jit_compile_s

    def _loop(self, body: Body, segment: Segment) -> Executable:
        assert body.running is not None
        return DrivenLoop(body.loop, body.running, segment, self._for_less).executable(self.graph)

    def with_basis(self, plan: Plan) -> Plan:
        loops = () if plan.whole else tuple(
            PlannedLoop(o, body.loop.name, body.loop.loop.length, body.plan) for o, body in self.bodies.items()
        )  # fmt: skip
        if not loops:
            return super().with_basis(plan)
        peak = (plan.host_peak_bytes or 0) + max(loop.plan.host_peak_bytes or 0 for loop in loops)
        budget = None if plan.host_budget_bytes is None else 2 * plan.host_budget_bytes
        return replace(super().with_basis(plan), loops=loops, host_peak_bytes=peak, host_budget_bytes=budget)
