"""Decides which loops and conditionals of a step are opened, so that the planner sees what is in them.

A scan that stays whole is one operator: all that its iterations keep for the backward pass is stacked, and stays on the device
from the forward loop to the backward loop. If a scan is opened, each iteration is planned and launched, and nothing is stacked. A
scan is opened if

    - it has one iteration or none; or
    - an iteration is worth a launch: it has a heavy operator, and computes at least a million floating-point operations or makes
      at least 256 KiB; and there are at most 128 iterations, or at most 32 if the loop is a recurrence (a heavy operator combines
      what is carried with what is the same in every iteration); and all of them together have at most 20,000 equations, counted
      with the loops inside of them opened by the same rule.

Layers of a network and parts of a batch are like that. Time steps of a recurrent network are mostly too many.
`open_loops=True` opens every scan, and `open_loops=False` none. Loops without a fixed number of iterations stay whole, and so do
those that work on mutable references. Of the scans that stay whole, some run under a plan of their body (`plannable_loops.py`).

A scan that is not opened can be *split* into up to 16 shorter ones, if it leaves stacks, most likely for a backward pass, that
are much larger than what is carried from each of these to the next. Each of them is compiled, so there are fewer if an
iteration has more than 1,250 equations, and up to 8 if it has more than 2,500, such as one of a physics engine. The loop of
the backward pass, which reads these stacks, is then split in the same way, also if it would be opened by the rules above. So
what some iterations leave can be dropped, and these iterations run again, as if each part were inside of `jax.checkpoint`.
Time steps of recurrent networks, solvers of differential equations, and very many layers are like that. Whether a step's loops
are split depends on the budget (`exec/step/variants.py`). With `open_loops` True or False, none is.

A conditional that stays whole is one operator, too: all its operands and all its results are on the device at once, and XLA
copies what it updates. The optimizers that may refuse a step are like that (`optax.apply_if_finite`), and so are steps that
update an average of their weights now and then: most of the state is in one conditional. If a conditional is opened, all its
branches are computed, and each result is selected. A conditional is opened if

    - its branches have no effects and no heavy operators, so XLA fuses most of them with what is around them;
    - they read at most four times as many bytes as they give, so to compute them without need costs little more than to copy; and
    - all of them together compute at most twice as much as one of them.
"""

from typing import Any

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.cost.flops import body_flops, flops_of
from tensile_jax.trace.cost.kinds import kind_of
from tensile_jax.trace.program import Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.jaxprs import closed
from tensile_jax.trace.reading.scans import Loop, loop_of

# Not tuned: a launch takes about 10 us, in which a CPU core computes a million operations and copies some 100 KB.
_MOST_ITERATIONS = 128
_MOST_STEPS = 32  # of a recurrence
_MOST_EQUATIONS = 20_000  # planning so many takes about as long as compiling a step
_LEAST_FLOPS = 1_000_000
_LEAST_BYTES = 256 * 2**10
_MOST_PIECES = 16  # of a loop that is split: what one of them leaves is a sixteenth of a stack
_LEAST_PIECES = 8  # likewise, if all of them together have more than `_MOST_EQUATIONS`
_LEAST_STACK = 2**20  # bytes of the stacks that a loop leaves, to be split
_LEAST_SHARE = 4  # times what is carried between its pieces
_MOST_READ = 4  # times the bytes of a conditional's results
_MOST_COMPUTED = 2  # times the operations of the branch that computes most


