"""Predicts the workspace of a segment, and remembers what XLA has reported for the segments that were compiled.

A *segment* is a stretch of operators that is compiled as one executable. Its *workspace* is the memory that it needs beside its
inputs and results. The workspace depends on the order of operators, which XLA chooses. `segment_account.py` computes two
values, for two extreme orders: operators that are computed again run as late as possible (`late`), or at the beginning of the
segment (`early`). A linear function of the two values, with the weights of the device profile, predicts the workspace:

    predicted = late_weight * late + early_weight * early
    workspace = measured                                                        if the same segment was compiled
              = predicted * ratio + results * copied + margin                   otherwise

`ratio` and `copied` correct a prediction by what XLA has reported for compiled segments that share operators with this segment.
From each compiled segment, the module computes a ratio: the reported workspace divided by the predicted one, but at most 4. If
the reported workspace is more than 4 times the predicted one, the module assumes that XLA has copied results that were expected
to take over the memory of inputs. Then `copied` is the part above 4 times, divided by the size of the compiled segment's
results. `correction` combines the values of several compiled segments. In the formula, `results` is the size of this segment's
results. `margin` begins at zero, and grows each time compiling shows that a plan does not fit.

Two segments are the same if they run the same operators, compute the same tensors again and leave the same results. Sizes in
bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.search.cost.segment_account import SegmentAccount

_MOST_RATIO, _MOST_COPIES = 4.0, 2.0  # a prediction that is wrong by more says nothing of other segments; not tuned

SegmentKey = tuple[int, int, frozenset[TensorId], frozenset[TensorId]]
"""The first place of a segment, the place behind its last, and what it computes again and leaves behind, of significant
tensors."""


class Compared(NamedTuple):
    """A workspace as XLA reported it, and as it was predicted; and the size of the segment's results."""

    nbytes: int
    predicted: float
    result_bytes: int = 0


class Correction(NamedTuple):
    """How a prediction is corrected: `predicted * ratio + results * copied`."""

    ratio: float
    copied: float


def _shown(found: Compared) -> Correction:
    """The correction that makes a prediction right: by the ratio, and by copies as far as the ratio would be above 4."""
    ratio = found.nbytes / found.predicted if found.predicted > 0 else _MOST_RATIO
    ratio = min(max(ratio, 1 / _MOST_RATIO), _MOST_RATIO)
    beyond = max(0.0, found.nbytes - ratio * found.predicted)
    return Correction(ratio, min(beyond / found.result_bytes, _MOST_COPIES) if found.result_bytes else 0.0)


@dataclass(frozen=True, slots=True)
class CompiledSizes:
    """The sizes that compiling has shown, in bytes.

    `workspaces` is by segment. `whole` is the peak of the step as one executable. `margin` is added to the workspace of each
    segment that was not compiled yet. `prior` is the ratio by which predictions are corrected where no segment was compiled yet.
    `alike` are workspaces of the same step on other shapes, which correct predictions in the same way as `workspaces`.
    `cautious` says whether a part of a compiled segment is expected to exceed its prediction in the same ratio as that segment.
    With `corrects` false, no prediction is corrected.
    """

    workspaces: Mapping[SegmentKey, Compared] = field(default_factory=dict[SegmentKey, Compared])
    whole: int | None = None
    margin: int = 0
    prior: float = 1.0
    alike: Mapping[SegmentKey, Compared] = field(default_factory=dict[SegmentKey, Compared])
    cautious: bool = False
    corrects: bool = True

    @property
    def compared(self) -> Mapping[SegmentKey, Compared]:
        """The workspaces by which predictions are corrected."""
        return {**self.alike, **self.workspaces} if self.corrects else {}

    def without_hints(self) -> "CompiledSizes":
        """Only what compiling has shown of this step."""
        return replace(self, margin=0, prior=1.0, alike={}, cautious=False)

    def without_corrections(self) -> "CompiledSizes":
        """Only the sizes of compiled segments themselves; those of all others are as predicted at first."""
        return replace(self.without_hints(), corrects=False)


def predicted_workspace(account: SegmentAccount, profile: DeviceProfile) -> int:
    """The workspace of a segment before anything was compiled, rounded up."""
    return ceil(profile.late_weight * account.late + profile.early_weight * account.early)


def correction(begin: int, end: int, measured: CompiledSizes) -> Correction:
    """How the prediction for the segment of the operators at places `[begin, end)` is corrected.

    Each of its operators takes the correction of the compiled segment that has the most in common with this segment and contains
    the operator; the ratio is `measured.prior` if there is none. The result is the mean over the operators. A ratio below 1
    counts less, the more operators the two segments do not share: XLA may need little for a segment, and still all that was
    predicted for a part of it. A ratio above 1 does so, too, unless `measured.cautious`: XLA may order many operators badly, and
    few well.
    """
    near = [
        (min(end, b) - max(begin, a), max(end, b) - min(begin, a), max(begin, a), min(end, b), found)
        for (a, b, _, _), found in measured.compared.items()
        if min(end, b) > max(begin, a) and (found.predicted > 0 or found.nbytes > 0)
    ]
    near.sort(key=lambda one: -one[0] / one[1])
    covered: list[tuple[int, int]] = []
    ratios = copies = 0.0
    for common, both, first, last, found in near:
        new = _uncovered(first, last, covered)
        if new:
            ratio, copied = _shown(found)
            weight = 1.0 if ratio > 1 and measured.cautious else common / both
            ratios += new * (1 + weight * (ratio - 1))
            copies += new * copied
            covered.append((first, last))
    return Correction((ratios + measured.prior * _uncovered(begin, end, covered)) / (end - begin), copies / (end - begin))


def _uncovered(begin: int, end: int, covered: Sequence[tuple[int, int]]) -> int:
    """How many of the places `[begin, end)` are in none of the stretches `covered`."""
    left = [(begin, end)]
    for a, b in covered:
        left = [part for c, d in left for part in ((c, min(d, a)), (max(c, b), d)) if part[0] < part[1]]
    return sum(d - c for c, d in left)
