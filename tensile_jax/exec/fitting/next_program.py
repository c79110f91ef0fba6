"""Chooses how the next program of a step is made, from the peaks of the programs that were compiled before.

A plan's *segments* (stretches of operators) can be launched one by one, each as an executable of its own. Or several of them are
compiled as one executable, a *program*, with a barrier at each boundary between segments. If no program keeps the budget, or if
separate launches would be faster, the segments are launched one by one (`programs.py`).

Apart from the barriers, XLA orders a program's operators as it likes. On several devices, XLA also collects operands and sums
gradients, in buffers that the planner cannot predict. So the program's peak differs from the plan's. Two things can be changed
for the next program: the limit of memory for which the plan is made, and the *form*, which says which tensors cross the barriers
(`program_code.py`). For instance, in the form `live`, all tensors that are needed later cross the barrier.

On one device, the compiled peaks of a step's programs differ from the expected peaks by nearly the same number of bytes. So the
next plan is made such that the expected peak of its program is the budget, less this difference and a margin. The peak of a
program with copies to or from the host may differ by more if XLA happens to keep several large tensors at the same time. The
next program usually does not keep them. So with copies, the second plan is made as if the difference were at most a tenth of
the budget. The third plan counts all of the second program's difference. If XLA has left a copy without kernels beside it,
the program cannot be used, and the next one is made for a little less memory. The peaks so far decide whether there is a next
program:

    all above the budget    the next program is made for less memory. Exception: if the first one is far above the budget and
                            has no copies, there is no next one, since plans for separate launches are better then
    first far below budget  the first plan leaves memory unused, and so loses time. One more program is made, for more memory
    otherwise               no further program is made

On several devices, the next limit and form depend on the limits and peaks of the programs before. If all peaks are above the
budget, the table is about the latest program. Otherwise, it is about the program with the highest peak within the budget. The
next limit is lower or higher than the limit of this program's plan:

    above the budget        the next limit is lower by the excess and a margin. If an earlier peak was above the budget too, the
                            limit falls by another half of the excess, and the next program has the form `live`, which mostly
                            needs less
    far above the budget    the next program has the form `live` even if no earlier peak was above the budget
    far below the budget    the next limit is higher. After the first plan, it rises by the difference between the budget and
                            the peak, less a margin. Later, a straight line through the peaks of two programs gives the limit
                            at which the peak would be the budget, less a margin. If the two programs have different forms,
                            the limit rises by no more than after a first plan
    otherwise               no further program is made

A plan made for more memory than the budget is also taken if its compiled peak keeps the budget. All sizes are bytes on each
device.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tensile_jax.plan_format import Barriers

# Each trades memory left unused for compilations (`python -m benchmarks.mesh`, `python -m benchmarks.mesh_largest --how ours`).
_MARGIN = 0.01  # of the budget; half of it where the limit rises
_FAR = 0.02  # of the budget: a peak further below it is worth one more compilation, if an earlier peak was above
_FIRST_FAR = 0.05  # the same if no peak was above
_FAR_ABOVE = (
    0.08  # of the budget: a first peak further above it asks for the other form, or for no program (`make bench-launches`)
)
_MOST_WRONG = 0.1  # of the budget: the second program with copies is expected to be wrong by no more (`make bench-launches`)
_AGAIN = 1.5  # times the excess: how much the limit falls after a second peak above the budget
_LEAST_RISE, _MOST_RISE = 0.5, 2.0  # of the limit, for each byte of the peak; not tuned: two peaks say little if they are close


class Try(NamedTuple):
    """For which limit a plan is made, and in which form it is compiled.

    `expected_bytes` is what its program is to be expected to need: at most that, and not much less. None: whatever it is.
    """

    limit: float
    form: Barriers
    expected_bytes: float | None = None


class Tried(NamedTuple):
    """For which limit a plan was made, its form, what its program was expected to need, and the peak that compiling showed."""

    limit: float
    form: Barriers
    expected_bytes: int
    peak_bytes: int


def first_try(budget: float, *, devices: int, copies: bool = False) -> Try:
    """How the first program is made.

    A program that copies to and from the host has the form `chain`, which alone has copies. On several devices, the first program
    has the form `lag`, which leaves the most of what devices exchange beside kernels. On one, a decoder needs the same in each
    form, and ResNet-50 the least with `inputs` (`make bench-launches`).
    """
    return Try(budget, "chain" if copies else "inputs" if devices == 1 else "lag")


def next_try(tried: Sequence[Tried], budget: float, *, devices: int) -> Try | None:
    """How the next program is made, after these; None if none is to be made.

    Args:
        tried: in the order in which they were compiled, at least one.
    """
    return _on_one_device(tried, budget) if devices == 1 else _on_several(tried, budget)


def try_after_exposed_copies(limit: float, expected_bytes: int, budget: float) -> Try:
    """How the next program is made after one that has a copy without kernels beside it.

    Args:
        limit: for which the plan of that program was made.
        expected_bytes: what the program was expected to need.
    """
    less = _MARGIN * budget
    return Try(min(limit, expected_bytes) - less, "chain", expected_bytes - less)


def _on_one_device(tried: Sequence[Tried], budget: float) -> Try | None:
    below = [one for one in tried if one.peak_bytes <= budget]
    latest = tried[-1]
    if below:
        nearest = max(below, key=lambda one: one.peak_bytes)
        if len(tried) > 1 or nearest.peak_bytes >= (1 - _FIRST_FAR) * budget:
            return None
        return _expected_to_need((1 - _MARGIN / 2) * budget, nearest, _wrong_by([nearest], budget))
    if len(tried) == 1 and latest.form != "chain" and latest.peak_bytes > (1 + _FAR_ABOVE) * budget:
        return None
    return _expected_to_need((1 - _MARGIN) * budget, latest, _wrong_by(tried, budget))


def _wrong_by(tried: Sequence[Tried], budget: float) -> float:
    """By how many bytes the next program is expected to need more than expected: as the latest of these. If that is the first one
    with copies, no more than the most that counts.
    """
    latest = tried[-1]
    excess = latest.peak_bytes - latest.expected_bytes
    return min(excess, _MOST_WRONG * budget) if latest.form == "chain" and len(tried) == 1 else excess


def _expected_to_need(nbytes: float, like: Tried, wrong_by: float) -> Try:
    """A program that needs so many bytes if it is wrong by `wrong_by`, made from the one that is like it."""
    expected = nbytes - wrong_by
    return Try(like.limit + expected - like.expected_bytes, like.form, expected)


def _on_several(tried: Sequence[Tried], budget: float) -> Try | None:
    below = [one for one in tried if one.peak_bytes <= budget]
    if not below:
        latest = tried[-1]
        excess = latest.peak_bytes - budget
        again, far = len(tried) > 1, excess > _FAR_ABOVE * budget
        lower = (_AGAIN if again else 1.0) * excess + _MARGIN * budget
        return Try(latest.limit - lower, "live" if far or again else latest.form)
    nearest = max(below, key=lambda one: one.peak_bytes)
    far = _FIRST_FAR if len(below) == len(tried) else _FAR
    if nearest.peak_bytes >= (1 - far) * budget:
        return None
    missing = (1 - _MARGIN / 2) * budget - nearest.peak_bytes
    return Try(nearest.limit + missing * _rise(nearest, [one for one in tried if one is not nearest]), nearest.form)


def _rise(nearest: Tried, others: Sequence[Tried]) -> float:
    """How much the limit may rise above that of `nearest`, for each byte by which the peak may rise.

    The slope is that of the line to the latest other program with the same form. A program with another form mostly needs more,
    so the line to such a program may only lower the rise (`python -m benchmarks.mesh_largest --how ours --batch 385`).
    """
    if not others:
        return 1.0
    alike = [one for one in others if one.form == nearest.form]
    other = (alike or others)[-1]
    peaks = other.peak_bytes - nearest.peak_bytes
    rise = min(max((other.limit - nearest.limit) / peaks if peaks else 1.0, _LEAST_RISE), _MOST_RISE)
    return rise if alike else min(rise, 1.0)
