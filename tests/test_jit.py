"""The public interface: signatures and keywords as in `jax.jit`, plans and reports, saved plans, state in host memory."""

import dataclasses
import functools
import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import msgspec
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.plan_format import unranged
from tensile_jax.units import format_bytes
from tests.builders import (
    ROWS,
    WIDTH,
    batch,
    dense_loss,
    device_bytes,
    fresh,
    kinds_of,
    low_budget,
    measure_launches,
    numbers,
    optimizer_state,
    optimizer_step,
    planned,
    running,
    sgd_step,
    slow_but,
    something_happened,
    weights,
)

RTOL, ATOL = 2e-4, 2e-6  # a cut step is fused, and so rounded, differently; see test_results.py


def same(got: Any, wanted: Any, *, exactly: bool = False) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(numbers(got), numbers(wanted), strict=True):
        if exactly:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)


def alive(tree: Any) -> bool:
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


# -- signatures -----------------------------------------------------------------------------------------------------------


def momentum_update(params: Any, velocity: Any, gradients: Any) -> Any:
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - 0.05 * v, params, velocity), velocity


def three_arguments(params: Any, velocity: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(dense_loss)(params, x)
    params, velocity = momentum_update(params, velocity, gradients)
    return params, velocity, loss


def test_several_donated_arguments_are_all_taken() -> None:
    args = (weights(), jax.tree.map(jnp.zeros_like, weights()), batch())
    step = planned(three_arguments, args, donate_argnums=(0, 1))
    assert something_happened(step.plan(*args))
    params, velocity, expected = fresh(args[0]), fresh(args[1]), (args[0], args[1], None)
    for i in range(5):
        gone = params, velocity
        params, velocity, loss = step(params, velocity, batch(i))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(gone))
        expected = jax.jit(three_arguments)(expected[0], expected[1], batch(i))
        same((params, velocity, loss), expected)


