"""Defines the records of a report on a function's memory: what is on the device, when, and what could be saved.

An operator is one equation of the step. Its number is its position in the planner's order of operators, counted from 0. A
tensor lives over `[begin, end)`, in numbers of operators; an argument lives from 0 on.

Each part of the memory has a *role*, such as `parameter` or `activation` for tensors. Three roles stand for what takes memory
beside the tensors that live at an operator:

    workspace   what an operator needs inside: a loop's own tensors, copies of operands into another layout
    reserved    buffers of results that are not written yet at the peak; XLA has them from the beginning
    packing     the difference between all this and the predicted peak: gaps between buffers, small buffers, and what XLA's order
                of operators adds. It is negative if XLA is expected to place some tensors into the buffers of others

Sizes are in bytes, times in microseconds. If the step runs on several devices, sizes are those of one of them.
"""

from dataclasses import dataclass
from typing import Literal

from tensile_jax.ir import BACKWARD, Role
from tensile_jax.units import format_bytes

WORDS = {
    "parameter": "parameters", "optimizer_state": "optimizer state", "state": "other state", "batch": "batch",
    "argument": "arguments", "constant": "constants", "activation": "activations", "gradient": "gradients",
    "output": "outputs", "workspace": "workspace", "reserved": "reserved for outputs", "packing": "packing",
}  # fmt: skip
"""What the roles are called where they are shown to people."""

HeldRole = Role | Literal["argument", "workspace", "reserved", "packing"]
"""The roles of tensors (`ir.py`), `argument` for the arguments of a function that returns no state, and what is no tensor."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that takes device memory under plain jit, over the operators `[begin, end)`.

    `made_by` and `last_used_by` name operators, `made_at` and `last_used_at` the user's file and line. `code` is the text of the
    line at `made_at`, and `called_from` the line that called the function in which that line is. A loop stacks what its
    iterations make: `made_by`, `made_at` and `code` are then those of the operator in the loop's body, `stacked_at` is the line
    of the loop, and `called_from` the line that called the function of the loop. What is not known is empty, as is `made_by` of
    an argument, and `last_used_by` of what no operator reads.
    """

    name: str
    role: HeldRole
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    made_by: str
    made_at: str
    code: str
    stacked_at: str
    called_from: str
    last_used_by: str
    last_used_at: str

    @property
    def form(self) -> str:
        """Type and shape, such as `float32[16,64]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_made_backward(self) -> bool:
        """Whether an operator of the backward pass makes it."""
        return self.made_by.startswith(BACKWARD)

    @property
    def is_used_backward(self) -> bool:
        """Whether the operator that uses it last is one of the backward pass."""
        return self.last_used_by.startswith(BACKWARD)


@dataclass(frozen=True, slots=True)
class Held:
    """A part of the peak. `tensor` is None for small tensors, which are one part for each role, and for what is no tensor."""

    what: str
    role: HeldRole
    nbytes: int
    tensor: Tensor | None = None

    def __str__(self) -> str:
        about = (self.tensor.form, self.tensor.made_at) if self.tensor is not None else ()
        return "  ".join(part for part in (format_bytes(self.nbytes), WORDS[self.role], self.what, *about) if part)


@dataclass(frozen=True, slots=True)
class PeakPoint:
    """Where the peak is reached: the operator's number, its name, the user's file and line, and the text of that line. The last
    two are empty if they are not known.
    """

    operator: int
    name: str
    source: str
    code: str


@dataclass(frozen=True, slots=True)
class RoleCurve:
    """The bytes of one role while each operator runs."""

    role: HeldRole
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MissedDonation:
    """An argument whose memory no result takes over: what it would save, why jit does not use it, and what would help."""

    name: str
    nbytes: int
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class UnusedArgument:
    """An argument that nothing in the function reads."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class AtBudget:
    """What a plan under a budget is predicted to need, and how long a step takes as a multiple of plain jit's."""

    share: float
    budget_bytes: int
    peak_bytes: int
    time_ratio: float
