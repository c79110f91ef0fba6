"""Decides to which device of a cluster a job goes, and with how much memory the job is planned.

Here, a "device" is what one Ray actor holds: one JAX device of a node, or a group of them. A job that is divided among the JAX
devices of a group needs the same memory on each of them. So all sizes are those of one JAX device.

A job may go to a device if the `Runtime` there would admit the job beside those on the device (`plan/multi_job/admission.py`).
Of these devices, the job goes to the one with the least time_j, the predicted time of one iteration of job j. The predicted
slowdown of the job is smallest there, too, because the slowdown is time_j divided by a number that is the same for all devices:

    slowdown_j   = time_j / (step_us of job j on the fastest kind of device)
    time_j       = step_us * total / weight_j * change
    step_us      = the predicted time of an iteration of job j, alone on the device
    total        = the sum of the weights (priorities) of job j and of all jobs that run on the device
    change       = 1                  if the job fits while the others keep their state on the device
                   1 + 1/COPY_TIMES   otherwise: jobs take turns on the device. Each turn lasts `COPY_TIMES` times as long as the
                                      copy of a state (`exec/controller/fair_share.py`)

If time_j is equal on several devices, the job goes to the one with the fewest jobs, then to the smallest group, then to the
first.

*The limit* is the memory for which a job is planned. The job's plan depends on the limit, and if another plan cuts the step
elsewhere, XLA rounds the results differently. A job must have the same results wherever it runs. So its limit must not depend
on the jobs that happen to be on a device, or on time. The limit is chosen once, when the job is submitted. `neighbours` is the
number of jobs that each device would have if all jobs were spread evenly. This job is one of them. The limit leaves room for
the states of the others, as if each were as large as this job's state.

    limit      = budget - (neighbours - 1) * state_bytes
    neighbours = the larger of two values, for d = 1 and for d = the number of JAX devices that the job needs:
                 ceil(number of jobs submitted together that need at least d JAX devices
                      / number of actors that hold at least d JAX devices)

The value for the larger d matters because jobs that need d JAX devices can share only the actors that hold at least d of them.

If no plan keeps this limit, the job is planned for the whole budget, as in a `Runtime`. Then the jobs take turns: while one
computes, the states of the others are *parked* in host memory.

Sizes are in bytes, times in microseconds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tensile_jax.budget_errors import host_too_small_for_job_of_cluster, too_small_for_job_of_cluster
from tensile_jax.exec.controller.fair_share import COPY_TIMES
from tensile_jax.plan.multi_job.admission import admits
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.ray.records import Device, DeviceId, Outline


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


def divide_node(devices: int, per_actor: int) -> tuple[range, ...]:
    """The devices of each actor of a node: groups of `per_actor`, and actors of one device for the rest.

    >>> divide_node(6, 4)
    (range(0, 4), range(4, 5), range(5, 6))
    """
    grouped = devices - devices % per_actor
    groups = (range(first, first + per_actor) for first in range(0, grouped, per_actor))
    return (*groups, *(range(one, one + 1) for one in range(grouped, devices)))


def refuse_devices(needed: Mapping[str, int], per_actor: int | None, most: int, why: str) -> None:
    """Raises ValueError, with the reason `why`, if `per_actor` or one of the jobs asks for more than `most` devices."""
    if per_actor is not None and per_actor > most:
        raise ValueError(f"devices_per_actor={per_actor}: {why}.")
    for name, devices in needed.items():
        if devices > most:
            raise ValueError(f"devices={devices} of {name}: {why}.")


def neighbours_of(needed: int, asked: Collection[int], held: Collection[int]) -> int:
    """How many jobs share the device of a job on average, as above.

    Args:
        needed: how many devices the job needs.
        asked: how many devices each job of the submission needs.
        held: how many devices each actor holds.
    """
    return max(-(-sum(one >= d for one in asked) // max(sum(one >= d for one in held), 1)) for d in (1, needed))


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
        (predicted_us(place, weight), len(place.residents), place.device.devices, index)
        for index, place in enumerate(places)
        if admits(
            place.memory,
            [one.memory for one in place.residents],
            budget_bytes=place.device.budget_bytes,
            host_budget_bytes=place.device.host_budget_bytes,
        )
    ]
    return places[min(fitting)[-1]].device.id if fitting else None


def refusal(name: str, needs: Sequence[tuple[Device, Outline]]) -> str:
    """Why a job fits on none of these devices, even alone; empty if it fits on one.

    `needs` are the devices that there are for this job, at least one, each with the job's outline there.
    """
    short: list[tuple[int, str]] = []
    for device, outline in needs:
        if outline.memory is None:
            story = too_small_for_job_of_cluster(name, device.budget_bytes, outline.floor_bytes)
            short.append((outline.floor_bytes, story))
            continue
        least = outline.memory.host_bytes
        if least <= device.host_budget_bytes:
            return ""
        short.append((least, host_too_small_for_job_of_cluster(name, device.host_budget_bytes, least)))
    return min(short)[1]