def test_state_is_found_wherever_it_stands_in_arguments_and_results() -> None:
    def step(x: Any, *, moving: Any, holder: Any) -> Any:
        loss, gradients = jax.value_and_grad(dense_loss)(holder["params"], x)
        params, velocity = momentum_update(holder["params"], moving, gradients)
        return {"metrics": {"loss": loss}, "holder": {"params": params}}, velocity

    kwargs = {"moving": jax.tree.map(jnp.zeros_like, weights()), "holder": {"params": weights()}}
    function = tensile.jit(step, budget=2**40, donate_argnames=("moving", "holder"))
    floor = function.plan(batch(), **kwargs).floor_bytes
    function = tensile.jit(step, budget=int(1.1 * floor), donate_argnames=("moving", "holder"))
    plan = function.plan(batch(), **kwargs)
    assert something_happened(plan)
    roles = {t.name: t.role for t in plan.tensors}
    assert roles["holder['params'][0]"] == "parameter"
    assert roles["moving[0]"] == "optimizer_state"
    assert roles["x"] == "batch"
    expected = jax.jit(step)(batch(), **kwargs)
    given = fresh(kwargs)
    same(function(batch(), **given), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_static_arguments_select_the_program_by_position_and_by_name() -> None:
    def step(params: Any, layers: int, x: Any, *, rate: float = 0.1) -> Any:
        loss, gradients = jax.value_and_grad(dense_loss)(params[:layers], x)
        return [w - rate * g for w, g in zip(params, gradients, strict=False)] + params[layers:], loss

    options: dict[str, Any] = {"static_argnums": 1, "static_argnames": "rate", "donate_argnums": 0}
    budget = low_budget(step, weights(), 5, batch(), part=0.5, **options)
    function = tensile.jit(step, budget=budget, **options)
    assert something_happened(function.plan(weights(), 5, batch()))
    plain = jax.jit(step, static_argnums=1, static_argnames="rate")
    for layers, rate in ((5, 0.1), (3, 0.1), (5, 0.3)):
        got = function(fresh(weights()), layers, batch(), rate=rate)
        same(got, plain(weights(), layers, batch(), rate=rate))


def test_arguments_after_a_static_one_keep_their_names() -> None:
    def step(params: Any, layers: int, x: Any) -> Any:
        return dense_loss(params[:layers], x)

    plan = tensile.jit(step, static_argnums=1).plan(weights(2), 2, batch())
    assert {"params[0]", "params[1]", "x"} <= {t.name for t in plan.tensors}
    plan = tensile.jit(step, static_argnames="layers").plan(weights(2), 2, batch())
    assert {"params[0]", "params[1]", "x"} <= {t.name for t in plan.tensors}


def test_arguments_passed_by_keyword_share_their_names_with_positional_ones() -> None:
    def step(params: Any, x: Any) -> Any:
        return dense_loss(params, x)

    plan = tensile.jit(step).plan(params=weights(2), x=batch())
    assert {"params[0]", "params[1]", "x"} <= {t.name for t in plan.tensors}


def test_partials_and_callable_objects_are_steps_too() -> None:
    class Step:
        def __call__(self, params: Any, x: Any) -> Any:
            return sgd_step(params, x)

    for step in (functools.partial(sgd_step), Step()):
        function = planned(step, (weights(), batch()), donate_argnums=0)
        assert something_happened(function.plan(weights(), batch()))
        same(function(fresh(weights()), batch()), jax.jit(sgd_step)(weights(), batch()))


def test_without_donation_the_arguments_stay_usable() -> None:
    params, x = weights(), batch()
    function = planned(sgd_step, (params, x))
    assert something_happened(function.plan(params, x))
    first, second = function(params, x), function(params, x)
    assert alive((params, x))
    same(first, second, exactly=True)
    same(first, jax.jit(sgd_step)(params, x))


@pytest.mark.slow
def test_the_same_array_may_be_passed_twice_where_it_is_not_donated() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: dense_loss(p, x) + dense_loss(p, y))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    x = batch()
    params = [weights()[0]] * 5
    function = planned(step, (params, x, x))
    assert something_happened(function.plan(params, x, x))
    same(function(params, x, x), jax.jit(step)(params, x, x))


def test_arrays_of_numpy_and_python_numbers_are_arguments_as_in_jit() -> None:
    def step(params: Any, x: Any, rate: Any) -> Any:
        loss, gradients = jax.value_and_grad(dense_loss)(params, x)
        return jax.tree.map(lambda w, g: w - rate * g, params, gradients), loss, rate + 1

    args = ([np.asarray(w) for w in weights()], np.asarray(batch()), 0.1)
    function = planned(step, (weights(), batch(), 0.1), donate_argnums=0)
    got, expected = function(*args), jax.jit(step)(*args)
    same(got, expected)
    assert [r.weak_type for r in jax.tree.leaves(got)] == [r.weak_type for r in jax.tree.leaves(expected)]


def test_a_result_returned_twice_gives_two_arrays() -> None:
    def step(params: Any, x: Any) -> Any:
        params, loss = sgd_step(params, x)
        return params, {"a": loss, "b": loss, "first": params[0]}

    function = planned(step, (weights(), batch()), donate_argnums=0)
    params, metrics = function(fresh(weights()), batch())
    params, _ = function(params, batch())  # donates what metrics["first"] must not share
    assert alive(metrics)
    expected = jax.jit(step)(weights(), batch())[1]
    same(metrics, expected)


@pytest.mark.parametrize("budget", [None, 10_000])
@pytest.mark.parametrize(
    "step",
    [lambda x: x, lambda x: (x, x), lambda x: None, lambda x: (3.0, {"x": x}), lambda x: x[:0], lambda x: x.sum()],
    ids=["identity", "twice", "nothing", "literal", "empty", "sum"],
)
def test_steps_with_next_to_nothing_in_them_run_as_in_jit(step: Callable[..., Any], budget: int | None) -> None:
    x = jnp.arange(12.0)
    function = tensile.jit(step, budget=budget)
    assert function.plan(x).peak_bytes >= x.nbytes
    same(function(x), jax.jit(step)(x), exactly=True)


