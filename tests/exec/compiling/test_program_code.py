"""All segments of a plan as one executable: the same results, within the budget, with one launch."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn

import tensile_jax as tensile
from tensile_jax.errors import PlanFileError
from tensile_jax.exec.compiling import seen_on_gpus
from tensile_jax.exec.compiling import step as exec_step
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting import find_plan, programs
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.next_program import Try
from tensile_jax.exec.transfer import places_on_host
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import Choice, Goal
from tensile_jax.plan_format import Barriers, Plan
from tests.builders import WIDTH, batch, fresh, low_budget, numbers, running, sgd_step, weights, within_budget, wrap_launches

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse,cse_barrier_expander"}  # which XLA for CPUs would drop
FORMS: tuple[Barriers, ...] = get_args(Barriers)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."

Step = Callable[..., Any]


def planned(step: Step, budget: Any = "80%", **options: Any) -> Any:
    options = {"launch": "program", "donate_argnums": 0, "compiler_options": KEEP_BARRIERS, **options}
    return tensile.jit(step, budget=budget, **options)


def plain(step: Step) -> Any:
    return jax.jit(step, donate_argnums=0, compiler_options=KEEP_BARRIERS)


def adam_step(width: int = WIDTH) -> tuple[Step, Any]:
    """A step of Adam on dense layers with dropout and a batch norm, and its state."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, x: jax.Array, key: jax.Array) -> Any:
        parameters, moments, mean = state

        def loss(parameters: Sequence[jax.Array]) -> Any:
            hidden, seen = x, jnp.zeros_like(mean)
            for place, w in enumerate(parameters):
                hidden = jnp.tanh(hidden @ w)
                seen = seen + hidden.mean(0)
                hidden = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, place), 0.9, hidden.shape), hidden, 0.0)
            return (hidden**2).mean(), seen

        (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(parameters, updates), moments, 0.9 * mean + 0.1 * seen), value

    parameters = weights(6, width)
    return step, (parameters, optimizer.init(parameters), jnp.zeros(parameters[0].shape[1]))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_as_plain_jit_does_in_one_launch(form: Barriers) -> None:
    step, state = adam_step()
    predicted = planned(step).plan(state, batch(), jax.random.key(0))
    saved = dataclasses.replace(predicted, barriers=form, budget_bytes=None)  # whatever this form needs
    function = tensile.jit(step, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    reference = plain(step)
    mine, theirs = fresh(state), fresh(state)
    for number in range(6):
        inputs = batch(), jax.random.key(number)
        mine, loss = function(mine, *inputs)
        theirs, expected = reference(theirs, *inputs)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
        assert a.dtype == b.dtype and a.weak_type == b.weak_type
    plan, report = running(function).plan, function.report()
    assert (plan.launch, plan.barriers, report.launches) == ("program", form, 1)
    assert len(plan.segments) > 1
    assert report.peak_bytes == plan.peak_bytes


def pooling_step(kernels: Any, images: jax.Array) -> Any:
    """Rectified and pooled convolutions, whose gradients are written into zeros, as the mask of a rectifier reads them."""

    def loss(kernels: Any) -> jax.Array:
        x = images
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = nn.max_pool(nn.relu(x), (2, 2), (1, 1), "SAME")
        return (x**2).mean()

    value, gradients = jax.value_and_grad(loss)(kernels)
    return [k - 0.1 * g for k, g in zip(kernels, gradients, strict=True)], value


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_pooling_are_those_of_plain_jit_in_every_form(form: Barriers) -> None:
    kernels = [0.3 * jax.random.normal(key, (3, 3, 4, 4)) for key in jax.random.split(jax.random.key(1), 6)]
    images = jax.random.normal(jax.random.key(2), (32, 16, 16, 4))
    predicted = planned(pooling_step, "40%", launch="segments").plan(kernels, images)
    assert len(predicted.segments) > 1
    saved = dataclasses.replace(predicted, launch="program", launches=1, barriers=form, budget_bytes=None)
    function = tensile.jit(pooling_step, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    mine, theirs, reference = fresh(kernels), fresh(kernels), plain(pooling_step)
    for _ in range(4):
        mine, loss = function(mine, images)
        theirs, expected = reference(theirs, images)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert running(function).plan.barriers == form
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_program_that_keeps_the_budget_runs() -> None:
    step, state = adam_step()
    function = planned(step)
    function(fresh(state), batch(), jax.random.key(0))
    plan = running(function).plan
    assert plan.launch == "program" and within_budget(plan)


def let_peaks_be(monkeypatch: pytest.MonkeyPatch, *shares: float) -> list[tuple[Barriers, float]]:
    """Let the programs that are compiled need these shares of the budget. Returns the form and predicted time of each."""
    seen: list[tuple[Barriers, float]] = []
    compiled = Fitting.compiled

    def compiled_so(self: Fitting, choice: Choice, goal: Goal) -> CompiledPlan | None:
        found = compiled(self, choice, goal)
        if found is None or choice.barriers is None:
            return found
        share = shares[len(seen)]
        seen.append((choice.barriers, found.plan.step_us))
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, peak_bytes=int(share * goal.limit)))

    monkeypatch.setattr(Fitting, "compiled", compiled_so)
    monkeypatch.setattr(find_plan, "_shown_ratio", lambda fitting: 1.0)  # these peaks say nothing of plain jit's
    return seen


