"""Traces and plans a function that a user names: one that `jax.jit` takes or has returned, or a step on NNX objects.

`UserCalls` stands for the function with its options, and gives the traced step or the plan for the arguments of a call.

A step on NNX objects is one that `flax.nnx.jit` or `tensile_jax.nnx.jit` has returned, or any function that is given NNX objects.
A pure function of pytrees stands for it (`nnx_steps/pure_step.py`). Flax is not imported before there is such a step.

If the function is jitted already, most options of `jax.jit` would change nothing any more, so they are refused. A few are taken,
such as `static_argnums`: they cannot be read from the jitted function, so the user gives them a second time.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import tree_leaves_with_path

from tensile_jax.arguments import shown
from tensile_jax.budget import Budget
from tensile_jax.exec.call.options import JitOptions, PlanOptions, read_options
from tensile_jax.exec.call.planned_calls import PlannedCalls
from tensile_jax.exec.compiling.step import Step
from tensile_jax.plan_format import Plan
from tensile_jax.progress.display import ShownCall
from tensile_jax.trace.step import KeyPath

if TYPE_CHECKING:  # at run time this would import Flax
    from tensile_jax.nnx_steps.pure_step import NnxStep

SAID_AGAIN = frozenset({"static_argnums", "static_argnames", "keep_unused", "in_shardings", "out_shardings", "device", "backend"})
"""The options of `jax.jit` that are to be given again with a function that is jitted already."""


@dataclass(frozen=True, slots=True, eq=False)
class UserCalls:
    """The calls of a user's function, with arguments as the user gives them.

    Attributes:
        planned: the calls of the function, or of the pure function that stands for a step on NNX objects.
        nnx_step: that step; None if the function takes pytrees.
    """

    planned: PlannedCalls
    nnx_step: "NnxStep | None"

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """See `PlannedCalls.step`."""
        return ask(self.nnx_step, self.planned.step, args, kwargs)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """See `PlannedCalls.plan`."""
        return ask(self.nnx_step, self.planned.plan, args, kwargs)

    def showing(self) -> AbstractContextManager[ShownCall]:
        """See `PlannedCalls.showing`."""
        return self.planned.showing()

    def how_to_donate(self, path: KeyPath, count: int) -> str:
        """The option that donates an argument.

        Args:
            path: where it is in `(args, kwargs)` of the function, without static arguments.
            count: how many positional arguments the user has given.
        """
        to = "" if self.nnx_step is None else " to nnx.jit"
        position = getattr(path[1], "idx", None)
        if position is None:
            return f"donate_argnames={getattr(path[1], 'key', '')!r}{to}"
        bound = 0 if self.nnx_step is None else len(self.nnx_step.args)
        return f"donate_argnums={self.planned.traced_positions(bound + count)[position]}{to}"

    @property
    def budget(self) -> Budget | None:
        """The budget that the user gave."""
        return self.planned.budget


def calls_with(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan_options: PlanOptions,
    jit_options: JitOptions,
) -> UserCalls:
    """The calls of a user's function with such arguments.

    Raises:
        TypeError: an option is none of `jax.jit`, or the function is jitted already, so that the option would change nothing.
    """
    refuse_unknown(jit_options)
    nnx_step = nnx_step_of(function, args, kwargs, jit_options)
    taken = function if nnx_step is None else nnx_step.function
    refuse_without_effect(taken, jit_options)
    return UserCalls(calls_of(taken, plan_options, jit_options), nnx_step)


def nnx_step_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], jit_options: JitOptions
) -> "NnxStep | None":
    """The step on NNX objects that this call is; None if it is one of pytrees.

    Raises:
        TypeError, ValueError: Flax does not take the function, or an option says where arrays lie.
    """
    if "flax.nnx" not in sys.modules:  # then there are no NNX objects
        return None
    from tensile_jax.nnx_steps.pure_step import jitted_step, placed_by_arguments, plain_step

    known = jitted_step(function)
    if known is None:
        return None if is_jitted(function) else plain_step(function, args, kwargs, jit_options)
    placed_by_arguments(jit_options)  # refuses others
    return known


def ask(
    nnx_step: "NnxStep | None",
    question: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of `question` for these arguments, or for the pytrees that stand for them in a step on NNX objects."""
    return question(args, kwargs) if nnx_step is None else nnx_step.ask(question, args, kwargs)


def leaves_with_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of the arguments, also those in NNX objects, with their paths in `(args, kwargs)`."""
    if "flax.nnx" not in sys.modules:
        return iter(tree_leaves_with_path((args, kwargs)))
    from tensile_jax.nnx_steps.paths import leaves_in

    return leaves_in((args, kwargs))


def calls_of(function: Callable[..., Any], plan_options: PlanOptions, jit_options: JitOptions) -> PlannedCalls:
    """The calls of a function of pytrees, which `jax.jit` takes or has returned."""
    request = read_options(plan_options)
    if is_jitted(function):
        jitted: Any = function
        return PlannedCalls(jitted.__wrapped__, jitted, request, jit_options)
    return PlannedCalls(function, jax.jit(function, **jit_options), request, jit_options)


def is_jitted(function: Any) -> bool:
    """Whether it is what `jax.jit`, `flax.nnx.jit` or this package's own `jit`s have returned."""
    return all(hasattr(function, name) for name in ("trace", "lower", "eval_shape", "__wrapped__"))


def refuse_unknown(jit_options: Mapping[str, Any]) -> None:
    """Raises: TypeError: an option is none of `jax.jit`."""
    for name, value in jit_options.items():
        if name in PlanOptions.__annotations__:
            raise TypeError(f"{name}={shown(value)} is an option of tensile_jax.jit, and this function does not take it.")
        if name not in JitOptions.__annotations__:
            raise TypeError(
                f"{name} is no option of this function, and none of jax.jit, which takes {', '.join(JitOptions.__annotations__)}."
            )


def refuse_without_effect(
    function: Callable[..., Any], jit_options: Mapping[str, Any], *, said_again: Collection[str] = SAID_AGAIN
) -> None:
    """Refuse options of `jax.jit` that would change nothing.

    Args:
        said_again: the options that have an effect with a function that is jitted already.

    Raises:
        TypeError: there is such an option.
    """
    for name, value in jit_options.items():
        if is_jitted(function) and name not in said_again:
            raise TypeError(
                f"{name}={shown(value)} would change nothing, because {getattr(function, '__name__', 'the function')!r} is "
                f"jitted already. Give {name} to the jit that made it, or give the function without jit."
            )
