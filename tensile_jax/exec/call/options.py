"""Reads the options of `tensile_jax.jit` and `tensile_jax.nnx.jit`, and checks those that concern the planner.

The options of `jax.jit` are passed on to `jax.jit` unchecked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict, cast, get_args

from tensile_jax.arguments import MOST, read_number, read_threshold, shown
from tensile_jax.budget import Budget, parse_budget, parse_host_budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import PlanFileError
from tensile_jax.exec.compiling.step import LaunchName
from tensile_jax.exec.fitting.saved_plan import above_budget, above_host_budget
from tensile_jax.plan import POLICIES, PolicyName, known_policy
from tensile_jax.plan_format import Plan, StateLayoutName, contradictions
from tensile_jax.progress.phases import Progress

ImproveName = Literal["background"]


class JitOptions(TypedDict, total=False):
    """The options of `jax.jit`. They mean here what they mean there, and have the same defaults."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None
    in_shardings: Any
    out_shardings: Any
    device: Any
    backend: str | None


class PlanOptions(TypedDict, total=False):
    """The options of the planner, as a user gives them; `tensile_jax.jit` says what they mean."""

    budget: int | float | str | None
    host_budget: int | float | str | None
    max_slowdown: float | None
    policy: PolicyName
    device_profile: str | None
    state_memory: Literal["device", "any"]
    launch: LaunchName
    state_layout: StateLayoutName
    open_loops: bool | None
    respect_checkpoint: bool
    plan: Plan | None
    renew_above: float | None
    improve: ImproveName | None
    keep_plans: str | PathLike[str] | None
    progress: bool | Progress | None


