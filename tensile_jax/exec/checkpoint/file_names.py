"""Defines the names of checkpoints and of the files in them (`format.py`), also for code that only copies checkpoints."""

import re
from collections.abc import Iterable

MARK = "tensile.json"
STATE = "state"
MANIFEST = "manifest.json"

_NAME = re.compile(r"(0|[1-9][0-9]{0,17})(?:-([1-9][0-9]{0,8}))?\Z")


def checkpoint_name(step: int, number: int) -> str:
    """The name of the checkpoint of a step that was saved so many times before."""
    return f"{step}-{number}" if number else f"{step}"


def step_and_number(name: str) -> tuple[int, int]:
    """The step of the checkpoint of that name, and how often the step was saved before.

    Raises:
        ValueError: no checkpoint has such a name.
    """
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return int(match[1]), int(match[2] or 0)


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of the names that are names of checkpoints, that of the newest checkpoint first."""
    return sorted(filter(_NAME.match, names), key=step_and_number, reverse=True)
