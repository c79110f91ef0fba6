"""An exception on its way from one process to another, with its traceback.

What it was when it was raised stays in the other process; its traceback goes along as text and is added to it as a note.
"""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Thrown:
    """`pickled` is empty where only `summary`, its type and message, can be told."""

    pickled: bytes
    summary: str
    story: str

    def caught(self) -> BaseException:
        """The exception, with its traceback as a note; a RuntimeError in the place of one that does not exist here."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(self.summary)
        error.add_note(f"In the job's own process:\n{self.story}")
        return error


def throw(error: BaseException) -> Thrown:
    """`error`, ready to go."""
    story = "".join(traceback.format_exception(error))
    return Thrown(_pickled(error), f"{type(error).__name__}: {error}", story)


def _pickled(error: BaseException) -> bytes:
    kind = type(error)
    whole = error if kind.__module__ == "builtins" else _Parts(kind, error.args, dict(error.__dict__))
    for one in (whole, _Parts(kind, error.args, {})):
        try:
            pickled = pickle.dumps(one)
            if type(pickle.loads(pickled)) is kind:
                return pickled
        except Exception:
            continue  # less of it, or only its text
    return b""


class _Parts:
    """Pickles an exception without calling its `__init__`, whose arguments need not be those that it keeps."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        self._parts = kind, args, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._parts


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
