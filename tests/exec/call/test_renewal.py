"""A plan follows the machine: it is renewed when latencies have drifted, and no result, byte or file is lost by that."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.errors import TensileError
from tensile_jax.exec.call import followed_plan
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting import planning_process
from tensile_jax.plan import drift
from tensile_jax.plan.drift import WATCHED_FIRST
from tensile_jax.plan_format import Segment
from tests.builders import (
    batch,
    low_budget,
    numbers,
    optimizer_state,
    optimizer_step,
    planned,
    running,
    sgd_step,
    weights,
    wrap_launches,
)
from tests.full_disk import FullDisk

OPTIMIZER = optax.adam(1e-3)
STEP = optimizer_step(OPTIMIZER)
_LONGEST_S = 90.0


@pytest.fixture(autouse=True)
def renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are renewed however short the training is, and not only where planning takes one per cent of it."""
    monkeypatch.setattr(drift, "WORTH", 0.0)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A factor of the first predictions of segments, in the place of what is measured; copies are as planned."""
    factor = [1.0]
    seen = followed_plan.FollowedPlan.seen

    def slowed(self: Any, running: CompiledPlan, watch: Any) -> None:
        if watch is not None:
            base = getattr(self, "base_us", None) or {}
            self.base_us = base
            for s in running.plan.segments:  # of a segment that was planned again, what the first plan predicted
                base.setdefault((s.operators, s.recomputes), s.latency_us / (factor[0] if base else 1.0))
            launch_us = running.plan.launch_us
            watch.segment_us = [launch_us + factor[0] * base[s.operators, s.recomputes] for s in running.plan.segments]
            watch.out = watch.into = (0, 0.0)
        seen(self, running, watch)

    monkeypatch.setattr(followed_plan.FollowedPlan, "seen", slowed)
    return factor


class Training:
    """A step under a plan beside plain jit, on the same batches; results are compared after every iteration."""

    def __init__(self, step: Callable[..., Any], state: Any, **options: Any) -> None:
        self.function = tensile.jit(step, donate_argnums=0, **options)
        self._jitted = jax.jit(step)
        self.expected, self.state = state, jax.tree.map(lambda leaf: leaf.copy(), state)
        self.iterations = 0

    def step(self) -> None:
        x = batch(self.iterations)
        self.expected, expected = self._jitted(self.expected, x)
        self.state, got = self.function(self.state, x)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        self.iterations += 1

    def until(self, plans: int) -> None:
        """Train until so many plans have been in use, and 3 iterations more."""
        began = time.monotonic()
        while self.function.report().plans < plans:
            self.step()
            assert time.monotonic() - began < _LONGEST_S, f"no new plan; drift {self.function.report().drift}"
        for _ in range(3):
            self.step()

    def plans(self) -> tuple[tensile.Plan, ...]:
        return self.function.plans(self.state, batch())

    def check(self) -> None:
        """The state is jit's, and the budget was kept."""
        for a, b in zip(numbers(self.state), numbers(self.expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
        peak = self.function.report().peak_bytes
        budget = self.plans()[-1].budget_bytes
        assert budget is not None and peak <= budget


@pytest.fixture
def budget() -> int:
    return low_budget(STEP, optimizer_state(OPTIMIZER), batch(), donate_argnums=0)


def test_wrong_predictions_are_replaced_by_what_was_measured(budget: int, fast_link: str, tmp_path: Path) -> None:
    """The profile says that computing is far slower than it is, also on a busy machine. A measured plan copies less."""
    slower = tmp_path / "slower.toml"
    slower.write_text(re.sub(r"(?m)^(flops|bytes)_per_us = .*", r"\1_per_us = 10.0", Path(fast_link).read_text()))
    training = Training(
        STEP,
        optimizer_state(OPTIMIZER),
        budget=budget,
        device_profile=str(slower),
        renew_above=0.3,
        keep_plans=tmp_path / "a" / "b",
    )
    training.step()
    first = training.plans()[0]
    assert first.swapped_out_bytes > 0 and not first.reason
    training.until(2)
    training.check()
    second = training.plans()[1]
    assert second.step_us < first.step_us / 3 and second.budget_bytes == first.budget_bytes
    assert re.match(r"After \d+ iterations under the plan before, segments took [\d.]+ ms", second.reason)
    assert "reason     After" in str(second)
    kept = sorted((tmp_path / "a" / "b").iterdir())
    assert [path.name for path in kept[:2]] == ["plan-000.json", "plan-001.json"]
    assert [tensile.Plan.load(path) for path in kept[:2]] == [first, second]


@pytest.mark.parametrize("state_memory", ["any", pytest.param("device", marks=pytest.mark.slow)])
def test_the_load_changes_three_times(budget: int, fast_link: str, load: list[float], state_memory: Any) -> None:
    training = Training(
        STEP, optimizer_state(OPTIMIZER), budget=budget, device_profile=fast_link, renew_above=0.3, state_memory=state_memory
    )
    for _ in range(4):
        training.step()
    for plans, factor in enumerate((3.0, 0.01, 1.0), start=2):
        load[0] = factor
        training.until(plans)
        training.check()
    assert len({plan.budget_bytes for plan in training.plans()}) == 1
    assert all(plan.reason for plan in training.plans()[1:])


@pytest.mark.slow
def test_a_plan_that_is_as_predicted_stays(budget: int, load: list[float]) -> None:
    training = Training(STEP, optimizer_state(OPTIMIZER), budget=budget, renew_above=0.3)
    for _ in range(60):
        training.step()
    report = training.function.report()
    assert report.plans == 1 and report.drift is not None and report.drift < 0.3
    training.check()


def test_segments_that_stay_are_not_compiled_again(budget: int, load: list[float]) -> None:
    training = Training(STEP, optimizer_state(OPTIMIZER), budget=budget, renew_above=0.3)
    for _ in range(4):
        training.step()
    before = running(training.function).compiled
    load[0] = 10.0  # the link is fast enough either way, so nothing but the times changes
    training.until(2)
    after = running(training.function).compiled
    assert before.executables is not None and after.executables is not None
    known = dict(zip(map(_code, before.plan.segments), before.executables, strict=True))
    kept = [(known[_code(s)], e) for s, e in zip(after.plan.segments, after.executables, strict=True) if _code(s) in known]
    assert kept and all(old is new for old, new in kept)
    assert sum(s.latency_us for s in after.plan.segments) > 1.3 * sum(s.latency_us for s in before.plan.segments)


def _code(segment: Segment) -> tuple[Any, ...]:
    return segment.operators, segment.recomputes, segment.inputs, segment.outputs, segment.donated


def _exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process, "_COMMAND", "import sys; print('no room', file=sys.stderr); sys.exit(3)")


def _raises(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "import tensile_jax.plan.drift as u; u.Planner.corrected = None; "
    command += planning_process._COMMAND  # choose_again then raises in the process
    monkeypatch.setattr(planning_process, "_COMMAND", command.replace("import sys, json; ", "import sys, json; ", 1))


def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process.sys, "executable", "/nowhere/python")


def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise TensileError("it is Sunday")

    monkeypatch.setattr(planning_process.PlanningProcess, "call", refuse)


@pytest.mark.parametrize(
    ("spoil", "story"),
    [
        (_exits, "code 3: no room"),
        (_raises, "planning failed: TypeError"),
        (_missing, "could not be started"),
        (_refused, "Sunday"),
    ],
)
def test_training_goes_on_if_planning_fails(
    budget: int, fast_link: str, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], story: str
) -> None:
    spoil(monkeypatch)
    training = Training(STEP, optimizer_state(OPTIMIZER), budget=budget, device_profile=fast_link, renew_above=0.3)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=f"No new plan could be made.*{story}.*Training goes on"):
        while time.monotonic() - began < _LONGEST_S:
            training.step()
            if training.function._calls._planned[training.function._calls._latest].followed._next._given_up:  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
                break
        training.step()
    for _ in range(4):
        training.step()
    assert len(training.plans()) == 1
    training.check()


