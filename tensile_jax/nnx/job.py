"""Turns a step on NNX objects into a job for a `Runtime`: a pure step, its first state, and a function that updates the objects.

    objects --split--> {"model.linear1.kernel": array, ...} --runtime, step by step--> the last state --> the same objects

While the job runs, its objects hold the state with which they were submitted to the runtime. When the job has ended, they hold
the state after its last finished iteration. Both states are in the memory of the CPU, because the jobs share the memory of the
device. JAX copies such arrays to the device when a computation on the device uses them. If a launch fails in the middle of an
iteration, the job's state is lost. Then the objects keep the state with which they were submitted.

A job runs one program. So its objects must have the same structure before and after the step: the same attributes, the same
Variables. If the structure changes, `flax.nnx.jit` traces the step again, but a job fails.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import GetAttrKey, SequenceKey, keystr, tree_flatten_with_path, tree_unflatten

from tensile_jax.errors import TraceError
from tensile_jax.exec.actor.pure_job import PureJob
from tensile_jax.exec.checkpoint.leaves import as_weakly_typed, host_copy, is_key, on_cpu
from tensile_jax.nnx_steps.paths import path_in_objects
from tensile_jax.trace.step import Boundary, KeyPath, name_of, parameter_names


def job_of(step: Callable[..., Any], objects: Any) -> PureJob:
    """The job of `step(*objects, batch)`.

    Args:
        objects: the tuple of NNX objects that the step changes. It may contain arrays as well.

    Raises:
        TypeError: `objects` is no tuple, or contains no array.
    """
    if not isinstance(objects, tuple) or not jax.tree.leaves(nnx.state(objects)):
        raise TypeError(
            "state of a step on NNX objects must be the tuple of the objects that come before the batch, such as "
            f"(model, optimizer): got {type(objects).__name__}."
        )
    graphdef, state = nnx.split(objects)
    paths, leaves, structure = _flatten(state)
    names = [name_of(parameter_names(step, ()), path) for path in paths]
    if len(set(names)) < len(names):  # a dictionary can have keys that look like attributes
        names = [keystr(path) for path in paths]
    pure = _PureStep(step, graphdef, structure, names)

    def write_to_objects(last: Any) -> Any:
        nnx.update(objects, tree_unflatten(structure, [_in_cpu_memory(last[name]) for name in names]))
        return objects

    return PureJob(pure, dict(zip(names, leaves, strict=True)), write_to_objects)


class _PureStep:
    """A step on NNX objects as a function `(state, batch) -> (state, metrics)`."""

    def __init__(self, step: Callable[..., Any], graphdef: Any, structure: Any, names: Sequence[str]) -> None:
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        self._step = step
        self._graphdef = graphdef
        self._structure = structure
        self._names = names

    def __call__(self, state: Any, batch: Any) -> Any:
        objects = nnx.merge(self._graphdef, tree_unflatten(self._structure, [state[name] for name in self._names]))
        metrics = self._step(*objects, batch)
        graphdef, changed = nnx.split(objects)
        paths, leaves, structure = _flatten(changed)
        if graphdef != self._graphdef or structure != self._structure:
            raise TraceError(self._explain(paths))
        return dict(zip(self._names, leaves, strict=True)), metrics

    def boundary(self, args_info: Any, out_info: Any, static: Collection[int]) -> Boundary:
        """For `trace_step`: arrays of the state have their names in the user's objects, and all of them are carried."""
        names = sorted(self._names)  # the order in which jax.tree_util takes a dictionary
        batch, _ = tree_flatten_with_path(args_info[0][1])
        metrics, _ = tree_flatten_with_path(out_info[1])
        return Boundary(
            [*names, *("batch" + keystr(path) for path, _ in batch)],
            [*names, *("result" + keystr(path) for path, _ in metrics)],
            [(i, i) for i in range(len(names))],
        )

    def _explain(self, paths: Sequence[KeyPath]) -> str:
        named = parameter_names(self._step, ())
        before, after = set(self._names), {name_of(named, path) for path in paths}
        news = [f"{name} is new" for name in sorted(after - before)] + [f"{name} is gone" for name in sorted(before - after)]
        return (
            f"The step {self.__name__!r} changes the structure of its objects ({'; '.join(news) or 'attributes or metadata'}), "
            "and a job runs one program. Make such attributes before the job starts, or remove within the step what it adds "
            "(flax.nnx.pop)."
        )


def _flatten(state: Any) -> tuple[list[KeyPath], list[Any], Any]:
    """The paths of the arrays in `(args, kwargs)` of the step, the arrays, and the structure of `state`."""
    leaves, structure = tree_flatten_with_path(state)
    paths = [
        path_in_objects((SequenceKey(0), SequenceKey(path[0].key), GetAttrKey("__state__"), *path[1:])) for path, _ in leaves
    ]
    return paths, [leaf for _, leaf in leaves], structure


def _in_cpu_memory(leaf: Any) -> Any:
    """A copy in the memory of the CPU, not committed to that device, so that it can be used with arrays on another one."""
    if not isinstance(leaf, jax.Array):
        return leaf
    numbers = host_copy(leaf)
    if jax.typeof(leaf).weak_type:
        return as_weakly_typed(numbers)
    with on_cpu():
        copy = jnp.array(numbers)
        return jax.random.wrap_key_data(copy, impl=jax.random.key_impl(leaf)) if is_key(leaf) else copy
