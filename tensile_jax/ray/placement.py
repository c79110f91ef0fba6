"""Decides to which device of a cluster a job goes, and under which limit of memory it is planned.

A "device" is here what one actor holds: one device of a node, or a group of them. A job may be divided among the devices of a
group, and counts on each of them alike, so all sizes are those of one device, as in a `Runtime` with several devices.

A job may go to a device if the runtime's own rule admits it beside the jobs that are there (`plan/multi_job/admission.py`). Of
these devices it goes to the one with the least predicted time of an iteration there, which is also the one with the least
predicted slowdown:

    slowdown_j   = time_j / (step_us of j, alone on the fastest kind of device)
    time_j       = step_us * (sum over the jobs k that are there and run, and j, of weight_k) / weight_j * change
    change       = 1                  if the job fits while the others keep their state on the device
                   1 + 1/COPY_TIMES   otherwise: jobs change places after computing for `COPY_TIMES` copies of a state, by the
                                      rule of the runtime (`exec/controller/fair_share.py`)

Of equal devices it goes to the one with the fewest jobs, then to the smallest group, and then to the first.

*The limit.* A job's plan depends on the limit of memory for which it is made, and XLA rounds floating-point results otherwise
where a plan cuts the step otherwise. A job shall have the same results wherever it runs, so its limit must depend neither on the
jobs that happen to be on a device nor on time. It is chosen once, when the job is submitted. If all jobs were spread evenly, some
number of them would come to each device; the limit leaves room for the states of so many jobs like this one.

    limit      = budget - (neighbours - 1) * state_bytes
    neighbours = max over d in (1, devices of the job) of
                 ceil(jobs submitted together that need at least d devices / actors that hold at least d)

A job for which there is no such plan has the plan for the whole budget, as in a `Runtime`: then jobs are parked in turns.

Sizes in bytes, times in microseconds.
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
