"""Compiles a plan within the memory budget as a *program*: one executable that contains all segments of the plan.

There is one exception. If the plan copies tensors to or from the host, and the copies are not part of the program, the plan
becomes several executables, divided where a copy begins or is waited for (`plan/result/joined.py`). Below, "program" then means
all of them together.

Only compiling shows how much memory a program really needs. So up to three programs are compiled, one after another, each from
a plan of its own. This ends early with a program that keeps the budget and is almost as fast as the step without a budget, or
if `next_program.py`, which decides what is tried next, has nothing to try. The fastest program that keeps the budget is taken.
If there is none, or if the step has a single device and is faster when its segments are launched one by one, there is no
program.

Before compiling, there is only an estimate: a program holds its arguments from its beginning to its end, and otherwise needs
what its segments need. `exec/compiling/program_code.py` makes the code of a program. All sizes are bytes on each device.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tensile_jax.exec.compiling.program_code import bytes_laid_out
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.next_program import Tried, Try, first_try, next_try, try_after_exposed_copies
from tensile_jax.plan import Choice, Goal, Planned
from tensile_jax.plan.result.joined import can_be_joined
from tensile_jax.plan_format import Plan

_NEAR_PROGRAM = 0.02  # of the limit: a program that is expected to exceed it by more is not compiled (`make bench-launches`)
_NEAR_LAID_OUT = 0.12
"""The same if XLA chooses the layouts of the state, of which it then needs no copies. A program may then exceed the limit by no
more than the bytes of that state beside `_NEAR_PROGRAM` (the same)."""
_FIRST_MARGIN = 0.02  # of the limit: left free by a first plan with copies, so that fewer programs are compiled (the same)
_MOST_PROGRAMS = 3  # compiled of a step, each with a plan of its own (`next_program.py`)
_PLANS_OF_PROGRAM = 2  # made to find one that is expected to need what it should; more may keep more memory in use (not tuned)
_EXPECTED = 0.97, 1.005  # of that: a program outside is worth a second plan (not tuned)
NEARLY_PLAIN_TIME = 1.02  # of the whole step's time: a plan within the limit that is no slower is taken


def as_program(fitting: Fitting, goal: Goal) -> CompiledPlan | None:
    """The fastest plan in one program that keeps the limit, of those that are compiled in turn (`next_program.py`).

    None if none is asked for or keeps the limit, if segments cannot be joined, or if one device would run separate launches
    faster. With `launch` "auto", one device gets no program that computes more again than the plan whose segments would be
    launched one by one.
    """
    step = fitting.step
    picks_faster = step.in_one_program and fitting.options.launch == "auto" and step.traced.devices == 1
    apart = fitting.chosen(goal) if picks_faster else None  # before the others: the first program is mostly made of this plan
    plan = _first_program(fitting, goal, likely_spared) if step.in_one_program else None
    best: CompiledPlan | None = None
    tried: list[Tried] = []
    compiled = 0
    while plan is not None:
        assert plan.choice.barriers is not None  # it is a program
        if apart is not None and plan.plan.recomputed_us > apart.plan.recomputed_us:
            break
        found = fitting.compiled(plan.choice, goal)
        compiled += 1
        if found is None:  # a copy has no kernels beside it, or the replay refuses the program
            if compiled == _MOST_PROGRAMS or plan.choice.barriers != "chain":
                break
            wanted = try_after_exposed_copies(plan.limit, plan.plan.peak_bytes, goal.limit)
            plan = _program_for(fitting, wanted, goal)
            continue
        if found.plan.peak_bytes <= goal.limit and (best is None or found.plan.step_us < best.plan.step_us):
            best = found
        tried.append(Tried(plan.limit, plan.choice.barriers, plan.plan.peak_bytes, found.plan.peak_bytes))
        fast = best is not None and best.plan.step_us <= NEARLY_PLAIN_TIME * fitting.planner.model.whole_us
        if fast or compiled == _MOST_PROGRAMS:
            break
        following = next_try(tried, goal.limit, devices=step.traced.devices)
        plan = None if following is None else _program_for(fitting, following, goal)
    slower = best is not None and apart is not None and best.launched.step_us > apart.plan.step_us
    return None if slower else best


def predicted_program(fitting: Fitting, goal: Goal) -> Planned | None:
    """The program that a prediction shows, which may be expected to exceed the limit; None if segments cannot be joined."""
    found = _first_program(fitting, goal, lambda *_: _NEAR_PROGRAM * goal.limit)
    return None if found is None else Planned(found.plan, found.choice)


class _Program(NamedTuple):
    """A plan in one program or several, predicted, with its choice, and the limit under which its segments were chosen."""

    plan: Plan
    choice: Choice
    limit: float


def _first_program(fitting: Fitting, goal: Goal, spared: Callable[[Fitting, Plan, float], float]) -> _Program | None:
    """The first program to compile; None if there are no segments, or if they cannot be joined.

    A program is expected to need more than its segments do, since it holds its arguments from its beginning to its end. If it is
    expected to exceed the limit by more than `spared(fitting, plan, limit)`, its segments are chosen under a lower limit, once.
    With copies inside, XLA may order a program in another way than planned, so its plan leaves a margin free if it can.
    """
    step, limit = fitting.step, goal.limit
    chosen = fitting.chosen_for_program(goal)
    if chosen is None:
        return None
    copies = step.copies_inside and bool(chosen.plan.swapped_out_bytes + chosen.plan.swapped_in_bytes)
    lower = (1 - _FIRST_MARGIN) * limit
    if copies and (with_margin := fitting.chosen_for_program(Goal(lower, goal.max_slowdown))) is not None:
        chosen, limit = with_margin, lower
    first = first_try(limit, devices=step.traced.devices, copies=copies)
    found = _as_joined(fitting, chosen, first, goal)
    if found is None or found.plan.peak_bytes <= goal.limit + spared(fitting, found.plan, goal.limit):
        return found
    excess = found.plan.peak_bytes - goal.limit
    return _program_for(fitting, Try(goal.limit - excess, first.form), goal) or found


def likely_spared(fitting: Fitting, plan: Plan, limit: float) -> float:
    """By how many bytes a program may be expected to exceed the limit, since XLA may need so much less."""
    step, near = fitting.step, _NEAR_PROGRAM * limit
    if step.options.state_layout == "row_major" or step.traced.devices > 1:
        return near
    return min(near + bytes_laid_out(plan, step.graph, fitting.planner.model.profile), _NEAR_LAID_OUT * limit)


def _program_for(fitting: Fitting, wanted: Try, goal: Goal) -> _Program | None:
    """The program whose segments are chosen under this limit, or near it if that is expected to need what is wanted.

    None if there is none.
    """
    best: _Program | None = None
    for _ in range(_PLANS_OF_PROGRAM):
        chosen = fitting.chosen_for_program(Goal(wanted.limit, goal.max_slowdown))
        found = None if chosen is None else _as_joined(fitting, chosen, wanted, goal)
        if found is None or wanted.expected_bytes is None:
            return best or found
        expected, (least, most) = found.plan.peak_bytes, (part * wanted.expected_bytes for part in _EXPECTED)
        if best is None or _misses(found, most) < _misses(best, most):
            best = found
        if least <= expected <= most:
            break
        wanted = wanted._replace(limit=wanted.limit + wanted.expected_bytes - expected)
    return best


def _misses(program: _Program, most: float) -> tuple[float, float]:
    """By how many bytes the program is expected to need more, and how long it is predicted to take: the less, the better."""
    return max(0.0, program.plan.peak_bytes - most), program.plan.step_us


def _as_joined(fitting: Fitting, chosen: Planned, wanted: Try, goal: Goal) -> _Program | None:
    """The chosen plan as programs of this form; None if its segments cannot be joined.

    Where copies are to be part of a program, a plan with copies has the form `chain`, though one before it had none.
    """
    has_copies = bool(chosen.plan.swapped_out_bytes + chosen.plan.swapped_in_bytes)
    form = "chain" if wanted.form == "inputs" and fitting.step.copies_inside and has_copies else wanted.form
    if not can_be_joined(chosen.plan, fitting.step.graph, form):
        return None
    choice = replace(chosen.choice, barriers=form)
    plan = fitting.planner.plan_of(choice, goal, fitting.measured)
    return None if plan is None else _Program(plan, choice, wanted.limit)
