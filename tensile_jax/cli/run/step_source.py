"""Finds the step that was named on the command line: that of a model, or one that a function of the user makes.

    MODULE:FUNCTION ::= a function that returns (step, args), (step, state, batches) or a model

For a model and for (step, state, batches), the step donates the state, as in `tensile run`. For (step, args), the user says
what is donated: the step may be `jax.jit(function, donate_argnums=...)`. No step runs here. Only the user's function is called,
and what makes the first state and the first batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from tensile_jax.cli.errors import Refusal, refusing_options
from tensile_jax.cli.options import Limits, ModelChoice, OwnStep
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.job_source import find_modules_here
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.actor.pure_job import pure_job
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.memory_report.calls import UserCalls, calls_with
from tensile_jax.trace import shape_struct

_MAKES_STEP = "Name a function that makes your step: it returns (step, args), as in docs/memory.md."


@dataclass(frozen=True, slots=True, eq=False)
class FoundStep:
    """A step, its arguments (arrays or shapes), and the position of the one that is donated; None if the step itself says it."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None

    @property
    def jit_options(self) -> JitOptions:
        """What `jax.jit` is to be told of the step."""
        return JitOptions() if self.donated is None else JitOptions(donate_argnums=self.donated)


def find_step(source: ModelChoice | OwnStep, *, to_run: bool = False) -> FoundStep:
    """The step, made anew.

    Args:
        to_run: whether the arguments must be arrays, so that the step can run. A function that returns (step, args) may still
            return shapes.

    Raises:
        Refusal: the model or the function does not take these sizes, cannot be imported, or makes no step.
    """
    if isinstance(source, ModelChoice):
        return _found(source.build(), source.name, to_run=to_run)
    find_modules_here()
    given = {} if source.batch_size is None else {"batch_size": source.batch_size}
    try:
        made = Entrypoint(source.target, given).call()
    except TypeError as error:
        raise Refusal(f"{error} {_MAKES_STEP}") from error
    except (ImportError, ValueError) as error:
        raise Refusal(str(error)) from error
    try:
        return _found(made, source.target, to_run=to_run)
    except (TypeError, ValueError) as error:
        raise Refusal(str(error)) from error


def calls_of_step(found: FoundStep, limits: Limits, phases: Phases) -> UserCalls:
    """The calls of the step under the limits; `phases` shows what tracing and planning does.

    Raises:
        Refusal: the limits contradict each other, or name what does not exist.
    """
    with refusing_options():
        options = PlanOptions(**asdict(limits), progress=phases.update)
        return calls_with(found.step, found.args, {}, options, found.jit_options)


def with_batch_size(source: ModelChoice | OwnStep, batch_size: int) -> ModelChoice | OwnStep:
    """The same step for another batch."""
    return replace(source, batch_size=batch_size)


def _found(made: Any, target: str, *, to_run: bool) -> FoundStep:
    if not isinstance(made, tuple) and all(hasattr(made, name) for name in ("step", "state_shape", "batch_shape")):
        given = (made.init(), next(made.batches())) if to_run else (made.state_shape, made.batch_shape)
        return FoundStep(made.step, given, 0)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list):
        return FoundStep(made[0], tuple(made[1]), None)
    if isinstance(made, tuple) and len(made) == 3 and callable(made[0]):
        step, state, batches = made
        step, state, _ = pure_job(step, state)
        first = next(iter(batches if isinstance(batches, Iterable) else batches()), None)
        if first is None:
            raise ValueError(f"{target}: its batches gave nothing. Give at least one batch.")
        given = (state, first)
        return FoundStep(step, given if to_run else jax.tree.map(shape_struct, given), 0)
    raise TypeError(
        f"{target} must return (step, args), (step, state, batches) or a model. It returned a {type(made).__name__}. "
        "args is the tuple of the step's arguments, arrays or jax.ShapeDtypeStructs. docs/memory.md has an example."
    )
