"""Defines two immutable classes: `Step`, a step at one set of shapes, ready to be planned, and `CompiledPlan`, its compiled plan.

    Step -- `exec/fitting/find_plan.py`, under a budget --> CompiledPlan -- `exec/running/runner.py` --> iterations

The sizes and peaks that planning and compiling show of a step are kept in its `Knowledge` (`exec/fitting/knowledge.py`).
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

import jax

from tensile_jax.exec.compiling.compiler import GPUS, Compiler, Executable
from tensile_jax.exec.compiling.plain_jit import PlainJit
from tensile_jax.exec.compiling.seen_on_gpus import is_seen
from tensile_jax.exec.compiling.segment_code import SegmentBuilder
from tensile_jax.exec.processes.agreement import ALONE, Agreement
from tensile_jax.exec.transfer import divided_as, is_divided
from tensile_jax.ir import Graph, OperatorId
from tensile_jax.plan import Choice, DeviceProfile, Planner, PolicyName
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.analysis.corrections import Corrections, no_corrections
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.result.joined import graph_of_programs
from tensile_jax.plan_format import Plan, StateLayoutName
from tensile_jax.progress.phases import Progress
from tensile_jax.trace import TracedStep
from tensile_jax.trace.plannable_loops import PlannableLoop

_MOST_ITERATIONS = 8  # of an opened loop, each of which a program contains; not tuned: as many as there are chunks of rows
_LONG_LAUNCH = 0.005
"""Of the step as one executable: from there on, joining five segments gains 2 %. On one device, programs gain nothing else, and
XLA packs their buffers with gaps (`make bench-launches`)."""
LaunchName = Literal["auto", "segments", "program", "one_program"]
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What the user asked for, apart from the budget. With `max_slowdown` there is no budget: the least memory is wanted.

    `host_limit` is the most bytes that a plan may have in host memory, on each device; zero: nothing is swapped. `host_basis`
    says for people where the limit comes from, and is empty if the user gave it. `agreed_swaps` are the swaps on which several
    jobs of policy `tensile` have agreed, if this is one of them. `launch` is "segments", "program" (segments between two copies
    are one executable where that keeps the budget), "one_program" (all segments are one executable, with the copies inside, where
    that keeps the budget), or "auto". With `state_layout` "auto", XLA chooses the memory layouts of state in one program.
    `planner` makes the planners of the step and of its forms.
    """

    policy: PolicyName
    profile: DeviceProfile
    state_memory: Literal["device", "any"]
    progress: Progress | None = None
    max_slowdown: float | None = None
    host_limit: float = float("inf")
    host_basis: str = ""
    agreed_swaps: tuple[SwappedOut, ...] | None = None
    launch: LaunchName = "segments"
    state_layout: StateLayoutName = "row_major"
    planner: Callable[..., Planner] = Planner


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A traced step, its planner, and what compiles it. Steps that were made of one another share all executables.

    Attributes:
        traced: the step as traced.
        options: what the user asked for.
        planner: makes plans of it, with the limit of host memory and the corrections that hold.
        compiler: compiles its segments.
        builder: makes their code.
        plain_jit: the step as one executable, the same for all its forms.
        agreement: how the processes agree of which the step uses devices.
        form_of: the step of which this is another form, or the same with corrected latencies; None if it is none.
        bodies: the loops that run under plans of their own, by the loop's operator.
    """

    traced: TracedStep
    options: Options
    planner: Planner
    compiler: Compiler
    builder: SegmentBuilder
    plain_jit: PlainJit
    agreement: Agreement = ALONE
    form_of: "Step | None" = None
    bodies: "Mapping[OperatorId, DrivenBody]" = field(default_factory=dict[OperatorId, "DrivenBody"])
    _made: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict[Hashable, Any])

    def once(self, what: Hashable, make: Callable[[], _Made]) -> _Made:
        """The result of `make` for this step. `make` runs only once, since it takes long."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    @property
    def graph(self) -> Graph:
        """The graph of the step, its operators in the order in which plans run them."""
        return self.planner.graph

    @property
    def origin(self) -> "Step":
        """The step of which this one is a form; itself, if it is none."""
        return self if self.form_of is None else self.form_of

    @property
    def kind(self) -> object:
        """What must be equal for two steps to have the same plans. Two steps of one kind share what is known of them."""
        options = self.options
        launch = self.in_one_program, self.copies_inside
        asked = options.policy, options.max_slowdown, options.agreed_swaps, launch, options.state_memory, options.state_layout
        where = options.profile, self.planner.model.host_limit, self.compiler.kind
        return self.graph.fingerprint, asked, where, tuple((o, body.nbytes, body.us) for o, body in self.bodies.items())

    @property
    def structure(self) -> object:
        """What is equal for two steps with the same operators, on whatever shapes, and the same options."""

        def digest() -> str:
            operators = [(op.primitive, op.inputs, op.outputs) for op in self.graph.operators]
            return hashlib.sha256(
                repr((operators, self.graph.inputs, self.graph.outputs, self.graph.carried)).encode()
            ).hexdigest()

        options = self.options
        state = options.state_memory, options.state_layout
        asked = options.policy, self.in_one_program, self.copies_inside, *state, options.profile.name
        return self.once("structure", digest), asked

    @property
    def compiles_for_profile(self) -> bool:
        """Whether this machine's compiler and the profile's device are of one platform, so that compiled sizes are those of the
        device.
        """
        return (self.options.profile.platform == "cpu") == (self.compiler.device.platform == "cpu")

    @property
    def in_one_program(self) -> bool:
        """Whether the segments are to be one executable, if a form of it keeps the budget."""
        options = self.options
        if options.launch != "auto":
            return options.launch in ("program", "one_program")
        if options.policy != "auto" or self.compiler.device.platform not in GPUS:
            return False
        model = self.planner.model
        # equal iterations of a loop share executables, and in one program each would be compiled
        if model.most_iterations > _MOST_ITERATIONS:
            return False
        return self.traced.devices > 1 or model.profile.launch_us > _LONG_LAUNCH * model.whole_us

    @property
    def jit_step_us(self) -> float:
        """The predicted microseconds of a step of plain jit, whatever the form of this step.

        If the latencies of this step are corrected by measurements, plain jit's time is corrected in the same ratio.
        """
        mine, plain_us = self.planner.model, self.origin.planner.whole_us
        if mine.corrections.change_nothing:
            return plain_us
        predicted_us = self.once("uncorrected", lambda: mine.corrected(no_corrections(len(mine.graph.operators))).whole_us)
        return plain_us * mine.whole_us / predicted_us

    @property
    def copies_inside(self) -> bool:
        """Whether copies to and from the host are to be part of the executable, if the segments are to be one."""
        if self.options.launch == "auto" and self.in_one_program:
            return is_seen("program with copies", self.compiler.device.device_kind, jax.__version__)
        return self.options.launch == "one_program"

    def whole_call(self) -> Callable[..., Any]:
        """What runs the step as one executable: plain `jax.jit`'s own, called so that it takes all arguments of the step."""
        return self.compiler.whole_call(self.plain_jit.compiled().executable, self.traced)

    def constants(self) -> tuple[Any, ...]:
        """The arrays that the step captures, where its segments expect them."""
        values, divided = self.traced.program.constants, self.traced.divided
        if divided is None:
            return tuple(jax.device_put(c, self.compiler.device) if is_divided(c) else c for c in values.values())
        return tuple(divided_as(value, divided.of[v]) for v, value in values.items())

    # -- steps that are made of this one ----------------------------------------------------------------------------------------

    def retraced(self, traced: TracedStep) -> "Step":
        """An equal step that was traced again: under the same budget, both have the same plan."""
        return replace(
            self,
            traced=traced,
            builder=SegmentBuilder(traced.program, traced.divided),
            plain_jit=PlainJit(self.compiler, traced.traced, self.agreement),
            form_of=None,
        )

    def form(self, traced: TracedStep) -> "Step":
        """This step in another form, which computes the same."""
        return replace(step_of(traced, self.options, self.compiler), plain_jit=self.plain_jit, form_of=self)

    def with_host_limit(self, host_limit: float, basis: str = "") -> "Step":
        """The same step, from which plans are made that have so many bytes in host memory at most; with zero, none are swapped.

        A limit that holds all tensors of the step is none.
        """
        planner = self.planner.with_host_limit(host_limit)
        if planner is self.planner:
            return self
        return replace(
            self,
            planner=planner,
            options=replace(self.options, host_limit=host_limit, host_basis=basis),
            form_of=None if self.form_of is None else self.form_of.with_host_limit(host_limit, basis),
        )

    def corrected(self, corrections: Corrections) -> "Step":
        """The same step, whose planner predicts latencies with these corrections.

        Corrections are of the operators of this step, so its other forms do not have them.
        """
        return replace(self, planner=self.planner.corrected(corrections), form_of=self.origin)

    def planned_by(self, planner: Callable[..., Planner]) -> "Step":
        """The same step, whose planner and those of its forms are made by `planner`, and which shows no progress."""
        return self._with_options(replace(self.options, planner=planner, progress=None))

    def with_swaps(self, swaps: tuple[SwappedOut, ...]) -> "Step":
        """The same step, for which several jobs have agreed on these swaps; itself, if it has them already."""
        if swaps == self.options.agreed_swaps:
            return self
        made = self._with_options(replace(self.options, agreed_swaps=swaps))
        return made.corrected(self.planner.model.corrections)

    def _with_options(self, options: Options) -> "Step":
        """The same step with a planner for these options."""
        return replace(step_of(self.traced, options, self.compiler, agreement=self.agreement), plain_jit=self.plain_jit)

    def swapping_accesses(self) -> AccessSequence | None:
        """The accesses from which swaps are chosen for several jobs together; None if the policy does not take part in that."""
        return self.planner.swapping_accesses()


