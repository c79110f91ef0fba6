"""Defines the report on a function's memory under *plain jit*, `jax.jit` without this package: its JSON, and the text for people.

    MemoryReport ::= header  Tensor*  Held*  RoleCurve*  MissedDonation*  UnusedArgument*  AtBudget*
    Held         ::= what is on the device at the peak: a tensor, many small tensors, or memory that is no tensor

`records.py` defines these. A `RoleCurve` has the bytes of one role (parameters, gradients, ...) over the operators. An `AtBudget`
says what a plan under one budget is predicted to cost. What is held adds up to `predicted_peak_bytes`.

Sizes are in bytes, times in microseconds. If the step runs on several devices, sizes are those of one of them.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike

import msgspec

from tensile_jax.arguments import read_count, shown
from tensile_jax.html_tables import ShownAsText
from tensile_jax.memory_report.alike import AtPeak, Largest, largest_lines, largest_of, shortened_code
from tensile_jax.memory_report.records import (
    WORDS,
    AtBudget,
    Held,
    HeldRole,
    MissedDonation,
    PeakPoint,
    RoleCurve,
    Tensor,
    UnusedArgument,
)
from tensile_jax.plan_format import read_report
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

REPORT_VERSION = 2
_WIDTH = 110  # characters of a line
_ROWS = 10  # of tensors at the peak that are alike
_MOST = 4  # donations and arguments that are named
_LEAST_SHARE = 0.0005  # of the peak: roles with less, which would be printed as 0.0 %, have no row


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
        held: what is on the device there, the largest part first; the parts add up to `predicted_peak_bytes`. `at_peak` has them,
            too, and is printed as a table.
        tensors: all tensors that take device memory, the largest first, except small ones.
        small_bytes: tensors that are smaller than this are in `curves`, and in `held` together, but not in `tensors`.
        operators: the names of the operators, by number: the first operator has number 0.
        curves: the bytes of each role over the operators. Their sum is the memory in use.
        begin_us: when each operator is predicted to begin.
        step_us: the predicted time of a step.
        missed_donations: arguments whose memory could be taken over and is not, the largest first.
        unused_arguments: arguments that nothing reads, the largest first.
        budgets: what plans under some budgets are predicted to cost; empty unless the report was made with `budgets=True`.
        smallest_budget_bytes: the smallest budget that has a plan, by prediction; None unless `budgets=True`.
        notes: what else one should know, such as which loops are one operator also under a budget.
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
    held: tuple[Held, ...]
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

    @property
    def at_peak(self) -> AtPeak:
        """What is on the device at the peak, the largest part first: a sequence of `Held`, each with its `Tensor`.

        The parts add up to `predicted_peak_bytes`. Printed, it is a table, in which tensors of one form and line share a row.
        """
        return AtPeak(self.held)

    @hides_frames
    def largest(self, count: int = 10) -> Largest:
        """The largest tensors at the peak: a sequence of `Tensor`, the largest first, which is printed as a table.

        If more tensors are as large as the last one, the table says how many, and `tied` is their number.

        Raises:
            ValueError: `count` is not a positive integer.
        """
        number = read_count(count)
        if number is None:
            raise ValueError(f"count must be a positive integer, the number of tensors: got {shown(count)}.")
        return largest_of(self.held, number)

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


def describe(report: MemoryReport, *, rows: int = _ROWS, in_shell: bool = False) -> str:
    """The report for a person.

    Args:
        rows: how many rows the largest tensors have.
        in_shell: whether options are named as the command line has them.
    """
    on = f"{report.devices} devices, all alike; sizes are those of one" if report.devices > 1 else "one device"
    lines = [f"Memory of {report.program!r} under jax.jit ({on}; predicted with profile {report.device_profile})"]
    lines += _peak(report, "--compile" if in_shell else "compile=True")
    if report.device_bytes is not None:
        verdict = "fits" if report.fits else "does not fit"
        lines.append(f"  device     {report.device} with {format_bytes(report.device_bytes)}: the peak {verdict}")
    only = "" if report.compiled_peak_bytes is None else " (of its own peak, XLA tells only the size)"
    lines += ["", f"On the device at the predicted peak{only}"]
    lines += _by_role(report)
    more = "--top N shows more" if in_shell else "report.largest(N) has them one by one"
    largest = list(largest_lines(report.held, rows=rows, more=more))
    if largest:
        lines += ["", "The largest there; tensors of one form, role and line share a row", *largest]
    lines += _entries("Donations missed", list(_missed(report.missed_donations)))
    lines += _entries("Not used by the function", [f"{format_bytes(a.nbytes):>10}  {a.name}" for a in report.unused_arguments])
    if report.smallest_budget_bytes is not None:
        lines += ["", f"Under a budget (the smallest that works: {format_bytes(report.smallest_budget_bytes)})"]
        lines += [
            f"  {b.share:>4.0%}  {format_bytes(b.budget_bytes):>10}  {b.time_ratio:.2f} times plain jit's step"
            for b in report.budgets
        ]
    if report.notes:
        lines += ["", "Notes"]
    for note in report.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _peak(report: MemoryReport, compiles: str) -> Iterator[str]:
    predicted = format_bytes(report.predicted_peak_bytes)
    if report.compiled_peak_bytes is None:
        yield f"  peak       about {predicted}, predicted; {compiles} asks XLA"
    else:
        off = report.predicted_peak_bytes / max(report.compiled_peak_bytes, 1) - 1
        yield f"  peak       {format_bytes(report.compiled_peak_bytes)} as XLA compiles it"
        yield f"  predicted  {predicted} ({off:+.1%}), the sum of the parts below"
    if report.peak is not None:
        number = f"operator {report.peak.operator} of {len(report.operators)}, counted from 0"
        yield f"  reached    in {report.peak.name}, {number}"
        if report.peak.source:
            yield f"             {report.peak.source}  {shortened_code(report.peak.code)}".rstrip()


def by_role(held: Sequence[Held]) -> dict[HeldRole, int]:
    """The bytes of each role at the peak, the largest first, and packing last."""
    found: dict[HeldRole, int] = defaultdict(int)
    for part in held:
        found[part.role] += part.nbytes
    return dict(sorted(found.items(), key=lambda item: (item[0] == "packing", -item[1], item[0])))


def _by_role(report: MemoryReport) -> Iterator[str]:
    whole = max(report.predicted_peak_bytes, 1)
    explained = {part.role: part.what for part in report.held if part.role in ("workspace", "reserved", "packing")}
    for role, nbytes in by_role(report.held).items():
        if abs(nbytes) >= _LEAST_SHARE * whole:
            line = f"  {WORDS[role]:<22}{format_bytes(nbytes):>11}  {nbytes / whole:>6.1%}  {explained.get(role, '')}"
            yield line.rstrip()
    yield f"  {'together':<22}{format_bytes(sum(part.nbytes for part in report.held)):>11}  the predicted peak"


def _missed(several: Sequence[MissedDonation]) -> Iterator[str]:
    """One entry for each remedy: what it saves, and the largest argument that it concerns."""
    by_remedy: dict[str, list[MissedDonation]] = defaultdict(list)
    for missed in several:
        by_remedy[missed.remedy].append(missed)
    for remedy, some in by_remedy.items():
        first, saved = some[0], f"{format_bytes(sum(missed.nbytes for missed in some)):>10}"
        if len(some) == 1:
            yield f"{saved}  {first.name}: {first.reason}. {remedy}"
        else:
            yield (
                f"{saved}  in {len(some)} arguments. {remedy} The largest, of {format_bytes(first.nbytes)}, is {first.name}: "
                f"{first.reason}."
            )


def _entries(title: str, entries: Sequence[str]) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for entry in entries[:_MOST]:
        yield from textwrap.wrap(entry, _WIDTH, initial_indent="  ", subsequent_indent=" " * 14, drop_whitespace=True)
    if len(entries) > _MOST:
        yield f"{'':14}and {len(entries) - _MOST} more"
