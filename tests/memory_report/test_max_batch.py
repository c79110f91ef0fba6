"""The largest batch of a step of the user's own."""

import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tensile_jax.memory_report import largest_batch
from tensile_jax.progress.phases import BATCHES, TRACING
from tests.memory_report.small_functions import WIDTH, shape

BUDGET = "400KiB"
WEIGHTS = shape(WIDTH, WIDTH)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


def make(batch_size: int) -> Any:
    return step, (WEIGHTS, shape(batch_size, WIDTH))


def plain_peak(batch_size: int) -> int:
    return tensile.memory(step, *make(batch_size)[1], device_profile="cpu", donate_argnums=0).predicted_peak_bytes


def test_the_largest_batches_fit_and_the_next_ones_do_not() -> None:
    found = tensile.max_batch(make, budget=BUDGET, device_profile="cpu", donate_argnums=0)
    plain, ours = found.plain_batch_size, found.batch_size
    assert plain_peak(plain) <= 400 * 1024 < plain_peak(plain + plain // 64 + 1)
    assert plain < ours and [cost.plain for cost in found.costs] == [True, False]
    assert all(cost.peak_bytes <= 400 * 1024 for cost in found.costs)
    (following,) = re.findall(r"^A batch of (\d+) ", found.limited_by)
    assert ours < int(following) <= ours + ours // 64 + 1
    assert str(found).startswith("Under 400 KiB, plain jit can run a batch of")


def test_an_axis_of_an_argument_gives_the_same_as_a_function_of_the_batch() -> None:
    options: dict[str, Any] = {"budget": BUDGET, "device_profile": "cpu", "donate_argnums": 0}
    along = tensile.max_batch(step, WEIGHTS, shape(2, WIDTH), batch_axis={1: 0}, **options)
    assert along == tensile.max_batch(make, **options)


def test_a_jitted_step_keeps_its_donation() -> None:
    jitted = tensile.max_batch(lambda n: (jax.jit(step, donate_argnums=0), make(n)[1]), budget=BUDGET, device_profile="cpu")
    assert jitted == tensile.max_batch(make, budget=BUDGET, device_profile="cpu", donate_argnums=0)


def test_without_a_budget_the_memory_of_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tells no limit of its memory"):
        tensile.max_batch(make, device_profile="cpu")
    monkeypatch.setattr(largest_batch, "memory_of", lambda device: 400 * 1024)
    found = tensile.max_batch(make, device_profile="cpu", donate_argnums=0)
    assert found.budget_bytes == 400 * 1024 and found.plain_batch_size > 0


def test_what_was_asked_for_is_a_limit_too() -> None:
    found = tensile.max_batch(make, budget="1GiB", most=10, device_profile="cpu")
    assert (found.batch_size, found.reached_most) == (10, True)
    assert found.limited_by == "No larger batch than 10 was asked for."


def test_wrong_arguments_are_refused() -> None:
    for wrong, message in (
        ({"budget": "50%"}, "every batch has its own peak"),
        ({"budget": BUDGET, "most": 0}, "most must be"),
        ({"budget": BUDGET, "speed": 2}, "speed must be"),
        ({"budget": BUDGET, "batch_axis": {3: 0}}, "batch_axis names argument 3"),
    ):
        with pytest.raises(ValueError, match=message):
            tensile.max_batch(make, **wrong)  # pyright: ignore[reportArgumentType] # as users err
    with pytest.raises(ValueError, match="without such an axis"):
        tensile.max_batch(step, WEIGHTS, shape(2, WIDTH), batch_axis={1: 2}, budget=BUDGET)
    with pytest.raises(TypeError, match=r"must return \(step, args\)"):
        tensile.max_batch(lambda n: step, budget=BUDGET)
    with pytest.raises(tensile.BudgetTooSmall):
        tensile.max_batch(make, budget="1KiB")


@pytest.mark.parametrize("answer", [1, 5, 63, 64, 100, 4095, 4096])
@pytest.mark.parametrize("guess", [1, 60, 99, 100, 101, 4096])
def test_a_guess_changes_how_long_the_search_takes_and_not_what_it_finds(answer: int, guess: int) -> None:
    found = largest_batch.largest(lambda n: n <= answer, most=4096, known=0, guess=guess)
    assert found <= answer <= found + max(1, found // 64)


def test_few_batches_are_planned_and_the_user_is_told_how_many_samples_are_left() -> None:
    told: list[tuple[str, int, int]] = []
    found = tensile.max_batch(
        make, budget=BUDGET, device_profile="cpu", donate_argnums=0, progress=lambda *phase: told.append(phase)
    )
    done = [done for what, done, _ in told if what == BATCHES]
    planned = [later - before for before, later in pairwise(done) if later > before]
    assert told[0] == (TRACING, 0, 1) and told[-1] == (BATCHES, done[-1], done[-1])
    assert found.batch_size in planned and len(planned) <= 8


LINES = {
    "a line": lambda n: 10 + 3 * n,
    "a line with a step": lambda n: 10 + 3 * n + 40 * (n > 20),
    "a parabola": lambda n: n * n,
    "steps": lambda n: 16 * (n // 16),
    "falling": lambda n: 500 - n,
    "constant": lambda n: 7,
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("limit", [20, 100, 311, 312, 100_000])
@pytest.mark.parametrize("known", [1, 3, 40])
def test_a_likely_batch_is_one_that_may_be_asked_for(line: str, limit: int, known: int) -> None:
    likely = largest_batch._likely(LINES[line], limit, known, 4096)
    assert known <= likely <= 4096
    if line == "a line" and LINES[line](known) <= limit:
        assert likely == min((limit - 10) // 3, 4096)
