"""Lists the tensors at the peak for people: with one row for all tensors that are alike, or with one row for each tensor.

Tensors are *alike* if they have the same type, shape and role (such as `parameter` or `activation`, see `records.py`), and the
same line of the user's code makes all of them in the same pass (forward or backward). Networks repeat layers, so a few rows
explain most of a peak:

    32 MiB  8 x 4 MiB  float32[16,64,64,16]  UNet/Block_0:logistic and 7 more
            train.py:16   x = nn.silu(x)                                       kept for the backward pass

Rows are ordered by the bytes of all their tensors together. If two are equal in this, the row of the larger tensor is first.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from tensile_jax.html_tables import ShownAsText
from tensile_jax.ir import BACKWARD
from tensile_jax.memory_report.records import WORDS, Held, Tensor
from tensile_jax.units import format_bytes, format_count

_ROWS = 25  # of a table of what is at the peak
_NAME = 42  # characters of a name
_CODE = 64  # characters of a line of code
_LINES = 2  # that are named where tensors that are alike are used
_MAKERS = 4  # operators of a loop's body that are named
_INDENT = " " * 14


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that are alike, the first one first."""

    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all of them together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def name(self) -> str:
        """The name of the first one, and how many more there are."""
        count = len(self.tensors)
        return shortened(self.tensors[0].name) + (f" and {count - 1} more" if count > 1 else "")

    @property
    def sizes(self) -> str:
        """How many there are, and how large each of them is; empty if there is one."""
        count = len(self.tensors)
        return f"{count} x {format_bytes(self.tensors[0].nbytes)}" if count > 1 else ""


def alike(tensors: Iterable[Tensor]) -> list[Alike]:
    """The groups of tensors that are alike, those with the most bytes first."""
    found: dict[object, list[Tensor]] = defaultdict(list)
    for t in tensors:
        found[t.shape, t.dtype, t.nbytes, t.role, bool(t.made_by), t.made_at, t.stacked_at, t.is_made_backward].append(t)
    groups = [Alike(tuple(several)) for several in found.values()]
    return sorted(groups, key=lambda group: (-group.nbytes, -group.tensors[0].nbytes))


def tensors_of(held: Iterable[Held]) -> list[Tensor]:
    """The tensors that are parts of the peak by themselves, the largest first."""
    return [part.tensor for part in held if part.tensor is not None]


def largest_lines(held: Iterable[Held], *, rows: int, more: str) -> Iterator[str]:
    """The largest groups at the peak, as lines for a person, with the code that makes their tensors, and what is not shown.

    Args:
        more: a sentence that says how to see the rest.
    """
    groups = alike(tensors_of(held))
    for group in groups[:rows]:
        first = group.tensors[0]
        role = "" if first.role == "activation" else f" ({WORDS[first.role]})"
        yield f"  {format_bytes(group.nbytes):>10}  {group.sizes:<15}  {first.form:<22}  {group.name}{role}"
        yield from _lines_of_code(group)
    rest = [tensor for group in groups[rows:] for tensor in group.tensors]
    if rest:
        largest = format_bytes(max(tensor.nbytes for tensor in rest))
        what = f"in 1 more tensor ({more})" if len(rest) == 1 else f"in {len(rest)} more tensors of at most {largest} ({more})"
        yield f"  {format_bytes(sum(tensor.nbytes for tensor in rest)):>10}  {what}"


def _lines_of_code(group: Alike) -> Iterator[str]:
    """The line that makes the tensors, its code and how long the tensors live, and the loop that stacks them."""
    first = group.tensors[0]
    if first.made_at:
        yield f"{_INDENT}{shortened_code(f'{first.made_at:<12}  {first.code}'):<{_CODE}}  {_life(group)}".rstrip()
    if first.stacked_at:
        yield f"{_INDENT}{_stacked(group)}"


def _stacked(group: Alike) -> str:
    """The operators of the loop's body that make the tensors, and the lines of the loop and of what called its function."""
    makers = list(dict.fromkeys(tensor.made_by.removeprefix(BACKWARD).rpartition("/")[2] for tensor in group.tensors))
    made = ", ".join(makers) if len(makers) <= _MAKERS else f"{len(makers)} operators"
    callers = list(dict.fromkeys(tensor.called_from for tensor in group.tensors if tensor.called_from))
    called = f", called from {_listed(callers)}" if callers else ""
    return f"{made}: stacked by the loop at {group.tensors[0].stacked_at}{called}"


