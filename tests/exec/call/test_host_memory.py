"""What is free of host memory, from the files of a machine or a container, XLA's pool, and what the step brings along."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tensile_jax.exec.call import host_memory
from tensile_jax.exec.call.host_memory import BASIS, available_bytes, free_host_memory, pool_bytes, rounded_down
from tensile_jax.exec.processes.agreement import Alone

GIB = 2**30
V2 = {"proc__self__cgroup": "0::/\n"}
FAR = 9223372036854771712  # what version 1 shows for no limit


def machine(root: Path, **files: str) -> Path:
    """A root folder with 16 GiB available, and these files; "__" in a name stands for "/", and "0" for "."."""
    root.mkdir(exist_ok=True)
    for name, content in {"proc__meminfo": f"MemTotal: 99 kB\nMemAvailable:   {16 << 20} kB\n", **files}.items():
        path = root / name.replace("__", "/").replace("0", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 16),
        (V2, 16),
        # version 2, in a container: the files are those of its own group
        (V2 | {"sys__fs__cgroup__memory0max": f"{4 * GIB}\n", "sys__fs__cgroup__memory0current": "0\n"}, 4),
        (V2 | {"sys__fs__cgroup__memory0max": "max\n", "sys__fs__cgroup__memory0current": "7\n"}, 16),
        # a group inside of another one with a lower limit, of which half is used, and half of that can be reclaimed
        (
            {
                "proc__self__cgroup": "0::/slice/job\n",
                "sys__fs__cgroup__slice__job__memory0max": f"{6 * GIB}",
                "sys__fs__cgroup__slice__job__memory0current": f"{1 * GIB}",
                "sys__fs__cgroup__slice__memory0max": f"{4 * GIB}",
                "sys__fs__cgroup__slice__memory0current": f"{2 * GIB}",
                "sys__fs__cgroup__slice__memory0stat": f"anon 5\ninactive_file {1 * GIB}\n",
            },
            3,
        ),
        # version 1, beside version 2; in a container whose path is the one outside
        (
            {
                "proc__self__cgroup": "5:cpu,memory:/docker/abc\n2:cpuset:/\n0::/\n",
                "sys__fs__cgroup__memory__memory0limit_in_bytes": f"{8 * GIB}",
                "sys__fs__cgroup__memory__memory0usage_in_bytes": f"{3 * GIB}",
            },
            5,
        ),
        (
            {
                "proc__self__cgroup": "4:memory:/a\n",
                "sys__fs__cgroup__memory__a__memory0limit_in_bytes": f"{2 * GIB}",
                "sys__fs__cgroup__memory__a__memory0usage_in_bytes": f"{3 * GIB}",
                "sys__fs__cgroup__memory__memory0limit_in_bytes": f"{FAR}",
                "sys__fs__cgroup__memory__memory0usage_in_bytes": "5",
            },
            0,
        ),
        ({"proc__meminfo": "nothing that is known\n"}, None),
    ],
)
def test_what_a_machine_or_its_control_groups_leave_is_available(files: dict[str, str], gib: int | None, tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path / "root", **files)) == (None if gib is None else gib * GIB)


def test_where_there_are_no_such_files_nothing_is_known_and_there_is_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert free_host_memory(jax.devices()[:1], root=tmp_path) is None


def test_a_tenth_is_left_and_the_rest_is_divided_among_the_devices_and_rounded_down(tmp_path: Path) -> None:
    root, device = machine(tmp_path / "root"), jax.devices()[0]
    one = free_host_memory([device], root=root)
    assert one is not None and one.basis == BASIS
    assert 0.9 * 0.9 * 16 * GIB < (one.nbytes or 0) <= 0.9 * 16 * GIB
    half = free_host_memory([device], root=machine(tmp_path / "half", proc__meminfo=f"MemAvailable: {8 << 20} kB\n"))
    assert free_host_memory([device, device], root=root) == half
    assert free_host_memory([device], root=root, others=1) == half


def test_rounding_keeps_four_binary_digits() -> None:
    assert [rounded_down(n) for n in (0, 5, 15, 16, 17, 31, 32, 0b1101_1111)] == [0, 5, 15, 16, 16, 30, 32, 0b1101_0000]


def test_arguments_in_host_memory_are_not_lacking(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", proc__meminfo="MemAvailable: 0 kB\n")
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    held = jax.device_put(jnp.ones(1024), there)
    found = free_host_memory(jax.devices()[:1], [held, held, jnp.ones(8), 1.0], root=root)
    assert found is not None and found.nbytes == 4096
    nothing = free_host_memory(jax.devices()[:1], [], root=root)
    assert nothing is not None and nothing.nbytes == 1


def test_the_pool_of_a_gpu_is_what_its_variable_says_less_what_is_in_it() -> None:
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    before = pool_bytes("cuda", {})
    held = jax.device_put(jnp.ones(1024), there)
    assert before is not None and before <= 64 * GIB
    assert pool_bytes("cuda", {}) == before - held.nbytes
    assert pool_bytes("gpu", {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "2"}) == before - held.nbytes - 62 * GIB
    assert pool_bytes("gpu", {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "much"}) == before - held.nbytes
    assert pool_bytes("cpu", {}) is None


def test_the_process_with_the_least_counts_and_those_of_one_machine_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory.platform, "node", lambda: "a")

    def of(*others: dict[str, Any]) -> int | None:
        class Several(Alone):
            def gather(self, value: Any) -> list[Any]:
                return [value, *(others if isinstance(value, dict) else [0 for _ in others])]

        found = free_host_memory(jax.devices()[:1], [], Several(), root=machine(tmp_path / "root"))
        return None if found is None else found.nbytes

    assert of({"machine": "b", "here": GIB, "pool": None}) == rounded_down(int(0.9 * GIB))
    assert of({"machine": "b", "here": 99 * GIB, "pool": 4 * GIB}) == rounded_down(int(0.9 * 4 * GIB))
    assert of({"machine": "a", "here": 16 * GIB, "pool": None}) == rounded_down(int(0.9 * 8 * GIB))
    assert of({"machine": "b", "here": None, "pool": None}) == rounded_down(int(0.9 * 16 * GIB))
