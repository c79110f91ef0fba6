"""Runs the calls of one function under plans. The first call with a new signature (shapes, dtypes, static arguments and the like)
finds a plan for that signature.

A plan usually cuts the step into *segments*, parts that are compiled as one executable each, and a call runs them one after
another. Plain `jax.jit` runs three kinds of calls instead: calls inside another transformation, calls under `jax.disable_jit`,
and calls whose plan leaves the step whole, as one executable.

A signature is also new if it differs from an earlier one only in the weak types of the arguments, or in which arguments are
committed to a device. The function is then traced again. If the new traced step equals an earlier one, it uses that step's
plan. Executables of equal code are always reused.

If a step runs on devices of several processes, each process calls the step, and one process plans for all
(`exec/processes/agreement.py`). Some iterations are *watched*, which means that they are measured. In these, the processes also
tell one another whether any device was out of memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.tree_util import tree_unflatten

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall, OutOfMemory, TraceError
from tensile_jax.exec.calibration.calibrate import profile_of
from tensile_jax.exec.call.cache_hint import CACHE_HINT
from tensile_jax.exec.call.device_memory import free_memory
from tensile_jax.exec.call.devices import Placement, is_committed, named_devices, on_mesh, placement_of
from tensile_jax.exec.call.donated_before import Donations, explain_deleted
from tensile_jax.exec.call.followed_plan import FollowedPlan
from tensile_jax.exec.call.host_memory import free_host_memory
from tensile_jax.exec.call.improved_plan import ImprovedPlan
from tensile_jax.exec.call.options import CheckedOptions, JitOptions
from tensile_jax.exec.call.other_shapes import ShapesCalled
from tensile_jax.exec.call.plan_folder import PlanFolder
from tensile_jax.exec.call.report import Report, report_of
from tensile_jax.exec.call.results import ResultPlacer
from tensile_jax.exec.call.signature import Call, Signature, SignatureReader, debugs_numbers
from tensile_jax.exec.call.unusable_arguments import refuse_unusable
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import CompiledPlan, Options, Step, package_version, step_of
from tensile_jax.exec.fitting.common_plan import digest_of, planned_for_all
from tensile_jax.exec.fitting.forms import fit_fastest, fit_for_less, predict_fastest
from tensile_jax.exec.fitting.improvement import fit_soon_or_fastest
from tensile_jax.exec.fitting.saved_or_new import fit_saved, predict_saved
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.processes.agreement import agreement_of, compare, writes_files
from tensile_jax.exec.running.executor import Observation
from tensile_jax.exec.running.runner import Runner
from tensile_jax.exec.transfer import HOST, Device, Transfer, divided_as, in_device_memory, on_host, to_device
from tensile_jax.plan import known_policy
from tensile_jax.plan.drift import WATCHED_FIRST, is_watched
from tensile_jax.plan_format import Plan
from tensile_jax.progress.display import DISPLAY, ShownCall, told_by
from tensile_jax.progress.phases import TRACING, Progress
from tensile_jax.trace import TracedStep, shape_struct, trace_step, trace_where_arguments_are, type_on_host

_PACES = 100  # the latest calls whose pace is kept for the report
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """The function, traced for one signature of its calls, under `settings` of JAX (`SignatureReader.settings`)."""

    step: Step
    placement: Placement
    settings: Hashable
    trace_s: float

    @property
    def on_host(self) -> frozenset[int]:
        """The positions of the arguments that the step takes from host memory."""
        return self.step.traced.on_host

    def may_have_left(self, signature: Signature) -> bool:
        """Whether a call's arguments are in the memories from which the step takes them, except for state that a plan may have
        left on the host.
        """
        if self.step.options.state_memory != "any":
            return False
        graph = self.step.graph
        state = {pair.input for pair in graph.carried}
        left = signature.on_host - self.on_host
        return self.on_host <= signature.on_host and all(graph.inputs[place] in state for place in left)


@dataclass(slots=True, eq=False)
class PlannedStep:
    """The function for one signature of its calls, with a plan that can run.

    Attributes:
        runner: runs the plan in use. Another plan takes its place when the device has run out of memory, or when latencies have
            drifted.
        place: gives the results of the plan in use the sharding that `jax.jit` gives them.
        donated: the positions and the names of the arguments whose memory the step takes over.
        followed: decides when latencies have drifted, and makes the next plan; None if the plan is not followed.
        improved: makes the plan that replaces one of a short search; None if the first plan is not of one.
        unwatched: when the latest call began, in seconds; None if that call was watched, which means that it was measured.
        paces_us: the times from the begin of a call that was not watched to the begin of the next call, for the latest such calls
            under the plan in use.
    """

    traced: _Traced
    runner: Runner
    place: Callable[[list[Any]], list[Any]]
    donated: tuple[list[int], list[str]]
    followed: FollowedPlan | None = None
    improved: ImprovedPlan | None = None
    unwatched: float | None = None
    paces_us: deque[float] = field(default_factory=lambda: deque(maxlen=_PACES))

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.runner.compiled.plan

    @property
    def may_be_replaced(self) -> bool:
        """Whether another plan may be made while training goes on."""
        return self.followed is not None or self.improved is not None

    @property
    def turn(self) -> AbstractContextManager[object]:
        """What a call holds while it runs, so that nothing is compiled meanwhile where that takes device memory."""
        return self.traced.step.compiler.turn if self.may_be_replaced else nullcontext()

    @property
    def is_improving(self) -> bool:
        """Whether a better plan is sought, or waits for the next call."""
        return self.improved is not None and self.improved.is_sought(self.runner.compiled)

    def next_plan(self) -> CompiledPlan | None:
        """The plan that replaces the one in use from now on; None if that stays. Asked before each call."""
        running = self.runner.compiled
        improved = None if self.improved is None else self.improved.next_plan(running)
        return self.followed.next_plan(running) if improved is None and self.followed is not None else improved

    @property
    def agrees(self) -> bool:
        """Whether the step runs on devices of several processes, which must agree before another plan replaces this one."""
        return len(self.traced.step.agreement.processes) > 1

    def begin(self) -> int:
        """A call begins: its number under the plan in use, counted from one."""
        now = time.perf_counter()
        if self.unwatched is not None:
            self.paces_us.append((now - self.unwatched) * 1e6)
        self.unwatched = now
        return self.runner.begin()

    def note_watched(self) -> None:
        """Record that the call was measured. The time from its begin to the next call's is then not counted."""
        self.unwatched = None

    def note_other_plan(self) -> None:
        """Another plan is in use: forget what was recorded of the one before."""
        self.place = _placer_of(self.traced, self.runner.compiled)
        self.unwatched = None
        self.paces_us.clear()
        if self.followed is not None:
            self.followed.restart()


