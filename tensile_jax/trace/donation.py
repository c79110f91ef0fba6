"""Which donated inputs a step takes, by the rule of `jax.jit`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.program import Atom


def taken_inputs(avals: Sequence[Any], inputs: Sequence[int], outputs: Sequence[Atom], usable: Sequence[bool]) -> list[bool]:
    """Whether each input is donated and an output takes over its memory; `usable` says which are donated and used.

    The rule is that of JAX's lowering (`_set_up_aliases`). First, each output in turn takes over the memory of the first usable
    input of its shape and dtype that is left. Then JAX gives each usable input that is left to XLA if an output that is left has
    as many elements, and XLA takes the input if an output that is left has as many bytes. All other inputs stay the caller's.
    """
    waiting: dict[Any, list[int]] = {}
    for place, (v, is_usable) in enumerate(zip(inputs, usable, strict=True)):
        if is_usable:
            waiting.setdefault(_form(avals[v]), []).append(place)
    taken = [False] * len(inputs)
    sizes_left: Counter[int] = Counter()
    bytes_left: Counter[int] = Counter()
    for atom in outputs:
        aval = avals[atom] if isinstance(atom, int) else atom.aval
        fitting = waiting.get(_form(aval))
        if fitting:
            taken[fitting.pop(0)] = True
        elif hasattr(aval, "size"):
            sizes_left[aval.size] += 1
            bytes_left[nbytes_of(aval)] += 1
    for place in sorted(place for places in waiting.values() for place in places):
        aval = avals[inputs[place]]
        if hasattr(aval, "size") and sizes_left[aval.size] > 0:
            sizes_left[aval.size] -= 1
            if bytes_left[nbytes_of(aval)] > 0:
                bytes_left[nbytes_of(aval)] -= 1
                taken[place] = True
    return taken


def _form(aval: Any) -> Any:
    """Shape and dtype. A token has neither; the result is then the abstract value itself."""
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else aval
