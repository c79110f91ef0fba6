"""Predicts the workspace of a segment, and remembers what XLA has reported for the segments that were compiled.

The workspace is the memory that a segment needs beside its inputs and results. The account (`account.py`) computes what XLA would
need with the best schedule, `least`. For the segment of the operators at places [a, b):

    workspace = measured                                       if the same segment was compiled
              = least * (1 + growth * heavy) + margin          otherwise

`heavy` is the number of heavy operators that run in the segment, and `growth` is `workspace_growth` of the device profile.
`margin` (of `Measured`) begins at zero, and grows each time compiling shows that a plan does not fit.

Two segments are the same if they run the same operators, compute the same tensors again and leave the same results. Sizes in
bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.search.account import Contents

SegmentKey = tuple[int, int, frozenset[TensorId], frozenset[TensorId]]
"""The first place of a segment, the place behind its last, and what it computes again and leaves behind, of significant tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` is by segment. `whole` is the peak of the step as one executable. `margin` is added to the workspace of each
    segment that was not compiled yet.
    """

    workspaces: Mapping[SegmentKey, int] = field(default_factory=dict[SegmentKey, int])
    whole: int | None = None
    margin: int = 0


def predicted_workspace(contents: Contents, profile: DeviceProfile) -> int:
    """The workspace of a segment that was not compiled, rounded up."""
    return ceil(contents.workspace * (1.0 + profile.workspace_growth * contents.heavy))
