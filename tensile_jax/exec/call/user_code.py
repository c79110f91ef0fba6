"""Finds the line of the user's code that has made the running call, for warnings and errors."""

import sys
from types import FrameType

_BETWEEN = frozenset({"tensile_jax", "flax", "jax"})
"""The packages whose code may stand between the user's line and this module."""


def level_of_the_user() -> int:
    """The `stacklevel` with which the caller's warning names the line of the user's code."""
    return _outwards(sys._getframe(1))[1]


def line_of_the_user() -> tuple[str, int]:
    """The file and the number of the line of the user's code."""
    frame, _ = _outwards(sys._getframe(1))
    return frame.f_code.co_filename, frame.f_lineno


def _outwards(frame: FrameType) -> tuple[FrameType, int]:
    """The first frame from `frame` outwards that is the user's, and its place, counted from one."""
    level = 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return frame, level
