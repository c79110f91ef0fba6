"""Gives a plan's results what `jax.jit` would give them: sharding, memory, and whether they are committed to a device.

Three kinds of results differ from those of `jax.jit` when the last of a plan's segments (executables of parts of the step) has
run:

    - A donated argument that the step returns unchanged. The caller's array must be deleted, and the result must be a new array
      in the same memory.
    - A result that was copied in from the host. Such a copy is always committed to a device; `jax.jit` commits a result only if
      an argument is committed.
    - A result for which `jax.jit` states the sharding in another form, such as a mesh of one device.

The first two kinds pass through an executable that returns its donated arguments, so that nothing is copied. `jax.device_put`
gives the third kind its sharding.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.transfer import on_host


class ResultPlacer:
    """Makes of the results of one plan the arrays that `jax.jit` would return.

    Args:
        compiler: the compiler of the plan's segments; it knows the device, and whether results are committed.
        passed_on: the positions of the results that are donated arguments, returned unchanged.
        shardings: the sharding of every result, as `jax.jit` states it (None for a token); None if the results have it already.
        always_on_host: the positions of the results that the step itself has in host memory. Others that are there belong to a
            plan, and stay as they are.
    """

    def __init__(
        self,
        compiler: Compiler,
        passed_on: Sequence[int],
        shardings: Sequence[Any] | None,
        always_on_host: Sequence[int] = (),
    ) -> None:
        self._compiler = compiler
        self._passed_on = frozenset(passed_on)
        self._shardings = shardings
        self._always_on_host = frozenset(always_on_host)

    def __call__(self, results: list[Any]) -> list[Any]:
        """The results as `jax.jit` would return them. An array in `results` that must be replaced is deleted."""
        if self._shardings is not None:
            results = [
                value
                if sharding is None or (on_host(value) and i not in self._always_on_host)
                else jax.device_put(value, sharding)
                for i, (value, sharding) in enumerate(zip(results, self._shardings, strict=True))
            ]
        if self._compiler.committed and not self._passed_on:
            return results
        uncommitted = not self._compiler.committed
        wrong = [
            i
            for i, value in enumerate(results)
            if (i in self._passed_on or (uncommitted and getattr(value, "committed", False)))
            and isinstance(value, jax.Array)
            and (i in self._always_on_host or not on_host(value))
        ]
        if not wrong:
            return results
        values = [results[i] for i in wrong]
        for i, value in zip(wrong, self._compiler.identity(values)(*values), strict=True):
            results[i] = value
        return results
