"""Calibrates a device within a time limit, and chooses the profile (the measured properties) of a device.

The results are stored after each stage (`measure.py`), so an interrupted calibration continues where it stopped.
"""

import warnings
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version

from tensile_jax.device_profiles import calibrations, profile_for
from tensile_jax.device_profiles.calibrations import SCHEMA_VERSION, Calibration
from tensile_jax.exec.calibration.measure import STAGES, rates_of
from tensile_jax.exec.calibration.operators import measured_operators
from tensile_jax.exec.transfer import Device
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.progress.display import DISPLAY
from tensile_jax.progress.phases import Progress

SECONDS, QUICK_SECONDS = 60.0, 10.0
"""How long a calibration takes, about; and a quick one, which is made by itself for a device that is not known."""

_RATES = 0.3
"""The part of the time in which rates are measured; in the rest, it is operators."""


def calibrate(device: Device, *, quick: bool = False, progress: Progress | None = None) -> Calibration:
    """Measure a device and keep the result. What an interrupted calibration has measured is not measured again.

    Args:
        progress: called as `progress(what, done, of)`.
    """
    from tensile_jax.exec.calibration.fit import fit  # imports Flax and optax, which is slow

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
    rates = rates_of(made.stages, made.platform)
    made = replace(made, made=_now(), operators=operators, rates=rates)
    calibrations.write_model(kind, made.made, fit(operators, rates["flops_per_us"], rates["bytes_per_us"]))
    calibrations.write(made)
    if progress is not None:
        progress(f"calibrating {kind}", parts, parts)
    return made


def profile_of(device: Device, name: str | None = None, progress: Progress | None = None) -> DeviceProfile:
    """The profile called `name`, or else that of the device. A device of an unknown kind is calibrated now, quickly.

    If that fails, a warning says so, and the profile is `unknown`.

    Args:
        progress: called as `progress(what, done, of)`. None: it is shown as a first call is.

    Raises:
        ValueError: there is no such profile.
    """
    kind = device.device_kind
    found = profile_for(kind, name)
    if name is not None or found.basis != "unknown":
        return found
    try:
        with DISPLAY.call(f"{kind} is not known and is measured once", progress):
            calibrate(device, quick=True, progress=progress or DISPLAY.tell)
    except Exception as error:
        warnings.warn(
            f"{kind} could not be measured ({type(error).__name__}: {error}), so plans for it are made with guessed rates. "
            "tensile calibrate tries again; device_profile= names a profile.",
            stacklevel=2,
        )
        return found
    return profile_for(kind)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
