"""Computes how far two results of a step are from each other, and judges whether rounding explains it.

Let a be one output of the step under the plan, and b the same output of the reference. The reference is the step under plain
`jax.jit` or, if that does not fit on the device, under another plan. Let b' be that output when the reference runs under
another rounding (`reference.py`).

    absolute(a, b) = max |a - b| over the elements that are finite in both
    unlike(a, b)   = number of elements that are infinite or NaN in a or in b, and not the same in both (two NaNs are the same)

Floating-point numbers agree if both of these conditions hold:

    absolute(a, b) <= max(FACTOR * own, FLOOR * eps * max |b|)       own = max of absolute(b', b)
    unlike(a, b)   <= max of unlike(b', b)

The maxima over b' are taken over all other roundings and all steps so far; max |b| is taken over the finite elements of b.
FACTOR and FLOOR are constants of this module, and eps is the distance from 1 to the next larger number of the output's type.
Integers, booleans and keys agree if they are equal.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tensile_jax.checking.report import OutputCheck

FACTOR = 10.0
"""Smaller: a plan that only rounds otherwise is more often said to differ. Larger: more faults are overlooked. `tensile check gpt
--batch-size 4 --budget 60%` prints both figures; in four models, outputs were at most 3.1 times their own from plain jit's."""
FLOOR = 16.0
"""In units in the last place of the output's largest number, for outputs on which the other roundings happen to agree; the same
trade and the same command."""

_CHUNK = 1 << 22  # elements that are compared at once, so that little memory is needed beside the two arrays


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two arrays are from each other.

    Attributes:
        differing: how many elements are not equal; two NaNs are.
        absolute: as above; zero for numbers that must be equal.
        largest: the largest finite magnitude in the second array.
        unlike: how many elements are finite, infinite or NaN in one array and not in the other one.
        nans: how many elements are NaN in both.
    """

    differing: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    unlike: int = 0
    nans: int = 0


def is_rounded(dtype: Any) -> bool:
    """Whether numbers of this type are floating-point or complex ones."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def difference_of(a: np.ndarray, b: np.ndarray) -> Difference:
    """How far `a` is from `b`, an array of the same shape and type."""
    a, b = a.reshape(-1), b.reshape(-1)
    if not is_rounded(b.dtype):
        return Difference(differing=int(np.count_nonzero(a != b)))
    parts = [_of_chunk(a[at : at + _CHUNK], b[at : at + _CHUNK]) for at in range(0, b.size, _CHUNK)]
    return Difference(
        differing=sum(part.differing for part in parts),
        absolute=max((part.absolute for part in parts), default=0.0),
        largest=max((part.largest for part in parts), default=0.0),
        unlike=sum(part.unlike for part in parts),
        nans=sum(part.nans for part in parts),
    )


def _of_chunk(a: np.ndarray, b: np.ndarray) -> Difference:
    wide = np.complex128 if b.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    nans = np.isnan(a) & np.isnan(b)
    equal = (a == b) | nans
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):  # of the largest doubles
        absolute = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return Difference(
        differing=int(np.count_nonzero(~equal)),
        absolute=absolute,
        largest=float(np.abs(b[np.isfinite(b)]).max(initial=0.0)),
        unlike=int(np.count_nonzero(~finite & ~equal)),
        nans=int(np.count_nonzero(nans)),
    )


def widest(several: Iterable[Difference]) -> Difference:
    """The most of each figure."""
    found = list(several)
    return Difference(
        differing=max((one.differing for one in found), default=0),
        absolute=max((one.absolute for one in found), default=0.0),
        largest=max((one.largest for one in found), default=0.0),
        unlike=max((one.unlike for one in found), default=0),
        nans=max((one.nans for one in found), default=0),
    )


def judge(name: str, dtype: Any, shape: tuple[int, ...], steps: Sequence[tuple[int, Difference, Difference]]) -> OutputCheck:
    """The judgement on one output: at the first step at which it differs or, if it agrees, at which it is furthest from b.

    Args:
        steps: for each step at which the output was compared: its number, the difference from the reference, and that of the
            reference from itself.
    """
    own = Difference()
    judged: list[tuple[float, OutputCheck]] = []
    for step, ours, own_here in steps:
        own = widest((own, own_here))
        judged.append(_judged_at(name, dtype, shape, step, ours, own))
    return next((one for _, one in judged if not one.agrees), max(judged, key=lambda one: one[0])[1])


def _judged_at(
    name: str, dtype: Any, shape: tuple[int, ...], step: int, ours: Difference, own: Difference
) -> tuple[float, OutputCheck]:
    """How far the output is at one step, as a part of what is allowed, and the judgement."""
    if is_rounded(dtype):
        allowed = max(FACTOR * own.absolute, FLOOR * float(jnp.finfo(dtype).eps) * ours.largest)
        reason = _reason(ours, own, allowed)
        far = ours.absolute / allowed if allowed else float(ours.differing)
    else:
        reason = f"{ours.differing} of {math.prod(shape)} elements are not equal" if ours.differing else ""
        far = float(ours.differing)
    found = OutputCheck(
        name=name,
        dtype=str(dtype),
        shape=shape,
        agrees=not reason,
        reason=reason,
        step=step,
        differing=ours.differing,
        absolute=ours.absolute if is_rounded(dtype) else None,
        relative=_part(ours.absolute, ours.largest) if is_rounded(dtype) else None,
        own_absolute=own.absolute if is_rounded(dtype) else None,
        own_relative=_part(own.absolute, ours.largest) if is_rounded(dtype) else None,
        own_differing=own.differing,
        nans=ours.nans,
    )
    return far, found


def _reason(ours: Difference, own: Difference, allowed: float) -> str:
    if ours.unlike > own.unlike:
        return f"{ours.unlike} elements are finite, infinite or NaN on one side only"
    if ours.absolute > allowed:
        return f"the largest difference is {ours.absolute:.3g}, and rounding explains at most {allowed:.3g}"
    return ""


def _part(absolute: float, largest: float) -> float:
    """The difference as a part of the largest number; 1 if all numbers of the reference are zero and the other ones are not."""
    return absolute / largest if largest else float(absolute > 0)
