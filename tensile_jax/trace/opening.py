"""Decides which loops of a step are opened, so that the planner sees what each iteration keeps (`loops.py`).

A scan that stays whole is one operator: all that its iterations keep for the backward pass is stacked, and stays on the device
from the forward loop to the backward loop. If a scan is opened, each iteration is planned and launched, and nothing is stacked. A
scan is opened if

    - it has one iteration or none; or
    - it has at most 128 iterations and 20,000 equations in all of them, and an iteration is worth a launch: it has a heavy
      operator, and computes at least a million floating-point operations or touches at least 256 KiB.

Layers of a network and parts of a batch are like that. Time steps of a recurrent network mostly are too many or too small.
`open_loops=True` opens every scan, and `open_loops=False` none. Loops without a fixed number of iterations stay whole, and so do
those that work on mutable references.
"""

from typing import Any

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.cost import body_flops, is_heavy
from tensile_jax.trace.loops import loop_of

# Not tuned: a launch takes about 10 us, in which a CPU core computes a million operations and copies some 100 KB.
_MOST_ITERATIONS = 128
_MOST_EQUATIONS = 20_000  # planning so many takes about as long as compiling a step
_LEAST_FLOPS = 1_000_000
_LEAST_BYTES = 256 * 2**10


class Opening:
    """Says of each scan, as an equation of a jaxpr, whether it is opened: always, never, or (None) by the rule above.

    `notes` says which loops stay whole since they have too many iterations or equations, in a sentence each.
    """

    def __init__(self, open_loops: bool | None) -> None:
        self.notes: list[str] = []
        self._open_loops = open_loops

    def __call__(self, scan: Any) -> bool:
        if self._open_loops is not None:
            return self._open_loops
        loop = loop_of(scan)
        assert loop is not None, "only scans are opened"
        if loop.length <= 1:
            return True
        equations = list(_inner_equations(loop.body))
        touched = sum(nbytes_of(v.aval) for e in equations for v in e.outvars)
        heavy = any(is_heavy(equation.primitive.name) for equation in equations)
        if not heavy or (body_flops(loop.body) < _LEAST_FLOPS and touched < _LEAST_BYTES):
            return False
        if loop.length <= _MOST_ITERATIONS and loop.length * len(equations) <= _MOST_EQUATIONS:
            return True
        where = f" at {scan.source_info.name_stack}" if str(scan.source_info.name_stack) else ""
        self.notes.append(
            f"A loop of {loop.length} iterations of {len(equations)} equations{where} stays one operator: only loops of up to "
            f"{_MOST_ITERATIONS} iterations and {_MOST_EQUATIONS} equations are opened. open_loops=True opens it."
        )
        return False


def _inner_equations(jaxpr: Any) -> Any:
    """The equations of a jaxpr, and in the place of each that holds another jaxpr, that jaxpr's."""
    for equation in jaxpr.eqns:
        inner = [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        if not inner or equation.primitive.name in ("scan", "while"):
            yield equation
        for body in inner:
            yield from _inner_equations(getattr(body, "jaxpr", body))
