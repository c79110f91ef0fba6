"""Finds the largest batch with which a step fits into a budget, with plain `jax.jit` and with a plan: `tensile_jax.max_batch`.

Nothing is compiled or run: peaks and times are predictions. A larger batch needs more memory and, under a budget, gives fewer
samples per second. There are two searches: the first with plain jit, the second with plans. In the second search, a batch is
also too large if its plan gives too few samples per second. The caller says how many are enough (`speed`): a share of what
plain jit gives with its largest batch. Each search begins at a guess, and goes down or up from there in growing steps, until it
has a batch that is not too large and a larger one that is. Then it bisects between the two, to 1/64 of the batch.

Making a plan takes long, so few are made, and the guess must be good. Plain jit's peak, and the floor (the smallest budget for
which there is a plan, as predicted), are nearly linear functions of the batch and are found quickly. A guess is the batch where
a line through the values of two batches meets the budget. The second search does not try its guess at once. It first makes
plans for 2, 4, 8, ... times the first search's result, as long as these batches are smaller than the guess, because the user is
shown what they cost. If one of them is too large, the guess is not used. Sizes are in bytes, times in microseconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import jax

from tensile_jax.arguments import read_count, shown
from tensile_jax.budget import Budget, parse_budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.call.options import JitOptions, PlanOptions
from tensile_jax.exec.compiling.compiler import memory_of
from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.fitting.find_plan import begin_to_predict
from tensile_jax.exec.fitting.rewritten_forms import always_rewritten
from tensile_jax.exec.transfer import Device
from tensile_jax.memory_report.calls import UserCalls, calls_with
from tensile_jax.memory_report.memory import report_of
from tensile_jax.memory_report.report import WORDS, by_role
from tensile_jax.plan import CompiledSizes, PolicyName
from tensile_jax.plan_format import Plan
from tensile_jax.progress.display import DISPLAY, told_by
from tensile_jax.progress.phases import BATCHES, TRACING, Progress
from tensile_jax.trace import shape_struct
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

__all__ = ["BatchCost", "LargestBatch", "max_batch"]

_PARTS = 64  # the largest batch is found to this part of its size
_NAMED = 3  # roles that hold the most memory of the batch that does not fit
_FARTHER = 4  # times as far from a guess that does not fit: a larger factor is better for worse guesses (not tuned)
_LINES = 4  # lines through the floors of two batches: each takes a trace, and saves plans if the floor is not linear

Make = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]
"""From a batch size to the function and its arguments."""


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
    """The largest batches under a budget. `print(found)` says them in a sentence or two.

    Attributes:
        model: the name of the function.
        speed: the least samples per second of a plan, as a share of those of plain jit with its largest batch.
        plain_batch_size: the largest batch whose plain `jax.jit` step fits; 0 if not even a batch of 1 fits. Then no
            plan is refused because of its speed.
        batch_size: the largest batch of which a plan keeps the budget and is fast enough.
        reached_most: whether that is the largest that was asked for, so that larger ones may fit too.
        limited_by: why the next batch that was tried is too large, in a sentence.
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
    limited_by: str
    costs: tuple[BatchCost, ...]

    def __str__(self) -> str:
        return f"{story_of(self)} {self.limited_by}"


