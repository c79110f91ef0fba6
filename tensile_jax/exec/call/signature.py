"""Reads the signature of a call: all properties of the call that make `jax.jit` trace or compile again when they change.

Two calls with equal signatures run the same program on the same device, so they share a plan. A signature consists of

    tree        the structure of the arguments that are traced
    leaves      shape, dtype and weak type of each of them, its sharding if it is committed to a device, and whether it is in host
                memory
    static      the static arguments, and every setting of JAX on which a trace depends

This module keeps no list of those settings. Instead, each call traces a *probe*, `jax.jit(lambda *static: None,
static_argnums=...)`. JAX returns the same jaxpr object for two such traces exactly if one trace would serve both calls. So static
arguments are told apart as `jax.jit` does it, by type and value, and so are all settings, such as `jax.default_matmul_precision`
and `jax.enable_x64`.

Reading a signature costs about 0.1 ms for 300 arrays (benchmarks/results/call.json, `python -m benchmarks.call`).
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax
import jax.core
from jax.extend.core import get_opaque_trace_state
from jax.tree_util import tree_flatten

from tensile_jax.exec.transfer import DEVICE, HOST, Device, in_device_memory

_CONFIG: Any = jax.config  # its settings are attributes that a type checker does not know

_FACTS = attrgetter("aval", "sharding", "committed")


class Signature:
    """The hashable signature of a call; equal signatures share a plan."""

    __slots__ = ("shapes", "forms", "placements", "on_host", "elsewhere", "_held", "_hash", "_key")

    def __init__(
        self,
        tree: Any,
        leaves: Sequence[tuple[tuple[Any, Any, bool], Hashable]],
        names: Hashable,
        probe: Any,
        on_host: frozenset[int],
    ) -> None:
        self.shapes: Hashable = (tree, tuple(shape for shape, _ in leaves), names, id(probe))
        """The signature without the places where the arguments lie."""
        self.forms = (tree, tuple((shape, dtype) for (shape, dtype, _), _ in leaves), names, id(probe))
        """The same without weak types: equal for a step's state before and after its first call."""
        self.placements = tuple(placement for _, placement in leaves)
        """The sharding of each argument that is committed, as if it were in device memory."""
        self.on_host = on_host
        """The positions of the arguments in host memory."""
        self.elsewhere = frozenset(i for i, place in enumerate(self.placements) if _is_elsewhere(place))
        """The positions of the arguments that are neither in pinned host memory nor in the memory in which a device computes."""
        self._held = probe  # a reference, since the id of a jaxpr may be used again once it is freed
        self._key = (self.shapes, self.placements, on_host)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self._key == other._key)

    def shape(self, place: int) -> Any:
        """The shape of the argument at this position."""
        return self.forms[1][place][0]

    def differing_shapes(self, other: "Signature") -> list[int]:
        """The positions of the arguments whose shapes differ; none if anything else differs that makes another program."""
        (tree, leaves, *settings), (other_tree, other_leaves, *other_settings) = self.forms, other.forms
        if (tree, settings) != (other_tree, other_settings) or [dtype for _, dtype in leaves] != [d for _, d in other_leaves]:
            return []
        return [i for i, (one, before) in enumerate(zip(leaves, other_leaves, strict=True)) if one != before]

    def differs_in_memory_only(self, other: "Signature") -> bool:
        """Whether the two are equal but for the memories in which arguments are."""
        return (self.shapes, self.placements) == (other.shapes, other.placements)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that can run under a plan.

    Attributes:
        signature: equal for calls that share a plan.
        leaves: the traced arguments, flat.
        all_arrays: whether every leaf is a `jax.Array`.
        devices: the devices of all leaves, also of those that are not committed.
    """

    signature: Signature
    leaves: list[Any]
    all_arrays: bool
    devices: frozenset[Device]


@dataclass(frozen=True, slots=True)
class _Settings:
    """JAX's settings, of which `probe` is one trace (see above). It is compared by identity, and kept so that it stays unique."""

    probe: Any = field(compare=False)
    debugs_numbers: bool
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", id(self.probe))


@dataclass(slots=True, eq=False)
class _Latest:
    """The latest call's signature and what it was read from, so that the next call, if it is equal, needs no hashing.

    `facts` are always those of the latest call. In a loop, the next call often has the same objects as abstract values and
    shardings, and identical objects need not be compared part by part.
    """

    tree: Any
    facts: list[Any]
    names: Hashable
    probe: Any
    signature: Signature
    devices: frozenset[Device]


