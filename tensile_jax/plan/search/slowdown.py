"""The least memory at which a step is still fast enough: what `max_slowdown` asks for.

    least limit with step_us(limit) <= max_slowdown * step_us(the step as one executable)

A lower limit never makes a plan faster by more than noise, so bisection finds it. The limit that is found is one that was tried.
"""

from collections.abc import Callable

from tensile_jax.plan_format import Plan

_HALVINGS = 14


def least_limit(plan_under: Callable[[float], Plan | None], *, lowest: float, highest: float, most_us: float) -> float:
    """The least limit, in bytes, that has a plan of `most_us` or less; `highest` is taken to have one."""
    for _ in range(_HALVINGS):
        if highest - lowest < 1:
            break
        middle = (lowest + highest) / 2
        plan = plan_under(middle)
        if plan is None or plan.step_us > most_us:
            lowest = middle
        else:
            highest = middle
    return highest
