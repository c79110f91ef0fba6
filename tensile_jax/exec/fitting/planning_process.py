"""Plans in a separate process, at the lowest priority, while the step goes on training in this process.

A step is planned while it trains if its measured latencies differ from the predicted ones (`plan/drift.py`), or if its first plan
was found in a short search (`exec/fitting/improvement.py`). Planning is pure Python and takes seconds. A thread that plans would
hold Python's global interpreter lock, and training would wait. So functions of `plan/` are called in the planning process:

    this process --pickled function and arguments--> planning process --pickled result, or a text about the failure-->

A planner that is among the arguments is sent once. From then on, only its number is sent, and the planning process uses the same
planner again, with what that planner has computed before.

The planning process imports no JAX. It is a new interpreter and not a `multiprocessing.Process`, because the latter would import
the main module (`exec/child_process/job_process.py`).
"""

import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from tensile_jax.errors import TensileError
from tensile_jax.plan import Planner

_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tensile_jax.exec.fitting.planning_process import main; main()"
)
_NICE = 19  # the lowest priority
_LOOK_S = 0.5
_LONGEST_S = 600.0  # not tuned: a plan that takes longer comes too late

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class PlanningProcess:
    """A process that plans. It ends when the `with` block ends, and with the process that has started it.

    Raises:
        TensileError: it could not be started.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # it is closed by `__exit__`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps([p for p in sys.path if isinstance(p, str)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C in a terminal is for the training process
            )
        except (OSError, ValueError) as error:
            self._errors.close()
            raise TensileError(f"the process that plans could not be started: {error}") from error
        self._end = weakref.finalize(self, self._process.kill)  # also at the exit of the interpreter
        self._planners: list[Planner] = []
        self._asking = threading.Lock()

    def __enter__(self) -> "PlanningProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._planners.clear()
        with suppress(OSError), self._process:  # closes its pipes, also one with half a message, and waits for its end
            self._errors.close()

    @property
    def is_open(self) -> bool:
        """Whether the `with` block has not ended yet."""
        return self._end.alive

    def call(
        self, function: Callable[_Parameters, _Result], *arguments: _Parameters.args, **named: _Parameters.kwargs
    ) -> _Result:
        """`function(*arguments, **named)`, computed in the process. Waits for it, without the interpreter lock.

        Args:
            function: a function of a module that imports no JAX.

        Raises:
            TensileError: the function has failed, or the process ended or took too long.
        """
        with self._asking:
            message, known = io.BytesIO(), len(self._planners)
            _Pickler(message, self._planners).dump((function, arguments, named))
            answered, too_long = threading.Event(), threading.Event()
            threading.Thread(target=self._end_if_late, args=(answered, too_long), daemon=True).start()
            try:
                has_failed, found = self._answer(pickle.dumps((self._planners[known:], message.getvalue())))
            except Exception as error:
                raise self._ended(took_too_long=too_long.is_set()) from error
            finally:
                answered.set()
        if has_failed:
            raise TensileError(f"planning failed: {found}")
        return found

    def _answer(self, message: bytes) -> tuple[bool, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def _end_if_late(self, answered: threading.Event, too_long: threading.Event) -> None:
        """End the process if it has not answered in time. In a thread of its own."""
        if not answered.wait(_LONGEST_S):
            too_long.set()
            self._process.kill()

    def _ended(self, *, took_too_long: bool) -> TensileError:
        """The error for a process that has not answered."""
        if took_too_long:
            return TensileError(f"planning took more than {_LONGEST_S:g} s")
        self._end()
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return TensileError(f"the process that plans ended with code {code}{f': {said[-1]}' if said else ''}")


class _Pickler(pickle.Pickler):
    """Pickles the numbers of planners instead of planners. New ones are added to `planners`."""

    def __init__(self, file: io.BytesIO, planners: list[Planner]) -> None:
        super().__init__(file)
        self._planners = planners

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Planner):
            return None
        place = next((place for place, planner in enumerate(self._planners) if planner is obj), None)
        if place is None:
            place = len(self._planners)
            self._planners.append(obj)
        return place


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written."""

    def __init__(self, file: io.BytesIO, planners: list[Planner]) -> None:
        super().__init__(file)
        self._planners = planners

    def persistent_load(self, pid: int) -> Planner:
        return self._planners[pid]


def main() -> None:
    """In the planning process: reads calls from standard input, and writes the results to standard output."""
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    planners: list[Planner] = []
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what else is printed must not get into the answers
        while True:
            try:
                more, message = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            planners += more
            try:
                function, arguments, named = _Unpickler(io.BytesIO(message), planners).load()
                answer = pickle.dumps((False, function(*arguments, **named)))
            except Exception as error:
                answer = pickle.dumps((True, "".join(traceback.format_exception_only(error)).strip()))
            answers.write(answer)
            answers.flush()


def _end_with(parent: int) -> None:
    """End this process once the training process, its parent, has ended in whatever way."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
