"""A saved plan is a start: it runs, corrected and within its budget, with the step's results, or is refused in a sentence."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensile_jax as tensile
from tensile_jax.exec.fitting.fitting import Fitting
from tests.builders import (
    batch,
    fresh,
    kinds_of,
    low_budget,
    numbers,
    optimizer_state,
    optimizer_step,
    planned,
    running,
    sgd_step,
    slow_but,
    weights,
)

ARGUMENTS = (weights(3, 128), batch(rows=256, width=128))


@pytest.fixture(scope="module")
def compiled(cheap_launches: str) -> tensile.Plan:
    """A plan in segments, with swaps, whose state may stay out, as it ran."""
    function = planned(sgd_step, ARGUMENTS, part=0.3, donate_argnums=0, state_memory="any", device_profile=cheap_launches)
    plan = function.plan(*ARGUMENTS)
    assert plan.workspaces == "compiled" and {"swap_in", "swap_out", "recompute"} <= kinds_of(plan)
    return plan


@pytest.fixture(scope="module")
def lowest() -> tensile.Plan:
    """The plan of the lowest budget that was found to work."""
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=1, donate_argnums=0)(fresh(ARGUMENTS[0]), ARGUMENTS[1])
    function = tensile.jit(sgd_step, budget=caught.value.floor_bytes, donate_argnums=0)
    function(fresh(ARGUMENTS[0]), ARGUMENTS[1])
    return function.plan(*ARGUMENTS)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    return numbers(jax.jit(sgd_step)(*ARGUMENTS))


def holds(function: Any, expected: list[np.ndarray]) -> tensile.Plan:
    """Run it, compare with what the step gives, and hold it to what its plan says."""
    results = function(fresh(ARGUMENTS[0]), ARGUMENTS[1])
    for a, b in zip(numbers(tensile.to_device(results)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    plan = function.plan(*ARGUMENTS)
    assert plan.workspaces == "compiled"
    assert function.report().peak_bytes <= plan.peak_bytes
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    return plan


@pytest.fixture
def greedy_compiler(monkeypatch: pytest.MonkeyPatch) -> int:
    """Another machine: every segment takes so many bytes more than it does here."""
    more, here = 50_000, Fitting.workspaces
    monkeypatch.setattr(Fitting, "workspaces", lambda self, *of: [nbytes + more for nbytes in here(self, *of)])
    return more


# -- a start ---------------------------------------------------------------------------------------------------------------


def test_a_plan_that_ran_runs_as_it_is(compiled: tensile.Plan, expected: list[np.ndarray], tmp_path: Path) -> None:
    compiled.save(tmp_path / "plan.json")
    function = tensile.jit(sgd_step, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    assert holds(function, expected) == compiled


@pytest.mark.parametrize("part", slow_but([0.6, 0.2, 0.0], 0.2))
def test_a_plan_with_estimates_runs_within_its_budget(part: float, expected: list[np.ndarray]) -> None:
    budget = low_budget(sgd_step, *ARGUMENTS, part=part, donate_argnums=0)
    try:
        tensile.jit(sgd_step, budget=budget, donate_argnums=0)(fresh(ARGUMENTS[0]), ARGUMENTS[1])
    except tensile.BudgetTooSmall as error:
        budget = error.floor_bytes
    plan = tensile.jit(sgd_step, budget=budget, donate_argnums=0).plan(*ARGUMENTS)
    assert holds(tensile.jit(sgd_step, plan=plan, donate_argnums=0), expected).budget_bytes == budget


def test_a_plan_that_needs_more_here_is_made_again_within_its_budget_and_says_so(
    compiled: tensile.Plan, expected: list[np.ndarray], greedy_compiler: int
) -> None:
    tight = dataclasses.replace(compiled, budget_bytes=compiled.peak_bytes + greedy_compiler // 2)
    plan = holds(tensile.jit(sgd_step, plan=tight, donate_argnums=0), expected)
    assert plan.budget_bytes == tight.budget_bytes
    assert plan.segments != compiled.segments
    assert (plan.policy, plan.state_memory) == (compiled.policy, compiled.state_memory)
    assert [note for note in plan.notes if "planned again within the budget" in note]
    assert f" note {plan.notes[-1]}" in " ".join(str(plan).split())


@pytest.mark.slow
def test_a_plan_that_no_other_can_replace_here_names_the_smallest_budget_and_leaves_the_state_alone(
    lowest: tensile.Plan, greedy_compiler: int
) -> None:
    state = fresh(ARGUMENTS[0])
    with pytest.raises(tensile.BudgetTooSmall, match="the smallest that works is") as caught:
        tensile.jit(sgd_step, plan=lowest, donate_argnums=0)(state, ARGUMENTS[1])
    assert caught.value.budget_bytes == lowest.budget_bytes
    assert caught.value.floor_bytes <= lowest.peak_bytes + greedy_compiler
    assert not any(w.is_deleted() for w in state)


def test_a_plan_without_a_budget_is_corrected_and_says_so(
    compiled: tensile.Plan, expected: list[np.ndarray], greedy_compiler: int
) -> None:
    free = dataclasses.replace(compiled, budget_bytes=None, workspaces="predicted")
    plan = holds(tensile.jit(sgd_step, plan=free, donate_argnums=0), expected)
    assert compiled.peak_bytes < plan.peak_bytes <= compiled.peak_bytes + greedy_compiler
    assert plan.notes == (
        f"Compiled here, the saved plan needs {plan.peak_bytes} bytes at its peak; the file says {compiled.peak_bytes}.",
    )


def test_a_whole_plan_is_held_to_its_budget_too(expected: list[np.ndarray]) -> None:
    whole = tensile.jit(sgd_step, donate_argnums=0).plan(*ARGUMENTS)
    assert whole.whole
    peak = tensile.jit(sgd_step, donate_argnums=0).jit_peak_bytes(*ARGUMENTS)
    assert holds(tensile.jit(sgd_step, plan=whole, donate_argnums=0), expected).peak_bytes == peak
    segment = dataclasses.replace(whole.segments[0], device_bytes=peak - 1)
    tight = dataclasses.replace(whole, segments=(segment,), peak_bytes=peak - 1, budget_bytes=peak - 1)
    plan = holds(tensile.jit(sgd_step, plan=tight, donate_argnums=0), expected)
    assert not plan.whole and plan.notes


# -- beside a budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [1, 0.5])
def test_a_plan_above_the_budget_beside_it_is_refused_before_anything_runs(compiled: tensile.Plan, below: float) -> None:
    budget = compiled.peak_bytes - 1 if below == 1 else int(compiled.peak_bytes * below)
    with pytest.raises(
        tensile.PlanFileError, match=rf"plan= needs {compiled.peak_bytes} bytes.*above budget={budget}.*leave budget out"
    ):
        tensile.jit(sgd_step, plan=compiled, budget=budget, donate_argnums=0)


def test_the_json_names_the_memory_of_a_copy_only_if_it_is_not_the_hosts(compiled: tensile.Plan, tmp_path: Path) -> None:
    raw = json.loads(msgspec.json.encode(compiled))
    assert raw["events"] and not any("memory" in event for event in raw["events"])
    file = tmp_path / "plan.json"
    raw["events"][0]["memory"] = "host"
    file.write_text(json.dumps(raw))
    assert tensile.Plan.load(file) == compiled
    raw["events"][0]["memory"] = "disk"
    file.write_text(json.dumps(raw))
    with pytest.raises(tensile.PlanFileError, match="Invalid enum value 'disk'"):
        tensile.Plan.load(file)


def test_a_plan_above_a_share_beside_it_is_refused_before_anything_runs(compiled: tensile.Plan) -> None:
    function = tensile.jit(sgd_step, plan=compiled, budget="1%", donate_argnums=0)
    state = fresh(ARGUMENTS[0])
    for call in (function.plan, function):
        with pytest.raises(tensile.PlanFileError, match=r"plan= needs .* above budget="):
            call(state, ARGUMENTS[1])
    assert not any(w.is_deleted() for w in state)


def test_the_lower_of_two_budgets_holds(compiled: tensile.Plan, expected: list[np.ndarray]) -> None:
    assert compiled.budget_bytes is not None
    function = tensile.jit(sgd_step, plan=compiled, budget=compiled.peak_bytes, donate_argnums=0)
    assert holds(function, expected).budget_bytes == compiled.peak_bytes
    function = tensile.jit(sgd_step, plan=compiled, budget=2**40, donate_argnums=0)
    assert holds(function, expected).budget_bytes == compiled.budget_bytes


def test_a_slowdown_beside_a_plan_is_refused(compiled: tensile.Plan) -> None:
    with pytest.raises(ValueError, match=r"max_slowdown=1\.5 asks for a new plan, and plan= is one that was made"):
        tensile.jit(sgd_step, plan=compiled, max_slowdown=1.5)


def test_the_plan_for_other_shapes_is_refused_with_what_differs(compiled: tensile.Plan) -> None:
    function = tensile.jit(sgd_step, plan=compiled, donate_argnums=0)
    assert function.plan(*ARGUMENTS) == compiled
    for call in (function.plan, function):
        with pytest.raises(tensile.PlanFileError, match=r"batch is float32\[100, 128\] here and float32\[256, 128\] in the plan"):
            call(ARGUMENTS[0], batch(rows=100, width=128))


def test_a_plan_of_another_step_is_refused_with_the_one_cause(compiled: tensile.Plan) -> None:
    def refusal(step: Any = sgd_step, plan: tensile.Plan = compiled, **options: Any) -> str:
        with pytest.raises(tensile.PlanFileError, match="was made for another program") as caught:
            tensile.jit(step, plan=plan, **options).plan(*ARGUMENTS)
        return re.sub(r".*?with [0-9a-f]{32}\. ", "", str(caught.value))

    def other(state: Any, x: Any) -> Any:
        new, loss = sgd_step(state, x)
        return new, loss + 1

    other.__name__ = "sgd_step"
    remedy = " Make a new one with step.plan(...)."
    assert refusal() == (
        "Only what is donated differs: this step donates nothing, and the plan's donates state[0], state[1], state[2]. "
        f"Donate the same (donate_argnums).{remedy}"
    )
    computes = (
        "The arguments are alike, but what the step computes differs; or an argument is weakly typed in one of the two, as "
        "arrays made from Python numbers are (give such an argument a dtype: jnp.asarray(2.0, jnp.float32))."
    )
    assert refusal(other, donate_argnums=0) == f"{computes}{remedy}"
    assert refusal(other) == f"{computes}{remedy}"
    older = dataclasses.replace(compiled, jax_version="0.9.2")
    assert refusal(other, older, donate_argnums=0) == (
        f"The arguments are alike, but the step was traced by jax 0.9.2, and this is {jax.__version__}.{remedy}"
    )
    silent = dataclasses.replace(compiled, donated=None)
    assert "what the step computes, what is donated, or the version of jax differs." in refusal(plan=silent)


def test_state_that_is_weakly_typed_at_first_trains_on_under_the_budget_of_the_plan() -> None:
    """The saved plan is for the first call. The second has another program: a strongly typed scale widens 16-bit numbers."""

    def step(state: Any, x: Any) -> Any:
        params, scale = state
        new, loss = sgd_step(params, x)
        mean = jnp.mean(x.astype(jnp.bfloat16) * scale)
        return (new, 0.9 * scale + 0.1 * loss), loss + mean.astype(jnp.float32)

    def begun() -> Any:
        return jax.tree.map(jnp.copy, ARGUMENTS[0]), jnp.asarray(2.0)

    x = ARGUMENTS[1]
    saved = tensile.jit(step, budget="60%", donate_argnums=0).plan(begun(), x)
    ours, plain = tensile.jit(step, plan=saved, donate_argnums=0), jax.jit(step, donate_argnums=0)
    state, expected = begun(), begun()
    assert state[1].weak_type
    for _ in range(3):
        state, loss = ours(state, x)
        expected, plain_loss = plain(expected, x)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
        assert not state[1].weak_type
        plan = ours.plan(state, x)
        assert plan.fingerprint != saved.fingerprint
        assert saved.budget_bytes is not None
        assert plan.budget_bytes == saved.budget_bytes >= plan.peak_bytes
        assert any("other weak types" in note for note in plan.notes)
    strong = tensile.jit(step, plan=saved, donate_argnums=0)
    with pytest.raises(tensile.PlanFileError, match="weakly typed"):
        strong(state, x)


# -- what is no plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", ["plan.json", Path("plan.json"), {"whole": True}, 3, b"plan", [1], np.zeros(3), tensile.Plan])
def test_what_is_no_plan_is_a_type_error_that_says_how_to_load_one(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"plan must be a Plan, got .*tensile_jax\.Plan\.load\(path\)"):
        tensile.jit(sgd_step, plan=thing)


def changed(plan: tensile.Plan, place: int = 0, **changes: Any) -> tensile.Plan:
    segments = list(plan.segments)
    segments[place] = dataclasses.replace(segments[place], **changes)
    return dataclasses.replace(plan, segments=tuple(segments))


def contradictory(plan: tensile.Plan) -> Iterator[tuple[str, tensile.Plan]]:
    first = plan.segments[0]
    yield "has no segments", dataclasses.replace(plan, segments=(), events=())
    smallest = min(range(len(plan.segments)), key=lambda i: plan.segments[i].device_bytes)
    yield "the peak, is not the largest", dataclasses.replace(plan, peak_segment=smallest)
    yield "its peak is in segment 99", dataclasses.replace(plan, peak_segment=99)
    yield "its peak is in segment -1", dataclasses.replace(plan, peak_segment=-1)
    yield "a tensor stands twice in outputs of segment 0", changed(plan, outputs=(*first.outputs, first.outputs[0]))
    yield "a tensor stands twice in inputs of segment 0", changed(plan, inputs=(*first.inputs, first.inputs[0]))
    yield "output that an earlier segment gives", changed(plan, 1, outputs=(first.outputs[0], *plan.segments[1].outputs))
    yield "name tensors that are not in the plan", changed(plan, inputs=(*first.inputs, 10**9))
    yield "name tensors that are not in the plan", changed(plan, frees=(-1,))
    yield "empty or negative range", changed(plan, operators=((-5, 3),))
    yield "empty or negative range", changed(plan, recomputes=((3, 3),))
    yield "workspace_bytes of segment 0 is -1", changed(plan, workspace_bytes=-1)
    yield "step_us of the plan is nan", dataclasses.replace(plan, step_us=float("nan"))
    yield "latency_us of segment 0 is inf", changed(plan, latency_us=float("inf"))
    yield "above its budget of 1000", dataclasses.replace(plan, budget_bytes=1000)
    yield "a tensor stands in it twice", dataclasses.replace(plan, tensors=(*plan.tensors, plan.tensors[0]))
    yield "runs whole, and yet has more than one segment", dataclasses.replace(plan, whole=True)
    event = msgspec.structs.replace(plan.events[0], until=77)
    yield "event 0 lies between segments", dataclasses.replace(plan, events=(event, *plan.events[1:]))


def test_a_plan_that_contradicts_itself_is_refused_where_it_is_read_and_where_it_is_given(
    compiled: tensile.Plan, tmp_path: Path
) -> None:
    for complaint, plan in contradictory(compiled):
        with pytest.raises(tensile.PlanFileError, match=complaint):
            tensile.jit(sgd_step, plan=plan, donate_argnums=0)
        if "nan" in complaint or "inf" in complaint:
            continue  # JSON has neither: see below
        plan.save(tmp_path / "plan.json")
        with pytest.raises(tensile.PlanFileError, match=f"plan.json is not a plan: .*{complaint}"):
            tensile.Plan.load(tmp_path / "plan.json")


def test_a_plan_of_an_unknown_policy_can_be_read_but_not_run(compiled: tensile.Plan, tmp_path: Path) -> None:
    dataclasses.replace(compiled, policy="best").save(tmp_path / "plan.json")
    plan = tensile.Plan.load(tmp_path / "plan.json")
    with pytest.raises(tensile.PlanFileError, match="plan= cannot be run: its policy is 'best', which is not known"):
        tensile.jit(sgd_step, plan=plan, donate_argnums=0)


def test_a_plan_that_does_something_else_is_refused_before_anything_runs(compiled: tensile.Plan) -> None:
    swapped = next(e for e in compiled.events if e.kind == "swap_in" and e.trigger >= 0)
    others = dataclasses.replace(compiled, events=tuple(e for e in compiled.events if e is not swapped))
    unfreed = changed(compiled, 0, recomputes=((0, 10**6),))
    state = fresh(ARGUMENTS[0])
    for plan in (others, unfreed):
        with pytest.raises(tensile.PlanFileError, match="does not do what the step does, so it cannot be run: Segment"):
            tensile.jit(sgd_step, plan=plan, donate_argnums=0)(state, ARGUMENTS[1])
    assert not any(w.is_deleted() for w in state)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe\x80", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"\xef\xbb\xbf{}",
     b'{"schema_version": 1e999}', b'{"schema_version": true}', b'{"schema_version": 1}', b'{"schema_version": "1"}',
     '{"schema_version": 1, "segments": "\ud800"}'.encode("utf-8", "surrogatepass"), b'{"schema_version": ' + b"1" * 400 + b"}"],
    ids=range(14),
)  # fmt: skip
def test_bytes_that_are_no_plan_are_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(tensile.PlanFileError, match="plan.json") as caught:
        tensile.Plan.load(tmp_path / "plan.json")
    assert len(str(caught.value)) < 1000


# -- any file --------------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 40), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "swap_in", "swap_out", "release", "predicted", "any", "device", [], {}, [0], [[0, 1]], 1.0, 1e308]),
)  # fmt: skip


def places_in(raw: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys or indices."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in list(items):
        yield raw, key
        yield from places_in(value)


def mutate(draw: Any, raw: Any) -> None:
    """Delete, duplicate, exchange or change one entry somewhere in the value."""
    by_kind: dict[str, list[tuple[Any, Any]]] = {}
    for container, key in places_in(raw):
        by_kind.setdefault(key if isinstance(key, str) else "entry", []).append((container, key))
    found = by_kind[draw(st.sampled_from(sorted(by_kind)))]
    container, key = found[draw(st.integers(0, len(found) - 1))]
    deed = draw(st.sampled_from(["delete", "change", "change", "nudge", "duplicate", "exchange"]))
    if deed == "delete":
        del container[key]
    elif deed == "nudge" and isinstance(container[key], int | float):
        container[key] += draw(st.sampled_from([-1, 1, -1000, 1000]))
    elif deed in ("duplicate", "exchange") and isinstance(container, list):
        other = draw(st.integers(0, len(container) - 1))
        if deed == "duplicate":
            container.insert(other, container[key])
        else:
            container[key], container[other] = container[other], container[key]
    else:
        container[key] = draw(VALUES)


def runs_or_is_refused(data: Any, plan: tensile.Plan, expected: list[np.ndarray], file: Path) -> None:
    plan.save(file)
    raw = json.loads(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(data.draw, raw)
    content = json.dumps(raw).encode()
    if data.draw(st.integers(0, 9)) == 0:
        content = content[: data.draw(st.integers(0, len(content)))]
    file.write_bytes(content)
    state = fresh(ARGUMENTS[0])
    try:
        loaded = tensile.Plan.load(file)
        str(loaded)
        function = tensile.jit(sgd_step, plan=loaded, donate_argnums=0)
        results = function(state, ARGUMENTS[1])
    except tensile.PlanFileError:
        assert not any(w.is_deleted() for w in state)
        return
    for _ in range(2):  # the second iteration begins where the first has left the state
        for a, b in zip(numbers(tensile.to_device(results)), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        state, expected = results[0], numbers(jax.jit(sgd_step)(*fresh((tensile.to_device(results[0]), ARGUMENTS[1]))))
        results = function(state, ARGUMENTS[1])
    assert running(function).plan.peak_bytes >= function.report().peak_bytes


ANY_FILE = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
)


@settings(ANY_FILE, max_examples=60, derandomize=True)
@given(data=st.data())
def test_a_plan_that_was_changed_anywhere_runs_right_or_is_refused(
    data: Any, compiled: tensile.Plan, expected: list[np.ndarray], tmp_path: Path
) -> None:
    runs_or_is_refused(data, compiled, expected, tmp_path / "plan.json")


@pytest.mark.slow
@settings(ANY_FILE, max_examples=3000)
@given(data=st.data())
def test_many_plans_that_were_changed_anywhere_run_right_or_are_refused(
    data: Any, compiled: tensile.Plan, expected: list[np.ndarray], tmp_path: Path
) -> None:
    runs_or_is_refused(data, compiled, expected, tmp_path / "plan.json")


# -- moments of another type -----------------------------------------------------------------------------------------------


def test_a_plan_of_a_step_with_narrow_moments_runs_again(tmp_path: Path) -> None:
    params, x = weights(2), batch()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    step, state = optimizer_step(optimizer), optimizer_state(optimizer, params)
    budget = low_budget(step, state, x, part=0.3, donate_argnums=0)
    tensile.jit(step, budget=budget, donate_argnums=0).plan(state, x).save(tmp_path / "plan.json")
    function = tensile.jit(step, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    ours, theirs = function(fresh(state), x), jax.jit(step)(state, x)
    for a, b in zip(numbers(ours), numbers(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4)
