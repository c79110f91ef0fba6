"""Turns a step that changes objects in place into a pure step, `(state, batch) -> (state, metrics)`, which a job runs.

A step that changes objects in place has a method `as_job`, which returns the pure step. `tensile_jax.nnx.jit` returns functions
with this method. The method is all that a runtime needs to know of such a step, so a runtime has no other code for Flax NNX.
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