class PlannedCalls:
    """The calls of `function`, and the plans under which they run.

    Args:
        function: the user's function.
        jitted: `jax.jit` of the function.
        request: what the user asked of the planner.
        jit_options: what the user asked of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], jitted: Any, request: CheckedOptions, jit_options: JitOptions) -> None:
        self._function = function
        self._jitted = jitted
        self._name = getattr(function, "__name__", "the step")
        self._request = request
        self._progress: Progress = told_by(request.progress)
        self._jit_options = jit_options
        self._signatures = SignatureReader(function, jit_options.get("static_argnums"), jit_options.get("static_argnames"))
        self._traced: dict[Signature, _Traced] = {}
        self._planned: dict[Signature, PlannedStep] = {}
        self._latest: Signature | None = None
        self._shapes = ShapesCalled(self._name)
        self._donations = Donations(self._name, _donating_option(jit_options))
        self._preparing = threading.RLock()
        self._folder = PlanFolder(request.keep_plans) if request.keep_plans is not None and writes_files() else None

    def read(self, args: _Args, kwargs: _Kwargs) -> Call | None:
        """The call with these arguments; None if plain `jax.jit` must run it."""
        try:
            return self._signatures.read(args, kwargs)
        except (TypeError, ValueError):
            self._jitted.trace(*args, **kwargs)  # raises the error that `jax.jit` raises for these arguments
            raise

    def planned(self, call: Call, args: _Args, kwargs: _Kwargs) -> PlannedStep:
        """The step that the call runs, with its plan. At the first call with a signature, the plan is made here.

        Raises:
            RuntimeError: an argument was deleted, or shares memory with a donated argument (a `JaxRuntimeError`).
        """
        signature = call.signature
        step = self._planned.get(signature)
        if step is None:
            with self._preparing:
                step = self._known(signature) or self._plan_first(call, args, kwargs)
        self._latest = signature
        if not step.plan.whole:
            refuse_unusable(call, step.traced.step.graph)
        return step

    def showing(self) -> AbstractContextManager[ShownCall]:
        """A block in which this thread traces, plans or compiles, and shows that if it takes long."""
        return DISPLAY.call(self._name, self._request.progress)

    def _plan_first(self, call: Call, args: _Args, kwargs: _Kwargs) -> PlannedStep:
        """Make the plan for the first call with a signature, and show that this is done, if it takes long."""
        began = time.perf_counter()
        try:
            with self.showing() as shown:
                step = self._plan(call, args, kwargs)
        except BudgetTooSmall as error:
            self._shapes.explain(error, call.signature, self._traced[call.signature].step.graph)
            raise
        seconds = time.perf_counter() - began
        if shown.visible:
            CACHE_HINT.give(self._name, seconds)
        self._shapes.add(call.signature, step.traced.step.graph, seconds, whole=step.plan.whole)
        return step

    def _known(self, signature: Signature) -> PlannedStep | None:
        """The step with a plan for calls with this signature. It is remembered for the next such call.

        A plan with `state_memory="any"` leaves state in host memory. The next call, which takes that state, runs under the same
        plan.
        """
        for known, step in self._planned.items():
            if known == signature:
                return step
            taken = step.traced.on_host == signature.on_host or step.traced.may_have_left(signature)
            if taken and known.differs_in_memory_only(signature):
                self._planned[signature] = step
                return step
        return None

    def run(self, step: PlannedStep, call: Call, args: _Args, kwargs: _Kwargs) -> Any:
        """Run the call and return its result. Once this is called, donated arguments may be deleted."""
        if step.may_be_replaced:
            self._renew(step)
        step.traced.step.agreement.begin_step()
        try:
            with step.turn:
                results = self._run(step, call, args, kwargs)
        except Exception as error:
            explain_deleted(error, step.traced.step.graph, call.leaves)
            raise
        places, names = step.donated
        self._donations.note(names, [call.leaves[place] for place in places])
        return results

    def _run(self, step: PlannedStep, call: Call, args: _Args, kwargs: _Kwargs) -> Any:
        iteration = step.begin()
        if step.plan.whole:
            try:
                return self._run_whole(step, call, args, kwargs, watched=iteration <= WATCHED_FIRST)
            except Exception as error:
                if step.agrees or not _run_for_less(step, call, error):
                    raise
                self._keep(step)
        while True:
            try:
                results, replaced = _run_segments(step, _brought(call, step.traced), iteration)
            except OutOfMemory as error:
                # one program has either run or done nothing
                if step.agrees or step.plan.launch == "segments" or not _run_for_less(step, call, error):
                    raise
                self._keep(step)
                continue
            if replaced:
                self._keep(step)
            return results

    def _renew(self, step: PlannedStep) -> None:
        """Replace the plan, if a new one was made. Nothing of this call has happened yet."""
        renewed = step.next_plan()
        if renewed is not None:
            step.runner.use(renewed)
            self._keep(step)

    def _keep(self, step: PlannedStep) -> None:
        """Take note that the step has another plan than before."""
        step.note_other_plan()
        self._write(step)

    def _write(self, step: PlannedStep) -> None:
        """Write the plan in use into the user's folder for plans, if there is one."""
        if self._folder is not None and step.traced.step.agreement.leads:
            self._folder.add(step.plan)

    def _run_whole(self, step: PlannedStep, call: Call, args: _Args, kwargs: _Kwargs, *, watched: bool) -> Any:
        began = time.perf_counter()
        # few calls have arguments on the host, and looking where the step takes its arguments from costs time in every call
        elsewhere = call.signature.on_host and call.signature.on_host - step.traced.on_host
        if elsewhere:
            wanted = {id(call.leaves[place]) for place in elsewhere}
            args, kwargs = self._signatures.map_dynamic(
                lambda leaf: to_device(leaf) if id(leaf) in wanted else leaf, args, kwargs
            )
        result = self._jitted(*args, **kwargs)
        if watched:
            jax.block_until_ready(result)
            step.note_watched()
            step_us = (time.perf_counter() - began) * 1e6
            step.runner.observations.append(Observation(peak_bytes=step.plan.peak_bytes, step_us=step_us))
        return result

    def plan(self, args: _Args, kwargs: _Kwargs) -> Plan:
        """The plan in use for these arguments. If there is none yet: the saved plan, or a new one with estimated workspaces."""
        with self.showing():
            return self._predicted(self._read_outermost(args, kwargs), args, kwargs)

    def _predicted(self, call: Call, args: _Args, kwargs: _Kwargs) -> Plan:
        step = self._planned.get(call.signature) or next(
            (step for signature, step in self._planned.items() if signature.shapes == call.signature.shapes), None
        )
        if step is not None:
            return step.plan
        traced, saved = self._with_host_limit(self._trace(call, args, kwargs), call), self._request.saved_plan
        if saved is None:
            return self._within(self._free(traced, call), partial(predict_fastest, traced.step)).plan
        return predict_saved(traced.step, self._request.budget, saved, has_run=self._has_run_alike(call))

    def _has_run_alike(self, call: Call) -> bool:
        """Whether a call has run whose arguments have the same shapes and dtypes, and other weak types."""
        mine = call.signature
        return any(one.forms == mine.forms and one.shapes != mine.shapes for one in self._planned)

    def plans(self, args: _Args, kwargs: _Kwargs) -> tuple[Plan, ...]:
        """All plans under which calls with these arguments have run, in their order."""
        step = self._planned.get(self._read_outermost(args, kwargs).signature)
        return () if step is None else tuple(plan for _, plan in step.runner.plans)

    def step(self, args: _Args, kwargs: _Kwargs) -> Step:
        """The step for these arguments, traced but not planned."""
        return self._trace(self._read_outermost(args, kwargs), args, kwargs).step

    def traced_positions(self, count: int) -> list[int]:
        """Which of `count` positional arguments are not static."""
        static = self._signatures.static_positions(count)
        return [place for place in range(count) if place not in static]

    @property
    def budget(self) -> Budget | None:
        """The budget that the user gave."""
        return self._request.budget

    def report(self, jit_step_us: float | None = None) -> Report:
        """What was measured of the plan of the latest call, beside what the user has measured of plain jit."""
        step = None if self._latest is None else self._planned.get(self._latest)
        if step is None or not step.runner.observations:
            raise RuntimeError("There is nothing to report before the first call.")
        drift = None if step.followed is None else step.followed.drift(step.plan)
        return report_of(
            step.runner,
            name=self._name,
            trace_s=step.traced.trace_s,
            drift=drift,
            improving=step.is_improving,
            paces_us=tuple(step.paces_us),
            jit_step_us=jit_step_us,
        )

    def forget(self) -> None:
        """Forget every trace and plan."""
        self._signatures.forget()
        with self._preparing:
            self._traced.clear()
            self._planned.clear()
            self._shapes.forget()
            self._latest = None

    def _read_outermost(self, args: _Args, kwargs: _Kwargs) -> Call:
        call = self.read(args, kwargs)
        if call is None:
            raise TraceError(
                f"{self._name!r} has a plan only where it is called outermost: not inside "
                "jit, grad, vmap and the like, and not under jax.disable_jit."
            )
        self._shapes.intend(call.signature)
        return call

    def _plan(self, call: Call, args: _Args, kwargs: _Kwargs) -> PlannedStep:
        """Make the plan for this call and compile it."""
        agreement = agreement_of(named_devices(call.leaves, self._jit_options))
        with agreement.session(f"the plan of {self._name!r}"):
            traced, saved = self._trace(call, args, kwargs), self._request.saved_plan
            if traced.step.agreement is not agreement:
                raise TraceError(
                    f"The step itself names devices of the processes {traced.step.agreement.processes}, and its arguments and "
                    f"options those of the processes {agreement.processes}. Give an argument that the step reads a NamedSharding "
                    "on the mesh that the step names (jax.device_put)."
                )
            if len(agreement.processes) > 1:
                compare(agreement, self._facts(traced), "step")
            traced = self._with_host_limit(traced, call)
            step = traced.step
            if saved is None:
                free = self._free(traced, call)
                find = fit_fastest if self._request.improve is None else fit_soon_or_fastest
                make = lambda: self._within(free, partial(find, step))  # noqa: E731
            else:
                has_run = self._has_run_alike(call)
                make = lambda: fit_saved(step, self._request.budget, saved, has_run=has_run)  # noqa: E731
            compiled = planned_for_all(step, make)
        planned = PlannedStep(traced, Runner(compiled, self._for_less), _placer_of(traced, compiled), _donated_by(step))
        same_settings = lambda: self._signatures.settings() == traced.settings  # noqa: E731
        if self._request.renew_above is not None:
            planned.followed = FollowedPlan(self._name, self._request.renew_above, same_settings)
        if compiled.soon:
            planned.improved = ImprovedPlan(self._name, compiled, same_settings)
        self._write(planned)
        self._planned[call.signature] = planned
        return planned

    def _for_less(self, running: CompiledPlan) -> CompiledPlan | None:
        """A plan for less memory than `running`, under which the device was out of memory; None if there is none."""
        with self.showing():
            return _for_less_of_all(running)

    def _facts(self, traced: _Traced) -> dict[str, str]:
        """By name, the values that must be equal in all processes of the step."""
        request, graph, budget = self._request, traced.step.graph, self._request.budget
        options = {
            name: getattr(request, name)
            for name in (
                "max_slowdown",
                "policy",
                "state_memory",
                "launch",
                "state_layout",
                "open_loops",
                "respect_checkpoint",
            )
        }
        saved = request.saved_plan
        return {
            "the version of tensile_jax": package_version(),
            "the version of jax": f"{jax.__version__} with jaxlib {version('jaxlib')}",
            "budget": _shown(budget),
            "host_budget": _shown(request.host_budget),
            **{name: repr(value) for name, value in options.items()},
            "plan": "None" if saved is None else f"that of {saved.program!r} {digest_of(saved)}",
            "compiler_options": repr(self._jit_options.get("compiler_options")),
            "whether JAX looks for NaNs": repr(debugs_numbers()),
            "the mesh": ", ".join(str(device.id) for device in traced.placement.devices),
            "the fingerprint of the step": graph.fingerprint,
        }

    def _free(self, traced: _Traced, call: Call) -> Budget | None:
        """The free memory of the device, if that is the budget since the user gave none; None if it is not, or is not known."""
        if self._request.budget is not None or self._request.max_slowdown is not None:
            return None
        return free_memory(traced.placement.devices, call.leaves, traced.step.agreement)

    def _with_host_limit(self, traced: _Traced, call: Call) -> _Traced:
        """The step with a limit of host memory for its plans: the user's budget, or what is free.

        If `device_profile` names a device of another platform, nothing is known of the host memory beside that device.
        """
        step, host = traced.step, self._request.host_budget
        if host is None and step.compiles_for_profile:
            host = free_host_memory(traced.placement.devices, call.leaves, step.agreement)
        limited = step.with_host_limit(*(float("inf"), "") if host is None else (host.resolve(0), host.basis))
        if limited is step:
            return traced
        self._traced[call.signature] = traced = replace(traced, step=limited)
        return traced

    def _within(self, free: Budget | None, make: Callable[[Budget | None], CompiledPlan]) -> CompiledPlan:
        """The result of `make` for the user's budget, or for the free memory of the device if the user gave none.

        If no plan fits the free memory, the step runs as plain jit runs it.
        """
        if free is None:
            return make(self._request.budget)
        try:
            return make(free)
        except BudgetTooSmall:
            return make(None)

    def _trace(self, call: Call, args: _Args, kwargs: _Kwargs) -> _Traced:
        """The function traced for this call; it is traced once for each signature."""
        with self._preparing:
            if call.signature not in self._traced:
                self._traced[call.signature] = self._trace_anew(call, args, kwargs)
            return self._traced[call.signature]

    def _trace_anew(self, call: Call, args: _Args, kwargs: _Kwargs) -> _Traced:
        request, jit_options = self._request, self._jit_options
        began = time.perf_counter()
        self._progress(TRACING, 0, 1)

        def trace(on_host: frozenset[int]) -> TracedStep:
            there = {id(call.leaves[place]) for place in on_host}
            shapes, named_shapes = self._signatures.map_dynamic(
                lambda leaf: _shape_of(leaf, on_host=id(leaf) in there), args, kwargs
            )
            return trace_step(
                self._jitted,
                self._function,
                shapes,
                named_shapes,
                static=self._signatures.static_positions(len(args)),
                keep_unused=bool(jit_options.get("keep_unused")),
                open_loops=request.open_loops,
                respect_checkpoint=request.respect_checkpoint,
            )

        stated = [jit_options.get(name) for name in ("in_shardings", "out_shardings")]
        if request.state_layout == "auto" and any(isinstance(place, Format) for place in jax.tree.leaves(stated)):
            raise ValueError(
                'state_layout="auto" lets XLA choose layouts, and in_shardings or out_shardings name some (Format). Leave one '
                "out."
            )
        if any(_is_particular(place) for place in jax.tree.leaves(jit_options.get("in_shardings"))):
            self._jitted.lower(*args, **kwargs)  # raises the error that `jax.jit` raises for arguments in another one
        known = self._expected_on_host(call.signature)
        step = trace_where_arguments_are(trace, call.signature.on_host) if known is None else trace(known)
        step.refuse_crossed_donations()
        used = [leaf for leaf, is_used in zip(call.leaves, step.program.used, strict=True) if is_used]
        try:
            placement = placement_of(used, jit_options, step.shardings)
        except TraceError:
            step.traced.lower()  # raises the error that `jax.jit` raises for these devices, if it does
            raise
        if placement.meshes:
            asked = jit_options.get("in_shardings"), jit_options.get("out_shardings")
            step = on_mesh(step, placement.meshes, call.leaves, *asked)
        trace_s = time.perf_counter() - began
        self._progress(TRACING, 1, 1)
        profile = profile_of(placement.device, request.profile, self._progress)
        options = Options(request.policy, profile, request.state_memory, self._progress, request.max_slowdown)
        options = replace(options, launch=request.launch, state_layout=request.state_layout)
        if request.saved_plan is not None:  # if the step must be planned again, use the options of the saved plan
            policy, saved = known_policy(request.saved_plan.policy), request.saved_plan
            launch = "one_program" if saved.barriers == "chain" else saved.launch
            state = {"state_memory": saved.state_memory, "state_layout": saved.state_layout}
            options = replace(options, policy=policy, launch=launch, **state)
        if options.state_memory != "device" or options.state_layout != "row_major":
            # JAX heeds the memory and the layout of committed arrays only, and the next call should find this one's executables
            placement = replace(placement, committed=True)
        settings = self._signatures.settings()
        alike = [t for t in self._traced.values() if (t.placement, t.settings) == (placement, settings)]
        same = next((t.step for t in alike if t.step.graph.fingerprint == step.graph.fingerprint), None)
        compiler = (
            alike[0].step.compiler
            if alike
            else Compiler(
                placement.device,
                committed=placement.committed,
                compiler_options=jit_options.get("compiler_options"),
                debugs_numbers=debugs_numbers(),
            )
        )
        agreement = agreement_of(placement.devices)
        if request.renew_above is not None and len(agreement.processes) > 1:
            raise ValueError(
                f"renew_above={request.renew_above!r} replaces a plan when measured latencies have drifted, and each of the "
                f"processes {agreement.processes} of this step measures its own. Leave renew_above out."
            )
        if request.improve is not None and len(agreement.processes) > 1:
            raise ValueError(
                f"improve={request.improve!r} replaces a plan as soon as a better one is found, and each of the processes "
                f"{agreement.processes} of this step would do so at another time. Leave improve out."
            )
        found = step_of(step, options, compiler, agreement=agreement) if same is None else same.retraced(step)
        return _Traced(found, placement, settings, trace_s)

    def _expected_on_host(self, signature: Signature) -> frozenset[int] | None:
        """The arguments that an earlier trace takes from host memory, if its plan may have left the other arguments that are now
        in host memory there.
        """
        for known, traced in self._traced.items():
            if known.forms == signature.forms and traced.may_have_left(signature):
                return traced.on_host
        return None