def test_what_was_measured_is_forgotten_when_the_device_is_out_of_memory() -> None:
    """The plan for less memory has other segments."""
    function = planned(STEP, (state := optimizer_state(OPTIMIZER), x := batch()), part=0.6, renew_above=1e6)
    before = function.plan(state, x)
    for _ in range(WATCHED_FIRST):
        function(state, x)

    def refuse_once(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if index == 0 and not refused:
                refused.append(index)
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes.")
            return call(*values)

        return launch

    refused: list[int] = []
    wrap_launches(function, refuse_once)
    function(state, x)
    after = function.plan(state, x)
    assert len(before.segments) != len(after.segments) and function.report().drift is None
    for _ in range(WATCHED_FIRST):
        expected = jax.jit(STEP)(state, x)
        for a, b in zip(numbers(function(state, x)), numbers(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    assert function.report().drift is not None


@pytest.mark.slow
def test_settings_of_one_thread_keep_the_plan(budget: int, fast_link: str) -> None:
    """A segment that is compiled in another thread would be compiled under other settings."""
    training = Training(STEP, optimizer_state(OPTIMIZER), budget=budget, device_profile=fast_link, renew_above=0.3)
    began = time.monotonic()
    with jax.default_matmul_precision("float32"), pytest.warns(RuntimeWarning, match="settings of JAX that hold in one thread"):
        while time.monotonic() - began < 5:
            training.step()
        assert len(training.plans()) == 1


@pytest.mark.slow
def test_several_shapes_have_plans_of_their_own(fast_link: str, tmp_path: Path) -> None:
    function = tensile.jit(sgd_step, budget="60%", device_profile=fast_link, renew_above=0.3, keep_plans=tmp_path)
    small, large = batch(rows=256), batch(rows=512)
    began = time.monotonic()
    while len(function.plans(weights(), large)) < 2 and time.monotonic() - began < _LONGEST_S:
        function(weights(), large)
    function(weights(), small)
    assert len(function.plans(weights(), large)) == 2 and len(function.plans(weights(), small)) == 1
    assert len(list(tmp_path.iterdir())) == 3
    assert function.plans(weights(), batch(rows=64)) == ()


# -- the folder of plans --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[tuple[Any, Any]]:
    yield weights(), batch()


def test_files_that_are_there_are_kept(tmp_path: Path, small: tuple[Any, Any]) -> None:
    (tmp_path / "plan-000.json").write_text("mine")
    (tmp_path / "plan-007.json").write_text("mine, too")
    tensile.jit(sgd_step, keep_plans=tmp_path)(*small)
    assert (tmp_path / "plan-000.json").read_text() == "mine" and (tmp_path / "plan-007.json").read_text() == "mine, too"
    assert tensile.Plan.load(tmp_path / "plan-008.json").whole


def test_a_full_disk_stops_no_training(tmp_path: Path, small: tuple[Any, Any]) -> None:
    function = tensile.jit(sgd_step, keep_plans=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, lambda number: True)
        with pytest.warns(RuntimeWarning, match="keep_plans: the plan cannot be written to .*Training goes on"):
            function(*small)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_had_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tensile.jit(sgd_step, keep_plans=tmp_path / "file")
    with pytest.raises(TypeError, match="keep_plans must be the path of a folder, got 3 of type int"):
        tensile.jit(sgd_step, keep_plans=3)  # pyright: ignore[reportArgumentType] # users err


@pytest.mark.parametrize("wrong", [0, -0.1, float("nan"), float("inf"), "a third", True])
def test_a_threshold_is_a_number_above_zero(wrong: Any) -> None:
    with pytest.raises(ValueError, match="renew_above must be a number above zero.*Pass 0.3"):
        tensile.jit(sgd_step, renew_above=wrong)


def test_a_saved_plan_is_not_renewed(small: tuple[Any, Any]) -> None:
    plan = tensile.jit(sgd_step).plan(*small)
    with pytest.raises(ValueError, match="renew_above=0.3 makes new plans, and plan= is one that was made"):
        tensile.jit(sgd_step, plan=plan, renew_above=0.3)
