"""A job whose latencies have drifted gets a new plan while it trains, and trains on to plain jit's result."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.errors import TensileError
from tensile_jax.exec.fitting.planning_process import PlanningProcess
from tensile_jax.exec.running.executor import Iteration
from tensile_jax.exec.running.instructions import Launch
from tensile_jax.exec.runtime.submission import Isolation
from tensile_jax.plan import drift
from tests.builders import batch, low_budget, numbers, optimizer_state, optimizer_step

OPTIMIZER = optax.adam(1e-3)
STEP = optimizer_step(OPTIMIZER)
_LONGEST_S = 90.0
_ENDLESS = 10**6


@pytest.fixture(autouse=True)
def renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are renewed however short the training is."""
    monkeypatch.setattr(drift, "WORTH", 0.0)


@pytest.fixture
def slow_device(fast_link: str, tmp_path: Path) -> str:
    """The file of a device like `fast_link` that computes so slowly that every machine is faster, however busy it is."""
    values = Path(fast_link).read_text()
    slow = values.replace("\nflops_per_us = 1000.0\n", "\nflops_per_us = 50.0\n").replace(
        "\nbytes_per_us = 100.0\n", "\nbytes_per_us = 5.0\n"
    )
    assert slow.count("us = 5") == 2
    path = tmp_path / "slow_device.toml"
    path.write_text(slow)
    return str(path)


def batches() -> Iterator[Any]:
    """Batches without end."""
    number = 0
    while True:
        yield np.asarray(batch(number))
        number += 1


def train(profile: str, until: str, **options: Any) -> tuple[Any, list[Any]]:
    """The job and its events, cancelled three steps after the first event `until`; another job runs beside it."""
    budget = low_budget(STEP, optimizer_state(OPTIMIZER), batch(), donate_argnums=0) * 5 // 4
    events: list[Any] = []
    began = time.monotonic()
    with tensile.Runtime(budget=4 * budget, device_profile=profile) as runtime:
        job = runtime.submit(
            STEP, optimizer_state(OPTIMIZER), batches, steps=_ENDLESS, name="a", budget=budget, renew_above=0.3, **options
        )
        other = runtime.submit(STEP, optimizer_state(OPTIMIZER), batches, steps=_ENDLESS, name="b", budget=budget)
        last = None
        for event in runtime.events():
            events.append(event)
            if event.job != "a":
                continue
            if event.kind == until and last is None:
                last = event.step + 3
            too_late = time.monotonic() - began > _LONGEST_S and last != _ENDLESS
            if event.kind == "step" and ((last is not None and event.step >= last) or too_late):
                job.cancel()
                other.cancel()
                until, last = "", _ENDLESS
    return job, events


def expected_state(steps: int) -> Any:
    """Plain jit's state after so many steps."""
    state, jitted, feed = optimizer_state(OPTIMIZER), jax.jit(STEP), batches()
    for _ in range(steps):
        state, _ = jitted(state, next(feed))
    return state


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_job_is_planned_again_from_what_was_measured(isolation: Isolation, slow_device: str) -> None:
    job, events = train(slow_device, "renewed", isolation=isolation)
    (_, first), (_, second), *_ = job.plans
    assert second.reason.startswith("After ") and second.step_us < first.step_us
    assert second.budget_bytes == first.budget_bytes and job.status.peak_bytes <= 1.1 * second.budget_bytes
    assert any(event.kind == "renewed" and "threshold 30%" in event.note for event in events)
    for a, b in zip(numbers(job.result()), numbers(expected_state(job.status.step)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


def test_a_job_goes_on_if_planning_fails(slow_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise TensileError("it is Sunday")

    monkeypatch.setattr(PlanningProcess, "call", refuse)
    job, events = train(slow_device, "renewal_failed")
    notes = [event.note for event in events if event.kind == "renewal_failed"]
    assert notes and "it is Sunday" in notes[0] and len(job.plans) == 1 and job.status.state == "cancelled"


def test_a_load_that_comes_between_two_watched_iterations_is_noticed_when_it_comes(
    slow_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plan's iterations the first three are watched, and the fiftieth. The load comes after the tenth.

    It is noticed when a new plan is asked for. When that plan is made depends on the machine: planning has a process of its own.
    While a plan is being made, nothing is noticed, so the load comes when none is: on a busy machine one more may be asked for.
    """
    perform, call, delay_s = Iteration.perform, PlanningProcess.call, 0.003
    asked: list[int] = []

    def loaded(self: Any, instruction: Any) -> None:
        perform(self, instruction)
        if isinstance(instruction, Launch):
            time.sleep(delay_s)

    def ask(*arguments: Any) -> Any:
        asked.append(job.status.step)
        return call(*arguments)

    monkeypatch.setattr(Iteration, "perform", loaded)
    monkeypatch.setattr(PlanningProcess, "call", ask)
    budget = low_budget(STEP, optimizer_state(OPTIMIZER), batch(), donate_argnums=0) * 5 // 4
    adopted, made, calm = _ENDLESS, 0, 0
    with tensile.Runtime(budget=4 * budget, device_profile=slow_device) as runtime:
        job = runtime.submit(STEP, optimizer_state(OPTIMIZER), batches, steps=_ENDLESS, name="a", budget=budget, renew_above=0.3)
        for event in runtime.events():
            if event.kind == "renewed" and delay_s == 0.003:
                adopted, made = event.step, made + 1
            elif event.step == adopted + 10 and len(asked) == made:
                delay_s, calm = 0.06, len(asked)
            elif event.step >= min(adopted + 100, 2000) or (calm and len(asked) > calm):
                break
        job.cancel()
    assert adopted + 10 <= asked[calm] < adopted + 48
    for a, b in zip(numbers(job.result()), numbers(expected_state(job.status.step)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("wrong", [0, -1, "often", float("nan")])
def test_a_threshold_is_a_number_above_zero(wrong: Any, tmp_path: Path) -> None:
    with tensile.Runtime(budget="1GiB") as runtime, pytest.raises(ValueError, match="renew_above must be a number above zero"):
        runtime.submit(STEP, optimizer_state(OPTIMIZER), batches, steps=1, renew_above=wrong)
