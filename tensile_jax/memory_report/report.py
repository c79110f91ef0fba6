"""Defines the report on a function's memory: its records, their JSON, and the text for people.

    MemoryReport ::= header  Tensor*  Held*  RoleCurve*  MissedDonation*  UnusedArgument*  AtBudget*
    Held         ::= what is on the device at the peak: a tensor, many small tensors, or memory that is no tensor

*Plain jit* is `jax.jit` without this package. An operator is one equation of the step, and its number is its position in the
order in which the report has the operators run. A tensor lives over `[begin, end)`, in numbers of operators; an argument lives
from 0 on.

The rows of `at_peak` add up to `predicted_peak_bytes`. Three roles are no tensors:

    workspace   what an operator needs inside: a loop's own tensors, copies of operands into another layout
    reserved    buffers of results that are not written yet at the peak; XLA has them from the beginning
    packing     the difference between all this and the predicted peak: gaps between buffers, small buffers, and what XLA's order
                of operators adds. It is negative if XLA is expected to place some tensors into the buffers of others

Sizes are in bytes, times in microseconds. If the step runs on several devices, sizes are those of one of them.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Literal

import msgspec

from tensile_jax.html_tables import ShownAsText
from tensile_jax.ir import Role
from tensile_jax.plan_format import read_report
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

REPORT_VERSION = 1
_WIDTH = 110  # characters of a line
_LARGEST = 10  # tensors at the peak that are named
_MOST = 4  # donations and arguments that are named
_NAME = 42  # characters of a name

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

    `made_by` and `last_used_by` name operators, and `made_at` and `last_used_at` the user's file and line. They are empty if no
    operator makes the tensor (it is an argument) or reads it, or if the line is not known.
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
    last_used_by: str
    last_used_at: str


@dataclass(frozen=True, slots=True)
class Held:
    """A part of the peak. `tensor` is its place in `MemoryReport.tensors`; None for small tensors, and for what is no tensor."""

    what: str
    role: HeldRole
    nbytes: int
    tensor: int | None = None


@dataclass(frozen=True, slots=True)
class PeakPoint:
    """Where the peak is reached: the operator's number, its name, and the user's file and line, if these are known."""

    operator: int
    name: str
    source: str


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


@dataclass(frozen=True, slots=True, repr=False)
class MemoryReport(ShownAsText):
    """What a function needs on the device under plain `jax.jit`. `print(report)` shows it on one screen.

    Attributes:
        program: the name of the function.
        devices: on how many devices it runs; all sizes are those of one of them.
        device: the kind of the device.
        device_bytes: the limit of the device's allocator; None if it has none, as on a CPU.
        device_profile: the device profile with which peak and times are predicted.
        predicted_peak_bytes: the predicted peak: arguments, results, and what lies in memory between them.
        compiled_peak_bytes: XLA's own figure; None unless the report was made with `compile=True`.
        peak: where the predicted peak is reached; None for a function without operators.
        at_peak: what is on the device there, the largest first; the rows add up to `predicted_peak_bytes`.
        tensors: all tensors that take device memory, the largest first, except small ones.
        small_bytes: tensors that are smaller than this are in `curves`, and in `at_peak` together, but not in `tensors`.
        operators: the names of the operators.
        curves: the bytes of each role over the operators. Their sum is the memory in use.
        begin_us: when each operator is predicted to begin.
        step_us: the predicted time of a step.
        missed_donations: arguments whose memory could be taken over and is not, the largest first.
        unused_arguments: arguments that nothing reads, the largest first.
        budgets: what plans under some budgets are predicted to cost; empty unless the report was made with `budgets=True`.
        smallest_budget_bytes: the smallest budget that has a plan, by prediction; None unless `budgets=True`.
        notes: sentences on the function's loops and rewrites.
    """

    report_version: int
    tensile_version: str
    program: str
    fingerprint: str
    devices: int
    device: str
    device_bytes: int | None
    device_profile: str
    predicted_peak_bytes: int
    compiled_peak_bytes: int | None
    peak: PeakPoint | None
    at_peak: tuple[Held, ...]
    tensors: tuple[Tensor, ...]
    small_bytes: int
    operators: tuple[str, ...]
    curves: tuple[RoleCurve, ...]
    begin_us: tuple[float, ...]
    step_us: float
    missed_donations: tuple[MissedDonation, ...]
    unused_arguments: tuple[UnusedArgument, ...]
    budgets: tuple[AtBudget, ...]
    smallest_budget_bytes: int | None
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak: XLA's own figure if the report has it, or else the prediction."""
        return self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether plain jit's peak is at most the memory of the device; None if the device has no known limit."""
        return None if self.device_bytes is None else self.peak_bytes <= self.device_bytes

    def to_json(self) -> str:
        """The report as JSON; `tensile schema memory` prints its schema."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    @hides_frames
    def from_json(text: str | bytes) -> "MemoryReport":
        """The report that `to_json` has written.

        Raises:
            ValueError: the text is no such JSON, or was written by another version of this package.
        """
        return read_report(text, MemoryReport, "a memory report", "report_version", REPORT_VERSION)

    @hides_frames
    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as a page that a browser shows without a network: one HTML file.

        Raises:
            ModuleNotFoundError: plotly, which draws the page, is not installed (`pip install 'tensile_jax[html]'`).
            OSError: the file cannot be written.
        """
        # the page reads these records, so it is looked up when it is needed
        import_module("tensile_jax.pages.memory_page").save_report(self, path)

    def __str__(self) -> str:
        return describe(self)


