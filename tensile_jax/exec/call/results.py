"""Give the results of a plan the sharding, the commitment and the memory that `jax.jit` gives them, and copy none without need.

Three kinds of results differ from those of `jax.jit`:

    - A donated argument that the step returns as it is. The caller's array must be deleted, and the result be a new array in the
      same memory.
    - A result that was copied in from the host. The copy is committed to a device; without committed arguments, a result of
      `jax.jit` is not.
    - A result for which `jax.jit` states the sharding in another form (a mesh of one device).

The first two kinds pass through an executable that returns its donated arguments. XLA lets its outputs take over their memory.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.transfer import on_host


class ResultPlacer:
    """Makes the results of one plan what `jax.jit` would return.

    Args:
        compiler: of the plan's segments; it knows the device and whether results are committed.
        passed_on: positions of the results that are donated arguments.
        shardings: of every result, as `jax.jit` states them; None where they are as the segments have them.
    """

    def __init__(self, compiler: Compiler, passed_on: Sequence[int], shardings: Sequence[Any] | None) -> None:
        self._compiler = compiler
        self._passed_on = frozenset(passed_on)
        self._shardings = shardings

    def __call__(self, results: list[Any]) -> list[Any]:
        """The results as `jax.jit` would give them. Those that have to change are taken over, and gone."""
        if self._shardings is not None:
            results = [
                value if on_host(value) else jax.device_put(value, sharding)
                for value, sharding in zip(results, self._shardings, strict=True)
            ]
        if self._compiler.committed and not self._passed_on:
            return results
        uncommitted = not self._compiler.committed
        wrong = [
            i
            for i, value in enumerate(results)
            if (i in self._passed_on or (uncommitted and getattr(value, "committed", False)))
            and isinstance(value, jax.Array)
            and not on_host(value)
        ]
        if not wrong:
            return results
        values = [results[i] for i in wrong]
        for i, value in zip(wrong, self._compiler.identity(values)(*values), strict=True):
            results[i] = value
        return results