def test_a_step_without_arguments_runs_as_in_jit() -> None:
    same(tensile.jit(lambda: jnp.ones(3), budget=1000)(), jnp.ones(3), exactly=True)


# -- budgets and plans ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_decorator_works_with_and_without_arguments() -> None:
    @tensile.jit
    def double(x: Any) -> Any:
        "Twice."
        return 2 * x

    @tensile.jit(budget="1MiB")
    def triple(x: Any) -> Any:
        return 3 * x

    assert (float(double(2.0)), float(triple(2.0))) == (4.0, 6.0)
    assert (getattr(double, "__name__", None), double.__doc__) == ("double", "Twice.")


def test_with_enough_budget_the_step_is_plain_jit_to_the_bit() -> None:
    function = tensile.jit(sgd_step, budget="1GiB", donate_argnums=0)
    state, loss = function(fresh(weights()), batch())
    assert function.plan(weights(), batch()).whole
    same((state, loss), jax.jit(sgd_step)(weights(), batch()), exactly=True)
    report = function.report()
    assert report.segments == 1
    assert report.peak_bytes == function.jit_peak_bytes(weights(), batch())


def test_a_share_of_plain_jits_peak_is_a_budget() -> None:
    function = tensile.jit(sgd_step, budget="85%", donate_argnums=0)
    peak = function.jit_peak_bytes(weights(), batch())
    memory = jax.jit(sgd_step, donate_argnums=0).lower(weights(), batch()).compile().memory_analysis()
    assert memory is not None
    assert peak == (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    )
    function(fresh(weights()), batch())
    plan = function.plan(weights(), batch())
    assert plan.budget_bytes == int(0.85 * peak)
    assert plan.jit_peak_bytes == peak
    assert plan.budget_basis == f"0.85 of plain jit's peak, {format_bytes(peak)} as compiled"
    assert function.report().peak_bytes <= 0.85 * peak


def test_a_share_is_of_a_predicted_peak_until_the_first_call_has_compiled_plain_jit() -> None:
    told: list[str] = []
    function = tensile.jit(sgd_step, budget="60%", donate_argnums=0, progress=lambda what, done, of: told.append(what))
    state = weights(layers=7)  # a step that no other test compiles
    predicted = function.plan(state, batch())
    assert set(told) == {"tracing", "planning"} and predicted.jit_peak_bytes is None
    assert "as predicted, since plain jit was not compiled" in predicted.budget_basis
    assert f"({predicted.budget_basis})" in str(predicted)
    unlimited = tensile.jit(sgd_step, donate_argnums=0).plan(state, batch())
    assert unlimited.workspaces == "predicted" and predicted.budget_bytes == int(0.6 * unlimited.peak_bytes)
    function(fresh(state), batch())
    plan = function.plan(state, batch())
    assert set(told) == {"tracing", "planning", "compiling plain jit", "compiling segments"}
    assert plan.jit_peak_bytes is not None and plan.budget_bytes == int(0.6 * plan.jit_peak_bytes)
    assert plan.budget_basis.endswith("as compiled")
    assert function.report().peak_bytes <= 0.6 * plan.jit_peak_bytes


def test_with_a_share_of_one_or_more_the_step_is_plain_jit() -> None:
    function = tensile.jit(sgd_step, budget="100%", donate_argnums=0)
    function(fresh(weights()), batch())
    plan = function.plan(weights(), batch())
    assert plan.whole and plan.budget_bytes == plan.jit_peak_bytes == plan.peak_bytes


def test_planning_needs_shapes_only_and_compiles_no_segment() -> None:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights(), batch()))
    told: list[str] = []
    budget = low_budget(sgd_step, weights(), batch(), donate_argnums=0)
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0, progress=lambda what, done, of: told.append(what))
    plan = function.plan(*shapes)
    assert set(told) == {"tracing", "planning"}
    assert plan.workspaces == "predicted"
    assert plan == function.plan(weights(), batch())
    assert plan.peak_bytes <= budget
    function(fresh(weights()), batch())
    assert function.plan(*shapes).workspaces == "compiled"
    assert set(told) == {"tracing", "planning", "compiling segments"}