@hides_frames
def max_batch(
    make: Callable[..., Any],
    /,
    *args: Any,
    batch_axis: Mapping[int, int] | None = None,
    budget: int | float | str | None = None,
    speed: float = 0.5,
    most: int = 4096,
    progress: bool | Progress | None = None,
    policy: PolicyName = "auto",
    host_budget: int | float | str | None = None,
    device_profile: str | None = None,
    state_memory: Literal["device", "any"] = "device",
    open_loops: bool | None = None,
    **jit_options: Unpack[JitOptions],
) -> LargestBatch:
    """The largest batch with which a step of your own fits, with plain `jax.jit` and with a plan. Nothing is compiled or run.

    Args:
        make: `make(batch_size)` returns `(step, args)`: the function, and the tuple of its arguments, as `tensile_jax.memory`
            takes them: arrays, `jax.ShapeDtypeStruct`s or Flax NNX objects. With `batch_axis`, it is the step itself.
        *args: with `batch_axis`, the arguments of the step, of any batch size.
        batch_axis: for each argument with a batch, its position and the axis that counts the samples, such as `{1: 0}`.
        budget: bytes, or a size such as `"8GiB"`. None: the memory of the device.
        speed: the least samples per second of a plan, as a share of those of plain jit with its largest batch.
        most: larger batches are not tried.
        progress: what is shown of a search that takes long, as in `tensile_jax.jit`. A function is called as
            `progress(what, done, of)` whenever a batch was planned, with the number of samples in all batches that were planned,
            and in those that will be, which is only about known.
        policy, host_budget, device_profile, state_memory, open_loops: as in `tensile_jax.jit`.
        **jit_options: as in `tensile_jax.memory`, such as `donate_argnums=0`.

    Returns:
        A `LargestBatch`: both sizes, what batches in between cost, and what limits the next one.

    Raises:
        BudgetTooSmall: a batch of 1 does not fit under any plan.
        TypeError: an option is none of `jax.jit`, or it would change nothing because the step is jitted already.
        ValueError: the budget is a share, the device has no known memory and no budget is given, or an option is wrong.

    >>> import jax.numpy as jnp
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w)
    >>> found = max_batch(step, jnp.ones((64, 64)), jnp.ones((1, 64)), batch_axis={1: 0}, budget="1MiB", donate_argnums=0)
    >>> 0 < found.plain_batch_size <= found.batch_size
    True
    """
    if read_count(most) is None or most < 1:
        raise ValueError(f"most must be a whole number of at least 1: got {shown(most)}.")
    if not isinstance(speed, int | float) or not 0 <= speed <= 1:  # pyright: ignore[reportUnnecessaryIsInstance] # users err
        raise ValueError(f"speed must be a share of plain jit's samples per second, from 0 to 1: got {shown(speed)}.")
    for_batch = make if batch_axis is None else _along(make, args, batch_axis)
    if batch_axis is None and args:
        raise TypeError(
            "max_batch takes arguments of the step only with batch_axis. Return them from make(batch_size) otherwise."
        )
    options = PlanOptions(
        budget=budget, policy=policy, host_budget=host_budget, device_profile=device_profile, state_memory=state_memory,
        open_loops=open_loops,
    )  # fmt: skip
    name = getattr(make, "__name__", "the step")
    with DISPLAY.call(name, progress):
        return find_largest(for_batch, options, jit_options, speed=float(speed), most=most, progress=told_by(progress))


def find_largest(
    make: Make,
    options: PlanOptions,
    jit_options: JitOptions,
    *,
    speed: float,
    most: int,
    progress: Progress,
) -> LargestBatch:
    """What `max_batch` describes, for a function that makes the step for each batch size."""
    budget = options.get("budget")
    if budget is not None and parse_budget(budget).nbytes is None:
        raise ValueError(f"budget={budget!r} is a share of a peak, and every batch has its own peak. Give a size such as '8GiB'.")
    search = _Search(make, options, jit_options, most, progress)
    progress(TRACING, 0, 1)
    first = search.plan_of(1)
    if isinstance(first, BudgetTooSmall):
        raise first
    step, limit = search.step_of(1), search.limit

    def fits_plain(batch_size: int) -> bool:
        return search.plain_peak_of(batch_size) <= limit

    plain = largest(fits_plain, most=most, known=0, guess=_guess(search.plain_peak_of, limit, most))
    costs = [search.plain_cost(plain)] if plain else []
    least = speed * costs[0].samples_per_s if plain else 0.0
    known = max(plain, 1)
    likely = _likely(search.floor_of, limit, known, most)
    search.expect([*_doubled(known, likely), likely, likely + _near(likely)])

    def fits(batch_size: int) -> bool:
        cost = search.cost(batch_size)
        return cost is not None and cost.samples_per_s >= least

    for size in _doubled(known, likely):  # these are shown
        if not fits(size):
            batch_size = _bisected(fits, known, size)
            break
        known = size
    else:
        batch_size = largest(fits, most=most, known=known, guess=likely)
    costs += [cost for size in _shown(2 * plain or 1, batch_size, plain) if (cost := search.cost(size)) is not None]
    search.end()
    return LargestBatch(
        step.graph.name, step.options.policy, step.options.profile.name, limit, speed, plain, batch_size, batch_size == most,
        search.limit_of(batch_size, least), tuple(costs),
    )  # fmt: skip


