"""Under a budget of host memory: what lies there while a step runs, what is refused and why, and where the budget comes from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.cli.main import main
from tensile_jax.exec.call import planned_calls
from tensile_jax.exec.transfer import on_host
from tests.builders import batch, fresh, numbers, running, sgd_step, slow_but, weights, wrap_launches

STEP, ROWS, WIDTH = sgd_step, 512, 128  # an activation has 256 KiB, and a tensor of the state 64 KiB


def state() -> Any:
    return weights(4, WIDTH)


def on_host_now() -> int:
    return sum(value.nbytes for value in jax.live_arrays() if on_host(value) and not value.is_deleted())


def measure_host(function: tensile.PlannedFunction) -> list[int]:
    """The bytes in host memory at each launch from now on."""
    seen: list[int] = []

    def wrap(index: int, call: Any) -> Any:
        def launch(*arguments: Any) -> Any:
            seen.append(on_host_now())
            return call(*arguments)

        return launch

    wrap_launches(function, wrap)
    return seen


def under(host_budget: Any, *, state_memory: str = "device", part: float = 0.1, **options: Any) -> tensile.PlannedFunction:
    """The step, so far above the smallest budget: a part of what lies between that and plain jit's peak."""
    options = {"donate_argnums": 0, "state_memory": state_memory, "host_budget": host_budget, **options}
    wide = tensile.jit(STEP, budget=2**50, **options).plan(state(), batch(0, rows=ROWS, width=WIDTH))
    floor, top = wide.floor_bytes, wide.unplanned_peak_bytes
    return tensile.jit(STEP, budget=int(1.05 * floor + part * max(0, top - floor)), **options)


@pytest.mark.parametrize("host_budget", slow_but([300_000, 600_000, "1MB"], 600_000))
@pytest.mark.parametrize("state_memory", slow_but(["device", "any"], "any"))
def test_what_lies_in_host_memory_is_what_the_plan_says_and_never_above_the_budget(
    state_memory: str, host_budget: Any, fast_link: str
) -> None:
    function = under(host_budget, state_memory=state_memory, device_profile=fast_link)
    batches = [batch(i, rows=ROWS, width=WIDTH) for i in range(4)]
    got, want = fresh(state()), fresh(state())
    before, seen = on_host_now(), list[int]()
    for i, one in enumerate(batches):
        if i == 2:  # from the second call on, the state is where the plan leaves it
            seen = measure_host(function)
        got, loss = function(got, one)
        want, own = jax.jit(STEP)(want, one)
        np.testing.assert_allclose(loss, own, rtol=1e-5)
    plan = function.plan(got, batches[0])
    limit = 1_000_000 if host_budget == "1MB" else host_budget
    assert plan.host_budget_bytes in (limit, None) and plan.swapped_out_bytes > 0
    assert 0 < max(seen) - before <= (plan.host_peak_bytes or 0) <= limit
    for a, b in zip(numbers(got), numbers(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_room_on_the_host_the_step_needs_more_on_the_device_and_the_refusal_says_how_much_of_both() -> None:
    arguments = state(), batch(0, rows=ROWS, width=WIDTH)
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(STEP, budget="20KiB", host_budget="100KB", donate_argnums=0).plan(*arguments)
    said = str(caught.value)
    assert "of host memory the step needs about" in said
    assert "on the device; with host_budget=97.66 KiB at least about" in said
    with pytest.raises(tensile.BudgetTooSmall) as free:
        tensile.jit(STEP, budget="20KiB", host_budget="1GiB", donate_argnums=0).plan(*arguments)
    assert free.value.floor_bytes < caught.value.floor_bytes and "host_budget" not in str(free.value)
    plan = tensile.jit(STEP, budget=caught.value.floor_bytes, host_budget="100KB", donate_argnums=0).plan(*arguments)
    assert (plan.host_peak_bytes or 0) <= 100_000


def test_by_default_the_plan_keeps_what_is_free_and_much_of_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fast_link: str
) -> None:
    arguments = fresh(state()), batch(0, rows=ROWS, width=WIDTH)

    def planned(free: int | None) -> tensile.Plan:
        found = None if free is None else Budget(free, None, "no host_budget was given")
        monkeypatch.setattr(planned_calls, "free_host_memory", lambda devices, given, agreement: found)
        return under(None, device_profile=fast_link).plan(*arguments)

    unlimited = planned(None)
    assert (unlimited.host_peak_bytes or 0) > 300_000 and unlimited.host_budget_bytes is None
    assert planned(2**40) == unlimited
    assert (planned(300_000).host_peak_bytes or 0) <= 300_000
    with pytest.raises(tensile.BudgetTooSmall, match=r"with host_budget=100 B \(no host_budget was given\) at least"):
        monkeypatch.setattr(planned_calls, "free_host_memory", lambda *given: Budget(100, None, "no host_budget was given"))
        tensile.jit(STEP, budget="20KiB", donate_argnums=0).plan(*arguments)


def test_two_equal_steps_that_are_traced_apart_have_one_plan_under_a_host_budget(fast_link: str) -> None:
    function = under(300_000, device_profile=fast_link)
    one = jnp.ones((ROWS, WIDTH))
    weak = jnp.broadcast_to(jnp.asarray(1.0), one.shape)
    assert function.plan(state(), one) == function.plan(state(), weak)
    assert len(function._calls._traced) == 2
    assert len({id(traced.step.planner) for traced in function._calls._traced.values()}) == 1


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (0, tensile.BudgetError, "host_budget must be above zero, got 0. Give a number of bytes, or a size"),
        ("lots", tensile.BudgetError, "host_budget 'lots' cannot be read. Give"),
        ("50%", tensile.BudgetError, "host_budget '50%' is a share, but host memory takes no share"),
        (True, TypeError, "host_budget must be a number of bytes or a string, got True"),
        ([1], TypeError, r"host_budget must be a number of bytes or a string, got \[1\]"),
    ],
)
def test_a_host_budget_that_is_none_is_refused_in_a_sentence_everywhere(value: Any, error: Any, says: str) -> None:
    for make in (
        lambda: tensile.jit(sgd_step, host_budget=value),
        lambda: tensile.nnx.jit(sgd_step, host_budget=value),
        lambda: tensile.Runtime("1GiB", host_budget=value),
    ):
        with pytest.raises(error, match=says):
            make()