def _placer_of(traced: _Traced, compiled: CompiledPlan) -> Callable[[list[Any]], list[Any]]:
    """What gives the results of a plan the sharding that `jax.jit` gives them."""
    if compiled.plan.whole:
        return list
    step = compiled.step
    graph, divided = step.graph, step.traced.divided
    passed_on = [place for place, tensor in enumerate(graph.outputs) if graph.tensors[tensor].producer is None]
    if divided is not None:
        shardings = [divided.of.get(v) for v in step.traced.program.outputs]
    else:
        shardings = None if traced.placement.plain else _formats_of(compiled)
    on_host = [place for place, tensor in enumerate(graph.outputs) if graph.tensors[tensor].in_host_memory]
    return ResultPlacer(step.compiler, passed_on, shardings, on_host)


def _formats_of(compiled: CompiledPlan) -> list[Any]:
    """The formats of plain jit's results; of those to which the plan gives a layout of its own, the sharding."""
    step = compiled.step
    laid_out = {layout.tensor for layout in compiled.plan.layouts or ()}
    successors = {pair.output for pair in step.graph.carried if pair.input in laid_out}
    formats = jax.tree.leaves(step.plain_jit.sized().executable.output_formats)
    return [
        place.sharding if tensor in successors else place for place, tensor in zip(formats, step.graph.outputs, strict=True)
    ]  # fmt: skip


