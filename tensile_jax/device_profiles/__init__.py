"""Finds and reads the device profiles that come with the package, and chooses the one for a device.

A profile is a TOML file with the rates of one device, in bytes or operations per microsecond.
"""

import tomllib
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

from tensile_jax.plan.analysis.device_profile import DeviceProfile


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that come with the package."""
    here = files("tensile_jax.device_profiles")
    return tuple(sorted(p.name.removesuffix(".toml") for p in here.iterdir() if p.name.endswith(".toml")))


def profile_for(platform: str, name: str | None = None) -> DeviceProfile:
    """The profile for a device of a JAX platform: the one called `name`, or else `cpu` for a CPU and `h200` for others.

    Raises:
        ValueError: as `load_profile`.
    """
    return load_profile(name or ("cpu" if platform == "cpu" else "h200"))


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
    elif name in profile_names():
        values = tomllib.loads((files("tensile_jax.device_profiles") / f"{name}.toml").read_text(encoding="utf-8"))
    else:
        raise ValueError(
            f"device_profile {name!r} is not known. Known: {', '.join(profile_names())}; or give the path of a .toml file."
        )
    wanted = {field.name for field in fields(DeviceProfile)}
    missing, unknown = sorted(wanted - set(values)), sorted(set(values) - wanted)
    if missing or unknown:
        raise ValueError(f"device_profile {name!r}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}.")
    return DeviceProfile(**values)
