"""Carries an exception from one process to another, with the text of its traceback as a note."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CarriedException:
    """An exception as data. If it cannot be pickled, `pickled` is empty, and only `summary` (type and message) is known."""

    pickled: bytes
    summary: str
    story: str

    def exception(self) -> BaseException:
        """The exception, with its traceback as a note; a RuntimeError if its class does not exist in this process."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(self.summary)
        error.add_note(f"In the job's own process:\n{self.story}")
        return error


def carry(error: BaseException) -> CarriedException:
    """`error` in a form that can be sent to another process."""
    story = "".join(traceback.format_exception(error))
    return CarriedException(_pickled(error), f"{type(error).__name__}: {error}", story)


def _pickled(error: BaseException) -> bytes:
    kind = type(error)
    whole = error if kind.__module__ == "builtins" else _Parts(kind, error.args, dict(error.__dict__))
    for one in (whole, _Parts(kind, error.args, {})):
        try:
            pickled = pickle.dumps(one)
            if type(pickle.loads(pickled)) is kind:
                return pickled
        except Exception:
            continue  # next without its attributes; after that, as text only
    return b""


class _Parts:
    """Pickles an exception without calling its `__init__`, whose arguments need not be those that the exception keeps."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        self._parts = kind, args, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._parts


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