def _donating_option(jit_options: JitOptions) -> str:
    """What the user has given to say what is donated, such as `donate_argnums=0`; empty if nothing is."""
    given = ((name, jit_options.get(name)) for name in ("donate_argnums", "donate_argnames"))
    return ", ".join(f"{name}={value!r}" for name, value in given if value not in (None, (), []))


def _donated_by(step: Step) -> tuple[list[int], list[str]]:
    """The positions and the names of the arguments whose memory the step takes over."""
    graph = step.graph
    donated = [(place, graph.tensors[t].name) for place, t in enumerate(graph.inputs) if t in graph.donated]
    return [place for place, _ in donated], [name for _, name in donated]


def _is_particular(place: Any) -> bool:
    """Whether a sharding that was given to `jax.jit` also names a layout, or host memory."""
    return isinstance(place, Format) or getattr(place, "memory_kind", None) == HOST


def _shown(budget: Budget | None) -> str:
    if budget is None or budget.share is None:
        return "None" if budget is None else f"{budget.nbytes} bytes"
    return f"{100 * budget.share:.6g}% of plain jit's peak"


def _for_less_of_all(running: CompiledPlan) -> CompiledPlan | None:
    """A plan for less memory than `running` needs, on which all processes of the step agree; None if there is none."""
    lower = planned_for_all(running.step, lambda: fit_for_less(running) or running)
    return None if lower.plan == running.plan else lower


