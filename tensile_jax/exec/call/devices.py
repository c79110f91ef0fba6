"""Finds the devices on which a call runs, and whether `jax.jit` would commit the results of the call to these devices.

`jax.jit` runs on the devices to which arguments are committed, or on the devices that `in_shardings`, `out_shardings`, `device`,
`backend` or the mesh in force name. Without any of these, it runs on the default device and does not commit its results. Several
devices must form one mesh, and all arguments and options must name the same devices. These may belong to several processes
(`jax.distributed`), each of which makes the call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import tree_unflatten

from tensile_jax.errors import TraceError
from tensile_jax.exec.transfer import DEVICE, HOST, Device, in_device_memory
from tensile_jax.trace import TracedStep, per_device

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA with which a step of 3,600 equations compiles in three quarters of the time; what they change comes after the
propagation of shardings."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a call, and whether its results are committed to them.

    Attributes:
        device: the device on which all segments run; if there are several, the first one of this process in the mesh.
        committed: whether results are committed to the device, as far as the call's arguments and options say.
        plain: whether every result of `jax.jit` has a `SingleDeviceSharding` in the memory that the step gives it. If not, the
            whole step must be compiled to find out its results' shardings, unless it runs on several devices.
        meshes: the meshes that the call names, if it runs on several devices; all have the same devices.
    """

    device: Device
    committed: bool
    plain: bool
    meshes: tuple[Mesh, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the call."""
        return tuple(d for mesh in self.meshes[:1] for d in mesh.devices.flat) or (self.device,)


def placement_of(leaves: Sequence[Any], options: Mapping[str, Any], named: Sequence[Any]) -> Placement:
    """The placement of a call with these arguments (flat, without static ones) and these options of `jax.jit`.

    Args:
        named: shardings and memory spaces that the step itself names.

    Raises:
        TraceError: the call names several devices, but not as one mesh.
    """
    asked = options.get("device") or (jax.local_devices(backend=options["backend"])[0] if options.get("backend") else None)
    if asked is not None:
        return Placement(asked, True, True)
    given, stated, inner, in_force = _places(leaves, options, named)
    places = [*given, *stated, *inner, *in_force]
    named_by: dict[Device, str] = {}
    for name, place in places:
        for device in _devices_of(place):
            named_by.setdefault(device, name)
    return Placement(
        device=_first_here(named_by) if named_by else _default_device(),
        committed=bool(given or stated or inner or in_force),
        plain=not stated and not in_force and all(_is_plain(place) for _, place in (*given, *inner)),
        meshes=_meshes(places, named_by) if len(named_by) > 1 else (),
    )


def named_devices(leaves: Sequence[Any], options: Mapping[str, Any]) -> frozenset[Device]:
    """The devices that the arguments of a call and its options name, apart from what the step itself names."""
    if options.get("device") or options.get("backend"):
        return frozenset()
    return frozenset(d for places in _places(leaves, options, ()) for _, place in places for d in _devices_of(place))


def on_mesh(
    step: TracedStep, meshes: Sequence[Mesh], leaves: Sequence[Any], in_shardings: Any = None, out_shardings: Any = None
) -> TracedStep:
    """The step with the sizes of one device of a mesh.

    Args:
        meshes: the meshes of a placement.
        leaves: the step's arguments, flat.

    Raises:
        ValueError: jit's own errors of arguments and shardings that do not fit together.
    """
    lowered = step.traced.lower()  # raises them
    given = given_shardings(leaves, step.in_tree, in_shardings)
    wanted = stated_shardings(out_shardings, tree_unflatten(step.out_tree, list(range(step.out_tree.num_leaves))))
    if any(operator.primitive in ("scan", "while") for operator in step.whole_graph.operators):
        # XLA changes loops before its propagation, so that only compiling shows how it divides their results
        compiled = lowered.compile(compiler_options=dict(_QUICK))
        wanted = [s if isinstance(s, NamedSharding) else None for s in jax.tree.leaves(compiled.output_shardings)]
    return per_device(step, given, wanted, meshes)


def given_shardings(leaves: Sequence[Any], tree: Any, in_shardings: Any) -> list[Any]:
    """For each argument, flat, the sharding in which a call on several devices takes it; None if it may be any.

    Args:
        tree: the structure of (positional arguments, keyword arguments), without static ones.
    """
    asked: list[Any] = [None] * len(leaves)
    if in_shardings is not None:
        args, _ = jax.tree.unflatten(tree, list(range(len(leaves))))
        positions = jax.tree.leaves(args)
        prefix = in_shardings if isinstance(in_shardings, tuple) or _is_stated(in_shardings) else tuple(in_shardings)
        for position, place in zip(positions, stated_shardings(prefix, args), strict=True):
            asked[position] = place
    return [in_device_memory(leaf.sharding) if is_committed(leaf) else place for leaf, place in zip(leaves, asked, strict=True)]


def stated_shardings(prefix: Any, tree: Any) -> list[Any]:
    """The sharding that `in_shardings` or `out_shardings`, a prefix of the tree, states for each of the tree's leaves."""
    found: list[Any] = []
    jax.tree.map(
        lambda place, below: found.extend([_named(place)] * len(jax.tree.leaves(below))), prefix, tree, is_leaf=_is_stated
    )
    return found


def mesh_in_force() -> Mesh | None:
    """The mesh that `jax.set_mesh` has set, if it has devices."""
    mesh = jax.sharding.get_mesh()
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def is_committed(leaf: Any) -> bool:
    """Whether the argument is bound to the devices of its sharding."""
    is_bound = leaf.committed if isinstance(leaf, jax.Array) else isinstance(leaf, jax.ShapeDtypeStruct)
    return is_bound and isinstance(leaf.sharding, Sharding)


_Places = list[tuple[str, Any]]
"""What names devices, and that as which it names them: a sharding, a mesh or a memory space."""


def _places(leaves: Sequence[Any], options: Mapping[str, Any], named: Sequence[Any]) -> tuple[_Places, _Places, _Places, _Places]:
    """What the arguments, the options, the step itself and the mesh in force name."""
    given = [("the arguments", leaf.sharding) for leaf in leaves if is_committed(leaf)]
    asked = [(name, place) for name in ("in_shardings", "out_shardings") for place in jax.tree.leaves(options.get(name))]
    stated = [(name, where) for name, place in asked if (where := _without_layout(place)) is not None]
    inner = [("the step itself", place) for place in named]
    in_force = [("the mesh in force (jax.set_mesh)", mesh)] if (mesh := mesh_in_force()) is not None else []
    return given, stated, inner, in_force


def _first_here(devices: Iterable[Device]) -> Device:
    """The first of the devices that is of this process; the first of all, if none is."""
    found = list(devices)
    return next((device for device in found if device.process_index == jax.process_index()), found[0])


def _is_stated(place: Any) -> bool:
    return place is None or isinstance(place, Sharding | PartitionSpec | Format)


def _without_layout(place: Any) -> Any:
    return place.sharding if isinstance(place, Format) else place


def _named(place: Any) -> Any:
    if isinstance(place, Format) and place.layout is not None:
        raise TraceError(
            f"{place} asks for a layout in memory, on a mesh. tensile_jax.jit gives none there: leave the layout out "
            "(pass the sharding), or use jax.jit for this step."
        )
    place = _without_layout(place)
    if not isinstance(place, PartitionSpec):
        return place
    mesh = mesh_in_force()
    return None if mesh is None else NamedSharding(mesh, place)


def _meshes(places: Sequence[tuple[str, Any]], named_by: Mapping[Device, str]) -> tuple[Mesh, ...]:
    """The meshes that are named, each once; all have all of these devices.

    Raises:
        TraceError: the devices are not those of one mesh.
    """
    found: dict[Mesh, None] = {}
    for name, place in places:
        if not any(True for _ in _devices_of(place)):
            continue
        mesh = place.mesh if isinstance(place, NamedSharding) else place
        if not isinstance(mesh, Mesh) or set(mesh.devices.flat) != set(named_by):
            devices = "; ".join(f"{device} by {by}" for device, by in named_by.items())
            raise TraceError(
                f"The step involves {len(named_by)} devices ({devices}), and {name} name some of them as {place}. Give every "
                "argument a NamedSharding on one mesh of all devices (jax.device_put), or use jax.jit for this step."
            )
        found[mesh] = None
    return tuple(found)


def _is_plain(sharding: Any) -> bool:
    if isinstance(sharding, jax.memory.Space):
        return True
    return isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind in (DEVICE, HOST, None)


def _devices_of(place: Any) -> Iterable[Device]:
    """The devices of a sharding or of a mesh; none if it names none, such as an abstract mesh."""
    if isinstance(place, Mesh):
        return place.devices.flat
    try:
        return place.device_set if isinstance(place, Sharding) else ()
    except ValueError:
        return ()


def _default_device() -> Device:
    """The device on which JAX runs a computation without committed arguments."""
    asked = getattr(jax.config, "jax_default_device", None)
    if isinstance(asked, str):  # the name of a platform
        return jax.local_devices(backend=asked)[0]
    return jax.local_devices()[0] if asked is None else asked