class _Search:
    """The steps, plans and peaks of the batch sizes that the search has tried. Each is traced and planned once."""

    def __init__(self, make: Make, options: PlanOptions, jit_options: JitOptions, most: int, progress: Progress) -> None:
        self._make = make
        self._budget = options.get("budget")
        self._options: PlanOptions = {**options, "progress": False}
        self._jit_options = jit_options
        self._calls: dict[int, tuple[UserCalls, tuple[Any, ...]]] = {}
        self._plans: dict[int, Plan | BudgetTooSmall] = {}
        self._expected: set[int] | None = None  # which batches will be planned, once that is about known
        self._most = most
        self._progress = progress

    @property
    def limit(self) -> int:
        """The budget in bytes.

        Raises:
            ValueError: there is no budget, and the device has no known memory.
        """
        if self._budget is not None:
            return parse_budget(self._budget).resolve(0)
        return _device_bytes(self.step_of(1).compiler.device)

    def _of(self, batch_size: int) -> tuple[UserCalls, tuple[Any, ...]]:
        """The calls of the step for this batch, and its arguments."""
        if batch_size not in self._calls:
            made = self._make(batch_size)
            if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
                raise TypeError(
                    f"make({batch_size}) must return (step, args): a function and the tuple of its arguments. It returned "
                    f"{shown(made)}."
                )
            step, arguments = made
            calls = calls_with(step, tuple(arguments), {}, self._options, self._jit_options)
            self._calls[batch_size] = calls, tuple(arguments)
        return self._calls[batch_size]

    def step_of(self, batch_size: int) -> Step:
        """The traced step."""
        calls, arguments = self._of(batch_size)
        return calls.step(arguments, {})

    def plan_of(self, batch_size: int) -> Plan | BudgetTooSmall:
        """The plan under the budget, or why there is none."""
        if batch_size not in self._plans:
            calls, arguments = self._of(batch_size)
            if self._budget is None:
                _device_bytes(calls.step(arguments, {}).compiler.device)  # refuses what cannot be searched
            try:
                plan = calls.plan(arguments, {})
                within = plan.peak_bytes <= self.limit
                self._plans[batch_size] = plan if within else _too_small(batch_size, self.limit, plan)
            except BudgetTooSmall as refusal:
                self._plans[batch_size] = refusal
            self._tell()
        return self._plans[batch_size]

    def expect(self, batch_sizes: Iterable[int]) -> None:
        """These batches are likely to be planned, which is only told to the user."""
        self._expected = {size for size in batch_sizes if size <= self._most}
        self._tell()

    def end(self) -> None:
        """No more batches will be planned."""
        self._expected = set()
        self._tell()

    def _tell(self) -> None:
        """Tell the user how many samples the planned batches have, since a larger batch mostly takes longer to plan."""
        if self._expected is not None:
            self._progress(BATCHES, sum(self._plans), sum({*self._plans, *self._expected}))

    def floor_of(self, batch_size: int) -> int:
        """The least memory that any plan is known to need, but for forms of the step that evaluate large tensors in chunks."""
        fitting = begin_to_predict(self.step_of(batch_size), Budget(self.limit, None))
        return fitting.of(always_rewritten(fitting.step)).floor_bytes()

    def plain_peak_of(self, batch_size: int) -> int:
        """Plain jit's predicted peak."""
        return self.step_of(batch_size).planner.whole_peak_bytes(CompiledSizes())

    def plain_cost(self, batch_size: int) -> BatchCost:
        """What plain jit needs and takes."""
        us = self.step_of(batch_size).planner.model.whole_us
        return BatchCost(batch_size, True, self.plain_peak_of(batch_size), us, batch_size / us * 1e6)

    def cost(self, batch_size: int) -> BatchCost | None:
        """What the plan needs and takes; None if there is none."""
        plan = self.plan_of(batch_size)
        if isinstance(plan, BudgetTooSmall):
            return None
        return BatchCost(batch_size, False, plan.peak_bytes, plan.step_us, batch_size / plan.step_us * 1e6)

    def limit_of(self, batch_size: int, least: float) -> str:
        """Why the smallest batch that was tried above this one is too large."""
        next_size = min((size for size in self._plans if size > batch_size), default=None)
        if next_size is None:
            return f"No larger batch than {batch_size} was asked for."
        plan = self._plans[next_size]
        if not isinstance(plan, BudgetTooSmall):
            speed = next_size / plan.step_us * 1e6
            return (
                f"A batch of {next_size} fits too, with {speed:.4g} samples per second, and at least {least:.4g} were asked for."
            )
        held = by_role(report_of(self.step_of(next_size)).at_peak)
        most = ", ".join(f"{WORDS[role]} {format_bytes(nbytes)}" for role, nbytes in list(held.items())[:_NAMED])
        return (
            f"A batch of {next_size} needs at least {format_bytes(plan.floor_bytes)} under any plan that was found. Under plain "
            f"jit, {format_bytes(sum(held.values()))} are needed: {most}, ..."
        )


def _too_small(batch_size: int, limit: int, plan: Plan) -> BudgetTooSmall:
    story = f"A batch of {batch_size} needs {format_bytes(plan.peak_bytes)}, and the device has {format_bytes(limit)}."
    return BudgetTooSmall(story, budget_bytes=limit, floor_bytes=plan.peak_bytes)


def _device_bytes(device: Device) -> int:
    limit = memory_of(device)
    if limit == float("inf"):
        raise ValueError(f"{device.device_kind} tells no limit of its memory. Pass a budget, such as budget='8GiB'.")
    return int(limit)


