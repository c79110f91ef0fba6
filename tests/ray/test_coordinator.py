"""What the coordinator of a cluster makes of Ray's nodes."""

from typing import Any

import pytest

pytest.importorskip("ray")

from tensile_jax.ray import coordinator  # noqa: E402 # needs Ray


def node(id: str, host: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": id, "NodeManagerHostname": host, "Alive": alive, "Resources": {"CPU": 8.0, **resources}}


def test_the_devices_of_each_node_are_divided_into_groups_which_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        node("1", "small", tensile_device=3.0),
        node("2", "large", GPU=6.0, tensile_device=4.0),
        node("3", "dead", alive=False, GPU=8.0),
        node("4", "bare"),
    ]
    monkeypatch.setattr(coordinator.ray, "nodes", lambda: nodes)
    found = [(slot.name, slot.key, slot.gpu, slot.devices, slot.of) for slot in coordinator._find_slots(4)]
    assert found == [
        ("large/devices-0-3", ("2", 0), True, 4, 6),
        ("large/devices-6-9", ("2", 6), False, 4, 4),
        ("large/device-4", ("2", 4), True, 1, 6),
        ("large/device-5", ("2", 5), True, 1, 6),
        ("small/device-0", ("1", 0), False, 1, 3),
        ("small/device-1", ("1", 1), False, 1, 3),
        ("small/device-2", ("1", 2), False, 1, 3),
    ]
    assert [slot.devices for slot in coordinator._find_slots(1)] == [1] * 13
