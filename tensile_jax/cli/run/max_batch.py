"""Finds the largest batch with which a model's step fits in a budget, and predicts the memory and time of smaller ones.

Nothing is compiled or run: peaks and times are predictions. A larger batch needs more memory and, under a budget, gives fewer
samples per second. So the search doubles the batch until it no longer fits, and then bisects, to 1/64 of the batch. Sizes are in
bytes, times in microseconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tensile_jax.cli.options import Limits, ModelChoice
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.single_model import planned_step
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.plan_format import Plan
from tensile_jax.units import format_bytes

_NO_LIMIT = str(2**50)  # bytes
_PARTS = 64  # the largest batch is found to this part of its size


@dataclass(frozen=True, slots=True)
class BatchCost:
    """One batch size: what the step needs and takes as plain `jax.jit` runs it (`plain`), or under the budget."""

    batch_size: int
    plain: bool
    peak_bytes: int
    step_us: float
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batches under a budget, as `tensile max-batch` writes them.

    Attributes:
        speed: the least samples per second of a plan, as a share of those of plain jit with its largest batch.
        plain_batch_size: the largest batch whose plain `jax.jit` step fits; 0 if not even one of 1 does. Every speed then counts.
        batch_size: the largest batch of which a plan keeps the budget and is fast enough.
        reached_most: whether that is the largest that was asked for, so that larger ones may fit too.
        costs: of `plain_batch_size` with plain jit, and of some sizes from there to `batch_size` under the budget.
    """

    model: str
    policy: str
    device_profile: str
    budget_bytes: int
    speed: float
    plain_batch_size: int
    batch_size: int
    reached_most: bool
    costs: tuple[BatchCost, ...]


def largest_batch(choice: ModelChoice, limits: Limits, *, speed: float, most: int, phases: Phases) -> LargestBatch:
    """The largest batches of the model under the budget, up to `most`, with at least this share of plain jit's speed.

    Raises:
        BudgetTooSmall: a batch of 1 does not fit under any plan.
    """
    plans: dict[tuple[int, bool], Plan | None] = {}
    refusals: dict[int, BudgetTooSmall] = {}

    def plan_of(batch_size: int, *, plain: bool) -> Plan | None:
        """The plan of a batch size; None if there is none under the budget."""
        if (batch_size, plain) not in plans:
            phases.begin(f"planning a batch of {batch_size}{', plain jit' if plain else ''}")
            model = replace(choice, batch_size=batch_size).build()
            asked = replace(limits, budget=_NO_LIMIT, policy="auto") if plain else limits
            try:
                plans[batch_size, plain] = planned_step(model, asked, phases=None).plan(model.state_shape, model.batch_shape)
            except BudgetTooSmall as refusal:
                refusals[batch_size] = refusal
                plans[batch_size, plain] = None
        return plans[batch_size, plain]

    first = plan_of(1, plain=False)
    if first is None:
        raise refusals[1]
    assert first.budget_bytes is not None  # the command asks for a budget in bytes
    budget_bytes = first.budget_bytes

    def fits_plain(batch_size: int) -> bool:
        plan = plan_of(batch_size, plain=True)
        return plan is not None and plan.peak_bytes <= budget_bytes

    plain = largest(fits_plain, most=most, known=0)
    costs = [_cost(plain, plan_of(plain, plain=True), plain=True)] if plain else []
    least = speed * costs[0].samples_per_s if plain else 0.0

    def fits(batch_size: int) -> bool:
        plan = plan_of(batch_size, plain=False)
        return plan is not None and _cost(batch_size, plan, plain=False).samples_per_s >= least

    batch_size = largest(fits, most=most, known=max(plain, 1))
    sizes = _shown(2 * plain or 1, batch_size)
    costs += [_cost(size, plan_of(size, plain=False), plain=False) for size in sizes]
    return LargestBatch(
        choice.name, limits.policy, first.device_profile, budget_bytes, speed, plain, batch_size, batch_size == most, tuple(costs)
    )


def largest(fits: Callable[[int], bool], *, most: int, known: int) -> int:
    """The largest number up to `most` that fits, where every smaller one does; to 1/64 of its size.

    `known` is known to fit (0 always does).

    >>> largest(lambda n: n <= 37, most=100, known=1), largest(lambda n: True, most=100, known=0)
    (37, 100)
    """
    low, high = known, max(2 * known, 1)
    while high < most and fits(high):
        low, high = high, 2 * high
    if high >= most:
        if fits(most):
            return most
        high = most
    while high - low > max(1, low // _PARTS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shown(first: int, last: int) -> Iterator[int]:
    """`first`, and its doubles up to `last`, and `last`; nothing if `first` is larger."""
    size = first
    while size < last:
        yield size
        size *= 2
    if first <= last:
        yield last


def _cost(batch_size: int, plan: Plan | None, *, plain: bool) -> BatchCost:
    assert plan is not None, f"a batch of {batch_size} was found to fit"
    return BatchCost(batch_size, plain, plan.peak_bytes, plan.step_us, batch_size / plan.step_us * 1e6)


def story_of(found: LargestBatch) -> str:
    """The result in a sentence or two."""
    ours, plain, budget = found.batch_size, found.plain_batch_size, format_bytes(found.budget_bytes)
    most = " (the largest that was asked for)" if found.reached_most else ""
    if not plain:
        return f"Under {budget}, plain jit cannot train a batch of 1; a plan can train one of {ours}{most}."
    last, first = found.costs[-1], found.costs[0]
    if ours == plain:
        return (
            f"Under {budget}, plain jit can train a batch of {plain}, and no plan a larger one at {found.speed:g} of its speed."
        )
    speed = last.samples_per_s / first.samples_per_s
    return (
        f"Under {budget}, plain jit can train a batch of {plain}, and a plan one of {ours}{most}: {ours / plain:.3g} times as "
        f"large, at {speed:.2f} of the samples per second."
    )