def test_the_same_step_gives_the_same_plan_again() -> None:
    budget = low_budget(sgd_step, weights(), batch(), donate_argnums=0)
    plans = [tensile.jit(sgd_step, budget=budget, donate_argnums=0).plan(weights(), batch()) for _ in range(2)]
    assert plans[0] == plans[1]


def test_another_precision_is_another_program() -> None:
    function = tensile.jit(sgd_step, budget=2**40)
    usual = function.plan(weights(), batch())
    with jax.default_matmul_precision("highest"):
        assert function.plan(weights(), batch()).fingerprint != usual.fingerprint
    assert function.plan(weights(), batch()) == usual


def test_another_shape_gets_another_plan_and_the_first_is_kept() -> None:
    budget = low_budget(sgd_step, weights(), batch(), part=0.5, donate_argnums=0)
    told: list[int] = []
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0, progress=lambda what, done, of: told.append(done))
    function(fresh(weights()), batch())
    first = function.plan(weights(), batch())
    small = batch(rows=ROWS // 2)
    same(function(fresh(weights()), small), jax.jit(sgd_step)(weights(), small))
    assert function.plan(weights(), small).fingerprint != first.fingerprint
    before = len(told)
    function(fresh(weights()), batch())
    assert len(told) == before
    assert function.plan(weights(), batch()) == first


@pytest.mark.slow
def test_repeated_blocks_compile_once() -> None:
    deep = weights(12)
    function = planned(sgd_step, (deep, batch()), part=0.1, donate_argnums=0)
    report = function.report()
    assert report.segments == len(function.plan(deep, batch()).segments)
    contents = {code.content for code in codes_of(function)}
    assert len(contents) < report.segments


def codes_of(function: tensile.PlannedFunction) -> list[Any]:
    now = running(function)
    return [
        now.compiled.step.builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, s.donated)
        for s in now.plan.segments
    ]


def test_the_policy_none_swaps_nothing_and_computes_nothing_heavy_again() -> None:
    function = tensile.jit(sgd_step, policy="none", donate_argnums=0)
    same(function(fresh(weights()), batch()), jax.jit(sgd_step)(weights(), batch()))
    plan = function.plan(weights(), batch())
    assert kinds_of(plan) <= {"release", "recompute"}
    assert plan.recomputed_us == 0.0  # what runs twice is what XLA fuses into its consumers
    assert function.report().swapped_bytes == 0


def test_the_policy_none_keeps_a_budget_or_says_which_one_it_can_keep() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=1000, policy="none", donate_argnums=0)(fresh(weights()), batch())
    least = caught.value.floor_bytes
    function = tensile.jit(sgd_step, budget=least, policy="none", donate_argnums=0)
    function(fresh(weights()), batch())
    assert function.report().peak_bytes <= least
    assert function.report().swapped_bytes == 0


