"""Leaves the frames of this package out of the tracebacks that a user sees, as JAX leaves out its own.

`jax.config.jax_traceback_filtering` (the environment variable `JAX_TRACEBACK_FILTERING`) says how, for this package as for JAX:

    off                   no frame is left out
    quiet_remove_frames   the frames are removed
    remove_frames         the frames are removed, and the `__cause__` of the error has all of them
    tracebackhide         the frames are marked (`__tracebackhide__`), and IPython does not show them. Frames at the end of the
                          traceback are removed instead, because IPython always shows the last frame
    auto                  tracebackhide in IPython, quiet_remove_frames elsewhere

The frames of the user's functions stay. So do frames of JAX that JAX itself does not leave out. Under `quiet_remove_frames`, an
error gets a note that frames were left out, unless it is a `TensileError`, which says all that its reader needs, or a
`KeyboardInterrupt`.

This module does not import JAX, because it also filters the errors of reading a plan, which works without JAX.
"""

import builtins
import functools
import sys
from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from pathlib import Path
from traceback import walk_tb
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

from tensile_jax.errors import TensileError

_PACKAGE = Path(__file__).parent
_SETTING = "JAX_TRACEBACK_FILTERING"
_NOTE = (
    "--------------------\n"
    f"For simplicity, tensile_jax has left its own frames out of the traceback. Set {_SETTING}=off to include these."
)
_SPECIAL = frozenset({"__init__", "__call__", "__enter__", "__exit__"})

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


class UnfilteredTraceback(Exception):
    """The cause of an error, under `remove_frames`: it has the traceback with all frames."""


def hides_frames(function: _Function) -> _Function:
    """The function or the generator function, whose errors have tracebacks without the frames of this package."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            _filter(error)
            raise

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return (yield from function(*args, **kwargs))
        except (Exception, KeyboardInterrupt) as error:
            _filter(error)
            raise

    return iterate if isgeneratorfunction(function) else call  # pyright: ignore[reportReturnType] # it takes and gives what the function does


def methods_hide_frames(cls: _Class) -> _Class:
    """The class, with `hides_frames` around each of the methods that users call."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and (name in _SPECIAL or not name.startswith("_")):
            setattr(cls, name, hides_frames(value))
    return cls


def _filter(error: Exception | KeyboardInterrupt) -> None:
    """Leave the frames of this package out of the tracebacks of the error, and of the errors that it comes from."""
    mode, whole = _mode(), error.__traceback__
    if mode == "off":
        return
    for one in list(_chain(error)):
        one.__traceback__ = _hidden(one.__traceback__) if mode == "tracebackhide" else _without_frames(one.__traceback__)
    if mode == "tracebackhide" or error.__traceback__ is whole:
        return
    if mode == "remove_frames":
        cause = UnfilteredTraceback(f"{type(error).__name__}: {error}").with_traceback(whole)
        cause.__cause__, cause.__context__, cause.__suppress_context__ = (
            error.__cause__, error.__context__, error.__suppress_context__,
        )  # fmt: skip
        error.__cause__ = cause
    elif not isinstance(error, TensileError | KeyboardInterrupt) and not any(
        _SETTING in note for note in getattr(error, "__notes__", ())
    ):
        error.add_note(_NOTE)


def _mode() -> str:
    """How frames are left out: one of the values above but `auto`."""
    config = getattr(sys.modules.get("jax"), "config", None)
    mode = getattr(config, "jax_traceback_filtering", None) or "auto"
    if mode != "auto":
        return mode
    return "tracebackhide" if hasattr(builtins, "get_ipython") else "quiet_remove_frames"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that Python prints before it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen or isinstance(one, UnfilteredTraceback):
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        yield one


def _hidden(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback with the frames of this package marked, and without those at its end."""
    for frame, _ in walk_tb(traceback):
        if _is_own(frame):
            frame.f_locals["__tracebackhide__"] = True
    return _rebuilt(traceback, lambda frame, at_end: not (at_end and _is_own(frame)))


def _without_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package; the same object if it has none."""
    return _rebuilt(traceback, lambda frame, at_end: not _is_own(frame))


def _rebuilt(traceback: TracebackType | None, keeps: Callable[[FrameType, bool], bool]) -> TracebackType | None:
    """The traceback with those entries that `keeps` says, given a frame, and whether no later frame was kept."""
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if keeps(entry.tb_frame, kept is None):
            same = entry.tb_next is kept
            kept = entry if same else TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_own(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)
