"""`improve="background"`: training begins under a plan of a short search, then a better one. Both keep the budget."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.errors import BudgetTooSmall, TensileError
from tensile_jax.exec.call.next_plan import NextPlan
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting import planning_process
from tensile_jax.exec.fitting.knowledge_store import STORE
from tensile_jax.exec.fitting.planner_elsewhere import PlannerElsewhere
from tensile_jax.exec.fitting.planning_process import PlanningProcess
from tensile_jax.plan import CompiledSizes, Goal, Planned, Planner
from tests.builders import (
    PROFILE,
    batch,
    device_bytes,
    fresh,
    low_budget,
    measure_launches,
    numbers,
    optimizer_state,
    optimizer_step,
    running,
    sgd_step,
    training_graph,
    weights,
    wrap_launches,
)

OPTIMIZER = optax.adam(1e-3)
STEP = optimizer_step(OPTIMIZER)
_LONGEST_S = 90.0


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    """Other tests have planned such steps, and a step that was planned before is not improved."""
    STORE.forget()


class Training:
    """A step that is improved, beside plain jit on the same batches; results are compared after every iteration."""

    def __init__(self, step: Callable[..., Any] = STEP, state: Any = None, **options: Any) -> None:
        given = optimizer_state(OPTIMIZER) if state is None else state
        self.function = tensile.jit(step, donate_argnums=0, improve="background", **options)
        self._jitted = jax.jit(step)
        self.expected, self.state = given, fresh(given)
        self.iterations = 0

    def step(self) -> tensile.Report:
        x = batch(self.iterations)
        self.expected, expected = self._jitted(self.expected, x)
        self.state, got = self.function(self.state, x)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        self.iterations += 1
        return self.function.report()

    def until_improved(self) -> None:
        """Train until no better plan is sought any more, and five iterations more."""
        began = time.monotonic()
        while self.step().improving:
            assert time.monotonic() - began < _LONGEST_S, "no better plan"
        for _ in range(5):
            self.step()
        for a, b in zip(numbers(self.state), numbers(self.expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)

    def plans(self) -> tuple[tensile.Plan, ...]:
        return self.function.plans(self.state, batch())


@pytest.fixture
def budget() -> int:
    found = low_budget(STEP, optimizer_state(OPTIMIZER), batch(), donate_argnums=0)
    STORE.forget()
    return found


def test_both_plans_keep_the_budget_and_train_as_plain_jit_does(budget: int, tmp_path: Path) -> None:
    training = Training(budget=budget, keep_plans=tmp_path)
    report = training.step()
    assert report.improving and report.plans == 1 and report.peak_bytes <= budget
    assert "found in a short search" in training.plans()[0].reason
    training.until_improved()
    report = training.function.report()
    assert report.plans == 2 and not report.improving and report.peak_bytes <= budget
    first, second = training.plans()
    assert "replaces the one that a short search had found" in second.reason and second.step_us <= first.step_us
    assert first.budget_bytes == second.budget_bytes == budget
    assert max(first.peak_bytes, second.peak_bytes) <= budget
    assert [tensile.Plan.load(path) for path in sorted(tmp_path.iterdir())] == [first, second]


def test_live_bytes_keep_the_budget_before_and_after(budget: int) -> None:
    baseline = device_bytes()
    training = Training(budget=budget)
    training.step()
    del training.expected
    for improved in (False, True):
        while improved and training.function.report().improving:
            training.state, _ = training.function(training.state, batch())
        live = measure_launches(training.function, baseline)
        training.state, _ = training.function(training.state, batch())
        assert live and max(live) <= budget


def test_the_better_plan_is_as_good_as_without(budget: int) -> None:
    budget = int(1.25 * budget)
    at_once = tensile.jit(STEP, budget=budget, donate_argnums=0)
    at_once(optimizer_state(OPTIMIZER), batch())
    expected = at_once.plan(optimizer_state(OPTIMIZER), batch())
    STORE.forget()
    training = Training(budget=budget)
    training.until_improved()
    first, *_, last = training.plans()
    assert last.step_us <= 1.02 * expected.step_us < first.step_us


def test_the_executables_of_the_first_plan_are_replaced_by_optimized_ones(budget: int) -> None:
    training = Training(budget=budget)
    training.step()
    first = running(training.function).compiled
    training.until_improved()
    last = running(training.function).compiled
    assert first.executables is not None and last.executables is not None and first.soon and not last.soon
    assert not set(map(id, first.executables)) & set(map(id, last.executables))


@pytest.mark.parametrize("options", [{"state_memory": "any"}, {"renew_above": 0.3}, {"host_budget": "1MB"}])
def test_with_other_options(budget: int, options: dict[str, Any]) -> None:
    training = Training(budget=budget, **options)
    training.until_improved()
    assert all(plan.peak_bytes <= budget for plan in training.plans())


def test_a_share_of_plain_jits_peak() -> None:
    training = Training(budget="80%")
    training.until_improved()
    jit_peak = training.function.report().jit_peak_bytes
    assert jit_peak is not None and all(plan.peak_bytes <= 0.8 * jit_peak for plan in training.plans())


def test_a_step_that_fits_runs_whole() -> None:
    training = Training(budget="1GB")
    report = training.step()
    assert report.whole and not report.improving and report.plans == 1


def test_a_step_that_was_planned_before_is_not_improved(budget: int) -> None:
    tensile.jit(STEP, budget=budget, donate_argnums=0)(optimizer_state(OPTIMIZER), batch())
    training = Training(budget=budget)
    assert not training.step().improving and not training.plans()[0].reason


def test_too_small_a_budget_is_refused_alike() -> None:
    refusals: list[str] = []
    for improve in (None, "background"):
        STORE.forget()
        with pytest.raises(BudgetTooSmall) as refused:
            tensile.jit(STEP, budget="1%", donate_argnums=0, improve=improve)(optimizer_state(OPTIMIZER), batch())
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_training_goes_on_if_planning_fails(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process, "_COMMAND", "import sys; print('no room', file=sys.stderr); sys.exit(3)")
    training = Training(budget=budget)
    with pytest.warns(RuntimeWarning, match=r"No new plan could be made in the background.*code 3: no room.*Training goes on"):
        training.step()
        began = time.monotonic()
        while training.function.report().improving and time.monotonic() - began < _LONGEST_S:
            training.step()
        training.step()
    report = training.step()
    assert report.plans == 1 and not report.improving


def test_a_better_plan_is_dropped_if_the_device_was_out_of_memory_meanwhile() -> None:
    """It may need more than the plan that has replaced the first one."""
    budget = low_budget(STEP, optimizer_state(OPTIMIZER), batch(), part=0.6, donate_argnums=0)
    STORE.forget()
    training = Training(budget=budget)
    training.step()
    lower: list[tensile.Plan] = []

    def refuse_once(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if index == 0 and not refused:
                refused.append(index)
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes.")
            return call(*values)

        return launch

    refused: list[int] = []
    wrap_launches(training.function, refuse_once)
    training.step()
    lower.append(training.plans()[-1])
    training.until_improved()
    assert len(training.plans()) == 2 and training.plans()[-1] == lower[0]
    assert lower[0].peak_bytes < training.plans()[0].peak_bytes


def test_a_training_that_ends_before_does_not_wait_for_the_search(tmp_path: Path) -> None:
    """Planning would take a minute, and its process ends with the training."""
    script = tmp_path / "train.py"
    script.write_text(
        "import tensile_jax as tensile\n"
        "from tensile_jax.exec.fitting import planning_process as p\n"
        "from tests.builders import batch, optimizer_state, optimizer_step\n"
        "import optax\n"
        "p._COMMAND = p._COMMAND.replace('main()', '__import__(\"time\").sleep(60); main()')\n"
        "adam = optax.adam(1e-3)\n"
        "f = tensile.jit(optimizer_step(adam), budget='80%', donate_argnums=0, improve='background')\n"
        "state = optimizer_state(adam)\n"
        "for number in range(3):\n"
        "    state, loss = f(state, batch(number))\n"
        "print(f.report().improving)\n"
    )
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "") and time.monotonic() - began < 50


@pytest.mark.parametrize(
    ("options", "story"),
    [
        ({"improve": True}, 'improve must be "background" or None, got True'),
        ({"improve": "now"}, "improve must be \"background\" or None, got 'now'"),
        ({"max_slowdown": 1.1}, r"max_slowdown=1\.1 asks for none. Pass a budget"),
        ({"budget": "50%", "policy": "vdnn"}, "policy='vdnn' was asked for. Pass one of them"),
        ({"budget": "50%", "launch": "one_program"}, "launch='one_program'.*Pass one of them"),
    ],
)
def test_what_cannot_be_improved_is_refused(options: dict[str, Any], story: str) -> None:
    given: Any = {"improve": "background", **options}
    with pytest.raises(ValueError, match=story):
        tensile.jit(sgd_step, **given)


def test_a_saved_plan_is_not_improved() -> None:
    plan = tensile.jit(sgd_step).plan(weights(), batch())
    with pytest.raises(ValueError, match='improve="background" begins with a plan of a short search, and plan= is one that was'):
        tensile.jit(sgd_step, plan=plan, improve="background")


# -- the next plan --------------------------------------------------------------------------------------------------------------


def _compiled() -> CompiledPlan:
    function = tensile.jit(sgd_step, budget="60%")
    function(weights(), batch())
    return running(function).compiled


def _settled(following: NextPlan, running: CompiledPlan) -> CompiledPlan | None:
    began = time.monotonic()
    while following.is_under_way:
        if (found := following.taken(running)) is not None:
            return found
        assert time.monotonic() - began < 10
        time.sleep(0.01)
    return None


def test_a_next_plan_is_taken_once() -> None:
    before, after = _compiled(), _compiled()
    following = NextPlan("here", lambda: True)
    assert following.taken(before) is None and following.may_begin
    following.begin(before, lambda: after)
    assert _settled(following, before) is after and following.taken(before) is None and following.may_begin


def test_a_next_plan_of_another_plan_is_dropped() -> None:
    before, after = _compiled(), _compiled()
    following = NextPlan("here", lambda: True)
    following.begin(before, lambda: after)
    assert _settled(following, after) is None and following.may_begin


def test_settings_of_one_thread_keep_the_plan() -> None:
    following = NextPlan("here", lambda: False)
    before = _compiled()
    following.begin(before, lambda: before)
    began = time.monotonic()
    while following.is_under_way and time.monotonic() - began < 10:
        time.sleep(0.01)
    with pytest.warns(RuntimeWarning, match="No new plan could be made here.*settings of JAX that hold in one thread"):
        assert following.taken(before) is None
    assert not following.may_begin


# -- planning elsewhere ---------------------------------------------------------------------------------------------------------


def test_a_planner_elsewhere_makes_the_same_plans() -> None:
    graph, nothing = training_graph(layers=6), CompiledSizes()
    here = Planner(graph, PROFILE)
    limit = 0.6 * here.whole_peak_bytes(nothing)
    goal = Goal(limit)
    with PlanningProcess() as process:
        there = PlannerElsewhere(process, graph, PROFILE)
        found = _plan(there.plan(goal, nothing))
        assert found == _plan(here.plan(goal, nothing))
        assert _plan(there.quick_plan(goal, nothing)) == _plan(here.quick_plan(goal, nothing))
        lower, choice = Goal(0.95 * limit), there.lowest_choice(nothing)
        assert _plan(there.revise(choice, lower, nothing)) == _plan(here.revise(choice, lower, nothing))
        assert there.floor_bytes(nothing) == here.floor_bytes(nothing)
        assert there.quick_us(limit, nothing) == here.quick_us(limit, nothing)
        assert there.bound_us(limit, nothing) == here.bound_us(limit, nothing)
        without = there.with_host_limit(0)
        assert isinstance(without, PlannerElsewhere)
        assert without.floor_bytes(nothing) == here.with_host_limit(0).floor_bytes(nothing)
    assert _plan(there.plan(lower, nothing)) == _plan(here.plan(lower, nothing))  # the process has ended


def _plan(found: Planned | None) -> tensile.Plan:
    assert found is not None
    return found.plan


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process, "_LONGEST_S", 1.5)
    with PlanningProcess() as process, pytest.raises(TensileError, match=r"planning took more than 1\.5 s"):
        process.call(time.sleep, 60)


def test_two_threads_may_ask_one_process() -> None:
    found: list[int] = []
    with PlanningProcess() as process:
        threads = [threading.Thread(target=lambda n=n: found.append(process.call(abs, -n))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(8))
