"""Computes how long a copy takes between device memory and host memory (or another memory where tensors wait).

    copy_out_us = nbytes / device_to_host_bytes_per_us
    copy_in_us  = nbytes / host_to_device_bytes_per_us

The link to each memory has one lane for each direction, and copies in different lanes do not slow each other down.
The time that the host takes to issue a copy is not counted. A copy also slows down the computation meanwhile;
`result/simulate.py` counts that.

Sizes in bytes, times in microseconds.
"""

from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan_format import Memory


def copy_out_us(nbytes: float, profile: DeviceProfile, memory: Memory = "host") -> float:
    """Microseconds to copy `nbytes` from the device to this memory."""
    return nbytes / profile.to_memory_bytes_per_us[memory]


def copy_in_us(nbytes: float, profile: DeviceProfile, memory: Memory = "host") -> float:
    """Microseconds to copy `nbytes` from this memory to the device."""
    return nbytes / profile.from_memory_bytes_per_us[memory]
