"""What a job of a jobs file trains: its entrypoint, checked before anything runs, and its shapes, for who only plans it.

A model knows its shapes; an entrypoint must be called for them, and what it makes is given back.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.refusal import Refusal
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.installed_models import MODELS, Model


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """A step, and a `ShapeDtypeStruct` for each array of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


def find_modules_here() -> None:
    """Entrypoints may lie in the folder in which the command was typed, as for `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def entrypoint_of(entry: JobEntry) -> Entrypoint:
    """How the job is made."""
    return Entrypoint(entry.model or entry.entrypoint or "", entry.args)


def model_of(entry: JobEntry) -> Model | None:
    """The job's model; None if it has an entrypoint.

    Raises:
        Refusal: the model does not take its `args`.
    """
    if entry.model is None:
        return None
    function = MODELS[entry.model]
    with_line = f"{entry.where}.args"
    try:
        inspect.signature(function).bind(**entry.args)
    except TypeError as error:
        known = ", ".join(inspect.signature(function).parameters)
        raise Refusal(f"{with_line}: {entry.model}: {error}. It takes: {known}.") from error
    try:
        return function(**entry.args)
    except (ValueError, TypeError) as error:
        raise Refusal(f"{with_line}: {error}") from error


def shapes_of(entry: JobEntry) -> Shapes:
    """Its step and shapes. An entrypoint makes its state for that, which is freed when this returns.

    Raises:
        Refusal: it cannot be made.
    """
    model = model_of(entry)
    if model is not None:
        return Shapes(model.step, model.state_shape, model.batch_shape)
    try:
        step, state, batches = entrypoint_of(entry).make()
        given = batches if isinstance(batches, Iterable) else batches()
        batch = next(iter(given))
    except StopIteration as error:
        raise Refusal(f"{entry.where}: its batches gave nothing. Give at least one batch.") from error
    except (ImportError, TypeError, ValueError) as error:
        raise Refusal(f"{entry.where}: {error}") from error
    return Shapes(step, _shapes(state), _shapes(batch))


def same_source(entry: JobEntry) -> bytes:
    """Equal for jobs that train the same thing at the same sizes."""
    return msgspec.json.encode((entry.model, entry.entrypoint, sorted(entry.args.items())), enc_hook=str)


def _shapes(tree: Any) -> Any:
    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        seen = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(seen.shape, seen.dtype, weak_type=getattr(seen, "weak_type", False))

    return jax.tree.map(shape_of, tree)
