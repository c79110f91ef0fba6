"""A caller's mistake on the command line, in the words of the command line.

The API names its arguments (`image_size=8`, `state_memory="any"`); who typed options is told of options
(`--image-size=8`, `--state-memory=any`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

_ARGUMENTS = ("batch_size", "image_size", "sequence_length", "device_profile", "state_memory", "max_slowdown", "policy", "seed")
_OPTION = re.compile(rf"\b({'|'.join(_ARGUMENTS)})\b")
_IN_QUOTES = re.compile(r'(--[a-z-]+=)"([^"]*)"')


class Refusal(click.ClickException):
    """`Error: message` on stderr, in one line, and the exit code."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class DoesNotFit(Refusal):
    """No plan keeps the budget; the message names the smallest that works."""

    exit_code = 3


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


@contextmanager
def refusing_options() -> Iterator[None]:
    """Inside it, a `ValueError` or `TypeError` is about what was typed."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(in_options(str(error))) from error