# -- the text for people ------------------------------------------------------------------------------------------------------


def describe(report: MemoryReport) -> str:
    """The report for a person."""
    on = f"{report.devices} devices, all alike; sizes are those of one" if report.devices > 1 else "one device"
    lines = [f"Memory of {report.program!r} under jax.jit ({on}; predicted with profile {report.device_profile})"]
    lines.append(f"  peak       {_peak(report)}")
    if report.peak is not None:
        at = f" ({report.peak.source})" if report.peak.source else ""
        lines.append(f"  reached    in {report.peak.name}{at}, operator {report.peak.operator + 1} of {len(report.operators)}")
    if report.device_bytes is not None:
        verdict = "fits" if report.fits else "does not fit"
        lines.append(f"  device     {report.device} with {format_bytes(report.device_bytes)}: the peak {verdict}")
    lines += ["", "On the device at the peak"]
    lines += _by_role(report)
    lines += ["", "The largest there, with the lines that make them and that use them last", *largest_lines(report)]
    lines += _entries("Donations missed", list(_missed(report.missed_donations)))
    lines += _entries("Not used by the function", [f"{format_bytes(a.nbytes):>10}  {a.name}" for a in report.unused_arguments])
    if report.smallest_budget_bytes is not None:
        lines += ["", f"Under a budget (the smallest that works: {format_bytes(report.smallest_budget_bytes)})"]
        lines += [
            f"  {b.share:>4.0%}  {format_bytes(b.budget_bytes):>10}  {b.time_ratio:.2f} times plain jit's step"
            for b in report.budgets
        ]
    for note in report.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  note       ", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _peak(report: MemoryReport) -> str:
    predicted = f"{format_bytes(report.predicted_peak_bytes)} predicted"
    if report.compiled_peak_bytes is None:
        return f"about {predicted}; compile=True asks XLA"
    off = report.predicted_peak_bytes / max(report.compiled_peak_bytes, 1) - 1
    return f"{format_bytes(report.compiled_peak_bytes)} as XLA compiles it; {predicted} ({off:+.1%})"


def by_role(held: Sequence[Held]) -> dict[str, int]:
    """The bytes of each role at the peak, the largest first, and packing last."""
    found: dict[str, int] = defaultdict(int)
    for part in held:
        found[part.role] += part.nbytes
    return dict(sorted(found.items(), key=lambda item: (item[0] == "packing", -item[1], item[0])))


def _by_role(report: MemoryReport) -> Iterator[str]:
    for role, nbytes in by_role(report.at_peak).items():
        share = nbytes / max(report.predicted_peak_bytes, 1)
        yield f"  {WORDS[role]:<22}{format_bytes(nbytes):>11}  {share:>6.1%}"
    yield f"  {'together':<22}{format_bytes(sum(h.nbytes for h in report.at_peak)):>11}"


def largest_lines(report: MemoryReport) -> Iterator[str]:
    """The largest tensors at the peak, each in a line for a person, with the lines of code that make it and that use it last."""
    named = [held for held in report.at_peak if held.tensor is not None]
    for held in named[:_LARGEST]:
        assert held.tensor is not None  # as filtered above
        tensor = report.tensors[held.tensor]
        form = f"{tensor.dtype}{list(tensor.shape)}".replace(" ", "")
        yield f"  {format_bytes(held.nbytes):>10}  {_shortened(held.what):<{_NAME}}  {form:<22}  {_lines(tensor)}".rstrip()
    rest = [held.nbytes for held in named[_LARGEST:]]
    if rest:
        yield f"  {format_bytes(sum(rest)):>10}  in {len(rest)} more tensors (report.at_peak has them)"


def _missed(several: Sequence[MissedDonation]) -> Iterator[str]:
    """One entry for each remedy: what it saves, and the largest argument that it concerns."""
    by_remedy: dict[str, list[MissedDonation]] = defaultdict(list)
    for missed in several:
        by_remedy[missed.remedy].append(missed)
    for remedy, some in by_remedy.items():
        others = f" And {len(some) - 1} more like it." if len(some) > 1 else ""
        yield f"{format_bytes(sum(m.nbytes for m in some)):>10}  {some[0].name}: {some[0].reason}.{others} {remedy}"


def _lines(tensor: Tensor) -> str:
    """Where the tensor is made and last used, such as `model.py:12 -> 30`."""
    made = tensor.made_at if tensor.made_by else "argument"
    file, _, number = tensor.last_used_at.rpartition(":")
    last = number if file and made.startswith(f"{file}:") else tensor.last_used_at
    return " -> ".join(part for part in (made, last) if part)


def _shortened(name: str) -> str:
    """The name without its middle, if it is long."""
    if len(name) <= _NAME:
        return name
    return f"{name[: _NAME // 2 - 2]}...{name[-(_NAME - _NAME // 2 - 1) :]}"


def _entries(title: str, entries: Sequence[str]) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for entry in entries[:_MOST]:
        yield from textwrap.wrap(entry, _WIDTH, initial_indent="  ", subsequent_indent=" " * 14, drop_whitespace=True)
    if len(entries) > _MOST:
        yield f"{'':14}and {len(entries) - _MOST} more"