@pytest.mark.parametrize(
    ("budget", "shares"),
    [
        ("66%", (1.0,)),  # near enough
        ("66%", (1.04, 0.99)),
        ("66%", (0.8, 0.9)),  # one more is the most, once one keeps the budget
        ("66%", (0.8, 1.01)),
        ("66%", (1.04, 1.02, 0.99)),  # three are the most
        ("66%", (1.04, 1.02, 1.01)),
        ("66%", (1.1,)),  # too far: segments run
        ("98%", (0.5,)),  # as fast as without a budget
    ],
)
def test_programs_are_compiled_until_one_is_near_the_budget(
    budget: str, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = let_peaks_be(monkeypatch, *shares)
    function = planned(sgd_step, budget)
    function(fresh(weights()), batch())
    assert [form for form, _ in seen] == ["inputs"] * len(shares)
    plan = running(function).plan
    kept = [us for share, (_, us) in zip(shares, seen, strict=True) if share <= 1]
    assert plan.launch == ("program" if kept else "segments")
    if kept:
        assert plan.step_us == min(kept)


def test_the_peak_of_the_plan_is_that_of_the_executable() -> None:
    step, state = adam_step()
    function = planned(step)
    function(fresh(state), batch(), jax.random.key(0))
    executables = running(function).compiled.executables
    assert executables is not None and len(executables) == 1
    memory = cast(Any, executables[0].call).memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = running(function).plan.peak_bytes
    assert peak == pytest.approx(given + memory.temp_size_in_bytes, abs=256)


def test_where_xla_drops_the_barriers_segments_keep_the_budget_and_a_note_says_so() -> None:
    function = planned(sgd_step, "60%", compiler_options=None)
    function(fresh(weights()), batch())
    plan = running(function).plan
    assert plan.launch == "segments" and plan.barriers is None
    assert within_budget(plan)
    assert any("launch='program' was asked for" in note for note in plan.notes)
    assert function.report().launches == len(plan.segments) > 1


def test_auto_joins_segments_on_a_gpu_where_launches_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def joins(platform: str, launch_us: float, step: Any = sgd_step, **options: Any) -> bool:
        function = planned(step, launch="auto", **options)
        joined = function._calls.step((weights(), batch()), {})
        monkeypatch.setattr(joined.compiler, "device", dataclasses.make_dataclass("Device", ["platform"])(platform))
        monkeypatch.setitem(
            joined.planner.model.__dict__, "profile", dataclasses.replace(joined.planner.model.profile, launch_us=launch_us)
        )
        return joined.in_one_program

    assert joins("gpu", 1e4) and joins("cuda", 1e4)
    assert not joins("gpu", 1e-3) and not joins("cpu", 1e4)
    assert not joins("gpu", 1e4, policy="checkpoint")
    assert joins("gpu", 1e4, scanned(8)) and not joins("gpu", 1e4, scanned(9))


@pytest.mark.parametrize(
    ("kind", "version", "is_seen"), [("GPU A", jax.__version__, True), ("GPU A", "0.1", False), ("GPU B", jax.__version__, False)]
)
def test_auto_puts_copies_into_a_program_only_where_that_has_been_seen_to_work(
    kind: str, version: str, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_on_gpus, "SEEN", frozenset({seen_on_gpus.Seen("program with copies", kind, version)}))
    monkeypatch.setattr(exec_step.Step, "in_one_program", property(lambda self: True))

    def inside(launch: str) -> bool:
        step = planned(sgd_step, launch=launch)._calls.step((weights(), batch()), {})
        monkeypatch.setattr(step.compiler, "device", dataclasses.make_dataclass("Device", ["device_kind"])("GPU A"))
        return step.copies_inside

    assert inside("auto") == is_seen
    assert inside("one_program") and not inside("program")


@pytest.mark.parametrize("slower", [False, True])
def test_a_program_that_is_slower_than_its_segments_is_not_taken(monkeypatch: pytest.MonkeyPatch, slower: bool) -> None:
    compile_programs = Fitting.compile_programs

    def compiled(self: Fitting, plan: Plan, choice: Choice | None) -> Any:
        found = compile_programs(self, plan, choice)
        assert found is not None
        slow = dataclasses.replace(found.launched, step_us=1e9)
        return dataclasses.replace(found, launched=slow) if slower else found

    monkeypatch.setattr(exec_step.Step, "in_one_program", property(lambda self: True))
    monkeypatch.setattr(Fitting, "compile_programs", compiled)
    function = planned(sgd_step, "90%", launch="auto")
    function(fresh(weights(4)), batch(rows=700 + slower))
    plan = running(function).plan
    assert plan.launch == ("segments" if slower else "program")
    assert within_budget(plan)


def test_auto_compiles_no_program_that_computes_more_again_than_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_step.Step, "in_one_program", property(lambda self: True))
    seen = let_peaks_be(monkeypatch, 1.07, 0.99)
    launched: dict[str, tuple[str, int]] = {}
    for launch, rows in (("program", 703), ("auto", 704)):  # other shapes, so that nothing is known of the second step
        seen.clear()
        function = planned(sgd_step, "75%", launch=launch)
        function(fresh(weights(12)), batch(rows=rows))
        launched[launch] = running(function).plan.launch, len(seen)
    assert launched == {"program": ("program", 2), "auto": ("segments", 1)}


