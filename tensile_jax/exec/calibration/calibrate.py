"""Calibrates a device, within a time limit, and chooses the profile of a device.

A calibration is kept after each of its stages (`measure.py`), so one that was interrupted goes on where it stopped.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version

from tensile_jax.device_profiles import calibrations, profile_for
from tensile_jax.device_profiles.calibrations import SCHEMA_VERSION, Calibration
from tensile_jax.exec.calibration.fit import fit
from tensile_jax.exec.calibration.measure import STAGES, rates_of
from tensile_jax.exec.calibration.operators import measured_operators
from tensile_jax.exec.step.transfer import Device
from tensile_jax.plan.analysis.device_profile import DeviceProfile

SECONDS, QUICK_SECONDS = 60.0, 10.0
"""How long a calibration takes, about; and a quick one, which is made by itself for a device that is not known."""

_RATES = 0.3
"""The part of the time in which rates are measured; in the rest, it is operators."""

Progress = Callable[[str, int, int], None]


def calibrate(device: Device, *, quick: bool = False, progress: Progress | None = None) -> Calibration:
    """Measure a device and keep the result. What an interrupted calibration has measured is not measured again.

    Args:
        progress: called as `progress(what, done, of)`.
    """
    kind, jaxlib = device.device_kind, version("jaxlib")
    kept = calibrations.read(kind)
    going_on = kept is not None and not kept.complete and kept.quick == quick
    made = kept if going_on else Calibration(SCHEMA_VERSION, kind, device.platform, jaxlib, _now(), quick, {}, {})
    assert made is not None
    seconds = QUICK_SECONDS if quick else SECONDS
    parts = len(STAGES) + 1
    for done, (name, measure) in enumerate(STAGES.items()):
        if progress is not None:
            progress(f"calibrating {kind}", done, parts)
        if name not in made.stages:
            made = replace(made, stages={**made.stages, name: tuple(measure(device, _RATES * seconds / len(STAGES)))})
            calibrations.write(made)
    if progress is not None:
        progress(f"calibrating {kind}", parts - 1, parts)
    operators = tuple(measured_operators(device, (1 - _RATES) * seconds))
    rates = rates_of(dict(made.stages))
    made = replace(made, made=_now(), operators=operators, rates=rates)
    calibrations.write_model(kind, made.made, fit(operators, rates["flops_per_us"], rates["bytes_per_us"]))
    calibrations.write(made)
    if progress is not None:
        progress(f"calibrating {kind}", parts, parts)
    return made


def profile_of(device: Device, name: str | None = None, progress: Progress | None = None) -> DeviceProfile:
    """The profile called `name`, or else that of the device. A device of an unknown kind is calibrated now, quickly.

    Raises:
        ValueError: there is no such profile.
    """
    found = profile_for(device.device_kind, name)
    if name is None and found.basis == "unknown":
        calibrate(device, quick=True, progress=progress)
        return profile_for(device.device_kind)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
