"""What a caller may get wrong: each mistake is refused by name, and none costs the caller's state."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import tensile_jax as tensile
import tensile_jax.device_profiles as profiles
from tensile_jax.cli.main import main
from tensile_jax.errors import OutOfMemory, TraceError
from tensile_jax.plan import POLICIES
from tensile_jax.units import format_bytes
from tests.builders import (
    batch,
    dense_loss,
    fresh,
    low_budget,
    numbers,
    optimizer_state,
    optimizer_step,
    planned,
    sgd_step,
    something_happened,
    weights,
)

# -- budgets, policies, profiles --------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("budget", [0, -1, 0.0, float("nan"), float("-inf"), "0", "0%", "0.0 GiB", "0.1 B"])
def test_a_budget_must_be_above_zero(budget: Any) -> None:
    with pytest.raises(tensile.BudgetError, match=f"budget must be above zero, got {re.escape(repr(budget))}.*1.2GiB"):
        tensile.jit(sgd_step, budget=budget)


def test_a_share_as_a_fraction_is_told_how_shares_are_written() -> None:
    with pytest.raises(
        tensile.BudgetError, match='budget is a number of bytes, and 0.5 is less than one.*share of plain jit.*"60%"'
    ):
        tensile.jit(sgd_step, budget=0.5)


@pytest.mark.parametrize("budget", [float("inf"), 10**30, f"{10**30} B"])
def test_a_budget_beyond_any_device_is_told_how_no_limit_is_written(budget: Any) -> None:
    with pytest.raises(tensile.BudgetError, match="is more than any device has. Leave the budget out if there is no limit"):
        tensile.jit(sgd_step, budget=budget)


@pytest.mark.parametrize("budget", ["", "lots", "12 parsecs", "-5MB", "1e9", "60 percent", "1.2.3GiB", "GiB", "nan", "%", "5%%"])
def test_a_budget_that_cannot_be_read_is_refused_with_examples(budget: str) -> None:
    with pytest.raises(tensile.BudgetError, match=f"budget {re.escape(repr(budget))} cannot be read.*1.2GiB.*60%"):
        tensile.jit(sgd_step, budget=budget)


@pytest.mark.parametrize("budget", [True, False, [1], b"1GiB", 1j, np.zeros(2)])
def test_a_budget_is_a_number_or_a_string(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget must be a number of bytes or a string"):
        tensile.jit(sgd_step, budget=budget)


@pytest.mark.parametrize("donate", [(0,), ()])
def test_a_budget_below_the_floor_is_refused_with_the_floor_and_what_holds_it(donate: tuple[int, ...]) -> None:
    args = weights(), batch()
    floor = tensile.jit(sgd_step, budget=2**40, donate_argnums=donate).plan(*args).floor_bytes
    function = tensile.jit(sgd_step, budget=floor - 1, donate_argnums=donate)
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        function.plan(*args)
    message = str(caught.value)
    assert caught.value.budget_bytes == floor - 1
    assert caught.value.floor_bytes == floor
    assert f"{floor} bytes" in message and f"{floor - 1} bytes" in message
    assert "'sgd_step'" in message and "batch (64 KiB)" in message
    assert 'state_memory="any"' in message
    assert ("donate_argnums=0" in message) == (donate == ())
    assert isinstance(caught.value, ValueError)


def test_the_error_about_the_floor_says_which_segment_needs_it_and_names_only_remedies_that_could_help() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=10, donate_argnums=0).plan(weights(), batch())
    least = tensile.jit(sgd_step, budget=caught.value.floor_bytes, donate_argnums=0).plan(weights(), batch())
    peak = least.segments[least.peak_segment]
    needs = f"The segment {peak.name!r} has {format_bytes(peak.resident_bytes)} of tensors, the largest being "
    assert needs in str(caught.value)
    assert f"and {format_bytes(peak.workspace_bytes)} of XLA's working memory" in str(caught.value)

    def large_activations(weight: jax.Array, x: jax.Array) -> jax.Array:
        return weight + jnp.sort(x.reshape(-1))[:4]

    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(large_activations, budget="600KiB")(jnp.ones(4), jnp.ones((512, 256)))
    assert "donate" not in str(caught.value) and "state_memory" not in str(caught.value)


def test_the_error_about_the_floor_names_no_state_memory_that_is_in_use_already() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        tensile.jit(sgd_step, budget=10, donate_argnums=0, state_memory="any").plan(weights(), batch())
    assert "state_memory" not in str(caught.value)


def test_a_budget_that_is_too_small_leaves_donated_arguments_alone() -> None:
    state = weights()
    with pytest.raises(tensile.BudgetTooSmall):
        tensile.jit(sgd_step, budget=10_000, donate_argnums=0)(state, batch())
    assert not any(w.is_deleted() for w in state)


@pytest.mark.parametrize("wrong", [0.9, 0, -1, float("nan"), float("inf"), True, "1.1"])
def test_a_max_slowdown_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"max_slowdown must be a number of at least 1, times plain jit's step: got .*Pass 1\.1"):
        tensile.jit(sgd_step, max_slowdown=wrong)


def test_a_budget_and_a_max_slowdown_ask_for_two_things() -> None:
    with pytest.raises(ValueError, match="budget='1GiB' and max_slowdown=1.1 ask for two things.*Pass one of them"):
        tensile.jit(sgd_step, budget="1GiB", max_slowdown=1.1)


def test_unknown_choices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="policy='fast' is not known. Known: auto, capuchin, checkpoint, none, tensile, vdnn"):
        tensile.jit(sgd_step, policy="fast")  # pyright: ignore[reportCallIssue, reportArgumentType]  (the mistake under test)
    with pytest.raises(
        ValueError, match="device_profile 'tpu' is not known. Known: a100, b200, cpu, h100, h200, l4, rtx4090; or give the path"
    ):
        tensile.jit(sgd_step, device_profile="tpu")
    with pytest.raises(ValueError, match="device_profile 'nowhere.toml': there is no such file"):
        tensile.jit(sgd_step, device_profile="nowhere.toml")
    with pytest.raises(ValueError, match='state_memory must be "device" or "any", got \'host\''):
        tensile.jit(sgd_step, state_memory="host")  # pyright: ignore[reportCallIssue, reportArgumentType]  (the mistake under test)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("flops_per_us = -1.0", "flops_per_us must be a number above zero, got -1.0"),
        ("flops_per_us = nan", "flops_per_us must be a number above zero, got nan"),
        ("flops_per_us = inf", "flops_per_us must be a number above zero, got inf"),
        ('flops_per_us = "fast"', "flops_per_us must be a number above zero, got 'fast'"),
        ("flops_per_us = true", "flops_per_us must be a number above zero, got True"),
    ],
)
def test_a_rate_that_is_none_is_refused(line: str, complaint: str, tmp_path: Path) -> None:
    lines = (Path(profiles.__file__).parent / "cpu.toml").read_text().splitlines()
    file = tmp_path / "wrong.toml"
    file.write_text("\n".join(line if kept.startswith("flops_per_us") else kept for kept in lines))
    with pytest.raises(ValueError, match=complaint):
        tensile.jit(sgd_step, device_profile=str(file))


def test_a_flag_that_is_a_number_is_refused(tmp_path: Path) -> None:
    text = (Path(profiles.__file__).parent / "cpu.toml").read_text()
    file = tmp_path / "wrong.toml"
    file.write_text(text.replace("canonical_layouts = true", "canonical_layouts = 1"))
    with pytest.raises(ValueError, match="canonical_layouts must be true or false, got 1"):
        tensile.jit(sgd_step, device_profile=str(file))


def test_a_tensor_that_is_larger_than_the_budget_is_named() -> None:
    def step(x: Any) -> Any:
        return jnp.outer(x, x) @ x

    with pytest.raises(tensile.BudgetTooSmall, match=r"One tensor alone is larger than the budget: mul \(976.6 KiB\)"):
        tensile.jit(step, budget="500KiB")(jnp.ones(500))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_step_with_one_operator_or_none_or_no_tensors_runs_under_every_policy(policy: Any) -> None:
    assert float(tensile.jit(lambda x: x @ x, policy=policy, budget="1MiB")(jnp.ones((4, 4))).sum()) == 64.0
    assert tensile.jit(lambda x: x, policy=policy, budget="1MiB")(jnp.ones((0, 4))).shape == (0, 4)
    assert tensile.jit(lambda: None, policy=policy, budget="1MiB")() is None
    assert float(tensile.jit(lambda x: x @ x, policy=policy, max_slowdown=1.5)(jnp.ones((4, 4))).sum()) == 64.0
    assert tensile.jit(lambda: None, policy=policy, max_slowdown=1.5)() is None


@pytest.mark.parametrize("step", [lambda: None, lambda: 3.0, lambda: jnp.zeros(3)])
def test_policies_are_compared_on_steps_with_nothing_in_them(step: Any) -> None:
    made = tensile.jit(step).compare()
    assert made.vanilla.eor == 1.0 and made.vanilla.msr == 0.0


def test_a_device_profile_of_ones_own_must_be_complete_and_sensible(tmp_path: Path) -> None:
    text = (Path(profiles.__file__).parent / "cpu.toml").read_text()
    good, lacking, extra, zero = (tmp_path / f"{name}.toml" for name in ("good", "lacking", "extra", "zero"))
    good.write_text(text)
    lacking.write_text(re.sub(r"(?m)^launch_us.*$", "", text))
    extra.write_text(text + "\nspeed = 3\n")
    zero.write_text(re.sub(r"(?m)^launch_us.*$", "launch_us = 0", text))
    assert tensile.jit(sgd_step, device_profile=str(good)).plan(weights(), batch()).device_profile == "cpu"
    with pytest.raises(ValueError, match="missing .'launch_us'."):
        tensile.jit(sgd_step, device_profile=str(lacking))
    with pytest.raises(ValueError, match="unknown .'speed'."):
        tensile.jit(sgd_step, device_profile=str(extra))
    with pytest.raises(ValueError, match="launch_us must be a number above zero, got 0"):
        tensile.jit(sgd_step, device_profile=str(zero))


# -- steps ------------------------------------------------------------------------------------------------------------------


def test_a_pure_callback_has_no_effect_and_runs() -> None:
    def step(params: Any, x: Any) -> Any:
        params, loss = sgd_step(params, x)
        shape = jax.ShapeDtypeStruct(loss.shape, loss.dtype)
        return params, jax.pure_callback(lambda v: np.asarray(v) * 2, shape, loss)

    function = planned(step, (weights(), batch()), donate_argnums=0)
    assert something_happened(function.plan(weights(), batch()))
    _, doubled = function(fresh(weights()), batch())
    np.testing.assert_allclose(doubled, 2 * dense_loss(weights(), batch()), rtol=1e-5)


@pytest.mark.parametrize("thing", [3, None, "step", [sgd_step]])
def test_what_is_not_a_function_is_refused(thing: Any) -> None:
    for wrap in (tensile.jit, tensile.jit(budget="1MiB")):
        with pytest.raises(TypeError, match=re.escape(f"Expected a callable value, got {thing}")):
            wrap(thing)  # pyright: ignore[reportArgumentType]  (the mistake under test)


def test_a_step_that_cannot_be_traced_fails_as_it_does_in_jit() -> None:
    def step(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as plain:
        jax.jit(step)(jnp.ones(4))
    with pytest.raises(jax.errors.TracerBoolConversionError) as ours:
        tensile.jit(step, budget="1MiB")(jnp.ones(4))
    assert str(ours.value).partition("\n")[0] == str(plain.value).partition("\n")[0]


def test_an_exception_in_the_users_step_reaches_the_user() -> None:
    def step(x: Any) -> Any:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        tensile.jit(step, budget="1MiB")(jnp.ones(4))


@pytest.mark.parametrize("argument", ["a string", object(), {1, 2}, np.array(["a"])])
def test_an_argument_that_is_not_an_array_is_a_type_error_as_in_jit(argument: Any) -> None:
    with pytest.raises(TypeError, match="Error interpreting argument"):
        jax.jit(lambda x: x)(argument)
    with pytest.raises(TypeError, match="Error interpreting argument"):
        tensile.jit(lambda x: x, budget="1MiB")(argument)


def test_a_static_argument_without_a_hash_is_refused_as_in_jit() -> None:
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jax.jit(lambda x, n: x, static_argnums=1)(1.0, [2])
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        tensile.jit(lambda x, n: x, static_argnums=1)(1.0, [2])


def test_a_missing_argument_is_a_type_error_as_in_jit() -> None:
    function = planned(sgd_step, (weights(), batch()), donate_argnums=0)
    with pytest.raises(TypeError, match="missing"):
        function(weights())


def test_a_batch_with_not_a_number_passes_through_as_in_jit() -> None:
    function = planned(sgd_step, (weights(), batch()), donate_argnums=0)
    assert something_happened(function.plan(weights(), batch()))
    poisoned = batch().at[3, 4].set(jnp.nan)
    got, expected = function(fresh(weights()), poisoned), jax.jit(sgd_step)(weights(), poisoned)
    assert np.isnan(got[1])
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    clean = function(fresh(weights()), batch())
    np.testing.assert_allclose(clean[1], dense_loss(weights(), batch()), rtol=1e-5)


def test_rectifiers_pass_not_a_number_on_as_in_jit() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            y = x
            for w in params:
                y = jax.nn.relu(y @ w)
            return jnp.sum(y)

        return jax.grad(loss_of)(params)

    x = batch().at[0, 0].set(jnp.nan).at[5, 5].set(-0.0)
    got, expected = planned(step, (weights(), x))(weights(), x), jax.jit(step)(weights(), x)
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


# -- donation -----------------------------------------------------------------------------------------------------------------


def test_donated_arrays_used_again_give_the_error_of_jit() -> None:
    function = planned(sgd_step, (weights(), batch()), part=0.5, donate_argnums=0)
    state = fresh(weights())
    function(state, batch())
    assert all(w.is_deleted() for w in state)
    with pytest.raises(RuntimeError) as ours:
        function(state, batch())
    with pytest.raises(RuntimeError) as plain:
        jax.jit(lambda x: x + 1)(state[0])
    assert str(plain.value).strip() == "Array has been deleted with shape=float32[32,32]."
    assert str(ours.value).strip() == str(plain.value).strip()


def test_donated_arrays_used_again_in_a_step_that_runs_whole_give_the_error_of_jit() -> None:
    errors: list[Exception] = []
    for function in (tensile.jit(sgd_step, donate_argnums=0), jax.jit(sgd_step, donate_argnums=0)):
        state = fresh(weights())
        function(state, batch())
        with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
            function(state, batch())
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


def test_an_array_donated_twice_is_refused_by_name_and_kept() -> None:
    function = planned(sgd_step, (weights(), batch()), donate_argnums=0)
    w = weights()[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"donate the same buffer twice.*state\[1\]\).*Copy one"):
        function([w] * 5, batch())
    assert not w.is_deleted()


def test_an_array_that_is_donated_and_passed_is_refused_by_name_and_kept() -> None:
    def step(params: Any, x: Any, first: Any) -> Any:
        params, loss = sgd_step(params, x)
        return params, loss + first.sum()

    function = planned(step, (weights(), batch(), weights()[0]), donate_argnums=0)
    params = fresh(weights())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"previously donated in the same call.*first\).*Copy one"):
        function(params, batch(), params[0])
    assert not any(w.is_deleted() for w in params)


# -- saved plans --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    budget = low_budget(sgd_step, weights(), batch(), part=0.5, donate_argnums=0)
    tensile.jit(sgd_step, budget=budget, donate_argnums=0).plan(weights(), batch()).save(path)
    return path


def test_a_truncated_plan_is_refused_wherever_it_was_cut(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 3):
        (tmp_path / "cut.json").write_bytes(whole[:length])
        with pytest.raises(tensile.PlanFileError, match="cut.json is not JSON, or was cut short"):
            tensile.Plan.load(tmp_path / "cut.json")


def test_a_plan_of_another_version_is_refused_with_both_versions(saved: Path, tmp_path: Path) -> None:
    raw = json.loads(saved.read_text())
    (tmp_path / "new.json").write_text(json.dumps({**raw, "schema_version": 99}))
    with pytest.raises(tensile.PlanFileError, match="schema_version 99; this version of tensile_jax reads 1"):
        tensile.Plan.load(tmp_path / "new.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '"plan"'])
def test_json_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(tensile.PlanFileError, match="schema_version None"):
        tensile.Plan.load(tmp_path / "other.json")


def test_a_plan_that_lacks_something_is_refused_by_its_name(saved: Path, tmp_path: Path) -> None:
    raw = json.loads(saved.read_text())
    del raw["segments"]
    (tmp_path / "lacking.json").write_text(json.dumps(raw))
    with pytest.raises(tensile.PlanFileError, match="segments"):
        tensile.Plan.load(tmp_path / "lacking.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.json").write_bytes(b"\x00\xff\xfe{")
    with pytest.raises(tensile.PlanFileError, match="not JSON"):
        tensile.Plan.load(tmp_path / "noise.json")


def test_a_plan_for_another_program_is_refused(saved: Path) -> None:
    plan = tensile.Plan.load(saved)
    other_shapes = tensile.jit(sgd_step, plan=plan, donate_argnums=0)
    other_donation = tensile.jit(sgd_step, plan=plan)
    other_step = tensile.jit(lambda params, x: (params, dense_loss(params, x)), plan=plan, donate_argnums=0)
    state = fresh(weights())
    with pytest.raises(tensile.PlanFileError, match="made for another program: it is of 'sgd_step'"):
        other_shapes(state, batch(rows=100))
    for function in (other_donation, other_step):
        with pytest.raises(tensile.PlanFileError, match="made for another program"):
            function(state, batch())
    assert not any(w.is_deleted() for w in state)


def test_the_same_step_with_another_optimizer_is_another_program() -> None:
    plans = [
        tensile.jit(optimizer_step(o), donate_argnums=0).plan(optimizer_state(o), batch()).fingerprint
        for o in (optax.sgd(0.1, momentum=0.9), optax.sgd(0.2, momentum=0.9), optax.adam(1e-3))
    ]
    assert len(set(plans)) == 3


def test_errors_name_the_command_that_explains_them() -> None:
    for error in (
        tensile.BudgetTooSmall("too small", budget_bytes=1, floor_bytes=2), TraceError("no graph"), OutOfMemory("full"),
    ):  # fmt: skip
        told, command = str(error).split("\nHow to read this, and what helps: tensile ")
        explained = CliRunner().invoke(main, command.split())
        assert told == error.message and type(error).__name__ in explained.stdout and explained.exit_code == 0
