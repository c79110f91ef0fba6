"""Small memory profiles, outlines and devices for the tests of placement."""

from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, MemoryProfile
from tensile_jax.ray.records import Device, DeviceId, Kind, Outline

CPU = Kind("cpu")


def memory(peak: int, idle: int, *, parked: int = 0, host: int = 0, step_us: float = 100.0) -> MemoryProfile:
    """One launch that needs `peak`; `idle` bytes are held between iterations, `parked` of them even when the job is parked."""
    needs, holds = (idle, peak, idle), (idle, idle, idle, idle)
    return MemoryProfile((INSTANT, LAUNCH, INSTANT), needs, holds, parked, idle, host, step_us)


def outline(peak: int | None, *, limit: int = 100, idle: int = 10, floor: int = 1, host: int = 0) -> Outline:
    """A job with that peak; None: no plan keeps the budget."""
    return Outline(limit, floor, None if peak is None else memory(peak, idle, host=host))


def device(name: str, budget: int = 100, *, kind: Kind = CPU, host: float = float("inf"), devices: int = 1) -> Device:
    return Device(DeviceId(name), kind, budget, host, devices)
