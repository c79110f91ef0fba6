"""Converts a number that a user passed as an argument to a Python `int` or `float`, whatever type of number it is.

Scalars of Python, NumPy and JAX are numbers, and so is an array without dimensions. Booleans, strings and complex numbers are
not. NumPy and JAX scalars can overflow at 32 bits, and can change the precision of comparisons; Python numbers do neither.
"""

import math
from numbers import Integral, Rational, Real
from typing import Any

MOST = 2**62
"""No count and no size can be so large; above it, arithmetic with 64 bits would overflow."""

_LONGEST_SHOWN = 60  # characters


def read_number(value: Any) -> int | float | None:
    """The value as a Python number, which may be infinite or NaN; None if it is no number."""
    value = _scalar(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a fraction may be beyond the largest float
        return math.inf if isinstance(value, Rational) and int(value.numerator) > 0 else -math.inf


def read_count(value: Any) -> int | None:
    """The value as an integer of at least 1 and below `MOST`; None if it is not one. The float 3.0 is not an integer."""
    number = read_number(value)
    return number if isinstance(number, int) and 1 <= number < MOST else None


def read_threshold(renew_above: Any) -> float | None:
    """The drift of latencies above which a plan is renewed; None for never.

    Raises:
        ValueError: it is not a number above zero.
    """
    if renew_above is None:
        return None
    number = read_number(renew_above)
    if number is None or not 0 < number < math.inf:
        raise ValueError(
            f"renew_above must be a number above zero, or None to keep the plan: got {shown(renew_above)}. Pass 0.3 to plan "
            "again when segments take 30 % longer, or less long, than the plan was made for."
        )
    return float(min(number, MOST))


def shown(value: Any) -> str:
    """`repr(value)` for a message, cut short where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an integer of more than 4300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:20]}... ({len(text)} characters)"


def _scalar(value: Any) -> Any:
    """The element of an array without dimensions; any other value unchanged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value
