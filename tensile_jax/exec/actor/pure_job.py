"""Turns a step that changes objects in place into the pure step that a job runs, `(state, batch) -> (state, metrics)`.

A step that trains modules of Flax NNX changes these objects in place. `tensile_jax.nnx.jit` gives such a step a method
`as_job`, which returns the pure step. A runtime only calls this method, so it needs no code for Flax NNX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

PutBack = Callable[[Any], Any]
"""Writes a state into the user's objects and returns them."""


class PureJob(NamedTuple):
    """A pure step, its first state, and a function that writes a state into the user's objects; None if there are no objects."""

    step: Any
    state: Any
    write_to_objects: PutBack | None


def pure_job(step: Any, state: Any) -> PureJob:
    """The pure job of `step`: what its method `as_job` returns, or `step` and `state` themselves if it has no such method."""
    as_job: Callable[[Any], PureJob] | None = getattr(step, "as_job", None)
    return PureJob(step, state, None) if as_job is None else as_job(state)
