"""The memory layouts of state, as XLA chooses them for one program: same results, nothing copied later, arrays for any use."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout

import tensile_jax as tensile
from tensile_jax.errors import PlanFileError
from tensile_jax.exec.compiling import compiler
from tensile_jax.exec.compiling.program_code import bytes_laid_out
from tensile_jax.exec.compiling.segment_code import LaidOut
from tensile_jax.exec.fitting.find_plan import begin
from tensile_jax.exec.fitting.programs import likely_spared
from tensile_jax.exec.transfer import Transfer, on_host, places_on_host
from tensile_jax.plan_format import StateLayout
from tests.builders import batch, fresh, low_budget, numbers, running, sgd_step, weights

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse,cse_barrier_expander"}  # which XLA for CPUs would drop
REVERSED = (3, 2, 1, 0)
OPTIMIZER = optax.adam(1e-2)


def kernels(layers: int = 5, channels: int = 8) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(3, 3, channels, channels)) / 8, jnp.float32) for _ in range(layers)]


def images(seed: int = 0, channels: int = 8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(8, 16, 16, channels)), jnp.float32)


def loss_of(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in parameters:
        x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return (x**2).mean()


def train(state: Any, x: jax.Array) -> Any:
    """A step of Adam on a stack of convolutions."""
    parameters, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(parameters, updates), moments), loss


def fresh_state() -> Any:
    parameters = kernels()
    return parameters, OPTIMIZER.init(parameters)


def planned(step: Any = train, budget: Any = "80%", **options: Any) -> Any:
    options = {"launch": "one_program", "state_layout": "auto", "donate_argnums": 0, **options}
    return tensile.jit(step, budget=budget, compiler_options=KEEP_BARRIERS, **options)


def plain(step: Any = train) -> Any:
    return jax.jit(step, donate_argnums=0, compiler_options=KEEP_BARRIERS)


def orders(tree: Any) -> list[tuple[int, ...]]:
    """The layouts of the arrays of four dimensions."""
    return [leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(tree) if leaf.ndim == 4]


def program_of(function: Any) -> Any:
    """The only executable of the plan in use."""
    executables = running(function).compiled.executables
    assert executables is not None and len(executables) == 1
    return executables[0].call


@pytest.fixture
def xla_reverses(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA for CPUs leaves kernels row-major; where it is to choose, it gets the reversed layout."""
    monkeypatch.setattr(compiler, "layout_of", lambda one: Layout(one.major_to_minor or REVERSED))


