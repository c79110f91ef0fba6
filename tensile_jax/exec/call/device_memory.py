"""Finds how much memory of a device is free for a step. The free memory is the budget of a call if the user gives no budget.

    free = (1 - margin) * limit of the device's allocator - (bytes in use - bytes of the step's own arguments)

A plan counts the step's arguments, so their bytes are not subtracted. Everything else in use on the device is: other models,
other states, results that somebody still refers to. All figures are read when the step is planned. If other code takes memory
later and the device runs out, the step is planned again for less.

The margin is for fragmentation: enough bytes may be free, while no free block is large enough. The margin is an assumption, not
a measurement.

The allocator of some devices, such as a CPU, reports no limit. For such a device the result is None, which means that there is
no limit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import msgspec

from tensile_jax.budget import Budget
from tensile_jax.exec.processes.agreement import ALONE, Agreement
from tensile_jax.exec.transfer import Device, nbytes_on_a_device, on_host

_MARGIN = 0.05  # of the allocator's limit


def free_memory(devices: Sequence[Device], arguments: Sequence[Any], agreement: Agreement = ALONE) -> Budget | None:
    """The budget for a step with these flat arguments, if the user gave none; None if the device's memory has no known limit.

    Of several devices, the one with the least free memory counts. Each process knows the memory of its own devices, and tells it
    to the other processes of the step.
    """
    own = [device for device in devices if device.process_index == jax.process_index()]
    found = [budget for device in own if (budget := _free_on(device, arguments)) is not None]
    least = min(found, key=lambda budget: budget.resolve(0), default=None)
    told = agreement.gather(None if least is None else msgspec.to_builtins(least))
    known = [msgspec.convert(budget, Budget) for budget in told if budget is not None]
    return min(known, key=lambda budget: budget.resolve(0), default=None)


def _free_on(device: Device, arguments: Sequence[Any]) -> Budget | None:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    own = {id(value): value for value in arguments if isinstance(value, jax.Array) and _lies_on(value, device)}
    others = max(stats.get("bytes_in_use", 0) - sum(nbytes_on_a_device(value) for value in own.values()), 0)
    nbytes = max(int((1 - _MARGIN) * stats["bytes_limit"]) - others, 1)
    return Budget(
        nbytes, None, f"no budget was given: what is free on {device}, less {_MARGIN:.0%} of its memory for fragmentation"
    )


def _lies_on(value: jax.Array, device: Device) -> bool:
    """Whether the array is in the memory of the device."""
    return not value.is_deleted() and device in value.sharding.device_set and not on_host(value)