@pytest.mark.parametrize(
    "slowdowns", [(1.0, 1.2, 2.0), pytest.param((1.0, 1.05, 1.2, 2.0, 10.0), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_least_memory_for_a_step_that_is_fast_enough(slowdowns: tuple[float, ...]) -> None:
    few = weights(3)

    def plan_for(max_slowdown: float) -> tensile.Plan:
        return tensile.jit(sgd_step, max_slowdown=max_slowdown, donate_argnums=0).plan(few, batch())

    plans = [plan_for(slowdown) for slowdown in slowdowns]
    alone_us = tensile.jit(sgd_step, donate_argnums=0).plan(few, batch()).step_us
    for slowdown, plan in zip(slowdowns, plans, strict=True):
        assert plan.step_us <= slowdown * alone_us + 0.01
        assert plan.max_slowdown == slowdown and plan.budget_bytes is None
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    assert "the least for a step of at most 1.2 times plain jit's time" in str(plans[slowdowns.index(1.2)])

    function = tensile.jit(sgd_step, max_slowdown=2.0, donate_argnums=0)
    same(function(fresh(few), batch()), jax.jit(sgd_step)(few, batch()))
    plan = function.plan(few, batch())
    assert plan.workspaces == "compiled" and function.report().peak_bytes <= plan.peak_bytes
    assert plan.peak_bytes < function.jit_peak_bytes(few, batch())


def test_a_plan_says_what_it_does() -> None:
    plan = planned(sgd_step, (weights(), batch()), donate_argnums=0).plan(weights(), batch())
    text = str(plan)
    assert plan.jit_step_us is not None
    assert text.startswith(
        f"Plan of 'sgd_step': {plan.step_us / plan.jit_step_us:.2f} times plain jit's time, predicted (policy auto, "
    )
    (parts,) = re.findall(
        r"step +([\d.]+) ms = plain jit ([\d.]+) \+ recomputation ([\d.]+) \+ waiting for copies ([\d.]+) (. [\d.]+)", text
    )
    whole, *rest = (float(part.replace(" ", "")) for part in parts)
    assert whole == round(plan.step_us / 1e3, 1) and rest[0] == round(plan.jit_step_us / 1e3, 1)
    assert whole == pytest.approx(sum(rest), abs=0.01)
    assert f"segments   {len(plan.segments)}" in text
    assert f"swaps      {sum(e.kind == 'swap_out' for e in plan.events)} out" in text
    assert plan.floor_bytes <= plan.peak_bytes <= (plan.budget_bytes or 0)
    assert plan.step_us > 0
    assert plan.floor_tensors


def test_a_plan_that_runs_whole_is_named_plain_jit() -> None:
    plan = tensile.jit(sgd_step, donate_argnums=0).plan(weights(), batch())
    assert str(plan).startswith("Plan of 'sgd_step': as plain jit runs it (policy auto, ") and plan.jit_step_us == plan.step_us


def test_every_form_of_a_step_is_compared_with_plain_jit() -> None:
    # a step whose rows are computed in chunks takes longer in the model than plain jit does
    step, x = jax.grad(lambda w, x: jnp.sum(jax.nn.softmax(x @ w) ** 2)), jnp.ones((512, 64))
    w = jnp.ones((64, 4096))
    plain_us = tensile.jit(step).plan(w, x).step_us
    plans = [tensile.jit(step, budget=budget).plan(w, x) for budget in ("90%", "40%")]
    assert any("chunks" in note for plan in plans for note in plan.notes)
    assert [plan.jit_step_us for plan in plans] == [plain_us, plain_us]


def test_the_report_says_what_was_measured() -> None:
    function = planned(sgd_step, (weights(), batch()), donate_argnums=0)
    state = fresh(weights())
    first = function.report()
    assert (first.step_us, first.watched_step_us, first.call_to_call_us, first.iterations) == (None, None, None, 1)
    assert first.first_step_us > 0
    for i in range(4):
        state, _ = function(state, batch(i))
    report, plan = function.report(), function.plan(state, batch())
    assert report.iterations == 5
    assert report.watched_step_us is not None and report.step_us is not None and 0 < report.step_us <= report.watched_step_us
    assert (report.predicted_step_us, report.predicted_jit_step_us) == (plan.step_us, plan.jit_step_us)
    assert (report.budget_bytes, report.jit_peak_bytes) == (plan.budget_bytes, plan.jit_peak_bytes)
    assert report.swapped_bytes == plan.swapped_out_bytes + plan.swapped_in_bytes
    assert report.segments == len(plan.segments)
    assert report.distinct_segments > 1
    assert report.compile_s > 0 and report.trace_s > 0 and report.plan_s > 0 and 1 <= report.tries <= 3
    assert (report.passive_swap_ins, report.out_of_memory) == (0, 0)


def test_a_report_has_one_headline_and_a_line_for_each_time() -> None:
    function, state = planned(sgd_step, (weights(), batch()), donate_argnums=0), fresh(weights())
    for i in range(6):
        state, _ = function(state, batch(i))
    report = function.report()
    assert report.predicted_jit_step_us and report.watched_step_us and report.call_to_call_us and report.step_us
    slowdown = report.predicted_step_us / report.predicted_jit_step_us
    assert report.slowdown == slowdown
    headline, *lines = str(report).splitlines()
    assert headline == f"'sgd_step': {slowdown:.2f} times plain jit's time, predicted; plain jit was not measured"
    said = {
        "measured from one call to the next, with what your program does in between": report.call_to_call_us,
        "measured in watched steps, which wait for each segment and so take longer": report.watched_step_us,
        "measured in the first step, without tracing, planning and compiling": report.first_step_us,
        "predicted by the plan": report.predicted_step_us,
        "predicted of plain jit": report.predicted_jit_step_us,
    }
    assert [line.strip() for line in lines if " ms  " in line] == [f"{us / 1e3:.1f} ms  {words}" for words, us in said.items()]
    assert repr(report) == str(report) and len(lines) < 20

    measured = function.report(jit_step_us=1000)
    assert measured.slowdown == report.step_us / 1000
    assert str(measured).startswith(f"'sgd_step': {measured.slowdown:.2f} times plain jit's time, measured\n")
    assert "1.0 ms  measured of plain jit" in str(measured)


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf"), "1 ms", True])
def test_the_time_of_plain_jit_must_be_a_positive_number(time: Any) -> None:
    with pytest.raises(ValueError, match="jit_step_us must be a positive number of microseconds"):
        tensile.jit(sgd_step).report(jit_step_us=time)


def test_a_step_that_runs_whole_is_reported_as_plain_jit() -> None:
    function, state = tensile.jit(sgd_step, donate_argnums=0), fresh(weights())
    for i in range(5):
        state, _ = function(state, batch(i))
    report = function.report()
    assert report.whole and report.step_us == report.jit_step_us == report.watched_step_us and report.slowdown == 1.0
    assert str(report).startswith("'sgd_step': runs as plain jit runs it, as one executable\n")
    assert "segment" not in str(report)


@pytest.mark.parametrize("budget", ["60%", None])
def test_the_time_from_call_to_call_is_that_of_calls_that_were_not_watched(budget: str | None) -> None:
    function, state = tensile.jit(sgd_step, budget=budget, donate_argnums=0), fresh(weights())
    for i in range(5):
        state, _ = function(state, batch())
        if i == 3:  # the fourth call is the first that is not watched, and its pace is known when the fifth begins
            assert function.report().call_to_call_us is None
            time.sleep(0.05)
    report = function.report()
    assert report.call_to_call_us is not None and report.call_to_call_us >= 5e4 and report.step_us is not None


def test_there_is_nothing_to_report_before_the_first_call() -> None:
    with pytest.raises(RuntimeError, match="before the first call"):
        tensile.jit(sgd_step).report()


def test_the_public_names_are_these() -> None:
    assert sorted(tensile.__all__) == [
        "BudgetError", "BudgetTooSmall", "CheckReport", "CheckpointError", "ClusterError", "DistributedError", "Entrypoint",
        "InvalidPlan", "Job", "JobFailed", "JobsFileError", "LargestBatch", "MemoryReport", "OutOfMemory", "Plan",
        "PlanFileError", "PlannedFunction", "ProcessDied", "Report", "Runtime", "TensileError", "TraceError", "assert_peak",
        "check", "explain_out_of_memory", "jit", "max_batch", "memory", "nnx", "ray", "to_device",
    ]  # fmt: skip
    assert all(getattr(tensile, name) is not None for name in tensile.__all__)


# -- the budget is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("donate", [(0,), ()], ids=["donated", "not donated"])
@pytest.mark.parametrize("part", slow_but([0.0, 0.5, 0.9], 0.0, 0.9))
def test_the_budget_is_kept_and_the_predicted_peak_is_the_measured_one(part: float, donate: tuple[int, ...]) -> None:
    optimizer = optax.adam(1e-3)
    step = optimizer_step(optimizer)
    example = optimizer_state(optimizer), batch()
    function = planned(step, example, part=part, donate_argnums=donate)
    plan = function.plan(*example)
    assert plan.workspaces == "compiled"
    if plan.whole:
        pytest.skip("plain jit fits, so nothing is planned")
    del example
    gc.collect()  # what other tests have left behind, and errors whose frames still name the example
    baseline = device_bytes()
    state = optimizer_state(optimizer)
    seen = measure_launches(function, baseline)
    for i in range(3):
        x = batch(i)
        state, loss = function(state, x)
        del x, loss
    assert len(seen) == 3 * len(plan.segments)
    assert plan.budget_bytes is not None
    assert max(seen) <= plan.peak_bytes <= plan.budget_bytes
    assert max(seen) >= 0.99 * plan.peak_bytes
    assert function.report().peak_bytes <= plan.peak_bytes
    assert function.report().peak_bytes >= 0.99 * plan.peak_bytes


def test_the_floor_of_a_plan_is_a_budget_that_works() -> None:
    floor = tensile.jit(sgd_step, budget=2**40, donate_argnums=0).plan(weights(), batch()).floor_bytes
    plan = tensile.jit(sgd_step, budget=floor, donate_argnums=0).plan(weights(), batch())
    assert plan.peak_bytes <= floor
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=floor - 1, donate_argnums=0).plan(weights(), batch())
    assert caught.value.floor_bytes == floor


def test_the_floor_that_an_error_names_is_a_budget_that_works() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=1000, donate_argnums=0)(fresh(weights()), batch())
    floor = caught.value.floor_bytes
    function = tensile.jit(sgd_step, budget=floor, donate_argnums=0)
    same(function(fresh(weights()), batch()), jax.jit(sgd_step)(weights(), batch()))
    assert function.report().peak_bytes <= floor


# -- state in host memory -------------------------------------------------------------------------------------------------

BIG, FEW = 256, 64  # matrices of 256 KiB, activations of 64 KiB: the state is what counts


@pytest.fixture(scope="module")
def momentum() -> tuple[Callable[..., Any], Any, Any]:
    optimizer = optax.sgd(0.05, momentum=0.9)
    state = optimizer_state(optimizer, weights(4, BIG))
    return optimizer_step(optimizer), state, batch(rows=FEW, width=BIG)


def test_state_may_come_back_in_host_memory_and_to_device_brings_it_in(momentum: Any) -> None:
    step, state, x = momentum
    device_floor = tensile.jit(step, budget=2**40, donate_argnums=0).plan(state, x).floor_bytes
    function = planned(step, (state, x), donate_argnums=0, state_memory="any")
    plan = function.plan(state, x)
    assert plan.peak_bytes < device_floor
    ours, theirs = fresh(state), fresh(state)
    for _ in range(5):
        ours, _ = function(ours, x)
        theirs, _ = jax.jit(step)(theirs, x)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(ours)}
    assert "pinned_host" in kinds
    stays_out = {e.tensor for e in plan.events if e.kind == "swap_out"} - {e.tensor for e in plan.events if e.kind == "swap_in"}
    assert sum(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(ours)) == len(stays_out)
    assert function.report().peak_bytes <= plan.peak_bytes
    inside = tensile.to_device(ours)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(inside)} == {"device"}
    same(inside, theirs)
    jax.jit(dense_loss)(inside["params"], x)  # a function of the user's own works on it


