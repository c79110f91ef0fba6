"""Finds the lines of the user's code that an equation of a step comes from, for messages.

JAX keeps a traceback with each equation. It goes no farther out than the innermost traced function: a loop's body, or a function
under `jax.jit`. So an equation inside one of JAX's own functions, such as `jnp.sort`, has no line of the user's code in its
traceback. The call of that function has one, so the search goes on from an equation to the calls around it.
"""

import builtins
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os.path import basename, join
from typing import Any

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox", "keras", __name__.partition(".")[0])


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    number: int

    @property
    def name(self) -> str:
        """The line for people, such as `train.py:17`."""
        return name_of_line(self.file, self.number)

    @property
    def code(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()


def source_lines(tracebacks: Sequence[Any]) -> Iterator[SourceLine]:
    """The lines of the frames that are not in a library, from the innermost one outwards.

    Args:
        tracebacks: those of an equation and of the calls around it, from the inside outwards; None where JAX has kept none.
    """
    for traceback in tracebacks:
        for frame in () if traceback is None else traceback.frames:
            if not frame.file_name.startswith(_folders()):
                yield SourceLine(frame.file_name, frame.line_num)


def source_line(tracebacks: Sequence[Any]) -> str:
    """The innermost of these lines, such as `train.py:17`; empty if there is none."""
    innermost = next(source_lines(tracebacks), None)
    return "" if innermost is None else innermost.name


def name_of_line(file: str, line: int) -> str:
    """The line for people: `train.py:17`, or in a notebook, as IPython writes it, `Cell In[3], line 17`."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    cell = None if shell is None else shell.compile.format_code_name(file)
    return f"{basename(file)}:{line}" if cell is None else f"{' '.join(cell)}, line {line}"


@cache
def _folders() -> tuple[str, ...]:
    """The folders of the libraries that are installed."""
    found = (find_spec(name) for name in _LIBRARIES)
    return tuple(join(folder, "") for spec in found if spec is not None for folder in spec.submodule_search_locations or ())