def _life(group: Alike) -> str:
    """How long the tensors live, if their line does not say it."""
    first = group.tensors[0]
    used = [tensor for tensor in group.tensors if tensor.last_used_by]
    backward = sum(tensor.is_used_backward for tensor in used)
    elsewhere = dict.fromkeys(t.last_used_at for t in used if t.last_used_at not in ("", first.made_at, first.stacked_at))
    where = _lines_beside(first.made_at, list(elsewhere))
    if first.is_made_backward:
        return "made in the backward pass" + (f", last used at {where}" if where else "")
    if not backward:
        return f"last used at {where}" if where else ""
    if backward < len(used):
        return f"{backward} of them kept for the backward pass"
    return "kept for the backward pass" + (f" of {where}" if where else "")


def _lines_beside(made_at: str, lines: Sequence[str]) -> str:
    """The lines, such as `lines 14 and 32` if they are in the file of `made_at`."""
    file = made_at.rpartition(":")[0]
    numbers = [line.removeprefix(f"{file}:") for line in lines]
    if not file or len(lines) > _LINES or not all(number.isdigit() for number in numbers):
        return _listed(lines)
    return f"line{'s' if len(numbers) > 1 else ''} {_listed(numbers)}" if numbers else ""


def _listed(lines: Sequence[str]) -> str:
    return f"{len(lines)} lines" if len(lines) > _LINES else " and ".join(lines)


def shortened(name: str) -> str:
    """The name without its middle, if it is long."""
    if len(name) <= _NAME:
        return name
    return f"{name[: _NAME // 2 - 2]}...{name[-(_NAME - _NAME // 2 - 1) :]}"


def shortened_code(code: str) -> str:
    """The line of code without its end, if it is long."""
    return code if len(code) <= _CODE else f"{code[: _CODE - 3].rstrip()}..."


# -- tables -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class AtPeak(ShownAsText, Sequence[Held]):
    """What is on the device at the peak, the largest part first. Printed, tensors that are alike share a row."""

    parts: tuple[Held, ...]

    @overload
    def __getitem__(self, place: int) -> Held: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Held, ...]: ...
    def __getitem__(self, place: int | slice) -> Held | tuple[Held, ...]:
        return self.parts[place]

    def __len__(self) -> int:
        return len(self.parts)

    def __str__(self) -> str:
        rows = [
            (group.nbytes, (group.sizes, WORDS[first.role], first.form, group.name, _made_at(first)))
            for group in alike(tensors_of(self.parts))
            for first in group.tensors[:1]
        ]
        rows += [(part.nbytes, ("", WORDS[part.role], "", part.what, "")) for part in self.parts if part.tensor is None]
        rows.sort(key=lambda row: -row[0])
        shown, rest = rows[:_ROWS], rows[_ROWS:]
        cells = [(format_bytes(nbytes), *texts) for nbytes, texts in shown]
        if rest:
            cells.append((format_bytes(sum(nbytes for nbytes, _ in rest)), "", "", "", format_count(len(rest), "more row"), ""))
        cells.append((format_bytes(sum(part.nbytes for part in self.parts)), "", "", "", "together, the predicted peak", ""))
        return _table(("size", "each", "role", "form", "what", "made at"), cells)


@dataclass(frozen=True, slots=True, repr=False)
class Largest(ShownAsText, Sequence[Tensor]):
    """The largest tensors at the peak. `tied` is the number of tensors beside them that are as large as the last of them."""

    tensors: tuple[Tensor, ...]
    tied: int

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, place: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self.tensors[place]

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        cells = [
            (format_bytes(t.nbytes), WORDS[t.role], t.form, shortened(t.name), _made_at(t), _last_used_at(t))
            for t in self.tensors
        ]
        text = _table(("size", "role", "form", "name", "made at", "last used at"), cells)
        if not self.tied:
            return text
        are = "1 more tensor is" if self.tied == 1 else f"{self.tied} more tensors are"
        return f"{text}\n{are} as large as the last one: report.largest({len(self.tensors) + self.tied}) has them, too."


def largest_of(held: Iterable[Held], count: int) -> Largest:
    """The `count` largest tensors at the peak."""
    tensors = tensors_of(held)
    chosen, rest = tensors[:count], tensors[count:]
    return Largest(tuple(chosen), sum(t.nbytes == chosen[-1].nbytes for t in rest) if chosen else 0)


def _made_at(tensor: Tensor) -> str:
    if not tensor.made_by:
        return "an argument"
    stacked = f", stacked at {tensor.stacked_at}" if tensor.stacked_at else ""
    return f"{tensor.made_at}{' (backward)' if tensor.is_made_backward else ''}{stacked}"


def _last_used_at(tensor: Tensor) -> str:
    return f"{tensor.last_used_at}{' (backward)' if tensor.is_used_backward else ''}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows as text; sizes, in the first column, are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)
