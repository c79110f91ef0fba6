"""Lists the ways of launching a plan that have been seen to work on GPUs. `launch="auto"` uses a way only if it is listed here.

One such way is to run a whole step as one executable that also makes the copies to and from the host. A way is added when `pytest
-m gpu` and a long training beside plain `jax.jit` (`make gpu-results`) have passed with it, on that kind of GPU
(`jax.Device.device_kind`) and under that version of JAX. Until then, users ask for it by its name:

    way                      asked for by
    program with copies      launch="one_program"
"""

from typing import Literal, NamedTuple

Way = Literal["program with copies"]


class Seen(NamedTuple):
    """A way of launching a step, and where it has been seen to work: the kind of GPU, and the version of JAX (`0.11.2`)."""

    way: Way
    device_kind: str
    jax_version: str


SEEN: frozenset[Seen] = frozenset()
"""No way in the docstring's table has run on a GPU yet."""


def is_seen(way: Way, device_kind: str, jax_version: str) -> bool:
    """Whether a way of launching has been seen to work on this kind of GPU, under this version of JAX."""
    return Seen(way, device_kind, jax_version) in SEEN
