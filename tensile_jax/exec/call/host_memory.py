"""Finds how much host memory is free for the copies of a step or a runtime. This is the host budget if the user gives none.

    free      = rounded_down((1 - room) * min(memory / sharers, pool / devices)) + arguments        for each device
    memory    = the least of
                    MemAvailable of /proc/meminfo
                    limit - (used - inactive file pages)    of the process' control group, and of each group around it (versions
                                                            1 and 2 of control groups)
    sharers   = number of devices that share the machine's memory: those of this process, of the other processes of the step on
                this machine and, on a cluster, of the node's other device actors
    pool      = limit - used                                of XLA's pool of pinned host memory; only on a GPU
    devices   = number of the devices of the step or the runtime that this process has; each process has a pool of its own
    arguments = bytes of the step's own arguments in host memory: they are no longer free, but a plan counts them

If a step runs in several processes, each of them reads its own figures, and the least free memory counts. All figures are read
when the step is planned. `rounded_down` keeps the first four binary digits of a number, and sets all others to zero. So a
difference of a few megabytes mostly does not lead to another plan.

The room is a share left free for later allocations, of this process and others, and for fragmentation of the pool. On a CPU,
device memory lies in the same memory, but is not subtracted here. If nothing is known of host memory (on a system without /proc),
the result is None, which means that there is no limit. Sizes are in bytes.
"""

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tensile_jax.budget import Budget
from tensile_jax.exec.compiling.compiler import GPUS
from tensile_jax.exec.processes.agreement import ALONE, Agreement
from tensile_jax.exec.transfer import Device, nbytes_on_a_device, on_host

_ROOM = 0.1  # of what is free; an assumption, not a measurement
_DIGITS = 4
_POOL, _POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64  # XLA's default, in units of 2 ** 30 bytes
BASIS = f"no host_budget was given: what is free of host memory, less {_ROOM:.0%}"


def free_host_memory(
    devices: Sequence[Device],
    arguments: Sequence[Any] = (),
    agreement: Agreement = ALONE,
    *,
    others: int = 0,
    root: Path = Path("/"),
) -> Budget | None:
    """The host budget, on each device, of a step with these flat arguments; None if nothing is known of host memory.

    Each process finds out what is free where it runs, and tells it to the other processes of the step. The least counts.

    Args:
        others: how many devices of the machine other processes use, which need as much.
        root: the folder in which /proc and /sys lie.
    """
    own = [device for device in devices if device.process_index == jax.process_index()]
    here = available_bytes(root) if own else None
    pool = pool_bytes(own[0].platform, os.environ) if own else None
    told = agreement.gather(
        {
            "machine": platform.node(),
            "here": None if here is None else here // (len(own) + others),
            "pool": None if pool is None else pool // len(own),
        }
    )
    sharing = Counter(one["machine"] for one in told)
    found = [one["here"] // sharing[one["machine"]] for one in told if one["here"] is not None]
    found += [one["pool"] for one in told if one["pool"] is not None]
    if not found:
        return None
    held = {id(value): value for value in arguments if on_host(value) and not value.is_deleted()}
    arrived = max(agreement.gather(sum(map(nbytes_on_a_device, held.values()))))
    return Budget(max(rounded_down(int((1 - _ROOM) * min(found)) + arrived), 1), None, BASIS)


def rounded_down(nbytes: int) -> int:
    """The largest number of at most so many bytes that has four binary digits, and zeros behind them."""
    behind = max(nbytes.bit_length() - _DIGITS, 0)
    return nbytes >> behind << behind


def pool_bytes(platform: str, environment: Mapping[str, str]) -> int | None:
    """What is left in XLA's pool of pinned host memory for GPUs; None if the platform has none."""
    if platform not in GPUS:
        return None
    text = environment.get(_POOL, "").strip()
    limit = (int(text) if text.isdecimal() else _POOL_GIB) << 30
    arrays = (value for value in jax.live_arrays() if on_host(value) and not value.is_deleted())
    used = sum(shard.data.nbytes for value in arrays for shard in value.addressable_shards)
    return max(limit - used, 0)


def available_bytes(root: Path = Path("/")) -> int | None:
    """What the process can still allocate of the machine's memory; None if that is not known."""
    meminfo = _numbers(root / "proc/meminfo").get("MemAvailable:")
    found = [] if meminfo is None else [meminfo << 10]  # in KiB
    found += _left_in_groups(root)
    return max(min(found), 0) if found else None


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left to each control group that holds the process and has a limit of memory."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts, names = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts = ("sys/fs/cgroup/memory",)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for mount in mounts:
            group = root / mount / path.strip("/")  # inside of a container, the path may be that outside of it
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root / mount):
                    break
                limit, used = (_text(folder / name).strip() for name in names[:2])
                if limit.isdecimal() and used.isdecimal():  # "max" is no limit
                    yield int(limit) - int(used) + _numbers(folder / "memory.stat").get(names[2], 0)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file whose lines are `NAME NUMBER ...`."""
    split = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in split if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
