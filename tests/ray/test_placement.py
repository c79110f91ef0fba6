"""Where a job goes in a cluster, and for which limit it is planned."""

import random

import pytest

from tensile_jax.plan.multi_job.admission import admits
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.ray.placement import (
    Place,
    Resident,
    choose_place,
    divide_node,
    limit_of,
    neighbours_of,
    predicted_us,
    refusal,
    refuse_devices,
)
from tests.ray.profiles import device, memory, outline

NEW = memory(60, 10)


def place(name: str, *weights: float, budget: int = 100, parked: int = 0, new: MemoryProfile = NEW) -> Place:
    residents = tuple(Resident(memory(50, 10, parked=parked), weight) for weight in weights)
    return Place(device(name, budget), residents, new)


def test_a_job_goes_to_an_empty_device() -> None:
    assert choose_place([place("a", 1.0), place("b"), place("c", 1.0)], 1.0) == "b"


def test_of_equal_devices_a_job_goes_to_the_first() -> None:
    assert choose_place([place("a"), place("b")], 1.0) == "a"


def test_a_job_goes_where_the_others_have_the_least_priority() -> None:
    assert choose_place([place("a", 1.0, 1.0), place("b", 1.5)], 1.0) == "b"


def test_a_paused_job_takes_no_time_but_a_device_without_it_is_preferred() -> None:
    assert predicted_us(place("a", 0.0), 1.0) == predicted_us(place("b"), 1.0)
    assert choose_place([place("a", 0.0), place("b")], 1.0) == "b"


def test_a_job_goes_where_the_others_need_not_be_parked() -> None:
    tight, wide = place("a", 1.0, budget=60), place("b", 1.0, budget=70)
    assert predicted_us(tight, 1.0) == pytest.approx(1.05 * predicted_us(wide, 1.0))
    assert choose_place([tight, wide], 1.0) == "b"


def test_a_job_goes_to_the_kind_of_device_on_which_its_step_is_fastest() -> None:
    slow = memory(60, 10, step_us=300.0)
    assert choose_place([place("slow", new=slow), place("fast", 1.0)], 1.0) == "fast"


def test_a_job_waits_where_the_runtime_would_not_admit_it() -> None:
    assert choose_place([place("a", 1.0, parked=10, budget=65)], 1.0) is None
    assert choose_place([place("a", budget=59)], 1.0) is None
    assert choose_place([], 1.0) is None


def test_it_is_the_runtime_that_says_where_a_job_fits_and_the_prediction_where_it_goes() -> None:
    rng = random.Random(0)
    for _ in range(300):
        new = memory(rng.randrange(10, 80), 10, host=rng.randrange(5), step_us=rng.uniform(1, 9))
        places = [
            Place(
                device(str(number), rng.randrange(40, 100), host=rng.randrange(10)),
                tuple(
                    Resident(
                        memory(rng.randrange(10, 60), 10, parked=rng.randrange(10), host=rng.randrange(5)), rng.uniform(0, 3)
                    )
                    for _ in range(rng.randrange(4))
                ),
                new,
            )
            for number in range(rng.randrange(5))
        ]
        fitting = [
            one
            for one in places
            if admits(
                new,
                [resident.memory for resident in one.residents],
                budget_bytes=one.device.budget_bytes,
                host_budget_bytes=one.device.host_budget_bytes,
            )
        ]
        chosen = choose_place(places, 1.5)
        assert (chosen is None) == (not fitting)
        if chosen is not None:
            assert chosen in {one.device.id for one in fitting}
            times = {one.device.id: predicted_us(one, 1.5) for one in fitting}
            assert times[chosen] == min(times.values())


def test_the_limit_leaves_room_for_as_many_jobs_as_come_to_a_device_or_is_the_whole_budget() -> None:
    assert [limit_of(100, 30, neighbours) for neighbours in (1, 2, 4, 5)] == [100, 70, 10, 100]


def test_a_job_that_fits_alone_is_not_refused() -> None:
    assert refusal("job", [(device("a", 50), outline(None)), (device("b"), outline(100))]) == ""


def test_a_job_without_a_plan_is_refused_with_the_smallest_budget() -> None:
    needs = [(device("a", 100), outline(None, floor=300)), (device("b", 200), outline(None, floor=250))]
    assert refusal("job", needs) == (
        "job fits on no device: no plan keeps the budget of 200 B a device. The smallest that works is about 250 B."
    )


def test_a_job_that_needs_more_host_memory_is_refused() -> None:
    why = refusal("job", [(device("a", host=5), outline(100, host=7))])
    assert why == "job fits on no device: host_budget=5 B is too small. Give it at least 7 B."


def test_of_equal_places_a_job_goes_to_the_smallest_group() -> None:
    group = Place(device("group", devices=4), (), NEW)
    assert choose_place([group, place("single")], 1.0) == "single"
    assert choose_place([group, place("single", 1.0)], 1.0) == "group"


@pytest.mark.parametrize(
    ("devices", "per_actor", "firsts", "sizes"),
    [
        (4, 1, [0, 1, 2, 3], [1, 1, 1, 1]),
        (4, 4, [0], [4]),
        (8, 4, [0, 4], [4, 4]),
        (6, 4, [0, 4, 5], [4, 1, 1]),  # the rest of a node
        (3, 4, [0, 1, 2], [1, 1, 1]),
        (0, 4, [], []),
    ],
)
def test_a_node_is_divided_into_groups_and_single_devices(
    devices: int, per_actor: int, firsts: list[int], sizes: list[int]
) -> None:
    divided = divide_node(devices, per_actor)
    assert [one.start for one in divided] == firsts
    assert [len(one) for one in divided] == sizes
    assert [one for group in divided for one in group] == list(range(devices))


@pytest.mark.parametrize(
    ("needed", "asked", "held", "neighbours"),
    [
        (1, [1, 1, 1], [1, 1], 2),
        (4, [4, 1, 1, 1], [4], 4),  # the small jobs come to the only group
        (4, [4, 1, 1], [4, 1, 1], 1),
        (4, [4, 4, 4], [4, 1, 1], 3),  # no large job goes to a single device
        (1, [4, 4, 1], [4, 1, 1], 1),
        (4, [4, 4], [1], 2),  # no group has joined yet
        (1, [1, 1], [], 2),
    ],
)
def test_how_many_jobs_share_a_device_on_average(needed: int, asked: list[int], held: list[int], neighbours: int) -> None:
    assert neighbours_of(needed, asked, held) == neighbours


@pytest.mark.parametrize(
    ("per_actor", "story"), [(8, "devices_per_actor=8: no node has so many."), (None, "devices=6 of large: no node has so many.")]
)
def test_groups_that_no_node_has_are_refused_with_what_asks_for_them(per_actor: int | None, story: str) -> None:
    with pytest.raises(ValueError, match=story):
        refuse_devices({"small": 1, "large": 6}, per_actor, 4, "no node has so many")
    refuse_devices({"small": 1, "large": 6}, per_actor, 8, "no node has so many")
