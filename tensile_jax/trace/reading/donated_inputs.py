"""Finds which donated inputs a step *takes*: those whose memory an output reuses.

A donated input is of use only if an output fits into its memory. `jax.jit` takes the inputs for which it finds such an output,
and leaves all others to the caller. JAX does not publish its rule for this; this module repeats it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensile_jax.trace.avals import in_host_memory, size_of
from tensile_jax.trace.program import Atom


class Taken(NamedTuple):
    """Whether each input is donated and an output takes over its memory.

    `crossed` are the pairs (input, output) of positions where the input is in host memory and the output is not, or the other way
    round. JAX does not check that. The process aborts when XLA has run such a step (jax 0.10 to 0.12, on a CPU).
    """

    inputs: list[bool]
    crossed: list[tuple[int, int]]


def taken_inputs(
    avals: Sequence[Any], inputs: Sequence[int], outputs: Sequence[Atom], usable: Sequence[bool], *, by_memory: bool = False
) -> Taken:
    """The inputs that are taken.

    Args:
        usable: for each input, whether it is donated and used.
        by_memory: whether JAX knows the memory of every argument and every result, and then compares these, too.

    This is the rule of JAX's lowering (`_set_up_aliases`). First, each output in turn takes over the memory of the first usable
    input of its shape and dtype that is left. Then JAX gives each remaining usable input to XLA if a remaining output has as many
    elements, and XLA takes the input if a remaining output has as many bytes in the same memory. All other inputs stay the
    caller's.
    """
    waiting: dict[Any, list[int]] = {}
    for place, (v, is_usable) in enumerate(zip(inputs, usable, strict=True)):
        if is_usable:
            waiting.setdefault(_form(avals[v], by_memory), []).append(place)
    taken = [False] * len(inputs)
    crossed: list[tuple[int, int]] = []
    sizes_left: Counter[int] = Counter()
    bytes_left: Counter[tuple[int, bool]] = Counter()
    for result, atom in enumerate(outputs):
        aval = avals[atom] if isinstance(atom, int) else atom.aval
        fitting = waiting.get(_form(aval, by_memory))
        if fitting:
            place = fitting.pop(0)
            taken[place] = True
            if in_host_memory(avals[inputs[place]]) != in_host_memory(aval):
                crossed.append((place, result))
        elif hasattr(aval, "size"):
            sizes_left[aval.size] += 1
            bytes_left[_room(aval)] += 1
    for place in sorted(place for places in waiting.values() for place in places):
        aval = avals[inputs[place]]
        if hasattr(aval, "size") and sizes_left[aval.size] > 0:
            sizes_left[aval.size] -= 1
            if bytes_left[_room(aval)] > 0:
                bytes_left[_room(aval)] -= 1
                taken[place] = True
    return Taken(taken, crossed)


def _room(aval: Any) -> tuple[int, bool]:
    """The bytes that a value takes, and whether it takes them in host memory."""
    return size_of(aval), in_host_memory(aval)


def _form(aval: Any, by_memory: bool) -> Any:
    """Shape and dtype, and the memory if it counts. A token has none of them; the result is then the abstract value itself."""
    return (aval.shape, aval.dtype, by_memory and in_host_memory(aval)) if hasattr(aval, "shape") else aval