def test_state_from_host_memory_is_taken_by_a_step_that_keeps_its_own_on_the_device(momentum: Any) -> None:
    step, state, x = momentum
    out = planned(step, (state, x), donate_argnums=0, state_memory="any")
    inside = planned(step, (state, x), donate_argnums=0)
    ours, _ = out(fresh(state), x)
    ours, _ = inside(ours, x)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(ours)} == {"device"}
    theirs = fresh(state)
    for _ in range(2):
        theirs, _ = jax.jit(step)(theirs, x)
    same(ours, theirs)


def test_to_device_leaves_everything_else_as_it_is() -> None:
    tree = {"a": jnp.ones(3), "b": None, "c": 4, "d": np.ones(2)}
    moved = tensile.to_device(tree)
    assert moved["a"] is tree["a"] and moved["d"] is tree["d"] and moved["c"] == 4


# -- saved plans ----------------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_read_back_as_it_was(tmp_path: Path) -> None:
    function = planned(sgd_step, (weights(), batch()), donate_argnums=0)
    plan = function.plan(weights(), batch())
    plan.save(tmp_path / "plan.json")
    assert tensile.Plan.load(tmp_path / "plan.json") == plan
    raw = json.loads((tmp_path / "plan.json").read_text())
    jsonschema.validate(raw, msgspec.json.schema(tensile.Plan))
    assert raw["schema_version"] == 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, "segments": "none"}, msgspec.json.schema(tensile.Plan))


