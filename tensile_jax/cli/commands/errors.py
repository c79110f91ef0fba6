"""`tensile errors`: prints docs/errors.md, or a section of it, even if only the package is installed.

The page lies beside this file: in a checkout as a link to docs/errors.md, in an installed package as a file.
"""

import re
from importlib.resources import files

import click

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import readable_console

_READABLE_WIDTH = 110
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")  # its text is enough: the other pages are not in the package


@click.command(short_help="Explain an error of the Python API.")
@click.argument("name", metavar="[NAME]", default="")
def errors(name: str) -> None:
    """Explain an error: how to read its message, what helps, and what that costs.

    NAME is a part of a title, such as BudgetTooSmall, TraceError, OutOfMemory or deleted. Without it, all errors are explained.
    """
    from rich.markdown import Markdown  # which takes a while to be imported

    page = files("tensile_jax.cli.commands").joinpath("errors.md").read_text()
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    found = [section for section in sections if name.lower() in _title(section).lower()]
    if not found:
        known = ", ".join(map(_title, sections))
        raise Refusal(f"NAME must be a part of a title of the page on errors ({known}): got {name!r}.")
    console = readable_console(_READABLE_WIDTH)
    console.print(Markdown(_LINK.sub(r"\1", "".join(found if name else [page]))))


def _title(section: str) -> str:
    return section.splitlines()[0].removeprefix("## ")
