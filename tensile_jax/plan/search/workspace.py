"""Predicts the workspace of a segment, and remembers what XLA has reported for the segments that were compiled.

The workspace is the memory that a segment needs beside its inputs and results. It depends on the order of operators, which XLA
chooses. `segment_account.py` computes the workspace for two extreme orders, `late` and `early`. A linear function of these two
values, with the weights of the device profile, predicts the workspace:

    predicted = late_weight * late + early_weight * early
    workspace = measured                            if the same segment was compiled
              = predicted * ratio + margin          otherwise

`ratio` comes from the compiled segment whose operators overlap most with those of the segment. It is the size that XLA reported,
divided by the predicted size, kept between 1/4 and 4, and weighted by the overlap. `margin` begins at zero, and grows each time
compiling shows that a plan does not fit.

Two segments are the same if they run the same operators, compute the same tensors again and leave the same results. Sizes in
bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.search.segment_account import SegmentAccount

_MOST_RATIO = 4.0  # a prediction that is wrong by more says nothing of other segments; not tuned

SegmentKey = tuple[int, int, frozenset[TensorId], frozenset[TensorId]]
"""The first place of a segment, the place behind its last, and what it computes again and leaves behind, of significant
tensors."""


class Compared(NamedTuple):
    """A workspace as XLA reported it, and as it was predicted."""

    nbytes: int
    predicted: float


@dataclass(frozen=True, slots=True)
class CompiledSizes:
    """The sizes that compiling has shown, in bytes.

    `workspaces` is by segment. `whole` is the peak of the step as one executable. `margin` is added to the workspace of each
    segment that was not compiled yet.
    """

    workspaces: Mapping[SegmentKey, Compared] = field(default_factory=dict[SegmentKey, Compared])
    whole: int | None = None
    margin: int = 0


def predicted_workspace(account: SegmentAccount, profile: DeviceProfile) -> int:
    """The workspace of a segment before anything was compiled, rounded up."""
    return ceil(profile.late_weight * account.late + profile.early_weight * account.early)


def ratio_near(begin: int, end: int, measured: Mapping[SegmentKey, Compared]) -> float:
    """By how much predictions for the segment of the operators at places `[begin, end)` must be corrected."""
    closest, ratio = 0.0, 1.0
    for (a, b, _, _), (nbytes, predicted) in measured.items():
        common = min(end, b) - max(begin, a)
        if common > 0 and predicted > 0:
            overlap = common / (max(end, b) - min(begin, a))
            if overlap > closest:
                closest, ratio = overlap, min(max(nbytes / predicted, 1 / _MOST_RATIO), _MOST_RATIO)
    return 1 + closest * (ratio - 1)