def _run_for_less(step: PlannedStep, call: Call, error: Exception) -> bool:
    """Plan a step for less memory after it failed while it ran whole. This needs two things: the device was out of memory, and
    the arguments still exist.

    Returns whether the step has such a plan now.
    """
    runner = step.runner
    effectful = any(operator.effectful for operator in runner.compiled.step.graph.operators)
    lost = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in call.leaves)
    if isinstance(error, OutOfMemory) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # XLA's own
    if lost or not is_out_of_memory(error, effectful=effectful) or not runner.use_less(refused=int(step.plan.whole)):
        return False
    runner.observations.append(Observation(step.plan.peak_bytes))
    return True


def _run_segments(step: PlannedStep, leaves: list[Any], iteration: int) -> tuple[Any, bool]:
    """The results of the step, and whether a plan for less memory has replaced its plan."""
    runner, followed = step.runner, step.followed
    running = runner.compiled
    if followed is not None:
        watch = followed.watch(running.plan)
    else:
        watch = Observation() if is_watched(iteration) else None
    try:
        results = step.place(runner.run(leaves, watch))
    except BaseException as error:
        step.traced.step.agreement.leave(error)
        raise
    if watch is not None:
        step.note_watched()
    if followed is not None and not step.is_improving:  # otherwise the plan will be replaced soon
        followed.seen(running, watch)
    replaced = _takes_less(step)
    if replaced:
        runner.observations.append(watch or Observation(running.plan.peak_bytes))
    return tree_unflatten(running.step.traced.out_tree, results), replaced


