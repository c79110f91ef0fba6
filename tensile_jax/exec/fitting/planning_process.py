"""Plans a step again in a separate process, at the lowest priority, while the step goes on training in this process.

A step is planned again when its measured latencies differ from the predicted ones (`plan/drift.py`). Planning is pure Python and
takes seconds. A thread that plans would hold Python's global interpreter lock, and training would wait. So the arguments of
`choose_again` are sent to the planning process. It sends back the choice (segments, and where each tensor is) to run from now on,
which is the present one if no other is predicted to be clearly faster:

    this process --pickled arguments of `choose_again`--> planning process --pickled `Renewal`, or a text about the failure-->

The planning process imports no JAX. It is a new interpreter and not a `multiprocessing.Process`, because the latter would import
the main module (`exec/child_process/job_process.py`).
"""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

from tensile_jax.errors import TensileError
from tensile_jax.plan.drift import Renewal, choose_again

_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tensile_jax.exec.fitting.planning_process import main; main()"
)
_NICE = 19  # the lowest priority
_LOOK_S = 0.5
_LONGEST_S = 600.0  # not tuned: a plan that takes longer comes too late


def choose_in_process(arguments: Sequence[Any]) -> Renewal:
    """`choose_again(*arguments)`, computed in a process of its own. Waits for it, without the interpreter lock.

    Raises:
        TensileError: planning has failed, or the process ended, could not be started, or took too long.
    """
    request = pickle.dumps(tuple(arguments))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps([p for p in sys.path if isinstance(p, str)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the training process
        )
    except (OSError, ValueError) as error:
        raise TensileError(f"the process that plans could not be started: {error}") from error
    ending = weakref.finalize(process, process.kill)  # also at the exit of the interpreter
    try:
        answer, errors = process.communicate(request, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise TensileError(f"planning took more than {_LONGEST_S:g} s") from error
    finally:
        ending()
        process.wait()
    try:
        found = pickle.loads(answer)
    except Exception as error:
        said = errors.decode(errors="replace").strip().splitlines()
        raise TensileError(
            f"the process that plans ended with code {process.returncode}{f': {said[-1]}' if said else ''}"
        ) from error
    if not isinstance(found, Renewal):
        raise TensileError(f"planning failed: {found}")
    return found


def main() -> None:
    """In the planning process: reads the arguments from standard input, and writes the answer to standard output."""
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what else is printed must not get into the answer
        try:
            found: Any = choose_again(*pickle.load(sys.stdin.buffer))
        except Exception as error:
            found = "".join(traceback.format_exception_only(error)).strip()
        answer.write(pickle.dumps(found))


def _end_with(parent: int) -> None:
    """End this process once the training process, its parent, has ended in whatever way."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
