"""Decides which loops and conditionals of a step are opened or split, so that the planner sees what is in them.

A `lax.scan` that stays whole is one operator. The values that its iterations keep for the backward pass are stacked, and the
stacks stay on the device from the forward loop to the backward loop. If a scan is *opened*, the operators of every iteration
replace it: the planner decides about each iteration by itself, and nothing is stacked. A scan with one iteration or none is
opened. Any other scan is opened if all of these hold:

    - An iteration is worth a launch: it has a heavy operator (one that XLA runs as a kernel of its own), and computes at least a
      million floating-point operations or makes at least 256 KiB.
    - There are at most 128 iterations. For a recurrence, in which a heavy operator combines carried values with values that every
      iteration shares (as in a recurrent network), there are at most 32.
    - All iterations together have at most 20,000 equations. To count them, the loops inside are opened by the same rule.

Loops over the layers of a network or the parts of a batch are mostly opened. A recurrent network mostly has too many time steps.
`open_loops=True` opens every scan, and `open_loops=False` none. Loops without a fixed number of iterations stay whole, and so do
loops that work on mutable references. For some of the scans that stay whole, the body gets a plan of its own
(`plannable_loops.py`).

A scan that is not opened can be *split* into shorter scans, mostly 8 to 16. A plan can then drop the stacks of some shorter
scans, and run those scans again before the backward pass needs the stacks, as if each scan were inside of `jax.checkpoint`.
This suits time steps of recurrent networks, solvers of differential equations, and very many layers. A scan is split if each
shorter scan has at least two iterations, and if the stacks are large: at least 1 MiB, and at least 4 * (number of shorter
scans) * (bytes of the values that one scan carries to the next). Each shorter scan must be compiled, so a scan with a long body
is split into fewer than 16. The number is about 20,000 / (equations of the body), but at least 8 and at most 16. The loop of
the backward pass is split at the same places (`treatments.py`), even if the rules above would open it. Splitting is a rewrite
of the step (`rewrites/split_loops.py`): whether a plan uses it depends on the budget. With `open_loops` True or False, no scan
is split.

A conditional that stays whole is one operator, too. All its operands and results are on the device at once, and XLA copies what
the conditional updates. That takes much memory if most of the state goes through one conditional, as with
`optax.apply_if_finite`. If a conditional is opened, all its branches are computed, and each result is selected. A conditional is
opened if all of these hold:

    - Its branches have no effects and no heavy operators, so XLA fuses most of them with what is around them.
    - The operands of the conditional have at most four times the bytes of its results. So computing branches needlessly costs
      little more than copying.
    - All branches together compute at most twice as much as the branch that computes most.
"""

from functools import cache, partial
from typing import Any

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.cost.flops import body_flops, flops_of
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.loops.treatments import find_treatments
from tensile_jax.trace.program import Nested, Program, TooLong
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.scans import Loop, loop_of
from tensile_jax.trace.reading.treatment import Bounds, Opened, Split, Treatment, Treatments, Whole

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


def treatments_of(nested: Nested, *, splits: bool = False) -> Treatments:
    """The treatment of each loop and each conditional of a jaxpr, by the rules above; with `splits`, long loops may be split."""
    return find_treatments(nested, partial(_treatment, open_loops=nested.open_loops, splits=splits))


def _treatment(equation: Any, may_split: bool, *, open_loops: bool | None, splits: bool) -> Treatment:
    if equation.primitive.name == "cond":
        return Opened() if _opens_conditional(equation, open_loops) else Whole()
    if open_loops is not None:
        return Opened() if open_loops else Whole()
    return _treatment_of_loop(equation, may_split=may_split and splits)


def _opens_conditional(cond: Any, open_loops: bool | None) -> bool:
    if cond.effects:
        return False
    branches = [_with_loops_treated(branch, open_loops) for branch in cond.params["branches"]]
    if any(e.effectful or kind_of(e) == "heavy" for b in branches for e in b.equations):
        return False
    read, given = (sum(nbytes_of(v.aval) for v in several) for several in (cond.invars[1:], cond.outvars))
    computed = [sum(flops_of(b, e) for e in b.equations) for b in branches]
    return read <= _MOST_READ * given and sum(computed) <= _MOST_COMPUTED * max(computed)


def _treatment_of_loop(scan: Any, *, may_split: bool) -> Treatment:
    loop = loop_of(scan)
    assert loop is not None, "every loop with a treatment is a scan"
    if loop.length <= 1:
        return Opened()

    @cache
    def count() -> int:
        """The equations of an iteration, in which loops are opened by the same rule."""
        return len(_with_loops_treated(scan.params["jaxpr"], None).equations)

    too_long = None
    body = flatten(Nested(scan.params["jaxpr"]))
    if _is_worth_a_launch(loop, body):
        most = _MOST_STEPS if _is_recurrence(loop, body) else _MOST_ITERATIONS
        if loop.length <= most and loop.length * count() <= _MOST_EQUATIONS:
            return Opened()
        too_long = TooLong(loop.length, count(), most, _MOST_EQUATIONS)
    carried, stacks = (
        sum(nbytes_of(v.aval) for v in some) for some in (scan.outvars[: loop.carried], scan.outvars[loop.carried :])
    )
    if not may_split or loop.length < 2 * _LEAST_PIECES or stacks < _LEAST_STACK:
        return Whole(too_long)
    pieces = min(max(_MOST_EQUATIONS // max(count(), 1), _LEAST_PIECES), _MOST_PIECES)
    if loop.length < 2 * pieces or stacks < _LEAST_SHARE * pieces * carried:
        return Whole(too_long)
    return Split(_pieces(loop.length, pieces))


def _with_loops_treated(jaxpr: Any, open_loops: bool | None) -> Program:
    """The program of a body or a branch."""
    nested = Nested(jaxpr, open_loops=open_loops)
    return flatten(nested, treatments_of(nested))


def _is_worth_a_launch(loop: Loop, body: Program) -> bool:
    """Whether an iteration has a heavy operator, and computes or makes enough."""
    made = sum(nbytes_of(body.avals[v]) for e in body.equations for v in e.outputs)
    return any(kind_of(e) == "heavy" for e in body.equations) and (body_flops(loop.body) >= _LEAST_FLOPS or made >= _LEAST_BYTES)


def _pieces(length: int, pieces: int) -> Bounds:
    """Cuts `length` iterations into so many intervals of equal length, or a few less. If none of their lengths divides `length`,
    the last interval is shorter.
    """
    least = -(-length // pieces)
    each = next((n for n in range(least, 2 * least) if length % n == 0), least)
    return tuple((begin, min(begin + each, length)) for begin in range(0, length, each))


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
