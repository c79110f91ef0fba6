"""`check` runs a step under a plan and as plain jit, and names the outputs that differ by more than rounding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import msgspec
import numpy as np
import pytest
from flax import nnx

import tensile_jax as tensile
from tensile_jax.checking import reference, ways
from tensile_jax.checking.ways import Allocated
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.running.executor import Executor
from tests.builders import low_budget
from tests.checking.small_steps import NAMES, has_form, images, numbers_of, spoil, state, train_step

SEGMENTS: Any = {"policy": "none", "device_profile": "cpu", "progress": False, "timed_calls": 1}
"""Options of a plan that cuts the step wherever it can be cut."""
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."


def checked(**options: Any) -> tensile.CheckReport:
    return tensile.check(train_step, state(), images(), donate_argnums=0, **(SEGMENTS | options))


@pytest.fixture(scope="module")
def report() -> tensile.CheckReport:
    return checked()


def test_a_plan_that_computes_the_same_agrees_in_every_output(report: tensile.CheckReport) -> None:
    assert (report.verdict, report.agrees, report.exit_code, report.differing) == ("agrees", True, 0, ())
    assert {output.name for output in report.outputs} == NAMES
    report.assert_ok()


def test_steps_follow_one_another_on_the_state_that_they_return(report: tensile.CheckReport) -> None:
    assert report.steps == 4
    assert sorted(report.fed_back) == ["state['count']", "state['key']", "state['mean']", "state['w']"]


def test_both_sides_are_measured(report: tensile.CheckReport) -> None:
    plan, plain = report.checked, report.reference
    compiled = jax.jit(train_step, donate_argnums=0).lower(state(), images()).compile()
    assert plain.peak_bytes == peak_of(compiled) and plan.peak_bytes > 0
    assert (plain.name, plain.launches, plain.tries) == ("plain jit", 1, 0)
    assert plan.launches > 1 and not report.whole
    assert min(plan.step_us, plain.step_us, plan.first_call_s, plain.first_call_s) > 0
    assert plan.allocator_peak_bytes is None and "not known on this backend" in str(report)


def test_the_report_is_one_screen_of_text_json_and_html(report: tensile.CheckReport) -> None:
    lines = str(report).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 130
    assert lines[0] == "Check of 'train_step': agrees. All 6 outputs are those of plain jit over 4 steps, up to rounding"
    assert tensile.CheckReport.from_json(report.to_json()) == report
    jsonschema.validate(json.loads(report.to_json()), msgspec.json.schema(tensile.CheckReport))
    assert report._repr_html_().startswith("<pre>Check of &#x27;train_step&#x27;: agrees.")
    with pytest.raises(ValueError, match="This is not the JSON of a check"):
        tensile.CheckReport.from_json("{}")
    with pytest.raises(ValueError, match="has check_version 0, and this version of tensile_jax reads 1"):
        tensile.CheckReport.from_json(report.to_json().replace('"check_version":1', '"check_version":0'))


def test_a_long_name_is_cut_and_stays_apart_from_the_type(report: tensile.CheckReport) -> None:
    first, *others = report.outputs
    long = replace(report, outputs=(replace(first, name="result" + "['parameters']" * 9), *others))
    (line,) = (line for line in str(long).splitlines() if "['parameters']" in line)
    assert f"['parameters'] {first.dtype}[" in line


@pytest.mark.parametrize(
    ("form", "change", "name"),
    [
        (has_form((5,), "float32"), lambda x: x + 1e-4, "result[0]['mean']"),
        (has_form((5,), "float32"), lambda x: x.at[2].set(jnp.nan), "result[0]['mean']"),
        (has_form((), "int32"), lambda x: x + 1, "result[0]['count']"),
        (has_form((64,), "int32"), lambda x: x.at[3].add(1), "result[1]['best']"),
    ],
    ids=["a small number", "a NaN", "a counter", "one index"],
)
def test_a_plan_that_computes_something_else_differs_in_the_output_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, form: Callable[[Any], bool], change: Callable[[Any], Any], name: str
) -> None:
    spoil(monkeypatch, form, change)
    report = checked(steps=2)
    assert (report.verdict, report.differing, report.exit_code) == ("differs", (name,), 1)
    assert report.outputs[0].step == 1 and report.outputs[0].reason
    with pytest.raises(AssertionError, match="DIFFERS"):
        report.assert_ok()
    assert f"differs. 1 of 6 outputs are not those of plain jit over 2 steps: {name}" in str(report)


def test_a_fault_of_a_later_step_is_found_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, has_form((64,), "int32"), lambda x: x + 1, after=2)
    report = checked(steps=4)
    assert [(output.name, output.step) for output in report.outputs if not output.agrees] == [("result[1]['best']", 3)]


def test_a_fault_in_a_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    is_key: Callable[[Any], bool] = lambda value: "key" in str(value.dtype) and value.shape == ()  # noqa: E731
    spoil(monkeypatch, is_key, lambda key: jax.random.fold_in(key, 1))
    assert "result[0]['key']" in checked(steps=1).differing


def test_arguments_are_neither_deleted_nor_changed() -> None:
    given, batch = state(), images()
    before = numbers_of((given, batch))
    tensile.check(train_step, given, batch, donate_argnums=0, steps=2, **SEGMENTS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((given, batch)))
    for now, then in zip(numbers_of((given, batch)), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_arguments_of_numpy_need_no_room_on_the_device_beside_their_copies() -> None:
    w = np.ones((8, 8), "float32")
    report = tensile.check(lambda w, x: w - 0.1 * jnp.tanh(x @ w), w, np.ones((8, 8), "float32"), donate_argnums=0, **SEGMENTS)
    assert report.agrees and report.copied_bytes == 0 and (w == 1).all()
    assert checked(steps=1).copied_bytes == 4 * 64 + 4 * 5 + 4 + 8


def test_an_argument_that_is_passed_on_is_kept() -> None:
    a, b = jnp.ones((8, 8)), jnp.full((8, 8), 2.0)
    report = tensile.check(lambda a, b: (b, jnp.tanh(a @ b)), a, b, donate_argnums=0, **SEGMENTS)
    assert report.agrees and not a.is_deleted() and not b.is_deleted() and float(b[0, 0]) == 2.0


def test_nans_on_both_sides_agree() -> None:
    report = tensile.check(lambda x: (jnp.log(x), jnp.tanh(x)), jnp.linspace(-1, 1, 64), **SEGMENTS)
    assert report.agrees and {output.name: output.nans for output in report.outputs}["result[0]"] == 32
    assert "32 NaNs on both sides" in str(report)


def test_static_and_keyword_arguments_are_those_of_jit() -> None:
    def power(x: jax.Array, n: int, *, z: jax.Array, a: jax.Array) -> jax.Array:
        return jnp.tanh(x) ** n + z - a

    options = SEGMENTS | {"static_argnums": 1, "donate_argnames": "z", "kwargs": {"z": jnp.zeros(4), "a": jnp.ones(4)}}
    report = tensile.check(power, jnp.ones(4), 3, steps=2, **options)
    assert report.agrees and [output.name for output in report.outputs] == ["result"]


def test_what_jit_has_returned_keeps_its_options() -> None:
    jitted = jax.jit(train_step, donate_argnums=0)
    planned = tensile.jit(train_step, policy="none", device_profile="cpu", donate_argnums=0)
    for step, options in ((jitted, SEGMENTS), (planned, {"timed_calls": 1, "progress": False})):
        report = tensile.check(step, state(), images(), steps=1, **options)
        assert report.agrees and report.policy == "none" and report.copied_bytes > 0


def test_a_planned_function_is_checked_without_writing_into_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    planned = tensile.jit(train_step, policy="none", device_profile="cpu", donate_argnums=0, keep_plans=folder)
    assert tensile.check(planned, state(), images(), steps=1, timed_calls=1, progress=False).agrees
    assert not folder.exists() or not list(folder.iterdir())


def test_a_plan_that_ran_out_of_memory_and_recovered_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run, failed = Executor.run, []

    def counted(self: Executor, *args: Any) -> Any:
        if not failed:
            failed.append(self)
            self.out_of_memory += 1
        return run(self, *args)

    monkeypatch.setattr(Executor, "run", counted)
    report = checked(steps=1)
    assert report.agrees and any("The device refused memory 1 times" in note for note in report.notes)


def test_a_plan_under_a_budget_says_what_it_is_a_share_of() -> None:
    report = checked(budget="90%", policy="auto", steps=1)
    assert report.agrees and report.budget_bytes is not None and report.budget_bytes >= report.checked.peak_bytes
    assert "of plain jit's peak" in report.budget_basis and report.checked.tries >= 1


def test_a_plan_that_runs_the_step_whole_says_so() -> None:
    report = checked(policy="auto", steps=1)
    assert report.agrees and report.whole and "as one executable, as plain jit does" in str(report)


def test_effects_are_announced() -> None:
    said: list[int] = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: said.append(1))
        return jnp.tanh(x)

    report = tensile.check(step, jnp.ones(4), steps=1, **SEGMENTS)
    jax.effects_barrier()
    assert len(said) > 2 and any("have happened in each of the runs" in note for note in report.notes)


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    checked(steps=2, progress=lambda *phase: told.append(phase))
    assert {("running the plan", 2, 2), ("running plain jit", 2, 2), ("timing", 1, 1)} <= set(told)
    assert any(what.startswith("running plain jit with excess precision off") for what, _, _ in told)


# -- refusals -----------------------------------------------------------------------------------------------------------------


def test_shapes_are_refused_by_their_names() -> None:
    shapes = {**state(), "w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(ValueError, match=r"Argument state\['w'\] is a shape, float32\[8, 8\], and check runs the step"):
        tensile.check(train_step, shapes, images(), **SEGMENTS)


def test_an_argument_that_was_donated_before_is_refused_by_its_name() -> None:
    given = state()
    given["mean"].delete()
    with pytest.raises(ValueError, match=r"Argument state\['mean'\] has been deleted"):
        tensile.check(train_step, given, images(), **SEGMENTS)


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_runs() -> None:
    ran: list[int] = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    x = jnp.ones((64, 64))
    with pytest.raises(tensile.BudgetTooSmall):
        tensile.check(step, x, budget="1KiB", donate_argnums=0, progress=False)
    jax.effects_barrier()
    assert (ran, x.is_deleted()) == ([], False)


@pytest.mark.parametrize("jit", [nnx.jit, tensile.nnx.jit, None])
def test_a_step_on_nnx_objects_trains_on_copies_of_them(jit: Any) -> None:
    seen: list[float] = []

    def loss_of(layer: nnx.Linear, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(layer(x))
        return jnp.mean(x**2)

    def nnx_step(layer: Any, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda bias: seen.append(float(bias)), layer.bias[0])
        loss, gradients = nnx.value_and_grad(loss_of)(layer, x)
        layer.kernel[...] -= 0.1 * gradients.kernel
        layer.bias[...] += 1.0
        return loss

    layer: Any = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    step = nnx_step if jit is None else jit(nnx_step)
    kernel = jnp.copy(layer.kernel[...])
    report = tensile.check(step, layer, jnp.ones((512, 32)), budget="80%", steps=3, timed_calls=1, progress=False)
    jax.effects_barrier()
    assert (report.verdict, report.whole, report.fed_back) == ("agrees", False, ("layer.bias", "layer.kernel"))
    assert {output.name for output in report.outputs} == {"layer.bias", "layer.kernel", "result"}
    assert seen[:3] == [0.0, 1.0, 2.0] and layer.bias[0] == 0.0 and jnp.array_equal(layer.kernel[...], kernel)


def test_a_step_of_nnx_jit_is_checked_with_the_options_that_it_was_made_with() -> None:
    @tensile.nnx.jit(budget="1GiB", donate_argnames="layer")
    def nnx_step(layer: Any, x: jax.Array) -> jax.Array:
        layer.bias[...] += 1.0
        return layer(x)

    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    report = tensile.check(nnx_step, layer, jnp.ones((4, 8)), steps=1, timed_calls=1, progress=False)
    assert (report.budget_bytes, report.copied_bytes) == (2**30, 4 * (8 + 64)) and not layer.kernel[...].is_deleted()


def test_arrays_of_nnx_objects_that_cannot_be_run_are_named() -> None:
    step = nnx.jit(lambda layer, x: layer(x))
    abstract = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"Argument layer.bias is a shape, float32\[8\]"):
        tensile.check(step, abstract, jnp.ones((4, 8)))


@pytest.mark.parametrize("option", ["nonsense", "renew_above", "keep_plans"])
@pytest.mark.parametrize("jit", [lambda step: step, jax.jit, tensile.jit])
def test_an_option_that_would_do_nothing_is_refused(jit: Any, option: str) -> None:
    given: dict[str, Any] = {option: 3}
    with pytest.raises(TypeError, match=rf"{option}.* this function"):
        tensile.check(jit(train_step), state(), images(), **given)


def test_an_option_of_a_jitted_step_is_refused_unless_the_plan_heeds_it() -> None:
    with pytest.raises(TypeError, match="donate_argnums=0 would change nothing"):
        tensile.check(jax.jit(train_step), state(), images(), donate_argnums=0)
    given: dict[str, Any] = {"budget": "99%", "steps": 1, "timed_calls": 1, "progress": False}
    own = {"xla_allow_excess_precision": False}
    assert tensile.check(jax.jit(train_step), state(), images(), compiler_options=own, **given).verdict == "agrees"
    assert tensile.check(tensile.jit(train_step), state(), images(), donate_argnums=0, **given).copied_bytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1: got 0"),
        ({"timed_calls": 1.5}, "timed_calls must be a whole number of at least 1: got 1.5"),
        ({"policy": "some"}, "some"),
        ({"budget": "60%", "max_slowdown": 1.1}, "ask for two things"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**options)


# -- where plain jit does not fit ---------------------------------------------------------------------------------------------


def wide_step(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


def wide() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(0), (32, 32)) / 6, jax.random.normal(jax.random.key(1), (512, 32))


def test_where_plain_jit_does_not_fit_another_plan_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = low_budget(wide_step, *wide(), part=0.3, donate_argnums=0)
    plain = jax.jit(wide_step, donate_argnums=0).lower(*wide()).compile()
    monkeypatch.setattr(reference, "memory_of", lambda device: 0.95 * peak_of(plain))
    report = tensile.check(wide_step, *wide(), budget=budget, donate_argnums=0, device_profile="cpu", timed_calls=1, steps=2)
    assert report.agrees and report.reference.name.startswith("a plan within ") and report.reference.launches > 1
    assert report.checked.peak_bytes < report.reference.peak_bytes
    assert report.notes[0].startswith("Plain jit does not fit on the device: it needs ")
    assert "which cuts the step in other places" in report.notes[0]


def test_where_nothing_else_fits_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "memory_of", lambda device: 1.0)
    with pytest.raises(tensile.OutOfMemory, match="so there is nothing to compare the plan with"):
        checked(steps=1)


def test_if_plain_jit_runs_out_of_memory_another_plan_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(leaves: Any) -> Any:
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(reference, "plain_run", lambda step, executable: no_room)
    budget = low_budget(wide_step, *wide(), part=0.3, donate_argnums=0)
    report = tensile.check(wide_step, *wide(), budget=budget, donate_argnums=0, device_profile="cpu", timed_calls=1, steps=1)
    assert report.agrees and report.notes[0].startswith("Plain jit ran out of memory on the device: RESOURCE_EXHAUSTED")


def test_an_error_of_plain_jit_that_is_no_lack_of_memory_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(leaves: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: a broken device")

    monkeypatch.setattr(reference, "plain_run", lambda step, executable: broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a broken device"):
        checked(steps=1)


def test_if_the_plan_runs_out_of_memory_the_copies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> Any:
        raise tensile.OutOfMemory("there is no room")

    monkeypatch.setattr("tensile_jax.exec.running.executor.Executor.run", no_room)
    with pytest.raises(tensile.OutOfMemory) as failed:
        checked(steps=1)
    assert any("copies of those that are donated" in note for note in failed.value.__notes__)


def test_the_allocators_peaks_are_those_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([(5_000, 9_000)] * 2 + [(5_000, 12_000), (5_000, 12_000), (5_000, 12_000)])

    def on(device: Any) -> Allocated:
        return Allocated(*next(counted))

    monkeypatch.setattr(ways.Allocated, "on", staticmethod(on))
    report = checked(steps=1)
    uncopied = 4 * 64 * 8
    # asked before plain jit is judged, before and after the plan's steps, before and after plain jit's
    assert (report.checked.allocator_peak_bytes, report.checked.allocator_is_limit) == (12_000 - 5_000 + uncopied, False)
    assert (report.reference.allocator_peak_bytes, report.reference.allocator_is_limit) == (12_000 - 5_000 + uncopied, True)
    assert "at most" in str(report)
