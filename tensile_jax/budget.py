"""Read a budget: bytes, `"1.2GiB"`, or a share of plain jit's peak, `"60%"`."""

import re
from dataclasses import dataclass
from typing import Any

from tensile_jax.arguments import MOST, read_number, shown
from tensile_jax.errors import BudgetError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*\Z")
_REMEDY = 'Give a number of bytes, a size such as "1.2GiB" or "800MB", or a share of plain jit\'s peak such as "60%".'


@dataclass(frozen=True, slots=True)
class Budget:
    """Either a number of bytes, or a share of the peak of plain `jax.jit`."""

    nbytes: int | None
    share: float | None

    def resolve(self, jit_peak_bytes: int) -> int:
        """The budget in bytes. A share of next to nothing, such as the peak of a step without arguments, is one byte."""
        return self.nbytes if self.nbytes is not None else max(int((self.share or 0.0) * jit_peak_bytes), 1)


_MOST_SHARE = 1e6  # of plain jit's peak: far above any use, and far below what overflows


def parse_budget(value: Any) -> Budget:
    """The budget that `value` says: a number of any kind, or a text.

    Raises:
        BudgetError: it is not above zero, too large for any device, or not readable.
        TypeError: it is neither a number nor a string.
    """
    if isinstance(value, str):
        return _parse_text(value)
    number = read_number(value)
    if number is None:
        raise TypeError(f"budget must be a number of bytes or a string, got {shown(value)}. {_REMEDY}")
    if not 0 < number < float("inf"):
        raise BudgetError(f"budget must be above zero, got {shown(value)}. {_REMEDY}")
    if number < 1:
        raise BudgetError(f"budget must be at least one byte, got {shown(value)}. {_REMEDY}")
    return Budget(int(_refuse_huge(number, MOST, value)), None)


def _parse_text(value: str) -> Budget:
    match = _TEXT.match(value)
    if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
        raise BudgetError(f"budget {shown(value)} cannot be read. {_REMEDY}")
    number = float(match[1])  # infinite where there are too many digits
    if match[2] == "%":
        budget = Budget(None, _refuse_huge(number / 100, _MOST_SHARE, value))
    else:
        budget = Budget(int(_refuse_huge(number * _UNITS[match[2].lower()], MOST, value)), None)
    if number <= 0 or budget.nbytes == 0:
        raise BudgetError(f"budget must be above zero, got {shown(value)}. {_REMEDY}")
    return budget


def _refuse_huge(number: float, most: float, value: Any) -> float:
    if number > most:
        raise BudgetError(f"budget {shown(value)} is more than any device has. Leave the budget out if there is no limit.")
    return number
