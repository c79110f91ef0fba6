"""Defines `Story`: the last events that a state machine has received. The errors of the state machine quote these events.

Each of the package's three state machines (`exec/controller/machine.py`, `exec/runtime/lifecycle.py`, `ray/scheduler.py`) keeps a
story in its state. A story is for people only: two states that differ only in their stories are equal. A story keeps the names of
events and their numbers and texts. It keeps no object of the user, so that the object's memory can be freed.
"""

from dataclasses import dataclass
from typing import Any

_KEPT = 32
_MOST_CHARACTERS = 80  # of one text
_SHOWN = frozenset({int, float, str, bool})


@dataclass(frozen=True, slots=True)
class Story:
    """The last 32 events, each with its name and with those of its fields that are numbers or texts."""

    told: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def with_event(self, event: Any) -> "Story":
        """The story, which goes on with this event: a dataclass or a named tuple."""
        fields = [getattr(event, name) for name in event.__match_args__]
        told = type(event).__name__, tuple([v for v in fields if type(v) in _SHOWN])
        return Story((*self.told[1 - _KEPT :], told))

    def add_to(self, error: BaseException) -> None:
        """Add the story to an error as a note."""
        if self.told:
            error.add_note(f"The last events: {self}")

    def __str__(self) -> str:
        return ", ".join(f"{name}({', '.join([_short(v) for v in values])})" for name, values in self.told)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
