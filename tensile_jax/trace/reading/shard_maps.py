"""Opens `jax.shard_map`, so that its body is planned operator by operator.

To *open* a `shard_map` is to replace it in the program by the equations of its body. When the equations run, they are wrapped in
a `shard_map` again. Inside of `shard_map`, a value is the *shard* of one device. In the program, the value is one array: the
shards of all devices, concatenated along the first axis. A scalar gets a first axis for this. JAX itself returns the residuals of
a `shard_map` in this form. If a value does not vary along an axis of the mesh, all devices along that axis have the same shard,
and the array contains it once.

Each equation of the body becomes an equation with a `Mapped` primitive in the program. The primitive says how the shards of its
operands and results lie in the program's arrays. Neighbouring equations of one body run in one `shard_map` (`run_equations.py`).
This `shard_map` moves nothing between devices at its boundaries, since the arrays are already divided into the shards that it
reads.

In three cases, the body is not opened and `shard_map` stays one operator: the body has effects (prints, callbacks, references),
some axes of the mesh stay automatic inside, or the mesh has one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
from jax.sharding import PartitionSpec

from tensile_jax.trace.avals import shape_of
from tensile_jax.trace.program import WrappedPrimitive, results_of

_SEEN_ONLY_INSIDE = "NamedAxisEffect"
"""The effect of using the name of a mesh axis. JAX has no public name for its class."""


class Placed(NamedTuple):
    """How a shard lies in an array of the program: its specification, and whether a scalar has a first axis there."""

    spec: PartitionSpec
    of_scalar: bool = False

    def shard(self, local: Any) -> Any:
        """What the body sees of what `shard_map` gives it."""
        return jax.lax.squeeze(local, (0,)) if self.of_scalar else local

    def given(self, shard: Any) -> Any:
        """What the body returns to `shard_map`."""
        return jax.lax.expand_dims(shard, (0,)) if self.of_scalar else shard


@dataclass(frozen=True, slots=True)
class Map:
    """A `shard_map` over all axes of a mesh. `checks` says whether JAX knows along which axes each value varies."""

    mesh: Any
    checks: bool

    def placed(self, aval: Any) -> Placed:
        """How the shard of a value that the body makes lies in the program."""
        varying = _varying(aval) if self.checks else set(self.mesh.axis_names)
        axes = tuple(axis for axis in self.mesh.axis_names if axis in varying)
        return Placed(PartitionSpec(axes), shape_of(aval) == ()) if axes else Placed(PartitionSpec())

    def whole(self, aval: Any, placed: Placed) -> Any:
        """The abstract value of the array of all shards."""
        shape = list(shape_of(aval)) or ([1] if placed.of_scalar else [])
        for dimension, axes in enumerate(placed.spec):
            for axis in axes if isinstance(axes, tuple) else (axes,):
                shape[dimension] *= 1 if axis is None else self.mesh.shape[axis]
        return jax.core.ShapedArray(tuple(shape), aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))

    def run(self, body: Callable[..., Any], values: Sequence[Any], inputs: Sequence[Placed], outputs: Sequence[Placed]) -> Any:
        """The results of `body`, a function of shards, on arrays of all shards."""

        def of_shards(*given: Any) -> Any:
            results = body(*(place.shard(value) for place, value in zip(inputs, given, strict=True)))
            return tuple(place.given(shard) for place, shard in zip(outputs, results, strict=True))

        mapped = jax.shard_map(
            of_shards,
            mesh=self.mesh,
            in_specs=tuple(place.spec for place in inputs),
            out_specs=tuple(place.spec for place in outputs),
            check_vma=self.checks,
        )
        return mapped(*values)


@dataclass(frozen=True, slots=True)
class Mapped(WrappedPrimitive):
    """A primitive on shards, as a function of arrays of all shards.

    `inputs` has None for a number that is written into the program. `context` is that of the equation in the body.
    """

    map: Map
    inputs: tuple[Placed | None, ...]
    outputs: tuple[Placed, ...]
    context: Any

    def on_shards(self, shards: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        """The results for these shards, inside of `shard_map`."""
        with self.context.manager:
            return results_of(self.primitive, shards, params)

    def bind(self, *values: Any, **params: Any) -> Sequence[Any]:
        """The results for these operands, in a `shard_map` of this equation alone."""
        places = [i for i, place in enumerate(self.inputs) if place is not None]

        def body(*shards: Any) -> Sequence[Any]:
            operands = list(values)
            for place, shard in zip(places, shards, strict=True):
                operands[place] = shard
            return self.on_shards(operands, params)

        arrays = [values[i] for i in places]
        return self.map.run(body, arrays, [place for place in self.inputs if place is not None], self.outputs)


def map_of(equation: Any) -> Map | None:
    """The map that an equation of a jaxpr stands for, if it is a `shard_map` that can be opened."""
    if equation.primitive.name != "shard_map":
        return None
    params = equation.params
    mesh, jaxpr = params["mesh"], params["jaxpr"]
    if mesh.size == 1 or set(params.get("newly_manual_axes", params.get("manual_axes", ()))) != set(mesh.axis_names):
        return None
    if any(type(effect).__name__ != _SEEN_ONLY_INSIDE for effect in jaxpr.effects):
        return None
    avals = [v.aval for e in jaxpr.eqns for v in e.outvars]
    if any(not hasattr(aval, "shape") or _is_partial(aval) for aval in avals):
        return None
    return Map(mesh, bool(params["check_vma"]))


def _varying(aval: Any) -> frozenset[str]:
    """The axes of the mesh along which the value differs between devices."""
    known = getattr(aval, "manual_axis_type", None)
    return known.varying if known is not None else getattr(aval, "vma", frozenset())


def _is_partial(aval: Any) -> bool:
    """Whether devices hold parts of a sum that is still to be taken, or are known to have taken it."""
    known = getattr(aval, "manual_axis_type", None)
    return known is not None and bool(known.unreduced or known.reduced)
