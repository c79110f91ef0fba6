"""Computes how long a copy between device memory and host memory takes.

    copy_out_us = nbytes / device_to_host_bytes_per_us
    copy_in_us  = nbytes / host_to_device_bytes_per_us

The link between the two memories has one lane for each direction, and copies in opposite directions do not slow each other down.
The time that the host takes to issue a copy is not counted. A copy also slows down the computation meanwhile;
`result/simulate.py` counts that.

Sizes in bytes, times in microseconds.
"""

from tensile_jax.plan.analysis.device_profile import DeviceProfile


def copy_out_us(nbytes: float, profile: DeviceProfile) -> float:
    """Microseconds to copy `nbytes` from the device to the host."""
    return nbytes / profile.device_to_host_bytes_per_us


def copy_in_us(nbytes: float, profile: DeviceProfile) -> float:
    """Microseconds to copy `nbytes` from the host to the device."""
    return nbytes / profile.host_to_device_bytes_per_us
