"""Decides to which device of a cluster a job goes, and under which limit of memory it is planned.

A job may go to a device if the runtime's own rule admits it beside the jobs that are there (`plan/multi_job/admission.py`). Of
these devices it goes to the one with the least predicted time of an iteration there, which is also the one with the least
predicted slowdown:

    slowdown_j   = time_j / (step_us of j, alone on the fastest kind of device)
    time_j       = step_us * (sum over the jobs k that are there and run, and j, of weight_k) / weight_j * change
    change       = 1                  if the job fits while the others keep their state on the device
                   1 + 1/COPY_TIMES   otherwise: parked jobs change places after computing for `COPY_TIMES` copies of a state

Of equal devices it goes to the one with the fewest jobs, and then to the first.

*The limit.* A job's segments depend on the limit for which the job is planned, and its rounding depends on the segments. So the
limit must depend neither on the jobs that happen to be on a device nor on time. It is chosen by what is known when the job is
submitted: it leaves room for as many jobs like this one as come to a device if all jobs are spread evenly.

    limit   = budget - (neighbours - 1) * state_bytes,     neighbours = ceil(jobs submitted together / devices)

A job for which there is no such plan has the plan for the whole budget, as in a `Runtime`: then jobs are parked in turns.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensile_jax.plan.multi_job.admission import admits
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.ray.records import Device, DeviceId, Outline
from tensile_jax.units import format_bytes

COPY_TIMES = 20.0
"""How many times longer a job computes than its state is copied, before another takes its place (`exec/controller`)."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A job that is on a device. `weight` is its priority; zero if it is paused."""

    memory: MemoryProfile
    weight: float


@dataclass(frozen=True, slots=True)
class Place:
    """A device, the jobs that are there, and what the new job needs on this kind of device."""

    device: Device
    residents: tuple[Resident, ...]
    memory: MemoryProfile


def limit_of(budget_bytes: int, state_bytes: int, neighbours: int) -> int:
    """The limit as above; the whole budget if so many states leave no room."""
    limit = budget_bytes - (neighbours - 1) * state_bytes
    return limit if limit > 0 else budget_bytes


def predicted_us(place: Place, weight: float) -> float:
    """The predicted time of an iteration of the new job, of that weight, at a place."""
    memory = place.memory
    idle = sum(one.memory.idle_bytes for one in place.residents)
    turns = idle + memory.peak_bytes > place.device.budget_bytes
    share = (sum(one.weight for one in place.residents) + weight) / weight
    return memory.step_us * share * (1 + 1 / COPY_TIMES if turns else 1.0)


def choose_place(places: Sequence[Place], weight: float) -> DeviceId | None:
    """The device to which the new job goes; None if it fits nowhere now."""
    fitting = [
        (predicted_us(place, weight), len(place.residents), index)
        for index, place in enumerate(places)
        if admits(
            place.memory,
            [one.memory for one in place.residents],
            budget_bytes=place.device.budget_bytes,
            host_budget_bytes=place.device.host_budget_bytes,
        )
    ]
    return places[min(fitting)[2]].device.id if fitting else None


def refusal(name: str, needs: Sequence[tuple[Device, Outline]], devices: int) -> str:
    """Why a job fits on none of these devices, even alone; empty if it fits on one.

    `needs` are the devices that there are, each with the job's outline there. `devices` is how many devices the job needs.
    """
    if devices > (most := max((device.devices for device, _ in needs), default=0)):
        return f"devices={devices} of {name}: no actor of this cluster holds more than {most}. Ask for at most {most}."
    short: list[tuple[int, str]] = []
    for device, outline in needs:
        if devices > device.devices:
            continue
        if outline.memory is None:
            floor, budget = outline.floor_bytes, device.budget_bytes
            story = f"no plan keeps the budget of {format_bytes(budget)} a device. The smallest that works is about "
            short.append((floor, f"{name} fits on no device: {story}{format_bytes(floor)}."))
            continue
        least = outline.memory.host_bytes
        if least <= device.host_budget_bytes:
            return ""
        story = f"host_budget={format_bytes(device.host_budget_bytes)} is too small. Give it at least {format_bytes(least)}."
        short.append((least, f"{name} fits on no device: {story}"))
    return min(short)[1]
