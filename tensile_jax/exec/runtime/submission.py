"""Checks the arguments of `Runtime.submit`, and puts them into the record `Submission`.

All arguments are checked before the runtime takes the job's state from the user.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from tensile_jax.arguments import MOST, read_count, read_number, read_threshold, shown
from tensile_jax.budget import parse_budget
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.transfer import Device
from tensile_jax.plan import PolicyName, known_policy

Isolation = Literal["thread", "process"]

_MOST_NAME_BYTES = 200  # file systems allow 255, and `tensile run` makes file names that are a little longer


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A job as the user submitted it: the arguments of `Runtime.submit`. The first `first` of the steps are done already."""

    step: Callable[..., Any] | Entrypoint
    steps: int
    name: str
    priority: float
    cap_bytes: int | None
    max_swap_rate: float
    max_slowdown: float | None
    policy: PolicyName
    checkpoint_every: int | None
    isolation: Isolation
    renew_above: float | None = None
    plan_for_bytes: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        if not callable(self.step) and not isinstance(self.step, Entrypoint):
            raise TypeError(f"step must be a function (state, batch) -> (state, metrics), or an Entrypoint: got {self.step!r}.")
        for argument, value in (("steps", self.steps), ("checkpoint_every", self.checkpoint_every)):
            if argument == "checkpoint_every" and value is None:
                continue
            count = read_count(value)
            if count is None:
                raise ValueError(f"{argument} must be a whole number of at least 1, got {shown(value)}.")
            object.__setattr__(self, argument, count)
        priority, rate, slowdown = map(read_number, (self.priority, self.max_swap_rate, self.max_slowdown))
        if priority is None or not 0 < priority < MOST:
            raise ValueError(
                f"priority must be a number above zero, got {shown(self.priority)}. Twice the priority is twice the time."
            )
        if rate is None or not 0 <= rate <= 1:
            raise ValueError(f"max_swap_rate must be from 0 to 1, a part of what all jobs swap: got {shown(self.max_swap_rate)}.")
        if self.max_slowdown is not None and (slowdown is None or not 1 <= slowdown < float("inf")):
            raise ValueError(f"max_slowdown must be at least 1, times plain jit's step: got {shown(self.max_slowdown)}.")
        for argument, number in (("priority", priority), ("max_swap_rate", rate), ("max_slowdown", slowdown)):
            object.__setattr__(self, argument, None if number is None else float(min(number, MOST)))
        known_policy(self.policy)
        if self.isolation not in get_args(Isolation):
            raise ValueError(f'isolation must be "thread" or "process", got {self.isolation!r}.')
        object.__setattr__(self, "renew_above", read_threshold(self.renew_above))
        refuse_unfit_name(self.name)


def bytes_of(argument: str, value: Any) -> int:
    """A budget for several jobs, in bytes.

    Raises:
        ValueError: `value` is a share of a peak, or cannot be read.
    """
    budget = parse_budget(value)
    if budget.nbytes is None:
        raise ValueError(
            f'{argument}={value!r} is a share. Give bytes, or a size such as "8GiB". The peak of a job under plain jit, of which '
            "you may take a share, is tensile.jit(step, donate_argnums=0).jit_peak_bytes(state, batch)."
        )
    return budget.nbytes


def refuse_incomplete_job(step: Any, state: Any, batches: Any) -> None:
    """Raises TypeError if state or batches are given beside an entrypoint, or if batches are missing without one."""
    if isinstance(step, Entrypoint):
        for argument, value in (("state", state), ("batches", batches)):
            if value is not None:
                raise TypeError(f"{argument} is given beside {step!r}, which makes it. Leave {argument} out.")
    elif batches is None:
        raise TypeError("batches must be an iterable or a function that gives one, got None. Only an Entrypoint makes its own.")


def name_of(step: Any) -> str:
    """The default name of a job: the name of its step if that can be the name of a folder, otherwise "job"."""
    name = step.name if isinstance(step, Entrypoint) else getattr(step, "__name__", "")
    try:
        refuse_unfit_name(name)
    except (TypeError, ValueError):
        return "job"
    return name


def refuse_unfit_name(name: Any) -> None:
    """Raises TypeError or ValueError if `name` cannot name a folder and files, or cannot be shown on one line."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {name!r}.")
    if not name.isprintable() or not name.strip() or name != name.strip():
        raise ValueError(f"name must be a text without control characters, and without spaces at its ends: got {shown(name)}.")
    if "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name must be a text without '/' and '\\' that does not begin with '.': got {shown(name)}.")
    if (size := len(name.encode())) > _MOST_NAME_BYTES:
        raise ValueError(
            f"name must be a text of at most {_MOST_NAME_BYTES} bytes, since folders and files are called after it: got {size} "
            f"bytes, {shown(name)}."
        )


def refuse_unfit_state(name: str, state: Any, devices: Sequence[Device], isolation: Isolation) -> None:
    """Raises ValueError if an array of the state was deleted or is not on the runtime's devices; TypeError if a leaf is not for
    JAX.

    Args:
        devices: those of the runtime. The state is on the first of them, or divided among some or all.
    """
    device = devices[0]
    together: frozenset[Device] = frozenset()  # the devices among which the state is divided
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = f"state{jax.tree_util.keystr(path)} of {name!r}"
        try:
            jax.typeof(leaf)
        except TypeError as error:
            raise TypeError(
                f"{where} is a {type(leaf).__name__}, with which JAX does not compute: {error}. Keep it out of the state."
            ) from error
        if not isinstance(leaf, jax.Array):
            continue
        if isinstance(leaf, Tracer):
            raise TypeError(f"{where} is a tracer. Submit jobs outside of functions that JAX transforms, such as jax.jit.")
        if leaf.is_deleted():
            raise ValueError(
                f"{where} has been given away, to another job or to a step that it was "
                "donated to. Give each job a state of its own, such as jax.tree.map(jnp.copy, state), made before."
            )
        there = frozenset(leaf.devices())
        if len(there) > 1:
            if not there <= set(devices):
                raise ValueError(
                    f"{where} is spread over {len(there)} devices, and the runtime has {', '.join(map(str, devices))}. Make the "
                    "runtime with Runtime(..., devices=...), or bring the state to one device: jax.device_put(state, device)."
                )
            if not isinstance(leaf.sharding, NamedSharding) or not there == (together or there):
                raise ValueError(
                    f"{where} is divided as {leaf.sharding}. All arrays of a state that is on several devices must have a "
                    "NamedSharding over the same devices: jax.device_put(state, sharding)."
                )
            if isolation == "process":
                raise ValueError(
                    f'{where} is spread over {len(there)} devices, and isolation="process" is for one. Pass isolation="thread".'
                )
            together = there
        elif leaf.committed and there != {device} and not there <= together:
            raise ValueError(
                f"{where} is on {next(iter(there))}, and the runtime on {device}. Bring it there, with jax.device_put(state, "
                "device), or make the runtime on the other one: Runtime(..., device=device)."
            )
