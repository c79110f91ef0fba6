"""Reads the memory budgets that users write.

A budget is a number of bytes, a size such as `"1.2GiB"`, or a share of plain jit's peak such as `"60%"`. *Plain jit* is `jax.jit`
without this package. A share becomes a number of bytes when a step is planned. It is a share of plain jit's predicted peak until
plain jit's step is compiled, and then of the compiled peak (`exec/fitting/find_plan.py`).
"""

import re
from dataclasses import dataclass
from typing import Any

from tensile_jax.arguments import MOST, read_number, shown
from tensile_jax.errors import BudgetError
from tensile_jax.units import SIZES, format_bytes

_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*\Z")
_REMEDY = 'Give a number of bytes, a size such as "1.2GiB" or "800MB", or a share of plain jit\'s peak such as "60%".'

_HOST_REMEDY = 'Give a number of bytes, or a size such as "8GiB".'


@dataclass(frozen=True, slots=True)
class Budget:
    """Either a number of bytes, or a share of the peak of plain `jax.jit`.

    `basis` says for people what a number of bytes was computed from; it is empty if the user gave the number. `beside` are
    further bytes that the user's budget has to hold and the plan does not count, such as a job's metrics; errors add them.
    """

    nbytes: int | None
    share: float | None
    basis: str = ""
    beside: int = 0

    def resolve(self, jit_peak_bytes: int) -> int:
        """The budget in bytes, at least one byte."""
        return self.nbytes if self.nbytes is not None else max(int((self.share or 0.0) * jit_peak_bytes), 1)

    def in_bytes(self, jit_peak_bytes: int, *, compiled: bool) -> "Budget":
        """The budget as a number of bytes, where plain jit's peak is `jit_peak_bytes`: `compiled`, or else a prediction."""
        if self.share is None:
            return self
        how = "as compiled" if compiled else "as predicted, since plain jit was not compiled"
        basis = f"{self.share:.4g} of plain jit's peak, {format_bytes(jit_peak_bytes)} {how}"
        return Budget(self.resolve(jit_peak_bytes), None, basis)


_MOST_SHARE = 1e6  # of plain jit's peak: far above any use, and far below an overflow


def parse_budget(value: Any) -> Budget:
    """The budget that `value` means: a number of bytes, or a text.

    Raises:
        BudgetError: the budget is not above zero, is too large for any device, or cannot be read.
        TypeError: `value` is neither a number nor a string.
    """
    return _parse(value, "budget", _REMEDY)


def parse_host_budget(value: Any) -> int:
    """The bytes of host memory that `value` means: a number of bytes, or a text.

    Raises:
        BudgetError: it is not above zero, is too large for any machine, is a share, or cannot be read.
        TypeError: `value` is neither a number nor a string.
    """
    budget = _parse(value, "host_budget", _HOST_REMEDY)
    if budget.nbytes is None:
        raise BudgetError(f"host_budget {shown(value)} is a share, but host memory takes no share. {_HOST_REMEDY}")
    return budget.nbytes


def _parse(value: Any, name: str, remedy: str) -> Budget:
    if isinstance(value, str):
        return _parse_text(value, name, remedy)
    number = read_number(value)
    if number is None:
        raise TypeError(f"{name} must be a number of bytes or a string, got {shown(value)}. {remedy}")
    if not number > 0:  # which no NaN is
        raise BudgetError(f"{name} must be above zero, got {shown(value)}. {remedy}")
    if number < 1:
        raise BudgetError(f"{name} is a number of bytes, and {shown(value)} is less than one. {remedy}")
    return Budget(int(_refuse_huge(number, MOST, value, name)), None)


def _parse_text(value: str, name: str, remedy: str) -> Budget:
    match = _TEXT.match(value)
    if match is None or (match[2] != "%" and match[2].lower() not in SIZES):
        raise BudgetError(f"{name} {shown(value)} cannot be read. {remedy}")
    number = float(match[1])  # infinite if there are too many digits
    if match[2] == "%":
        budget = Budget(None, _refuse_huge(number / 100, _MOST_SHARE, value, name))
    else:
        budget = Budget(int(_refuse_huge(number * SIZES[match[2].lower()], MOST, value, name)), None)
    if number <= 0 or budget.nbytes == 0:
        raise BudgetError(f"{name} must be above zero, got {shown(value)}. {remedy}")
    return budget


def _refuse_huge(number: float, most: float, value: Any, name: str) -> float:
    if number > most:
        raise BudgetError(f"{name} {shown(value)} is more than any device has. Leave the {name} out if there is no limit.")
    return number