class GivenOptions(PlanOptions, JitOptions, total=False):
    """All options of `tensile_jax.jit`."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedOptions:
    """The options of the planner, checked. `saved_plan` is to be run instead of a new plan; `profile` names a device profile."""

    budget: Budget | None
    host_budget: Budget | None
    max_slowdown: float | None
    policy: PolicyName
    profile: str | None
    state_memory: Literal["device", "any"]
    launch: LaunchName
    state_layout: StateLayoutName
    open_loops: bool | None
    respect_checkpoint: bool
    saved_plan: Plan | None
    renew_above: float | None
    improve: ImproveName | None
    keep_plans: str | PathLike[str] | None
    progress: bool | Progress | None


def read_options(given: PlanOptions) -> CheckedOptions:
    """The options that were given, checked.

    Raises:
        ValueError: an option has a value that is not allowed, or two options contradict each other.
        TypeError: the plan is not a `Plan`, or another option is of the wrong type.
        PlanFileError: the plan contradicts itself, or is above the budget.
    """
    state_memory = given.get("state_memory", "device")
    if state_memory not in ("device", "any"):
        raise ValueError(f'state_memory must be "device" or "any", got {state_memory!r}.')
    policy = known_policy(given.get("policy", "auto"))
    launch = given.get("launch", "auto")
    if launch not in get_args(LaunchName):
        raise ValueError(f"launch must be {' or '.join(map(repr, get_args(LaunchName)))}, got {shown(launch)}.")
    state_layout = given.get("state_layout", "row_major")
    if state_layout not in get_args(StateLayoutName):
        raise ValueError(f'state_layout must be "row_major" or "auto", got {shown(state_layout)}.')
    if state_layout == "auto" and launch not in ("program", "one_program") and given.get("plan") is None:
        raise ValueError(
            f'state_layout="auto" lets XLA choose the layouts of state in one program, and launch={launch!r} does not ask for '
            'one. Pass launch="one_program".'
        )
    open_loops = given.get("open_loops")
    if open_loops is not None and not isinstance(open_loops, bool):  # pyright: ignore[reportUnnecessaryIsInstance] # users err
        raise ValueError(f"open_loops must be True, False or None (where it is worth it), got {shown(open_loops)}.")
    respect_checkpoint = given.get("respect_checkpoint", False)
    if not isinstance(respect_checkpoint, bool):  # pyright: ignore[reportUnnecessaryIsInstance] # users err
        raise ValueError(f"respect_checkpoint must be True or False, got {shown(respect_checkpoint)}.")
    text, slowdown, plan, profile = (given.get(name) for name in ("budget", "max_slowdown", "plan", "device_profile"))
    budget, host = None if text is None else parse_budget(text), given.get("host_budget")
    host_budget = None if host is None else Budget(parse_host_budget(host), None)
    max_slowdown = None if slowdown is None else _read_slowdown(slowdown, text)
    saved_plan = None if plan is None else _read_plan(plan, budget, host_budget, slowdown)
    if profile is not None:
        load_profile(profile)
    renew_above = _read_threshold(given.get("renew_above"), saved_plan)
    if renew_above is not None and launch in ("program", "one_program"):
        raise ValueError(
            f"renew_above={renew_above!r} follows the latencies of segments, and launch={launch!r} launches them all at once. "
            "Pass one of them."
        )
    improve = given.get("improve")
    if improve is not None:
        _check_improvement(improve, given)
    return CheckedOptions(
        budget, host_budget, max_slowdown, policy, profile, state_memory,
        "segments" if renew_above is not None else launch, state_layout, open_loops,
        respect_checkpoint, saved_plan, renew_above, improve, _read_folder(given.get("keep_plans")),
        _read_progress(given.get("progress")),
    )  # fmt: skip


def _read_threshold(renew_above: Any, saved_plan: Plan | None) -> float | None:
    if renew_above is not None and saved_plan is not None:
        raise ValueError(f"renew_above={renew_above!r} makes new plans, and plan= is one that was made. Pass one of them.")
    return read_threshold(renew_above)


def _check_improvement(improve: Any, given: PlanOptions) -> None:
    """Refuse a value of `improve` that is not known, and options of which there is no short search."""
    if improve not in get_args(ImproveName):
        raise ValueError(f'improve must be "background" or None, got {shown(improve)}.')
    said = f'improve="{improve}" begins with a plan of a short search'
    if given.get("plan") is not None:
        raise ValueError(f"{said}, and plan= is one that was made. Pass one of them.")
    if given.get("max_slowdown") is not None:
        raise ValueError(f"{said} under a budget, and max_slowdown={given.get('max_slowdown')!r} asks for none. Pass a budget.")
    if (policy := given.get("policy", "auto")) != "auto":
        raise ValueError(f'{said}, which only policy="auto" has, and policy={policy!r} was asked for. Pass one of them.')
    if (launch := given.get("launch", "auto")) in ("program", "one_program"):
        raise ValueError(
            f"{said}, whose segments are launched one by one, and launch={launch!r} was asked for. Pass one of them."
        )


def _read_folder(folder: Any) -> str | PathLike[str] | None:
    if folder is not None and not isinstance(folder, str | PathLike):
        raise TypeError(f"keep_plans must be the path of a folder, got {shown(folder)} of type {type(folder).__name__}.")
    return cast("str | PathLike[str] | None", folder)


def _read_progress(progress: Any) -> bool | Progress | None:
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            "progress must be True, False, None (shown on a terminal and in a notebook) or a function progress(what, done, of), "
            f"got {shown(progress)}."
        )
    return cast("bool | Progress | None", progress)


def _read_slowdown(max_slowdown: Any, budget: Any) -> float:
    number = read_number(max_slowdown)
    if number is None or not 1 <= number < float("inf"):
        raise ValueError(
            f"max_slowdown must be a number of at least 1, times plain jit's step: got {shown(max_slowdown)}. "
            "Pass 1.1 for steps that may take ten per cent longer."
        )
    if budget is not None:
        raise ValueError(
            f"budget={budget!r} and max_slowdown={max_slowdown!r} ask for two things: the fastest step in so much memory, and "
            "the least memory for a step so fast. Pass one of them."
        )
    return float(min(number, MOST))


def _read_plan(plan: Any, budget: Budget | None, host_budget: Budget | None, max_slowdown: Any) -> Plan:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a Plan, got {shown(plan)} of type {type(plan).__name__}. Read a saved one with "
            "tensile_jax.Plan.load(path)."
        )
    story = next(contradictions(plan), None)
    if story is None and plan.policy not in POLICIES:
        story = f"its policy is {plan.policy!r}, which is not known"
    if story is not None:
        raise PlanFileError(f"plan= cannot be run: {story}. Make a new one with step.plan(...).")
    if max_slowdown is not None:
        raise ValueError(f"max_slowdown={max_slowdown!r} asks for a new plan, and plan= is one that was made. Pass one of them.")
    if budget is not None and budget.nbytes is not None and plan.peak_bytes > budget.nbytes:
        raise above_budget(plan, budget.nbytes)
    if host_budget is not None and (plan.host_peak_bytes or 0) > host_budget.resolve(0):
        raise above_host_budget(plan, host_budget.resolve(0))
    return plan
