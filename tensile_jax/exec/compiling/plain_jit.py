"""Compiles a step as plain `jax.jit` does, as one executable: to know its peak, or to run it.

A step can be planned in several *forms*, which are variants with the same results (`exec/fitting/forms.py`). All of them share
this executable and this peak, which are those of the user's own step. If the budget is a share of the peak, the step hardly ever
runs as one executable. So the peak is read from an executable that is compiled only for its sizes (`compiler.py`), unless an
executable that can run already exists.
"""

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

from tensile_jax.exec.compiling.compiler import CompiledWhole, Compiler, peak_of
from tensile_jax.exec.processes.agreement import Agreement
from tensile_jax.exec.processes.orders import CompileWhole
from tensile_jax.progress.phases import PLAIN_JIT, Progress


def _tell_nobody(what: str, done: int, of: int) -> None:
    pass


class JitExecutable(NamedTuple):
    """Plain `jax.jit`'s executable, its peak in bytes, which is the largest of all processes, and what compiling it has taken."""

    executable: Any
    peak_bytes: int
    seconds: float


class PlainJit:
    """Plain `jax.jit`'s executable of one step, compiled when it is first asked for.

    Args:
        agreement: how the processes agree of which the step uses devices.
    """

    def __init__(self, compiler: Compiler, traced: Any, agreement: Agreement) -> None:
        self._compiler = compiler
        self._traced = traced
        self._agreement = agreement
        self._compiling: dict[bool, Future[CompiledWhole]] = {}  # by whether it is to run
        self._found: dict[bool, JitExecutable] = {}
        self._beginning = threading.Lock()

    def is_known(self, *, to_run: bool = False) -> bool:
        """Whether the executable was asked for and is there; if it need not run, its sizes suffice."""
        return True in self._found if to_run else bool(self._found)

    def begin(self) -> None:
        """Begin to compile for its peak in a thread; `sized` waits for it.

        If other processes are to compile it, too, nothing is done: they wait for orders then.
        """
        if len(self._agreement.processes) == 1 and not self._found:
            self._begun(self._grade(to_run=False))

    def compiled(self, tell: Progress = _tell_nobody) -> JitExecutable:
        """The executable, for the process that plans. If other processes run the step too, they are told to compile it as
        well.
        """
        return self._made(to_run=True, tell=tell)

    def sized(self, tell: Progress = _tell_nobody) -> JitExecutable:
        """The same for its peak: an executable that may run more slowly."""
        return self._made(to_run=next(iter(self._found), self._grade(to_run=False)), tell=tell)

    def follow(self, tell: Progress = _tell_nobody, *, to_run: bool = True) -> JitExecutable:
        """The executable, for a process that was told to compile it. The processes agree on the peak."""
        return self._awaited(self._grade(to_run=to_run), tell)

    def _made(self, *, to_run: bool, tell: Progress) -> JitExecutable:
        if to_run not in self._found:
            self._agreement.tell(CompileWhole(to_run))
        return self._awaited(to_run, tell)

    def _awaited(self, to_run: bool, tell: Progress) -> JitExecutable:
        if to_run not in self._found:
            tell(PLAIN_JIT, 0, 1)
            try:
                executable, seconds = self._begun(to_run).result()
            except Exception:
                self._compiling.pop(to_run, None)  # whoever asks again tries again
                raise
            tell(PLAIN_JIT, 1, 1)
            peak = max(self._agreement.gather(peak_of(executable)))
            self._found[to_run] = JitExecutable(executable, peak, seconds)
        return self._found[to_run]

    def _grade(self, *, to_run: bool) -> bool:
        """Whether the executable to compile must be able to run. If compiling only for the sizes takes as long, it always is."""
        return to_run or not self._compiler.sizes_quickly

    def _begun(self, to_run: bool) -> Future[CompiledWhole]:
        with self._beginning:
            if to_run not in self._compiling:
                self._compiling[to_run] = self._compiler.begin_whole(self._traced, for_sizes=not to_run)
            return self._compiling[to_run]
