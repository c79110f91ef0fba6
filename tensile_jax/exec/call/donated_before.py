"""Remembers which arrays were donated to earlier calls, so that an error about the use of such an array can name that call.

JAX's own error for an array that is used after it was donated names neither the array nor the call. So a function that donates
arguments keeps weak references to the donated arrays of its first call and of its latest ones. Weak references keep no array in
memory. They cost about 0.02 ms a call for 300 arrays.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from tensile_jax.exec.call.user_code import line_of_the_user
from tensile_jax.ir import Graph
from tensile_jax.trace.reading.source_lines import name_of_line

_LATEST = 8  # calls of a function, beside its first one


@dataclass(frozen=True, slots=True)
class _Donation:
    """The arrays that were donated to one call: `arrays[i]` as argument `names[i]`."""

    function: str
    option: str
    number: int
    line: tuple[str, int]
    names: Sequence[str]
    arrays: Sequence[Any]


class Donations:
    """The donations to the calls of one function.

    Args:
        function: the name of the function.
        option: what the user has given to `jit`, such as `donate_argnums=0`; empty if the function donates nothing.
    """

    def __init__(self, function: str, option: str) -> None:
        self._function = function
        self._option = option
        self._numbers = count(1)
        self._first: _Donation | None = None
        self._latest: deque[_Donation] = deque(maxlen=_LATEST)
        if option:
            _ALL.add(self)

    def note(self, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Record that these arrays, with these names, were donated to a call that has ended."""
        if not arrays:
            return
        try:
            references = list(map(weakref.ref, arrays))
        except TypeError:  # a number
            references = [weakref.ref(one) if isinstance(one, jax.Array) else None for one in arrays]
        made = _Donation(self._function, self._option, next(self._numbers), line_of_the_user(), names, references)
        if self._first is None:
            self._first = made
        self._latest.append(made)

    def __iter__(self) -> Iterator[_Donation]:
        if self._first is not None:
            yield self._first
        yield from tuple(self._latest)


_ALL: "weakref.WeakSet[Donations]" = weakref.WeakSet()


def explain_deleted(error: Exception, graph: Graph, arguments: Sequence[Any]) -> None:
    """Add a note to an error about a deleted argument, if the argument was donated to a call that is remembered.

    Args:
        graph: that of the step which is called with these arguments.
    """
    if "deleted" not in str(error) and "donated" not in str(error):
        return
    for tensor, argument in zip(graph.inputs, arguments, strict=True):
        if not isinstance(argument, jax.Array) or not argument.is_deleted():
            continue
        found = _donation_of(argument)
        if found is not None:
            donation, donated_as = found
            error.add_note(
                f"Argument {graph.tensors[tensor].name} of {graph.name!r} was donated to call {donation.number} of "
                f"{donation.function!r}, at {name_of_line(*donation.line)}, as its argument {donated_as} ({donation.option}). "
                f"That call has deleted it. Use what the call returned, or leave out {donation.option.partition('=')[0]}."
            )
            return


def _donation_of(array: jax.Array) -> tuple[_Donation, str] | None:
    """The earliest remembered call that the array was donated to, and the name of the argument there."""
    for donations in tuple(_ALL):
        for donation in donations:
            for name, reference in zip(donation.names, donation.arrays, strict=True):
                if reference is not None and reference() is array:
                    return donation, name
    return None
