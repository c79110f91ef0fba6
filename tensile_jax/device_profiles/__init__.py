"""Finds and reads the device profiles that come with the package, and chooses the one for a device.

A profile is a TOML file with the rates of one kind of device, in bytes or operations per microsecond. The first of these profiles
that exists is chosen:

    1. what `tensile calibrate` has measured for this kind of device (`calibrations.py`)
    2. the profile for this kind of device that comes with the package
    3. the profile `unknown`, with which predicted times mean nothing

A profile for GPUs also says which kind of allocator hands out the device's memory. If its file names no `allocator`, the
profile has the one that JAX uses in this process, which the environment variables `XLA_PYTHON_CLIENT_ALLOCATOR` and
`XLA_PYTHON_CLIENT_PREALLOCATE` choose.
"""

import os
import re
import tomllib
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path

from tensile_jax.device_profiles import calibrations
from tensile_jax.plan.analysis.device_profile import Allocator, DeviceProfile

_UNKNOWN = "unknown"
"""The profile of a device of which nothing is known."""


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that come with the package for kinds of devices."""
    here = files("tensile_jax.device_profiles")
    names = {p.name.removesuffix(".toml") for p in here.iterdir() if p.name.endswith(".toml")}
    return tuple(sorted(names - {_UNKNOWN}))


def profile_for(device_kind: str, name: str | None = None) -> DeviceProfile:
    """The profile called `name`, or else the one for devices of this kind (`jax.Device.device_kind`), as above.

    Raises:
        ValueError: as `load_profile`.
    """
    if name is not None:
        return load_profile(name)
    shipped = shipped_profile(device_kind)
    measured = calibrations.read(device_kind)
    if measured is None or not measured.complete:
        return shipped
    return measured.profile(shipped, calibrations.read_model(device_kind, measured.made))


def shipped_profile(device_kind: str) -> DeviceProfile:
    """The profile that comes with the package for devices of this kind; `unknown` if there is none."""
    for name in profile_names():
        profile = load_profile(name)
        if any(re.fullmatch(kind, device_kind) for kind in profile.kinds):
            return profile
    return load_profile(_UNKNOWN)


def load_profile(name: str) -> DeviceProfile:
    """The profile of that name, or in that file if the name ends in `.toml`.

    Raises:
        ValueError: there is none, or its file cannot be read, or it lacks a rate, or has one that is not above zero.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.exists():
            raise ValueError(f"device_profile {name!r}: there is no such file.")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"device_profile {name!r} cannot be read: {what}. Give the .toml file of a profile.") from error
    elif name in (*profile_names(), _UNKNOWN):
        values = tomllib.loads((files("tensile_jax.device_profiles") / f"{name}.toml").read_text(encoding="utf-8"))
    else:
        raise ValueError(
            f"device_profile {name!r} is not known. Known: {', '.join(profile_names())}; or give the path of a .toml file."
        )
    wanted = {field.name for field in fields(DeviceProfile)}
    optional = {field.name for field in fields(DeviceProfile) if field.default is not MISSING}
    missing, unknown = sorted(wanted - optional - set(values)), sorted(set(values) - wanted)
    if missing or unknown:
        raise ValueError(f"device_profile {name!r}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}.")
    if values.get("platform") == "gpu":
        values.setdefault("allocator", _allocator_of_gpus())
    if isinstance(values.get("kinds"), list):
        values["kinds"] = tuple(values["kinds"])
    return DeviceProfile(**values)


def _allocator_of_gpus() -> Allocator:
    """How this process lets XLA hand out the memory of GPUs, which JAX reads from the same environment variables."""
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() not in ("default", "bfc"):
        return "exact"
    grows = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    return "growing" if grows else "best_fit"