def scanned(layers: int) -> Any:
    """A step with a loop of so many iterations, which is opened."""

    def step(params: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.numpy.sum(jax.lax.scan(lambda h, _: (jax.numpy.tanh(h @ w), None), x, None, layers)[0] ** 2)

        first, *rest = params
        value, gradient = jax.value_and_grad(loss)(first)
        return [first - 0.01 * gradient, *rest], value

    return step


def test_on_a_cpu_auto_launches_segments() -> None:
    function = planned(sgd_step, launch="auto")
    function(fresh(weights()), batch())
    plan = running(function).plan
    assert plan.launch == "segments" and not plan.notes


def test_copies_to_the_host_and_back_are_inside_one_program(fast_link: str) -> None:
    options = {"launch": "one_program", "device_profile": fast_link}
    predicted = planned(sgd_step, **options).plan(weights(), batch())
    assert (predicted.launch, predicted.barriers, predicted.launches) == ("program", "chain", 1)
    assert predicted.swapped_in_bytes > 0
    saved = dataclasses.replace(predicted, budget_bytes=None)  # XLA for CPUs counts the copies as memory of the device
    function, reference = tensile.jit(sgd_step, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS), plain(sgd_step)
    mine, theirs = fresh(weights()), fresh(weights())
    for _ in range(3):
        mine, theirs = function(mine, batch())[0], reference(theirs, batch())[0]
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert running(function).plan.barriers == "chain"
    assert function.report().passive_swap_ins == 0 and function.report().launches == 1


def test_a_plan_with_copies_is_one_program_also_after_a_program_without_copies(
    fast_link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "first_try", lambda budget, **_: Try(budget, "inputs"))  # as after one without copies
    predicted = planned(sgd_step, launch="one_program", device_profile=fast_link).plan(weights(), batch())
    assert (predicted.launch, predicted.barriers, predicted.launches) == ("program", "chain", 1)


def test_without_one_program_copies_lie_between_launches(fast_link: str) -> None:
    predicted = planned(sgd_step, device_profile=fast_link).plan(weights(), batch())
    assert predicted.swapped_in_bytes > 0 and predicted.barriers != "chain"
    assert predicted.launch == "segments" or (predicted.launches or 0) > 1


@pytest.fixture
def host_state_plan(fast_link: str) -> Plan:
    """A plan in one program that keeps state in host memory between two iterations, for `adam_step(256)`."""
    step, state = adam_step(256)
    inputs = batch(width=256), jax.random.key(0)
    options = {"device_profile": fast_link, "state_memory": "any", "policy": "tensile"}
    budget = low_budget(step, state, *inputs, part=0.3, donate_argnums=0, **options)
    plan = planned(step, budget, launch="one_program", **options).plan(state, *inputs)
    assert (plan.launch, plan.barriers, plan.launches) == ("program", "chain", 1)
    return dataclasses.replace(plan, budget_bytes=None)


def test_state_in_host_memory_is_given_to_one_program_and_returned_there(host_state_plan: Plan) -> None:
    step, state = adam_step(256)
    function = tensile.jit(step, plan=host_state_plan, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    reference, mine, theirs = plain(step), fresh(state), fresh(state)
    on_host: list[frozenset[int]] = []
    for number in range(5):
        inputs, given = (batch(width=256), jax.random.key(number)), mine
        mine, loss = function(mine, *inputs)
        theirs, expected = reference(theirs, *inputs)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        on_host.append(places_on_host(mine))
        jax.block_until_ready(mine)
    for a, b in zip(numbers(mine), numbers(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    assert on_host[0] and set(on_host) == {on_host[0]}
    plan, report = running(function).plan, function.report()
    assert plan.launches == report.launches == 1
    assert report.passive_swap_ins == 0 and report.peak_bytes <= plan.peak_bytes


def test_state_of_one_program_in_host_memory_can_be_evaluated_saved_and_donated_elsewhere(
    host_state_plan: Plan, tmp_path: Path
) -> None:
    step, state = adam_step(256)
    function = tensile.jit(step, plan=host_state_plan, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    state, _ = function(fresh(state), batch(width=256), jax.random.key(0))
    there = places_on_host(state)
    before = numbers(state)
    total = jax.jit(lambda tree: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype == jnp.float32))
    expected = sum(float(np.sum(leaf, dtype=np.float64)) for leaf in before if leaf.dtype == np.float32)
    np.testing.assert_allclose(float(total(tensile.to_device(state))), expected, rtol=1e-3)
    for a, b in zip(jax.device_get(jax.tree.leaves(state)), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", state)
    assert places_on_host(state) == there
    again, _ = function(state, batch(width=256), jax.random.key(1))  # from wherever the state is now
    assert places_on_host(again) == there
    moved = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(tensile.to_device(again))
    assert len(jax.tree.leaves(moved)) == len(before)


def test_segments_run_where_the_copies_of_a_program_do_not_run_beside_kernels(
    fast_link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "2 kernels read or write host memory themselves (a, b)"
    program_executables, made = Fitting.program_executables, list[Plan]()

    def faulty(self: Fitting, plan: Plan) -> Any:
        made.append(plan)
        return [dataclasses.replace(e, fault=said) for e in program_executables(self, plan)]

    monkeypatch.setattr(Fitting, "program_executables", faulty)
    function = planned(sgd_step, launch="one_program", device_profile=fast_link)
    function(fresh(weights()), batch())
    plan = running(function).plan
    assert plan.launch == "segments" and within_budget(plan)
    assert any("launch='one_program' was asked for" in note and said in note for note in plan.notes)
    first, second, third = (one.peak_bytes for one in made)  # each program is made for less than the one before
    assert first > second > third


@pytest.mark.parametrize("state_memory", ["any", pytest.param("device", marks=pytest.mark.slow)])
def test_state_comes_in_between_two_launches(fast_link: str, state_memory: str) -> None:
    step, state = adam_step(256)
    inputs = batch(width=256), jax.random.key(0)
    options = {"device_profile": fast_link, "state_memory": state_memory, "policy": "tensile"}
    budget = low_budget(step, state, *inputs, part=0.3, donate_argnums=0, **options)
    predicted = planned(step, budget, **options).plan(state, *inputs)
    kept = {t.id for t in predicted.tensors if t.role in ("parameter", "optimizer_state", "state")}
    assert any(e.kind == "swap_in" and e.tensor in kept for e in predicted.events)
    assert predicted.launch == "program" and 1 < predicted.launches < len(predicted.segments)
    saved = dataclasses.replace(predicted, budget_bytes=None)
    function, reference = tensile.jit(step, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS), plain(step)
    mine, theirs = fresh(state), fresh(state)
    for number in range(4):
        inputs = batch(width=256), jax.random.key(number)
        mine, loss = function(mine, *inputs)
        theirs, expected = reference(theirs, *inputs)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    plan, report = running(function).plan, function.report()
    assert plan.launch == "program" and plan.launches == report.launches == predicted.launches
    assert report.passive_swap_ins == 0
    assert report.peak_bytes <= plan.peak_bytes


def test_effects_happen_once_each_iteration() -> None:
    said: list[float] = []

    def step(state: Any, x: jax.Array) -> Any:
        state, loss = sgd_step(state, x)
        jax.debug.callback(lambda value: said.append(float(value)), loss)
        return state, loss

    function = planned(step)
    state, losses = fresh(weights()), []
    for _ in range(4):
        state, loss = function(state, batch())
        losses.append(float(loss))
    jax.effects_barrier()
    assert running(function).plan.launch == "program"
    assert said == losses


def test_a_saved_plan_of_one_program_runs_as_one_program(tmp_path: Path) -> None:
    function = planned(sgd_step)
    expected = numbers(function(fresh(weights()), batch()))
    running(function).plan.save(tmp_path / "plan.json")
    plan = tensile.Plan.load(tmp_path / "plan.json")
    assert plan == running(function).plan
    again = tensile.jit(sgd_step, plan=plan, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    for a, b in zip(numbers(again(fresh(weights()), batch())), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert running(again).plan == plan


def test_a_saved_plan_that_needs_more_here_is_planned_again() -> None:
    function = planned(sgd_step)
    function(fresh(weights()), batch())
    less = int(0.97 * running(function).plan.peak_bytes)
    saved = dataclasses.replace(running(function).plan, peak_bytes=less, budget_bytes=less)
    again = tensile.jit(sgd_step, plan=saved, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    again(fresh(weights()), batch())
    plan = running(again).plan
    assert plan.budget_bytes == less and within_budget(plan)
    assert any("planned again" in note for note in plan.notes)


@pytest.mark.parametrize("change", [{"barriers": None}, {"launch": "segments"}])
def test_a_plan_that_contradicts_itself_about_its_launch_is_refused(change: dict[str, Any]) -> None:
    function = planned(sgd_step)
    function(fresh(weights()), batch())
    with pytest.raises(PlanFileError, match="its launch is"):
        tensile.jit(sgd_step, plan=dataclasses.replace(running(function).plan, **change), donate_argnums=0)


def test_a_predicted_plan_says_how_it_is_to_be_launched() -> None:
    plan = planned(sgd_step).plan(weights(), batch())
    assert plan.launch == "program" and plan.workspaces == "predicted"
    assert "all in one launch" in str(plan)


def test_a_predicted_plan_keeps_its_budget_and_can_be_read_again(tmp_path: Path) -> None:
    """Under the lowest share, the program is expected to need more than the budget, and its segments are shown."""
    for share in ("70%", "30%"):
        function = tensile.jit(sgd_step, budget=share, launch="program", device_profile="h200", donate_argnums=0)
        plan = function.plan(weights(12), batch(rows=6000))
        assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_if_the_device_is_out_of_memory_the_same_call_is_planned_for_less() -> None:
    function = planned(sgd_step)
    state = function(fresh(weights()), batch())[0]
    before, kept = running(function).plan, fresh(state)

    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    wrap_launches(function, lambda index, call: fail)
    results = function(state, batch())
    for a, b in zip(numbers(results), numbers(plain(sgd_step)(kept, batch())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    plan = running(function).plan
    assert before.launch == "program" and plan.peak_bytes <= 0.9 * before.peak_bytes
    assert function.report().out_of_memory > 0
    assert function.plans(results[0], batch()) == (before, plan)


@pytest.mark.parametrize("name", ["gpt_scan", pytest.param("gpt", marks=pytest.mark.slow)])
def test_a_decoder_trains_as_plain_jit_does(name: str, cheap_launches: str) -> None:
    model = MODELS[name](batch_size=4, sequence_length=64, width=64, heads=2, layers=3)
    function, reference = planned(model.step, "75%", device_profile=cheap_launches), plain(model.step)
    mine, theirs, batches = model.init(), model.init(), model.batches()
    for _ in range(4):
        inputs = next(batches)
        mine, metrics = function(mine, inputs)
        theirs, expected = reference(theirs, inputs)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert running(function).plan.launch == "program"


def test_a_saved_plan_of_one_program_with_copies_runs_as_it_did(host_state_plan: Plan, tmp_path: Path) -> None:
    step, state = adam_step(256)
    inputs = batch(width=256), jax.random.key(0)
    function = tensile.jit(step, plan=host_state_plan, donate_argnums=0, compiler_options=KEEP_BARRIERS)
    expected = numbers(function(fresh(state), *inputs))
    running(function).plan.save(tmp_path / "plan.json")
    again = tensile.jit(
        step, plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0, compiler_options=KEEP_BARRIERS
    )  # fmt: skip
    for a, b in zip(numbers(again(fresh(state), *inputs)), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert running(again).plan == running(function).plan


@pytest.mark.parametrize("wrong", ["one", True, None, 1])
def test_launch_must_be_known(wrong: Any) -> None:
    with pytest.raises(ValueError, match="launch must be 'auto' or 'segments' or 'program'"):
        tensile.jit(sgd_step, launch=wrong)


def test_one_program_and_the_renewal_of_plans_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="renew_above=0.3 follows the latencies of segments"):
        tensile.jit(sgd_step, launch="program", renew_above=0.3)
