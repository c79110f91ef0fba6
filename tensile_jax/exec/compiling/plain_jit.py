"""Compiles a step as plain `jax.jit` does, as one executable, at most once.

All forms of a step (`exec/fitting/forms.py`) share this executable, since they compute the same.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from tensile_jax.exec.compiling.compiler import CompiledWhole, Compiler, peak_of
from tensile_jax.exec.processes.agreement import Agreement
from tensile_jax.exec.processes.orders import CompileWhole
from tensile_jax.progress.phases import PLAIN_JIT


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
        self._compiling: Future[CompiledWhole] | None = None
        self._found: JitExecutable | None = None
        self._beginning = threading.Lock()

    @property
    def is_compiled(self) -> bool:
        """Whether somebody has asked for the executable, and has it."""
        return self._found is not None

    def begin(self) -> None:
        """Begin to compile in a thread; `compiled` waits for it.

        If other processes are to compile it, too, nothing is done: they wait for orders then.
        """
        if len(self._agreement.processes) == 1:
            self._begun()

    def compiled(self, tell: Callable[[str, int, int], None] = lambda what, done, of: None) -> JitExecutable:
        """The executable. In the process that plans: if others use the step's devices, they are told to compile it as well."""
        if self._found is None:
            self._agreement.tell(CompileWhole())
        return self.follow(tell)

    def follow(self, tell: Callable[[str, int, int], None] = lambda what, done, of: None) -> JitExecutable:
        """The executable. In a process that was told to compile it; the processes agree on the peak."""
        if self._found is None:
            tell(PLAIN_JIT, 0, 1)
            try:
                executable, seconds = self._begun().result()
            except Exception:
                self._compiling = None  # whoever asks again tries again
                raise
            tell(PLAIN_JIT, 1, 1)
            self._found = JitExecutable(executable, max(self._agreement.gather(peak_of(executable))), seconds)
        return self._found

    def _begun(self) -> Future[CompiledWhole]:
        with self._beginning:
            if self._compiling is None:
                self._compiling = self._compiler.begin_whole(self._traced)
            return self._compiling
