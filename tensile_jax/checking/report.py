"""Defines the report on a checked plan: its records, their JSON, and the text for people.

    CheckReport ::= header  checked=Side  reference=Side  OutputCheck*

A *side* is one of the two ways in which the step has run: `checked`, under the plan, and `reference`, under plain `jax.jit` or,
if that does not fit on the device, under another plan (`reference.py`). Each side has run `steps` steps from the same
arguments. An output is one leaf of the step's results.

    absolute = max |checked - reference|   over the elements that are finite in both
    relative = absolute / max |reference|
    own      = absolute and relative with the reference, run again under another rounding, in place of `checked`

So `own` shows what rounding alone changes. `reference.py` says how the other rounding is brought about.

Sizes are in bytes, times in microseconds (`_us`) or seconds (`_s`). If the step runs on several devices, sizes are those of one
of them.
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tensile_jax.html_tables import ShownAsText
from tensile_jax.plan_format import read_report
from tensile_jax.units import format_bytes

CHECK_VERSION = 1
_WIDTH = 110  # characters of a line
_MOST = 10  # outputs that are listed, if none of the others differs
_MOST_DIFFERING = 20
_NAMED = 5  # outputs that a sentence names
_NAME = 38  # characters of a name

Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """One leaf of the results: at the first step at which it differs or, if it agrees, where it is furthest from the reference.

    Attributes:
        name: such as `result[0]['weights']`.
        agrees: whether rounding explains the differences.
        reason: why it does not, in a clause; empty if the output agrees.
        step: the step, counted from one.
        differing: how many elements are not equal. Two NaNs are.
        absolute, relative: as above; None for integers, booleans and keys, which must be equal.
        own_absolute, own_relative: the same of the reference under another rounding, the most up to this step.
        own_differing: how many elements were not equal there.
        nans: the elements that are NaN on both sides.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    agrees: bool
    reason: str
    step: int
    differing: int
    absolute: float | None
    relative: float | None
    own_absolute: float | None
    own_relative: float | None
    own_differing: int
    nans: int


@dataclass(frozen=True, slots=True)
class Side:
    """What was measured of one way in which the step has run.

    Attributes:
        name: "plain jit", or which plan it is.
        peak_bytes: the peak by the account of this package: of a plan, as measured while it ran; of plain jit, XLA's own figure.
        allocator_peak_bytes: the peak that the device's allocator has counted, without what else was in use. None: the backend
            does not tell.
        allocator_is_limit: whether the allocator's peak is only known to be at most that, since the process had used more before.
        step_us: the median time of calls after the first ones, each of which was waited for.
        first_call_s: what the first call has taken: tracing, planning, compiling and running. What JAX has traced or compiled
            before is not done again.
        launches: how many executables a step launches.
        tries: how many plans were compiled until one kept the budget; zero for plain jit.
    """

    name: str
    peak_bytes: int
    allocator_peak_bytes: int | None
    allocator_is_limit: bool
    step_us: float
    first_call_s: float
    launches: int
    tries: int


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(ShownAsText):
    """Whether a step under a plan returns what plain `jax.jit` returns, and what both cost. `print(report)` shows one screen.

    Attributes:
        verdict: "agrees" or "differs".
        program: the name of the step.
        devices: on how many devices it runs; all sizes are those of one of them.
        device: the kind of the device.
        policy, budget_bytes, budget_basis: those of the plan.
        whole: whether the plan runs the step as one executable, as plain jit does.
        steps: how many steps were compared.
        fed_back: the arguments that results took the place of in the next step; empty if the steps had the same arguments.
        timed_calls: how many calls of each side were timed.
        copied_bytes: the copies of donated arguments that lay on the device beside the arguments themselves. The peaks of both
            sides count each argument once.
        outputs: those that differ, the earliest first, and then those that agree, the furthest from the reference first.
        roundings: how the reference has run again, to know by how much it differs from itself.
        notes: why plain jit is not the reference, and what else one should know.
    """

    check_version: int
    tensile_version: str
    jax_version: str
    verdict: Verdict
    program: str
    fingerprint: str
    devices: int
    device: str
    policy: str
    budget_bytes: int | None
    budget_basis: str
    whole: bool
    steps: int
    fed_back: tuple[str, ...]
    timed_calls: int
    copied_bytes: int
    checked: Side
    reference: Side
    outputs: tuple[OutputCheck, ...]
    roundings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every output agrees."""
        return self.verdict == "agrees"

    @property
    def differing(self) -> tuple[str, ...]:
        """The names of the outputs that differ."""
        return tuple(output.name for output in self.outputs if not output.agrees)

    @property
    def exit_code(self) -> int:
        """0 if the plan agrees, 1 if it differs: the exit code of `tensile check`."""
        return 0 if self.agrees else 1

    def assert_ok(self) -> None:
        """Nothing, if the plan agrees.

        Raises:
            AssertionError: it differs; the message is the report.
        """
        if not self.agrees:
            raise AssertionError(describe(self))

    def to_json(self) -> str:
        """The report as JSON; `tensile schema check` prints its schema."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "CheckReport":
        """The report that `to_json` has written.

        Raises:
            ValueError: the text is no such JSON, or was written by another version of this package.
        """
        return read_report(text, CheckReport, "a check", "check_version", CHECK_VERSION)

    def __str__(self) -> str:
        return describe(self)


# -- the text for people ------------------------------------------------------------------------------------------------------


