"""Rewrites the program of a step into others that compute the same (`trace/rewrites/registry.py`), each a *form* of the step.

Rewrites that cost nothing are always done. Of the others, a form has at most one. Only the policy `auto` has such forms.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.trace import REWRITES, Part, Program, Rewrite

_LARGE_TENSOR = 1 / 32  # of plain jit's peak: a part without such a tensor is rewritten only where nothing else fits; not tuned
_MANY_EQUATIONS = 200  # the same if the part has more equations, since each rewrite of it is planned; not tuned


def always_rewritten(step: Step) -> Step:
    """The step with all rewrites that cost nothing; itself, if none of them can be done."""
    base = step
    for rewrite in REWRITES:
        if rewrite.always:
            base = _rewritten(step, base, rewrite) or base
    return base


def worth_trying(step: Step, base: Fitting, limit: float) -> list[Rewrite]:
    """The other rewrites that may give a faster plan under the limit, or a plan where there is none."""
    traced = base.step.traced

    @cache
    def is_worth_it(find: Callable[[Program], Part | None]) -> bool:
        found = None if traced.divided is not None or step.options.policy != "auto" else find(traced.program)
        if found is None:
            return False
        large = found.nbytes >= _LARGE_TENSOR * base.planner.whole_peak_bytes(base.measured)
        return (large and found.equations <= _MANY_EQUATIONS) or base.floor_bytes() > limit

    return [
        r for r in REWRITES
        if not r.always and (is_worth_it(r.part) if r.part is not None else _rewritten(step, base.step, r) is not None)
    ]  # fmt: skip


def all_rewritten(step: Step) -> Iterator[Step]:
    """The step and its forms whose programs are rewritten, each made when it is asked for."""
    yield step
    base = always_rewritten(step)
    yield base
    yield from rewritten_each(step, base, [rewrite for rewrite in REWRITES if not rewrite.always])


def rewritten_each(step: Step, base: Step, rewrites: Iterable[Rewrite]) -> Iterator[Step]:
    """The forms that these rewrites make of `base`, each made when it is asked for."""
    return (form for rewrite in rewrites if (form := _rewritten(step, base, rewrite)) is not None)


def _rewritten(step: Step, base: Step, rewrite: Rewrite) -> Step | None:
    """The form of a step that the rewrite makes of `base`, made once; None if it makes none. Only the policy `auto` has any."""

    def make() -> Step | None:
        traced = base.traced.rewritten(rewrite) if step.options.policy == "auto" else None
        return None if traced is None else step.form(traced)

    return step.once(rewrite, make)