class SignatureReader:
    """Reads the signatures of the calls of one function.

    Args:
        function: the user's function.
        static_argnums: as given to `jax.jit`.
        static_argnames: as given to `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
    ) -> None:
        self._numbers, self._names = _complete(function, static_argnums, static_argnames)
        self._probes: dict[int, Any] = {}
        self._latest: _Latest | None = None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The call with these arguments, or None if plain `jax.jit` must run it.

        Plain `jax.jit` must run calls inside another transformation (`jit`, `grad`, `vmap`, `eval_shape`, ...), whose arguments
        or captured values may be tracers, and calls under `jax.disable_jit`.

        Raises:
            TypeError: an argument is not a JAX type.
            ValueError: a static argument cannot be hashed.
        """
        if not _at_top_level() or _CONFIG.jax_disable_jit:
            return None
        places, static, dynamic_args, dynamic_kwargs = self._split(args, kwargs)
        names = (places, debugs_numbers())  # if JAX looks for NaNs the trace is the same, but the segments differ
        probe = self._probe(static)
        leaves, tree = tree_flatten((dynamic_args, dynamic_kwargs))
        try:
            facts, all_arrays = list(map(_FACTS, leaves)), True
        except AttributeError:  # a number, a NumPy array, a shape, a tracer
            if any(issubclass(leaf_type, jax.core.Tracer) for leaf_type in set(map(type, leaves))):
                return None
            facts, all_arrays = list(map(_facts_of, leaves)), False
        latest = self._latest
        if latest is None or latest.probe is not probe or latest.names != names or latest.facts != facts or latest.tree != tree:
            on_host = frozenset(i for i, (_, place, _) in enumerate(facts) if place is not None and place.memory_kind == HOST)
            signature = Signature(tree, [_normal(*fact) for fact in facts], names, probe, on_host)
            devices = frozenset(device for _, sharding, _ in facts if sharding is not None for device in sharding.device_set)
            self._latest = latest = _Latest(tree, facts, names, probe, signature, devices)
        latest.facts = facts
        return Call(latest.signature, leaves, all_arrays, latest.devices)

    def settings(self) -> Hashable:
        """A value that is equal at two moments if all settings of JAX on which traces and segments depend are so, too."""
        return _Settings(self._probe(()), debugs_numbers())

    def forget(self) -> None:
        """Forget the latest call."""
        self._latest = None

    def static_positions(self, count: int) -> frozenset[int]:
        """Which of `count` positional arguments are static."""
        return frozenset(n + count if n < 0 else n for n in self._numbers)

    def map_dynamic(
        self, change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `change` applied to every leaf that is not static."""
        static = self.static_positions(len(args))
        return (
            tuple(a if i in static else jax.tree.map(change, a) for i, a in enumerate(args)),
            {k: v if k in self._names else jax.tree.map(change, v) for k, v in kwargs.items()},
        )

    def _split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Hashable, tuple[Any, ...], tuple[Any, ...], Mapping[str, Any]]:
        """(places of the static arguments, their values, positional arguments without them, keyword arguments without them)."""
        if not self._numbers and not self._names:
            return (), (), args, kwargs
        static = self.static_positions(len(args))
        places = [i for i in range(len(args)) if i in static]
        keywords = sorted(k for k in kwargs if k in self._names)
        values = (*(args[i] for i in places), *(kwargs[k] for k in keywords))
        dynamic_args = tuple(a for i, a in enumerate(args) if i not in static)
        dynamic_kwargs = {k: v for k, v in kwargs.items() if k not in self._names}
        return (*places, *keywords), values, dynamic_args, dynamic_kwargs

    def _probe(self, static: tuple[Any, ...]) -> Any:
        """An object that is the same for two calls exactly if `jax.jit` would use one trace for both (see above)."""
        count = len(static)
        probe = self._probes.get(count)
        if probe is None:
            probe = self._probes[count] = jax.jit(lambda *_: None, static_argnums=tuple(range(count)))
        return probe.trace(*static).jaxpr


def _facts_of(leaf: Any) -> tuple[Any, Any, bool]:
    """(abstract value, sharding, whether it is committed) of any leaf."""
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval = jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))
        return aval, leaf.sharding, leaf.sharding is not None
    return jax.typeof(leaf), None, False


def _normal(aval: Any, sharding: Any, committed: bool) -> tuple[tuple[Any, Any, bool], Hashable]:
    """((shape, dtype, weak type), sharding if committed), the same for device memory and host memory."""
    shape = getattr(aval, "shape", None), getattr(aval, "dtype", aval), bool(getattr(aval, "weak_type", False))
    if not committed or sharding is None:
        return shape, None
    return shape, in_device_memory(sharding)


def _is_elsewhere(place: Any) -> bool:
    if place is None or place.memory_kind in (None, HOST, DEVICE):
        return False
    return any(device.default_memory().kind != place.memory_kind for device in place.device_set)


def _complete(
    function: Callable[..., Any], argnums: int | Iterable[int] | None, argnames: str | Iterable[str] | None
) -> tuple[frozenset[int], frozenset[str]]:
    """The positions and names of static parameters. If only one of the two is given, the other is inferred, as by `jax.jit`."""
    numbers = frozenset([argnums] if isinstance(argnums, int) else argnums or ())
    names = frozenset([argnames] if isinstance(argnames, str) else argnames or ())
    if (argnums is None) == (argnames is None):
        return numbers, names
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return numbers, names
    either = [(i, p.name) for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD]
    if argnums is None:
        return frozenset(i for i, name in either if name in names), names
    positive = {n + len(parameters) if n < 0 else n for n in numbers}
    return numbers, frozenset(name for i, name in either if i in positive)


with jax.core.ensure_compile_time_eval():
    _TOP_LEVEL = get_opaque_trace_state()


def debugs_numbers() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is set."""
    return _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs


def _at_top_level() -> bool:
    """Whether no transformation is under way in this thread."""
    return get_opaque_trace_state() == _TOP_LEVEL