@pytest.fixture
def relaid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays that are copied into another layout."""
    seen: list[int] = []
    laid_out = Transfer.laid_out

    def counted(self: Transfer, array: Any, layout: Any) -> Any:
        copy = laid_out(self, array, layout)
        if copy is not array:
            seen.append(array.nbytes)
        return copy

    monkeypatch.setattr(Transfer, "laid_out", counted)
    return seen


def check_training(function: Any, state: Any, steps: int = 4) -> Any:
    """Train as plain jit does; the state at the end."""
    mine, theirs, reference = state, fresh(state), plain()
    for seed in range(steps):
        given = mine
        mine, loss = function(mine, images(seed))
        theirs, expected = reference(theirs, images(seed))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    for a, b in zip(numbers(mine), numbers(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    return mine


@pytest.mark.usefixtures("xla_reverses")
def test_a_program_may_be_expected_to_exceed_its_limit_by_no_more_than_the_state_that_xla_lays_out() -> None:
    state = fresh_state()
    function = planned(launch="program", state_memory="device")
    plan = function.plan(state, images())
    step = function._calls.step((state, images()), {})
    nbytes = bytes_laid_out(plan, step.graph, step.planner.model.profile)
    assert nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim == 4)
    fitting = begin(step, None)
    most = likely_spared(fitting, plan, 100 * nbytes), likely_spared(fitting, plan, 2 * nbytes)
    assert most == pytest.approx((0.02 * 100 * nbytes + nbytes, 0.12 * 2 * nbytes))


@pytest.mark.usefixtures("xla_reverses")
def test_results_come_back_in_the_chosen_layouts_and_later_calls_copy_nothing(relaid: list[int]) -> None:
    function, state = planned(), fresh_state()
    count = len(orders(state))
    state = check_training(function, state, 1)
    assert len(relaid) == count == 15
    state = check_training(function, state)
    assert len(relaid) == count
    assert orders(state) == [REVERSED] * count
    plan, report = running(function).plan, function.report()
    assert (plan.state_layout, plan.launches, len(plan.layouts or ())) == ("auto", 1, count)
    assert "15 tensors of the state" in str(plan) and "are not row-major, as XLA has chosen" in str(plan)
    assert report.passive_swap_ins == 0 and report.peak_bytes == plan.peak_bytes
    memory = program_of(function).memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim == 4)


def test_the_layouts_of_the_state_are_those_that_xla_says_it_has_chosen() -> None:
    """XLA for CPUs chooses the row-major one for all."""
    function = planned()
    state = check_training(function, fresh_state())
    (given, _), made = program_of(function).input_formats, program_of(function).output_formats
    chosen = {place.layout.major_to_minor for place in (*given, *made) if len(place.layout.major_to_minor) == 4}
    assert set(orders(state)) == chosen == {(0, 1, 2, 3)}
    assert running(function).plan.layouts == ()


@pytest.mark.usefixtures("xla_reverses")
def test_where_xla_chooses_other_layouts_for_results_the_program_is_compiled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    read_layouts, compiled = compiler._read_layouts, []

    def read(executable: Any, laid_out: Sequence[LaidOut]) -> Any:
        found = list(read_layouts(executable, laid_out))
        if not laid_out:
            return found
        compiled.append([one.major_to_minor for one in laid_out])
        return [(given, (0, 1, 2, 3)) for given, _ in found] if laid_out[0].major_to_minor is None else found

    monkeypatch.setattr(compiler, "_read_layouts", read)
    function = planned()
    state = check_training(function, fresh_state())
    assert compiled and compiled == [[None] * 15, [REVERSED] * 15] * (len(compiled) // 2)
    assert orders(state) == [REVERSED] * 15


@pytest.mark.usefixtures("xla_reverses")
def test_arrays_in_the_chosen_layouts_can_be_evaluated_saved_and_donated_elsewhere(relaid: list[int], tmp_path: Path) -> None:
    function = planned()
    state = check_training(function, fresh_state(), 2)
    before, layouts = numbers(state), orders(state)
    expected = loss_of([jnp.asarray(np.asarray(kernel)) for kernel in state[0]], images())
    np.testing.assert_allclose(jax.jit(loss_of)(state[0], images()), expected, rtol=1e-5)
    np.testing.assert_allclose(loss_of(state[0], images()), expected, rtol=1e-5)  # not jitted
    for a, b in zip(jax.device_get(jax.tree.leaves(state)), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    for a, b in zip(numbers(restored), before, strict=True):
        np.testing.assert_array_equal(a, b)
    copied = len(relaid)
    resumed, loss = function(restored, images(7))
    state, same = function(state, images(7))
    assert len(relaid) - copied in (0, 15)  # what orbax restores may be row-major
    np.testing.assert_array_equal(loss, same)
    for a, b in zip(numbers(resumed), numbers(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert orders(resumed) == orders(state) == layouts
    theirs = plain()(state, images())[0]  # donated to another function
    segments = tensile.jit(train, budget="80%", donate_argnums=0, compiler_options=KEEP_BARRIERS)
    ours = segments(resumed, images())[0]
    for a, b in zip(numbers(theirs), numbers(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, resumed)))


@pytest.mark.usefixtures("xla_reverses")
def test_a_runtime_takes_state_in_the_chosen_layouts() -> None:
    state = check_training(planned(), fresh_state(), 2)
    reference = fresh(state)
    for seed in range(3):
        reference = plain()(reference, images(seed))[0]
    budget = int(0.9 * tensile.memory(train, state, images(), donate_argnums=0).peak_bytes)
    with tensile.Runtime(budget=budget) as runtime:
        result = runtime.submit(train, state, (images(seed) for seed in range(3)), steps=3).result()
    for a, b in zip(numbers(result), numbers(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.usefixtures("xla_reverses")
@pytest.mark.parametrize("passed_on", [True, False])
def test_state_in_the_chosen_layouts_that_another_step_returns_unchanged_keeps_its_numbers(passed_on: bool) -> None:
    state = check_training(planned(), fresh_state(), 1)
    before = numbers(state[0])

    def only_moments(state: Any, x: jax.Array) -> Any:
        parameters, moments = state
        _, moments = OPTIMIZER.update(jax.grad(loss_of)(parameters, x), moments)
        return (parameters if passed_on else [1.0 * kernel for kernel in parameters], moments), loss_of(parameters, x)

    function = tensile.jit(only_moments, budget="80%", donate_argnums=0, compiler_options=KEEP_BARRIERS)
    for _ in range(2):
        state, _ = function(state, images())
    for a, b in zip(numbers(state[0]), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("xla_reverses")
def test_arguments_of_any_layout_and_kind_are_taken(relaid: list[int]) -> None:
    function = planned()
    expected = numbers(function(fresh_state(), images()))
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    mixed = Format(Layout((1, 0, 3, 2)), sharding)
    for given in (
        jax.tree.map(np.asarray, fresh_state()),
        jax.device_put(fresh_state(), device),
        jax.tree.map(lambda leaf: jax.device_put(leaf, mixed) if leaf.ndim == 4 else leaf, fresh_state()),
        jax.device_put(fresh_state(), sharding.with_memory_kind("pinned_host")),
    ):
        for a, b in zip(numbers(function(given, images())), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        leaves = [leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array)]
        assert all(leaf.is_deleted() for leaf in leaves if not on_host(leaf))


@pytest.mark.usefixtures("xla_reverses")
def test_state_in_host_memory_stays_there_row_major(fast_link: str) -> None:
    options: dict[str, Any] = {"device_profile": fast_link, "state_memory": "any", "policy": "tensile"}
    state = kernels(6, 64), OPTIMIZER.init(kernels(6, 64))
    inputs = images(channels=64)
    budget = low_budget(train, state, inputs, part=0.2, donate_argnums=0, **options)
    plan = planned(train, budget, **options).plan(state, inputs)
    assert (plan.barriers, plan.launches, plan.state_layout) == ("chain", 1, "auto")
    saved = dataclasses.replace(plan, budget_bytes=None)  # XLA for CPUs counts the copies as memory of the device
    function = tensile.jit(train, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    reference, mine, theirs = plain(), fresh(state), fresh(state)
    for seed in range(4):
        inputs = images(seed, 64)
        mine, loss = function(mine, inputs)
        theirs, expected = reference(theirs, inputs)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    there = places_on_host(mine)
    leaves = jax.tree.leaves(mine)
    layouts = [leaf.format.layout.major_to_minor for leaf in leaves]
    assert there and {layouts[place] for place in there} == {(0, 1, 2, 3)}
    assert {layouts[i] for i, leaf in enumerate(leaves) if leaf.ndim == 4 and i not in there} == {REVERSED}
    assert function.report().passive_swap_ins == 0


@pytest.mark.usefixtures("xla_reverses")
def test_a_saved_plan_keeps_its_layouts_and_chooses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = planned()
    expected = numbers(function(fresh_state(), images()))
    plan = running(function).plan
    plan.save(tmp_path / "plan.json")
    assert tensile.Plan.load(tmp_path / "plan.json") == plan
    asked: list[Any] = []
    layout_of = compiler.layout_of
    monkeypatch.setattr(compiler, "layout_of", lambda one: asked.append(one.major_to_minor) or layout_of(one))
    again = tensile.jit(
        train, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0, compiler_options=KEEP_BARRIERS
    )  # fmt: skip
    for a, b in zip(numbers(again(fresh_state(), images())), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert running(again).plan == plan and asked == [REVERSED] * 15


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"state_layout": "row_major"}, "it has layouts of its state"),
        ({"layouts": (StateLayout(0, (0, 1, 2, 2)),)}, "the layout (0, 1, 2, 2) is none of tensor 0"),  # type: ignore[arg-type]
        ({"launch": "segments", "launches": None, "barriers": None}, "XLA is to choose the layouts of its state"),
    ],
)
def test_a_plan_that_contradicts_itself_about_layouts_is_refused(change: dict[str, Any], story: str) -> None:
    plan = planned().plan(fresh_state(), images())
    plan = dataclasses.replace(dataclasses.replace(plan, layouts=()), **change)
    with pytest.raises(PlanFileError) as caught:
        tensile.jit(train, plan=plan, donate_argnums=0)
    assert story in str(caught.value)


def test_a_predicted_plan_says_that_xla_will_choose() -> None:
    plan = planned().plan(fresh_state(), images())
    assert (plan.state_layout, plan.layouts) == ("auto", None)
    assert "XLA chooses those of state of four and more dimensions" in str(plan)


def test_where_segments_run_a_note_says_that_state_is_row_major() -> None:
    function = tensile.jit(sgd_step, budget="60%", launch="one_program", state_layout="auto", donate_argnums=0)
    function(fresh(weights()), batch())
    plan = running(function).plan
    assert (plan.launch, plan.state_layout, plan.layouts) == ("segments", "row_major", None)
    assert any("All state is row-major" in note for note in plan.notes)


@pytest.mark.parametrize("wrong", ["column_major", True, None, (0, 1)])
def test_state_layout_must_be_known(wrong: Any) -> None:
    with pytest.raises(ValueError, match='state_layout must be "row_major" or "auto", got'):
        tensile.jit(sgd_step, launch="one_program", state_layout=wrong)


@pytest.mark.parametrize("launch", ["auto", "segments"])
def test_xla_chooses_layouts_only_if_one_program_was_asked_for(launch: Any) -> None:
    with pytest.raises(ValueError, match='Pass launch="one_program"'):
        tensile.jit(sgd_step, launch=launch, state_layout="auto")


@pytest.mark.usefixtures("xla_reverses")
@pytest.mark.parametrize("names", ["in_shardings", "out_shardings"])
def test_with_stated_shardings_results_come_back_in_the_chosen_layouts(names: str, relaid: list[int]) -> None:
    function = planned(**{names: jax.sharding.SingleDeviceSharding(jax.devices()[0])})
    state = check_training(function, fresh_state())
    assert orders(state) == [REVERSED] * 15 and len(relaid) == 15


def test_a_stated_layout_and_the_choice_of_xla_exclude_each_other() -> None:
    place = Format(Layout((0, 1)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    function = tensile.jit(sgd_step, launch="one_program", state_layout="auto", in_shardings=place, donate_argnums=0)
    with pytest.raises(ValueError, match="Leave one out"):
        function(fresh(weights()), batch())
