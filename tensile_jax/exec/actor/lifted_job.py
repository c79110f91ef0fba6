"""How a job is run whose step changes objects in place: as the pure step `(state, batch) -> (state, metrics)` that it stands for.

A library that makes such steps, as `tensile_jax/nnx` does, gives them a method `as_job`, which returns a `LiftedJob`. The runtime
knows nothing else of that library.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

PutBack = Callable[[Any], Any]
"""Writes a state into the user's objects and returns them."""


class LiftedJob(NamedTuple):
    """A pure step, its first state, and what writes a state into the user's objects; None where there are no objects."""

    step: Any
    state: Any
    put_back: PutBack | None


def lifted_job(step: Any, state: Any) -> LiftedJob:
    """The job of `step`, which may be an `Entrypoint` too: as its method `as_job` says, or, if it has none, as it is."""
    as_job: Callable[[Any], LiftedJob] | None = getattr(step, "as_job", None)
    return LiftedJob(step, state, None) if as_job is None else as_job(state)