def _takes_less(step: PlannedStep) -> bool:
    """Whether the next iteration runs under a plan for less memory, because the device was out of memory in this one.

    Processes that share a step agree on this in watched iterations only. Until then, each iteration recovers by itself.
    """
    runner, agreement = step.runner, step.traced.step.agreement
    if not step.agrees:
        return runner.needs_less and runner.use_less()
    if not is_watched(runner.iteration):
        return False
    with agreement.session(f"whether a device was out of memory in {step.plan.program!r}"):
        return any(agreement.gather(runner.needs_less)) and runner.use_less()


def _brought(call: Call, traced: _Traced) -> list[Any]:
    """The arguments. Those that are not where the step reads them are copied there, without being committed."""
    divided, program = traced.step.traced.divided, traced.step.traced.program
    if divided is not None:
        if call.all_arrays and None not in call.signature.placements:
            return call.leaves
        return [
            leaf if is_committed(leaf) or not used or v not in divided.of else divided_as(leaf, divided.of[v])
            for leaf, v, used in zip(call.leaves, program.inputs, program.used, strict=True)
        ]
    device = traced.placement.device
    if call.devices <= {device} and not call.signature.elsewhere:
        return call.leaves
    return _copied_to_device(call, device, committed=traced.placement.committed)


def _copied_to_device(call: Call, device: Device, *, committed: bool) -> list[Any]:
    """The arguments. Those on another device or in another memory are copied to where the step reads them, without being
    committed.
    """
    transfer = Transfer(device, committed=committed)
    return [
        (transfer.out if on_host(leaf) else transfer.into)(leaf)
        if isinstance(leaf, jax.Array) and (leaf.sharding.device_set != {device} or place in call.signature.elsewhere)
        else leaf
        for place, leaf in enumerate(call.leaves)
    ]


def _shape_of(leaf: Any, *, on_host: bool) -> Any:
    """What stands for an argument while the step is traced: for an array its shape, and for an array in host memory the array
    itself.

    JAX does not read the memory from a shape. A trace keeps no reference to the array.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    if on_host:
        return leaf if isinstance(leaf, jax.Array) else type_on_host(leaf)
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed else None
    return shape_struct(leaf, None if sharding is None else in_device_memory(sharding))
