"""Without a budget, a step is plain jit if that fits on the device, and planned if it does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.exec.call import planned_calls
from tensile_jax.exec.call.device_memory import free_memory
from tensile_jax.exec.processes.agreement import Alone
from tests.builders import batch, fresh, low_budget, running, sgd_step, weights


class Device:
    """The first device, with statistics of its allocator."""

    def __init__(self, **stats: int) -> None:
        self._device, self._stats = jax.devices()[0], stats
        self.process_index = self._device.process_index

    def __eq__(self, other: object) -> bool:
        return other == self._device

    def __hash__(self) -> int:
        return hash(self._device)

    def __str__(self) -> str:
        return "gpu:0"

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats or None


def bytes_of(budget: Budget | None) -> int | None:
    return None if budget is None else budget.nbytes


def test_what_others_hold_is_not_free_and_the_arguments_are() -> None:
    x = jnp.ones(100)  # 400 bytes
    assert bytes_of(free_memory([Device(bytes_limit=10_000, bytes_in_use=0)], [])) == 9_500
    assert bytes_of(free_memory([Device(bytes_limit=10_000, bytes_in_use=1_000)], [x, np.ones(100), 1.0])) == 8_900
    assert bytes_of(free_memory([Device(bytes_limit=10_000, bytes_in_use=1_000)], [x, x])) == 8_900  # one array, given twice
    assert bytes_of(free_memory([Device(bytes_limit=10_000, bytes_in_use=10_000)], [])) == 1


def test_arguments_in_host_memory_do_not_lie_on_the_device() -> None:
    host = jax.device_put(jnp.ones(100), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    assert bytes_of(free_memory([Device(bytes_limit=10_000, bytes_in_use=1_000)], [host])) == 8_500


def test_of_several_devices_the_one_with_the_least_free_counts() -> None:
    devices = [Device(bytes_limit=10_000, bytes_in_use=0), Device(bytes_limit=10_000, bytes_in_use=3_000), Device()]
    assert bytes_of(free_memory(devices, [])) == 6_500


def test_the_least_free_memory_of_all_processes_counts() -> None:
    class Two(Alone):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"nbytes": 7_000, "share": None, "basis": "what is free on gpu:1", "beside": 0}, None]

    assert free_memory([Device(bytes_limit=10_000, bytes_in_use=0)], [], Two()) == Budget(7_000, None, "what is free on gpu:1")
    assert bytes_of(free_memory([Device(bytes_limit=5_000, bytes_in_use=0)], [], Two())) == 4_750
    assert bytes_of(free_memory([Device()], [], Two())) == 7_000


def test_where_memory_has_no_known_limit_there_is_none() -> None:
    assert free_memory([Device()], [jnp.ones(100)]) is None
    assert free_memory([jax.devices("cpu")[0]], []) is None


def without_budget(monkeypatch: pytest.MonkeyPatch, free: int | None, **options: Any) -> tensile.PlannedFunction:
    """The step without a budget, on a device that has so much free."""
    found = None if free is None else Budget(free, None, "no budget was given")
    monkeypatch.setattr(planned_calls, "free_memory", lambda device, arguments, agreement: found)
    return tensile.jit(sgd_step, **options)


def expect_a_step(results: Any) -> None:
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(jax.jit(sgd_step)(weights(), batch())), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)


def test_a_step_that_fits_is_plain_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    function = without_budget(monkeypatch, 2**30, donate_argnums=0)
    expect_a_step(function(fresh(weights()), batch()))
    plan = function.plan(weights(), batch())
    assert plan.whole and plan.budget_bytes == 2**30 and plan.budget_basis == "no budget was given"


def test_a_step_that_does_not_fit_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    free = low_budget(sgd_step, weights(), batch(), part=0.5, donate_argnums=0)
    function = without_budget(monkeypatch, free, donate_argnums=0)
    assert not function.plan(weights(), batch()).whole
    expect_a_step(function(fresh(weights()), batch()))
    plan = function.plan(weights(), batch())
    assert not plan.whole and plan.peak_bytes <= free == plan.budget_bytes


def test_a_step_that_no_plan_makes_fit_is_left_to_plain_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    function = without_budget(monkeypatch, 1, donate_argnums=0)
    assert function.plan(weights(), batch()).whole
    expect_a_step(function(fresh(weights()), batch()))
    assert function.plan(weights(), batch()).whole


def fail_once(function: tensile.PlannedFunction, story: str, *, after: bool = False) -> None:
    """The next call of plain jit raises an error, before it runs or `after`."""
    jitted = function._calls._jitted

    class Failing:
        failed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(jitted, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if Failing.failed:
                return jitted(*args, **kwargs)
            Failing.failed = True
            if after:
                jitted(*args, **kwargs)
            raise jax.errors.JaxRuntimeError(story)

    function._calls._jitted = Failing()


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."


@pytest.mark.parametrize("budget", [None, 2**30])
def test_if_plain_jit_runs_out_of_memory_the_same_call_is_planned_for_less(budget: int | None) -> None:
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    state = fresh(weights())
    fail_once(function, OUT_OF_MEMORY)
    results = function(state, batch())
    expect_a_step(results)
    assert all(w.is_deleted() for w in state)
    plan = function.plan(weights(), batch())
    assert not plan.whole and plan.jit_peak_bytes is not None and plan.peak_bytes <= 0.9 * plan.jit_peak_bytes
    assert function.report().out_of_memory == 1
    function(results[0], batch())
    assert running(function).plan is plan


@pytest.mark.parametrize(("story", "after"), [(OUT_OF_MEMORY, True), ("INTERNAL: a broken device", False)])
def test_an_error_that_cannot_be_recovered_from_is_raised(story: str, after: bool) -> None:
    function = tensile.jit(sgd_step, donate_argnums=0)
    fail_once(function, story, after=after)
    with pytest.raises(jax.errors.JaxRuntimeError, match=story):
        function(fresh(weights()), batch())
    assert function.plan(weights(), batch()).whole


def test_if_a_callback_only_quotes_the_error_its_call_is_not_repeated() -> None:
    said: list[int] = []

    def step(x: jax.Array) -> jax.Array:
        def say(value: Any) -> None:
            said.append(int(value))
            raise RuntimeError("RESOURCE_EXHAUSTED is what this callback says")

        jax.debug.callback(say, x[0])
        return x + 1

    function: Callable[..., Any] = tensile.jit(step)
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(function(jnp.ones(3)))
        jax.effects_barrier()
    assert said == [1]