def test_a_loaded_plan_gives_the_same_bits_as_the_plan_that_was_saved(tmp_path: Path) -> None:
    optimizer = optax.adam(1e-3)
    step, state = optimizer_step(optimizer), optimizer_state(optimizer)
    function = planned(step, (state, batch()), donate_argnums=0)
    plan = function.plan(state, batch())
    assert something_happened(plan)
    plan.save(tmp_path / "plan.json")
    loaded = tensile.jit(step, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    ours, theirs = fresh(state), fresh(state)
    for i in range(4):
        ours, loss = function(ours, batch(i))
        theirs, loaded_loss = loaded(theirs, batch(i))
        same((theirs, loaded_loss), (ours, loss), exactly=True)
    assert loaded.plan(state, batch()).segments == plan.segments
    assert loaded.report().peak_bytes == function.report().peak_bytes


def test_a_saved_plan_for_the_whole_step_runs_too(tmp_path: Path) -> None:
    tensile.jit(sgd_step, donate_argnums=0).plan(weights(), batch()).save(tmp_path / "whole.json")
    plan = tensile.Plan.load(tmp_path / "whole.json")
    assert plan.whole
    got = tensile.jit(sgd_step, plan=plan, donate_argnums=0)(fresh(weights()), batch())
    same(got, jax.jit(sgd_step)(weights(), batch()), exactly=True)


def test_a_plan_made_from_shapes_runs_without_planning_again() -> None:
    budget = low_budget(sgd_step, weights(), batch(), part=0.5, donate_argnums=0)
    plan = tensile.jit(sgd_step, budget=budget, donate_argnums=0).plan(weights(), batch())
    assert something_happened(plan)
    function = tensile.jit(sgd_step, plan=dataclasses.replace(plan, budget_bytes=2 * budget), donate_argnums=0)
    same(function(fresh(weights()), batch()), jax.jit(sgd_step)(weights(), batch()))
    assert [s.operators for s in function.plan(weights(), batch()).segments] == [s.operators for s in plan.segments]


def test_the_width_of_the_examples_is_what_their_docstring_says() -> None:
    assert batch().nbytes == 2**16 == ROWS * WIDTH * 4


@pytest.mark.parametrize("budget", [None, "80%", 2**40])
def test_state_that_lies_on_the_host_from_the_first_call_on_is_brought_in(budget: int | str | None) -> None:
    """As after a restart, or where another function of the same state has left it."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    function = tensile.jit(sgd_step, budget=budget, state_memory="any", donate_argnums=0)
    state = [jax.device_put(w, host) for w in weights()]
    assert function.plan(state, batch()) == function.plan(weights(), batch())
    state, loss = function(state, batch())
    expected, expected_loss = jax.jit(sgd_step)(weights(), batch())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-4)
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)
