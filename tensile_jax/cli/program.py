"""The entry point of the installed script `tensile`: sets up signal handling for the whole process, and then runs the commands.

Only the installed script imports this module. The module handles signals before it imports the commands, so that Ctrl-C ends the
process without a traceback at any time. Other code imports the commands from `tensile_jax.cli.main`, which leaves signals alone.
"""

# ruff: noqa: E402, I001
import sys

from tensile_jax.cli.signals import ProcessEnd, flush_output, listen_to_the_end

_SPAWNED = "__mp_main__" in sys.modules  # `multiprocessing` imports the script in the processes that it spawns for a user's step
_END = ProcessEnd() if _SPAWNED else listen_to_the_end()  # before anything else is imported

import os
import warnings
from typing import NoReturn

from tensile_jax.cli.errors import Failure, format_warning
from tensile_jax.cli.main import main

_TRACEBACK = "TENSILE_TRACEBACK"


def start() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    warnings.formatwarning = format_warning
    _END.code = _exit_code()
    sys.exit(_END.code)


def _exit_code() -> int:
    """Run the command line, and return its exit code. Only this function turns an unexpected exception into one line."""
    try:
        try:
            main()
        except SystemExit as end:
            flush_output()
            return end.code if isinstance(end.code, int) else 0
        finally:
            flush_output()
        return 0
    except BrokenPipeError:
        return 1  # the reader of the output has closed the pipe
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        Failure.unexpected(error, remedy=f"Set {_TRACEBACK}=1 to see where.").show()
        return Failure.exit_code
