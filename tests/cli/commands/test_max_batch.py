"""`tensile max-batch`: the largest batch that fits, and what it costs."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main
from tensile_jax.memory_report.largest_batch import largest
from tests.cli.small_models import small_mlp, small_models

BUDGET = "700KiB"


def asked(*options: str) -> Result:
    """What the command says of `small_mlp`."""
    with small_models():
        return CliRunner().invoke(main, ["max-batch", "mlp", "--device-profile", "cpu", *options], catch_exceptions=False)


@functools.cache
def found_at_any_speed() -> tuple[Result, dict[str, Any]]:
    """What the command shows and writes for the budget that the tests share."""
    with TemporaryDirectory() as folder:
        done = asked("--budget", BUDGET, "--speed", "0", "-o", f"{folder}/found.json")
        return done, json.loads(Path(folder, "found.json").read_text())


def peak(batch_size: int, budget: int) -> int | None:
    model = small_mlp(batch_size=batch_size)
    try:
        return (
            tensile.jit(model.step, budget=budget, donate_argnums=0, device_profile="cpu")
            .plan(model.state_shape, model.batch_shape)
            .peak_bytes
        )
    except tensile.BudgetTooSmall:
        return None


@pytest.mark.slow
def test_the_largest_batches_fit_and_larger_ones_do_not() -> None:
    done, found = found_at_any_speed()
    assert done.exit_code == 0, done.stderr
    plain, ours, budget = found["plain_batch_size"], found["batch_size"], found["budget_bytes"]
    assert 1 <= plain < ours and not found["reached_most"] and budget == 700 * 1024
    assert peak(ours, budget) is not None and peak(ours * 5 // 4, budget) is None
    whole = [peak(size, 2**50) or 0 for size in (plain, plain + plain // 64 + 1)]
    assert whole[0] <= budget < whole[1]
    first, *others = found["costs"]
    assert first["plain"] and first["batch_size"] == plain and others[-1]["batch_size"] == ours
    assert all(cost["peak_bytes"] <= budget for cost in found["costs"])
    assert all(cost["samples_per_s"] == pytest.approx(cost["batch_size"] / cost["step_us"] * 1e6) for cost in found["costs"])
    assert f"plain jit can run a batch of {plain}, and a plan one of {ours}" in done.stdout


def test_a_limit_of_the_search_is_told() -> None:
    done = asked("--budget", "1GiB", "--most", "10")
    assert done.exit_code == 0 and "plain jit can run a batch of 10, and no plan a larger one at 0.5 of its speed" in done.stdout


@pytest.mark.slow
def test_a_plan_must_be_fast_enough() -> None:
    slow, fast = found_at_any_speed()[0].stdout, asked("--budget", BUDGET, "--speed", "1").stdout
    assert "times as large" in slow and slow != fast


def test_what_cannot_be_found_is_said() -> None:
    too_small = asked("--budget", "10KB")
    assert too_small.exit_code == 3 and "the smallest that works" in too_small.stderr
    assert "\nWhat needs it:\n    " in too_small.stderr and "\nWhat to do:\n    Give a budget of " in too_small.stderr
    share = asked("--budget", "60%")
    assert share.exit_code == 2 and "every batch has its own peak" in share.stderr
    typed = asked("--budget", "1GiB", "--batch-size", "8")
    assert typed.exit_code == 2 and "--batch-size is what is looked for" in typed.stderr
    assert asked().exit_code == 2


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 63, 64, 65, 1000, 4095, 4096])
@pytest.mark.parametrize("known", [0, 1])
def test_the_search_finds_the_largest_number_to_a_part_of_it(answer: int, known: int) -> None:
    asked_for: list[int] = []

    def fits(number: int) -> bool:
        assert 1 <= number <= 4096
        asked_for.append(number)
        return number <= answer

    found = largest(fits, most=4096, known=min(known, answer))
    assert found <= answer <= found + max(1, found // 64) - (found == answer) or found == answer
    assert len(asked_for) <= 30