def _along(step: Callable[..., Any], args: tuple[Any, ...], batch_axis: Mapping[int, int]) -> Make:
    """Makes the arguments of `step` of any batch size, as shapes."""
    for position, axis in batch_axis.items():
        if not 0 <= position < len(args):
            raise ValueError(f"batch_axis names argument {position}, and the step is given {len(args)}. Name one of these.")
        for leaf in jax.tree.leaves(args[position]):
            if not -len(getattr(leaf, "shape", ())) <= axis < len(getattr(leaf, "shape", ())):
                raise ValueError(
                    f"batch_axis={{{position}: {axis}}}: argument {position} has an array without such an axis, of the shape "
                    f"{getattr(leaf, 'shape', ())}."
                )

    def make(batch_size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def resized(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
            form = list(leaf.shape)
            form[axis] = batch_size
            kept = shape_struct(leaf)
            return jax.ShapeDtypeStruct(tuple(form), kept.dtype, sharding=kept.sharding)

        return step, tuple(
            jax.tree.map(lambda leaf, axis=batch_axis[place]: resized(leaf, axis), argument) if place in batch_axis else argument
            for place, argument in enumerate(args)
        )

    return make


def _guess(peak_of: Callable[[int], int], limit: int, most: int) -> int | None:
    """Where the line through the peaks of two batches meets the limit; None if it does not rise."""
    few, many = min(8, most), min(16, most)
    rise = peak_of(many) - peak_of(few)
    if rise <= 0:
        return None
    return max(1, min(most, int(few + (limit - peak_of(few)) * (many - few) / rise)))


def _likely(floor_of: Callable[[int], int], limit: int, known: int, most: int) -> int:
    """The largest batch of which a plan is likely to fit: the floor of the next one is above the limit.

    The floor is taken to be linear between the largest batch of which it fits and the smallest of which it does not.
    """
    low, high = known, min(max(2 * known, 16), most)
    floors = {low: floor_of(low), high: floor_of(high)}
    for _ in range(_LINES):
        rise = (floors[high] - floors[low]) / max(high - low, 1)
        if rise <= 0:
            return low
        meets = max(known, min(most, int(low + (limit - floors[low]) / rise)))
        if meets in floors:
            return meets
        floors[meets] = floor_of(meets)
        below = [size for size in floors if floors[size] <= limit]
        above = [size for size in floors if floors[size] > limit]
        high = min(above, default=max(floors))
        low = max(below, default=known) if above else sorted(floors)[-2]
    return max((size for size in floors if floors[size] <= limit), default=known)


def _doubled(known: int, likely: int) -> Iterator[int]:
    """Twice `known`, twice that, and so on, below `likely`."""
    size = 2 * known
    while size < likely:
        yield size
        size *= 2


def _near(batch_size: int) -> int:
    """How near the largest batch is to be found."""
    return max(1, batch_size // _PARTS)


def largest(fits: Callable[[int], bool], *, most: int, known: int, guess: int | None = None) -> int:
    """The largest number up to `most` that fits, where every smaller one does; to 1/64 of its size.

    `known` is known to fit (0 always does). The search begins near `guess`, if there is one.

    >>> largest(lambda n: n <= 37, most=100, known=1), largest(lambda n: True, most=100, known=0)
    (37, 100)
    """
    low, high = known, max(2 * known, 1)
    if guess is not None and guess > known:
        near = _near(guess)
        if not fits(guess):
            high, lower = guess, guess - near
            while lower > known and not fits(lower):
                high, near = lower, _FARTHER * near
                lower = guess - near
            return _bisected(fits, max(lower, known), high)
        low, high = guess, min(guess + near, most) if guess < most else 2 * most
    while high < most and fits(high):
        low, high = high, 2 * high
    if high >= most:
        if low < most and fits(most):
            return most
        if low >= most:
            return most
        high = most
    return _bisected(fits, low, high)


def _bisected(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number that fits, where `low` does and `high` does not; to 1/64 of its size."""
    while high - low > _near(low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shown(first: int, last: int, plain: int) -> Iterator[int]:
    """`first`, and its doubles up to `last`, and `last` if that is larger than what plain jit can run."""
    size = first
    while size < last:
        yield size
        size *= 2
    if last > plain:
        yield last


def story_of(found: LargestBatch) -> str:
    """The result in a sentence or two."""
    ours, plain, budget = found.batch_size, found.plain_batch_size, format_bytes(found.budget_bytes)
    most = " (the largest that was asked for)" if found.reached_most else ""
    if not plain:
        return f"Under {budget}, plain jit cannot run a batch of 1; a plan can run one of {ours}{most}."
    last, first = found.costs[-1], found.costs[0]
    if ours == plain:
        return f"Under {budget}, plain jit can run a batch of {plain}, and no plan a larger one at {found.speed:g} of its speed."
    speed = last.samples_per_s / first.samples_per_s
    return (
        f"Under {budget}, plain jit can run a batch of {plain}, and a plan one of {ours}{most}: {ours / plain:.3g} times as "
        f"large, at {speed:.2f} of the samples per second."
    )