class Opening:
    """Says of each scan and each conditional, as an equation of a jaxpr, whether it is opened, by the rules above.

    With `open_loops` True or False, scans always or never are.

    `notes` says which loops stay whole since they have too many iterations or equations, in a sentence each.
    """

    def __init__(self, open_loops: bool | None) -> None:
        self.notes: list[str] = []
        self._noted: Any = None  # the scan of the last note
        self._counted: tuple[Any, int] = None, 0  # the last scan whose equations were counted, and their number
        self._open_loops = open_loops

    def __call__(self, equation: Any) -> bool:
        return self._opens_conditional(equation) if equation.primitive.name == "cond" else self._opens_loop(equation)

    def splits(self, scan: Any) -> tuple[tuple[int, int], ...]:
        """The iterations of the shorter scans into which a scan that is not opened is split; none if it stays whole.

        If it is split, `notes` no longer says that it stays whole.
        """
        loop = loop_of(scan)
        if self._open_loops is not None or loop is None or scan.effects or loop.length < 2 * _LEAST_PIECES:
            return ()
        carried, stacks = (sum(map(nbytes_of, avals)) for avals in _results(loop, scan))
        if stacks < _LEAST_STACK:
            return ()
        pieces = min(max(_MOST_EQUATIONS // max(self._count(scan), 1), _LEAST_PIECES), _MOST_PIECES)
        if loop.length < 2 * pieces or stacks < _LEAST_SHARE * pieces * carried:
            return ()
        least = -(-loop.length // pieces)
        length = next((n for n in range(least, 2 * least) if loop.length % n == 0), least)
        if self._noted is scan:
            self.notes.pop()
            self._noted = None
        return tuple((begin, min(begin + length, loop.length)) for begin in range(0, loop.length, length))

    def _opens_conditional(self, cond: Any) -> bool:
        if cond.effects:
            return False
        branches = [flatten(closed(b), opens=Opening(self._open_loops)) for b in cond.params["branches"]]
        if any(e.effectful or kind_of(e) == "heavy" for b in branches for e in b.equations):
            return False
        read, given = (sum(nbytes_of(v.aval) for v in several) for several in (cond.invars[1:], cond.outvars))
        computed = [sum(flops_of(b, e) for e in b.equations) for b in branches]
        return read <= _MOST_READ * given and sum(computed) <= _MOST_COMPUTED * max(computed)

    def _opens_loop(self, scan: Any) -> bool:
        if self._open_loops is not None:
            return self._open_loops
        loop = loop_of(scan)
        assert loop is not None, "only scans are opened"
        if loop.length <= 1:
            return True
        body = flatten(closed(scan.params["jaxpr"]))
        made = sum(nbytes_of(body.avals[v]) for e in body.equations for v in e.outputs)
        heavy = any(kind_of(e) == "heavy" for e in body.equations)
        if not heavy or (body_flops(loop.body) < _LEAST_FLOPS and made < _LEAST_BYTES):
            return False
        most = _MOST_STEPS if _is_recurrence(loop, body) else _MOST_ITERATIONS
        equations = self._count(scan)
        if loop.length <= most and loop.length * equations <= _MOST_EQUATIONS:
            return True
        where = f" at {scan.source_info.name_stack}" if str(scan.source_info.name_stack) else ""
        self._noted = scan
        self.notes.append(
            f"A loop of {loop.length} iterations of {equations} equations{where} stays one operator: loops like it are "
            f"opened up to {most} iterations and {_MOST_EQUATIONS} equations. open_loops=True opens it."
        )
        return False

    def _count(self, scan: Any) -> int:
        """The equations of an iteration, in which loops are opened by the same rule."""
        if self._counted[0] is not scan:
            self._counted = scan, len(flatten(closed(scan.params["jaxpr"]), opens=Opening(self._open_loops)).equations)
        return self._counted[1]


def _results(loop: Loop, scan: Any) -> tuple[list[Any], list[Any]]:
    """The abstract values of what a scan carries to its end, and of the stacks that it leaves."""
    avals = [v.aval for v in scan.outvars]
    return avals[: loop.carried], avals[loop.carried :]


_SAME, _CARRIED, _OWN = 1, 2, 4  # what a value of a body is computed from: what is the same in every iteration, and so on


def _is_recurrence(loop: Loop, body: Program) -> bool:
    """Whether a heavy operator combines what is carried with what is the same in every iteration, as a recurrent network does."""
    kinds = [_SAME] * loop.constants + [_CARRIED] * loop.carried
    kinds += [_OWN] * (len(body.inputs) - len(kinds))
    found = dict(zip(body.inputs, kinds, strict=True)) | dict.fromkeys(body.constants, _SAME)
    for e in body.equations:
        read = [found[v] for v in e.inputs if isinstance(v, int)]
        if kind_of(e) == "heavy" and _SAME in read and any(kind & _CARRIED for kind in read):
            return True
        union = 0
        for kind in read:
            union |= kind
        found.update(dict.fromkeys(e.outputs, union))
    return False