@dataclass(frozen=True, slots=True)
class Spent:
    """What it has taken to make a plan, in seconds: planning, choosing the form of the step, and compiling.

    An executable that was there already has taken nothing. `tries` is the number of plans whose segments were compiled.
    """

    plan_s: float = 0.0
    ranking_s: float = 0.0
    compile_s: float = 0.0
    tries: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.plan_s + other.plan_s,
            self.ranking_s + other.ranking_s,
            self.compile_s + other.compile_s,
            self.tries + other.tries,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPlan:
    """A plan of a step with its executables.

    Attributes:
        step: the step, in the form that the plan is for.
        choice: what the planner chose, from which the plan was made; None for a plan that was read from a file.
        plan: the plan, as the user sees it.
        launched: what is carried out: the plan, or, where its segments are joined into programs, the plan of these.
        executables: those of the segments of `launched`, in order; one, plain jit's, if the step runs whole; None if the plan is
            only predicted.
        spent: what making it has taken.
        soon: whether it was found in a short search and compiled to be there soon, so that a better one may be found.
    """

    step: Step
    choice: Choice | None
    plan: Plan
    launched: Plan
    executables: Sequence[Executable] | None
    spent: Spent = Spent()
    soon: bool = False

    def because(self, reason: str, before: "CompiledPlan | None" = None) -> "CompiledPlan":
        """This plan, which states the reason for which it was made, a sentence.

        Args:
            before: the plan that it replaces. What was spent for that one is added.
        """
        spent = self.spent if before is None else before.spent + self.spent
        return replace(self._stating(replace(self.plan, reason=reason)), spent=spent)

    def noted(self, note: str) -> "CompiledPlan":
        """This plan, with one more note, a sentence."""
        return self._stating(replace(self.plan, notes=(*self.plan.notes, note)))

    def _stating(self, plan: Plan) -> "CompiledPlan":
        """This plan, which states other things about itself."""
        return replace(self, plan=plan, launched=plan if self.launched is self.plan else self.launched)

    @property
    def graph(self) -> Graph:
        """The graph that `launched` is for."""
        return graph_of_programs(self.plan, self.step.graph)

    @property
    def distinct_segments(self) -> int:
        """How many different executables there are."""
        return max(len(set(map(id, self.executables or ()))), 1)


