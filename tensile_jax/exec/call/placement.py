"""Finds the device on which a call runs, and whether `jax.jit` would commit the call's results to that device.

`jax.jit` runs on the device to which arguments are committed, or on the device that is named by `in_shardings`, `out_shardings`,
`device`, `backend` or the mesh that is set. Without any of these it runs on the default device, and does not commit its results
to that device. A plan is for one device, so a call that involves several devices is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from tensile_jax.errors import TraceError
from tensile_jax.exec.step.transfer import DEVICE, HOST, Device


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a call, and whether its results are committed to it.

    Attributes:
        device: the one device on which all segments run.
        committed: whether results are committed to the device, as far as the call's arguments and options say.
        plain: whether every result of `jax.jit` has a `SingleDeviceSharding` in device memory. If not, the whole step must be
            compiled to find out its results' shardings.
    """

    device: Device
    committed: bool
    plain: bool


def placement_of(leaves: Sequence[Any], options: Mapping[str, Any], named: Sequence[Any]) -> Placement:
    """The placement of a call with these arguments (flat, without static ones) and these options of `jax.jit`.

    Args:
        named: shardings and memory spaces that the step itself names.

    Raises:
        TraceError: several devices are involved.
    """
    asked = options.get("device") or (jax.local_devices(backend=options["backend"])[0] if options.get("backend") else None)
    if asked is not None:
        return Placement(asked, True, True)
    given = [("the arguments", leaf.sharding) for leaf in leaves if _is_committed(leaf)]
    stated = [(name, place) for name in ("in_shardings", "out_shardings") for place in jax.tree.leaves(options.get(name))]
    inner = [("the step itself", place) for place in named]
    mesh = jax.sharding.get_mesh()
    in_force = [("the mesh in force (jax.set_mesh)", mesh)] if isinstance(mesh, Mesh) and not mesh.empty else []
    named_by: dict[Device, str] = {}
    for name, place in (*given, *stated, *inner, *in_force):
        for device in _devices_of(place):
            named_by.setdefault(device, name)
    if len(named_by) > 1:
        places = "; ".join(f"{device} by {name}" for device, name in named_by.items())
        raise TraceError(
            f"The step involves {len(named_by)} devices ({places}), and a plan is for one device. Put all arguments on one "
            "device with jax.device_put, or use jax.jit for this step."
        )
    return Placement(
        device=next(iter(named_by)) if named_by else _default_device(),
        committed=bool(given or stated or inner or in_force),
        plain=not stated and not in_force and all(_is_plain(place) for _, place in (*given, *inner)),
    )


def _is_committed(leaf: Any) -> bool:
    is_bound = leaf.committed if isinstance(leaf, jax.Array) else isinstance(leaf, jax.ShapeDtypeStruct)
    return is_bound and isinstance(leaf.sharding, Sharding)


def _is_plain(sharding: Any) -> bool:
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
