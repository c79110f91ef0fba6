"""Read a budget: bytes, `"1.2GiB"`, or a share of plain jit's peak, `"60%"`."""

import re
from dataclasses import dataclass

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
        """The budget in bytes."""
        return self.nbytes if self.nbytes is not None else int((self.share or 0.0) * jit_peak_bytes)


def parse_budget(value: int | float | str) -> Budget:
    """The budget that `value` says.

    Raises:
        BudgetError: it is not above zero, or not readable.
        TypeError: it is neither a number nor a string.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"budget must be a number of bytes or a string, got {value!r}. {_REMEDY}")
    if isinstance(value, int | float):
        if not 0 < value < float("inf"):
            raise BudgetError(f"budget must be above zero, got {value!r}. {_REMEDY}")
        if value < 1:
            raise BudgetError(f"budget must be at least one byte, got {value!r}. {_REMEDY}")
        return Budget(int(value), None)
    match = _TEXT.match(value)
    if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
        raise BudgetError(f"budget {value!r} cannot be read. {_REMEDY}")
    number = float(match[1])
    budget = Budget(None, number / 100) if match[2] == "%" else Budget(int(number * _UNITS[match[2].lower()]), None)
    if number <= 0 or budget.nbytes == 0:
        raise BudgetError(f"budget must be above zero, got {value!r}. {_REMEDY}")
    return budget
