"""Uses Flax to turn a step on NNX objects into a pure function, and the objects of a call into the pytrees for that function.

    step              --flax.nnx.jit-->          a wrapper, whose attribute `jitted_fn` is `jax.jit` of a pure function
    objects of a call --the wrapper's `trace`--> pytrees, with which the wrapper calls `jitted_fn.trace`

Only Flax's wrapper can make these pytrees, and the pure function can be traced only while the wrapper's `trace` runs. So this
module makes a wrapper of its own, in which a stand-in takes the place of `jitted_fn`. Flax calls the stand-in's `trace`, which
answers a question, such as "What is the plan for these arguments?". So Flax itself handles options and shared references, and
raises its own errors. The user's wrapper is never changed.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import jax
from flax import nnx
from jax.tree_util import tree_leaves

from tensile_jax.nnx_steps.paths import boundary_with_updates, boundary_without_updates, is_nnx_object
from tensile_jax.trace.step import Boundary, parameter_names

Question = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""From the positional and the keyword arguments of a pure function to anything."""

_PLACEMENT = ("in_shardings", "out_shardings", "device", "backend")


@dataclass(frozen=True, slots=True, eq=False)
class NnxStep:
    """A step on NNX objects, and what stands for it: a pure function.

    Attributes:
        wrapper: what `flax.nnx.jit` has made of the step.
        function: the pure function. If the user's step was jitted, this has the methods of what `jax.jit` returns, and the pure
            function in `__wrapped__`. Each has a method `boundary`, which names the arrays by the user's objects.
        args, kwargs: the first arguments of every call, as `functools.partial` binds them.
    """

    wrapper: Any
    function: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, question: Question, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of `question` for the pytrees that Flax makes of these arguments. The objects stay as they are.

        What the question traces must be traced before it returns.
        """
        stand_in = _StandIn(self.wrapper, lambda *args, **kwargs: question(args, kwargs))
        return type(self.wrapper).trace(stand_in, *self.args, *args, **{**self.kwargs, **kwargs}).traced


def jitted_step(function: Callable[..., Any]) -> NnxStep | None:
    """The step on NNX objects that `flax.nnx.jit` or `tensile_jax.nnx.jit` has returned; None if neither has.

    Raises:
        TypeError: `flax.nnx.jit_partial` has returned it.
    """
    inner: Any = function
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while isinstance(inner, functools.partial):  # such as a method that nnx.jit decorates
        inner, args, kwargs = inner.func, (*inner.args, *args), {**inner.keywords, **kwargs}
    known: Any = inner.nnx_step if hasattr(type(inner), "nnx_step") else None
    if isinstance(known, NnxStep):
        return replace(known, args=args, kwargs=kwargs)
    if not type(inner).__module__.startswith("flax.") or not hasattr(inner, "jitted_fn"):
        return None
    if getattr(inner, "partial_args", ()):
        raise TypeError(
            f"{getattr(inner, '__name__', 'The function')!r} comes from nnx.jit_partial, which keeps some of the arguments. Give "
            "the function of nnx.jit, with all of its arguments."
        )
    return NnxStep(inner, _JittedStep(inner.jitted_fn, pure_function_of(inner)), args, kwargs)


def plain_step(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], jit_options: Mapping[str, Any]
) -> NnxStep | None:
    """The step that `flax.nnx.jit` makes of a function with these options; None if none of the arguments is an NNX object.

    Raises:
        ValueError: an option says where arrays lie, or the function is a bound method.
    """
    if not _has_objects((args, kwargs)):
        return None
    wrapper = nnx.jit(function, **placed_by_arguments(jit_options))
    return NnxStep(wrapper, pure_function_of(wrapper))


class PureFunction:
    """The pure function that Flax has made of a step, with a method `boundary` that names its arrays by the user's objects."""

    def __init__(self, pure: Callable[..., Any]) -> None:
        functools.update_wrapper(self, pure, updated=())
        self._pure = pure
        self._find = boundary_with_updates if hasattr(pure, "ctxtag") else boundary_without_updates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pure(*args, **kwargs)

    def boundary(self, args_info: Any, out_info: Any, static: Collection[int]) -> Boundary:
        """For `trace_step`."""
        return self._find(parameter_names(self._pure, static), args_info, out_info, static)


def pure_function_of(wrapper: Any) -> PureFunction:
    """The pure function that a wrapper of `flax.nnx.jit` has given to `jax.jit`.

    Raises:
        RuntimeError: this version of Flax does not keep it.
    """
    pure = getattr(getattr(wrapper, "jitted_fn", None), "__wrapped__", None)
    if pure is None:
        raise RuntimeError(
            f"flax {version('flax')} does not keep the jitted function of flax.nnx.jit as `jitted_fn`, in whose place "
            "tensile_jax puts its own. Use a version of flax that does, such as 0.12.12."
        )
    return PureFunction(pure)


def placed_by_arguments(jit_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `flax.nnx.jit`, without those that say where arrays lie and those that say nothing.

    Raises:
        ValueError: an option says where arrays lie.
    """
    for name in _PLACEMENT:
        value = jit_options.get(name)
        if any(leaf is not None for leaf in tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, nnx.StateSharding))):
            raise ValueError(
                f"{name}={value!r} says where arrays lie. Leave {name} out: the step runs on the one device, or the mesh, on "
                "which its arrays lie. Place them with jax.device_put before the call."
            )
    kept = {name: value for name, value in jit_options.items() if name not in _PLACEMENT}
    return {name: value for name, value in kept.items() if value is not None and value is not False}


def _has_objects(arguments: Any) -> bool:
    """Whether some are NNX objects. A `State` is none: it is a pytree of values, which a pure function takes."""
    leaves = jax.tree.leaves(arguments, is_leaf=lambda node: is_nnx_object(node) or isinstance(node, nnx.State))
    return any(map(is_nnx_object, leaves))


class _StandIn:
    """Stands in for a wrapper of `flax.nnx.jit` in a call of its method `trace`, with a question in place of `jitted_fn.trace`.

    It is equal to the wrapper, because Flax finds what belongs to a call by the wrapper.
    """

    def __init__(self, wrapper: Any, question: Callable[..., Any]) -> None:
        self._wrapper = wrapper
        self.jitted_fn = _Asked(question)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def __hash__(self) -> int:
        return hash(self._wrapper)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._wrapper


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Has the method of a jitted function that asks the question."""

    trace: Callable[..., Any]


class _JittedStep:
    """What `jax.jit` has returned to Flax, with the pure function in `__wrapped__` that names its arrays."""

    def __init__(self, jitted: Any, pure: PureFunction) -> None:
        functools.update_wrapper(self, pure, updated=())
        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.eval_shape(*args, **kwargs)
