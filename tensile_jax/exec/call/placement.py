"""Find the device on which a call runs, and whether `jax.jit` would commit its results to that device.

`jax.jit` runs on the device to which arguments are committed, or which `in_shardings`, `out_shardings`, `device`, `backend` or
the mesh in force name. Without any of these it runs on the default device, and its results are not committed to it. A plan is
for one device, so a call that involves several devices is refused.
"""

from collections.abc import Mapping, Sequence
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
        committed: whether results are committed to it, as far as the call's arguments and options say.
        plain: whether every result of `jax.jit` has a `SingleDeviceSharding` in device memory. If not, only compiling the
            whole step tells its results' shardings.
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
    found: dict[Device, str] = {}
    plain = True
    committed = False
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        is_committed = leaf.committed if isinstance(leaf, jax.Array) else isinstance(leaf, jax.ShapeDtypeStruct)
        if not isinstance(sharding, Sharding) or not is_committed:
            continue
        committed = True
        plain = plain and _is_plain(sharding)
        found.update((device, "the arguments") for device in sharding.device_set if device not in found)
    for name in ("in_shardings", "out_shardings"):
        for sharding in jax.tree.leaves(options.get(name)):
            committed, plain = True, False
            if isinstance(sharding, Sharding):
                found.update((device, name) for device in sharding.device_set if device not in found)
    for sharding in named:
        committed, plain = True, plain and _is_plain(sharding)
        if isinstance(sharding, Sharding):
            found.update((device, "the step itself") for device in _devices_of(sharding) if device not in found)
    mesh = jax.sharding.get_mesh()
    if not mesh.empty and isinstance(mesh, Mesh):
        committed, plain = True, False
        found.update((device, "the mesh in force (jax.set_mesh)") for device in mesh.devices.flat if device not in found)
    if len(found) > 1:
        places = "; ".join(f"{device} by {name}" for device, name in found.items())
        raise TraceError(
            f"The step involves {len(found)} devices ({places}), and a plan is for one device. Put all arguments on one device "
            "with jax.device_put, or use jax.jit for this step."
        )
    device = next(iter(found)) if found else _default_device()
    return Placement(device, committed, plain)


def _is_plain(sharding: Any) -> bool:
    return isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind in (DEVICE, HOST, None)


def _devices_of(sharding: Sharding) -> set[Device]:
    """The devices of a sharding; none if it is on an abstract mesh."""
    try:
        return sharding.device_set
    except ValueError:
        return set()


def _default_device() -> Device:
    """The device on which JAX runs what is committed to none."""
    asked = getattr(jax.config, "jax_default_device", None)
    if isinstance(asked, str):  # the name of a platform
        return jax.local_devices(backend=asked)[0]
    return jax.local_devices()[0] if asked is None else asked