def test_a_saved_plan_above_the_host_budget_is_refused_and_one_above_what_is_free_is_made_again(
    monkeypatch: pytest.MonkeyPatch, fast_link: str
) -> None:
    arguments = fresh(state()), batch(0, rows=ROWS, width=WIDTH)
    saved = under("1GiB", device_profile=fast_link).plan(*arguments)
    assert (saved.host_peak_bytes or 0) > 300_000
    with pytest.raises(tensile.PlanFileError, match="plan= needs .* bytes of host memory .* above host_budget=300000"):
        tensile.jit(STEP, plan=saved, host_budget=300_000, donate_argnums=0)
    found = Budget(300_000, None, "no host_budget was given")
    monkeypatch.setattr(planned_calls, "free_host_memory", lambda devices, given, agreement: found)
    function = tensile.jit(STEP, plan=saved, donate_argnums=0, device_profile=fast_link)
    function(*arguments)
    plan = running(function).plan
    assert (plan.host_peak_bytes or 0) <= 300_000 and "bytes of host memory, above the host budget" in plan.notes[-1]


def test_donated_state_in_host_memory_is_deleted_as_any_donated_argument() -> None:
    large, one = weights(4, 256), batch(0, rows=16, width=256)  # the state is far larger than the activations
    function = tensile.jit(STEP, budget=950_000, donate_argnums=0, state_memory="any")
    first, _ = function(fresh(large), one)
    there = [leaf for leaf in jax.tree.leaves(first) if on_host(leaf)]
    assert there
    function(first, one)
    assert all(leaf.is_deleted() for leaf in there)


@pytest.mark.slow
def test_a_job_whose_swaps_the_host_cannot_hold_is_refused_with_both_budgets_named() -> None:
    one = batch(0, rows=2 * ROWS, width=WIDTH)  # one activation alone is larger than the host budget
    free, limited = (
        tensile.jit(STEP, budget=2**50, donate_argnums=0, state_memory="any", host_budget=host).plan(state(), one).floor_bytes
        for host in ("1GiB", 300_000)
    )
    assert free < 0.9 * limited
    with tensile.Runtime((free + limited) // 2, host_budget=300_000) as runtime:
        job = runtime.submit(STEP, fresh(state()), [one] * 2, steps=2)
    assert isinstance(job.exception(), tensile.BudgetTooSmall)
    assert "of host memory the step needs about" in str(job.exception())
    assert "with host_budget=293 KiB at least" in str(job.exception())


def test_the_command_line_plans_under_a_host_budget() -> None:
    def tensile_plan(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["plan", "mlp", "--batch-size", "32", *arguments], catch_exceptions=False)

    refused = tensile_plan("--budget", "1KiB", "--host-budget", "64KiB")
    assert refused.exit_code == 3 and "--host-budget=64 KiB at least about" in refused.stderr
    assert tensile_plan("--host-budget", "half").stderr.startswith("Error: --host-budget 'half' cannot be read. Give a number")
