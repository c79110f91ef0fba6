"""Lists which ways of launching a plan were tested on which GPUs. Nothing is listed yet.

`launch="auto"` uses a way in the table below only if `SEEN` has an entry for this way, this kind of GPU
(`jax.Device.device_kind`) and this version of JAX. An entry is added when two tests have passed with this way on such a GPU:
`pytest -m gpu`, and a long training beside plain `jax.jit` (`make gpu-results`). Without an entry, the way is used only if the
user asks for it. Other ways, such as launching segments one by one, need no entry. A *program with copies* runs a whole step as
one executable that also makes the copies to and from the host:

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