def describe(report: CheckReport) -> str:
    """The report for a person."""
    lines = [_headline(report), *_header(report), "", *_costs(report.checked, report.reference, report.timed_calls), ""]
    lines += _outputs(report.outputs)
    for note in report.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  note       ", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _headline(report: CheckReport) -> str:
    over = f"over {report.steps} steps" if report.steps > 1 else "in one step"
    beside = f"{report.reference.name} {over}"
    if report.agrees:
        return f"Check of {report.program!r}: agrees. All {len(report.outputs)} outputs are those of {beside}, up to rounding"
    names = report.differing
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"Check of {report.program!r}: differs. {len(names)} of {len(report.outputs)} outputs are not those of {beside}: "
        f"{', '.join(names[:_NAMED])}{more}"
    )


def _header(report: CheckReport) -> Iterator[str]:
    budget = "none" if report.budget_bytes is None else format_bytes(report.budget_bytes)
    basis = f" ({report.budget_basis})" if report.budget_basis else ""
    on = f"{report.devices} devices of kind {report.device}" if report.devices > 1 else report.device
    yield from _entry("budget", f"{budget}{basis}, policy {report.policy}, on {on}")
    if report.steps > 1:
        state = ", ".join(
            f"{root} ({count} {'array' if count == 1 else 'arrays'})"
            for root, count in Counter(map(_root, report.fed_back)).items()
        )
        after = f"each on the results of the one before, in place of {state}" if state else "all on the same arguments"
        yield from _entry("steps", f"{report.steps}, {after}")
    if report.copied_bytes:
        yield from _entry(
            "copies", f"{format_bytes(report.copied_bytes)} of donated arguments, beside the arguments; no peak below has both"
        )
    if report.roundings:
        yield from _entry("own", f"how far {report.reference.name} is from itself {' or '.join(report.roundings)}")


def _root(name: str) -> str:
    """The parameter to which an argument belongs: `state` of `state.params['w']`."""
    return name.split(".")[0].split("[")[0]


def _entry(title: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=f"  {title:<11}", subsequent_indent=" " * 13)


def _costs(checked: Side, reference: Side, calls: int) -> Iterator[str]:
    yield f"  {'':<34}{'the plan':>16}{reference.name:>20}"
    rows = (
        ("peak, by account", *map(format_bytes, (checked.peak_bytes, reference.peak_bytes)),
         _ratio(checked.peak_bytes, reference.peak_bytes)),
        ("peak, by the device's allocator", _allocated(checked), _allocated(reference), _allocated_ratio(checked, reference)),
        (f"step, median of {calls} calls", _ms(checked.step_us), _ms(reference.step_us),
         _ratio(checked.step_us, reference.step_us)),
        ("first call", f"{checked.first_call_s:.3g} s", f"{reference.first_call_s:.3g} s",
         _ratio(checked.first_call_s, reference.first_call_s)),
        ("launches in a step", str(checked.launches), str(reference.launches), ""),
        ("plans that were compiled", str(checked.tries), str(reference.tries), ""),
    )  # fmt: skip
    if checked.allocator_peak_bytes is None:
        rows = (rows[0], ("peak, by the device's allocator", "not known on this backend", "", ""), *rows[2:])
    for title, ours, theirs, ratio in rows:
        yield f"  {title:<34}{ours:>16}{theirs:>20}   {ratio}".rstrip()


def _allocated(side: Side) -> str:
    if side.allocator_peak_bytes is None:
        return "not known"
    return f"{'at most ' if side.allocator_is_limit else ''}{format_bytes(side.allocator_peak_bytes)}"


def _allocated_ratio(checked: Side, reference: Side) -> str:
    ours, theirs = checked.allocator_peak_bytes, reference.allocator_peak_bytes
    if ours is None or theirs is None or checked.allocator_is_limit or reference.allocator_is_limit:
        return ""
    return _ratio(ours, theirs)


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f} times" if theirs > 0 else ""


def _ms(us: float) -> str:
    return f"{us / 1000:.4g} ms"


def _outputs(outputs: Sequence[OutputCheck]) -> Iterator[str]:
    differing = [output for output in outputs if not output.agrees]
    named = differing[:_MOST_DIFFERING] or outputs[:_MOST]
    if differing:
        named = [*named, *outputs[len(differing) : len(differing) + max(_MOST - len(named), 0)]]
    if outputs:
        yield f"  {'output':<{_NAME + 10}}{'type':<20}{'relative':>9}{'own':>9}{'absolute':>10}{'own':>9}{'step':>6}"
    for output in named:
        yield from _output(output)
    rest = outputs[len(named) :]
    if rest:
        equal = sum(not output.differing for output in rest)
        what = "all of them equal" if equal == len(rest) else f"{equal} of them equal"
        yield f"  and {len(rest)} more, {what} (report.outputs has them)"


def _output(output: OutputCheck) -> Iterator[str]:
    form = f"{output.dtype}{list(output.shape)}".replace(" ", "")
    name = output.name if len(output.name) <= _NAME else f"...{output.name[-(_NAME - 3) :]}"
    line = f"  {'agrees ' if output.agrees else 'DIFFERS'}  {name:<{_NAME}} {form:<20}"
    if output.differing and output.absolute is not None:
        figures = (output.relative, output.own_relative, output.absolute, output.own_absolute)
        line += "".join(f"{figure or 0:>{width}.1e}" for figure, width in zip(figures, (9, 9, 10, 9), strict=True))
        line += f"{output.step:>6}"
    else:
        line += f"{'not equal' if output.differing else 'equal':>9}"
    if output.nans:
        line += f", {output.nans} NaNs on both sides"
    yield line
    if output.reason:
        yield f"{'':11}{output.reason}"
