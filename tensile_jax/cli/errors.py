"""Defines the errors of the command line: how each error is printed, and its exit code. Most are printed as one line.

    Refusal        2  an option, a file or a step is wrong; for a jobs file, there is a line for each mistake
    BudgetRefused  3  no plan keeps the budget; several lines say what needs the memory, and what to do
    Failure        1  what was typed is right, but the command failed

All exit codes are listed in `cli/__init__.py`. A warning of this package is printed as one line, too.

The messages of the Python API name arguments (`image_size=8`, `state_memory="any"`). On the command line, each argument is an
option. So `in_options` rewrites the messages (`--image-size=8`, `--state-memory=any`).
"""

import difflib
import errno
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import click

from tensile_jax.errors import BudgetTooSmall, JobsFileError, TensileError

_ARGUMENTS = (
    "batch_size", "image_size", "sequence_length", "device_profile", "host_budget", "state_memory", "max_slowdown", "policy",
    "seed",
)  # fmt: skip
_OPTION = re.compile(rf"\b({'|'.join(_ARGUMENTS)})\b")
_IN_QUOTES = re.compile(r'(--[a-z-]+=)"([^"]*)"')
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_HELP_WAS_ASKED_FOR: type[Exception] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2
_PACKAGE = Path(__file__).parent.parent
_format_as_python_does = warnings.formatwarning


class _OneLine(click.ClickException):
    """An error that click prints as one line `Error: message` on stderr, with unprintable characters escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(_line_of(message))


def _line_of(message: str) -> str:
    """The message in one line, with unprintable characters escaped."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in line)


def _lines_of(message: str) -> str:
    """The message with its lines and their indentation, with unprintable characters escaped."""
    return "\n".join(line[: len(line) - len(line.lstrip(" "))] + _line_of(line) for line in message.splitlines())


class Refusal(_OneLine):
    """An option, an argument or a named file is wrong. Exit code 2."""

    exit_code = 2

    @staticmethod
    def of_path(error: OSError, what: str, remedy: str) -> "Refusal | Failure":
        """The error for a path that the operating system refuses: a `Failure` if the disk is full or faulty, else a `Refusal`."""
        if error.errno in _FULL:
            return Failure(f"{what}: {error.strerror}.")
        return Refusal(f"{what}: {error.strerror}. {remedy}")


class JobsFileRefused(Refusal):
    """A jobs file has mistakes; the message has a line for each. Exit code 2."""

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, _lines_of(message))


class BudgetRefused(Refusal):
    """No plan keeps the budget; the message names the smallest that works, and keeps its lines. Exit code 3."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, _lines_of(message))


class Failure(_OneLine):
    """What was typed is right, but the command failed: the disk is full, or the package has a bug. Exit code 1."""

    exit_code = 1

    @classmethod
    def of_system(cls, error: OSError) -> Self:
        """The failure for an error of the operating system."""
        what = error.strerror or str(error) or type(error).__name__
        return cls(f"{what}." if error.filename is None else f"{error.filename}: {what}.")

    @classmethod
    def unexpected(cls, error: Exception, *, remedy: str) -> Self:
        """The failure for an exception that no code expects."""
        return cls(f"{type(error).__name__}: {error or 'without a message'}. {remedy}".replace("..", "."))


def in_options(message: str) -> str:
    """`message` with the API's arguments written as options.

    >>> in_options("image_size must be at least 8: got 4. Pass image_size=8 or more.")
    '--image-size must be at least 8: got 4. Pass --image-size=8 or more.'
    """
    message = _OPTION.sub(lambda found: "--" + found[1].replace("_", "-"), message)
    message = _IN_QUOTES.sub(r"\1\2", message)
    message = re.sub(r"\Abudget\b", "--budget", message)
    message = re.sub(r"\Aplan= ", "--plan ", message)
    message = message.replace("Make a new one with step.plan(...)", "Make a new one with tensile plan")
    return message.replace("Save the plan again with plan.save(path)", "Make it again with tensile plan")


def format_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """What is printed of a warning: one line without a place in the code, if the warning comes from this package's own code.

    A warning from other code, such as a user's entry point, is printed as Python does it. It replaces `warnings.formatwarning`.
    """
    if Path(filename).is_relative_to(_PACKAGE):
        return f"Warning: {_line_of(in_options(str(message)))}\n"
    return _format_as_python_does(message, category, filename, lineno, line)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question `Did you mean ...?` with the known name that is most similar to `name`; empty if none is similar.

    >>> did_you_mean("stpes", ["steps", "seed"])
    ' Did you mean steps?'
    """
    found = closest(name, known)
    return "" if found is None else f" Did you mean {found}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


@contextmanager
def refusing_options() -> Iterator[None]:
    """A context that turns a `ValueError`, `TypeError` or `OverflowError` into a `Refusal`."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise Refusal(in_options(str(error))) from error


@contextmanager
def in_one_line() -> Iterator[None]:
    """A context that turns each expected exception into an error of this module. Other exceptions pass unchanged."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, _HELP_WAS_ASKED_FOR):
            raise
        help_at = f" Try: {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise Refusal(error.format_message() + help_at) from error
    except BudgetTooSmall as error:
        raise BudgetRefused(in_options(str(error))) from error
    except JobsFileError as error:
        raise JobsFileRefused(str(error)) from error  # it names keys of the file, not options
    except TensileError as error:
        kind = Refusal if isinstance(error, ValueError) else Failure  # a caller's mistake is a ValueError as well
        raise kind(in_options(str(error))) from error
    except ModuleNotFoundError as error:
        raise Refusal(in_options(str(error))) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise Failure.of_system(error) from error