ForLess = Callable[[CompiledPlan], CompiledPlan | None]
"""Makes a plan that needs less memory than a given one, under which the device was out of memory; None if there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class DrivenBody:
    """The body of a loop that runs under a plan of its own.

    Attributes:
        loop: the loop.
        step: the body as a step, in the form that its plan is for.
        plan: its predicted plan.
        compile: makes the plan under which it runs.
        for_less: makes the plan that replaces that one, if the device runs out of memory.
    """

    loop: PlannableLoop
    step: Step
    plan: Plan
    compile: Callable[[], CompiledPlan]
    for_less: ForLess

    @property
    def nbytes(self) -> int:
        """The bytes that the loop needs beside its inputs and outputs."""
        return bytes_beside(self.loop, self.step.graph, self.plan.peak_bytes)

    @property
    def us(self) -> float:
        """The predicted microseconds of the loop."""
        return self.loop.loop.length * self.plan.step_us


def bytes_beside(loop: PlannableLoop, body: Graph, peak_bytes: int) -> int:
    """What a driven loop needs beside its inputs and outputs, if the plan of its body has this peak and nothing is copied."""
    shared = loop.loop.constants + loop.loop.carried
    return max(0, peak_bytes - sum(body.tensors[t].nbytes for t in body.inputs[:shared]))


def step_of(traced: TracedStep, options: Options, compiler: Compiler, *, agreement: Agreement = ALONE) -> Step:
    """A step with a planner of its own.

    Args:
        agreement: how the processes agree of which the step uses devices.
    """
    planner = options.planner(
        traced.graph,
        options.profile,
        policy=options.policy,
        state_memory=options.state_memory,
        host_limit=options.host_limit,
        versions=(package_version(), jax.__version__),
        whole_graph=traced.whole_graph,
        agreed_swaps=options.agreed_swaps,
    )
    builder = SegmentBuilder(traced.program, traced.divided)
    return Step(traced, options, planner, compiler, builder, PlainJit(compiler, traced.traced, agreement), agreement)


def package_version() -> str:
    """The version of this package, as installed."""
    try:
        return version("tensile_jax")
    except PackageNotFoundError:
        return "0+unknown"
