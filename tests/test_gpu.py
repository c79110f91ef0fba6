"""What only a GPU shows: programs with barriers, and copies that run beside computation (`pytest -m gpu`)."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.transfer import Transfer, places_on_host
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import drift
from tests.builders import fresh, numbers, running
from tests.trace.rewrites.test_outer_products import dense_network, dense_step

pytestmark = pytest.mark.gpu

_SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"batch_size": 8, "sequence_length": 256, "width": 256, "heads": 4, "layers": 4},
    "gpt_scan": {"batch_size": 8, "sequence_length": 256, "width": 256, "heads": 4, "layers": 4},
    "resnet50": {"batch_size": 16, "image_size": 96, "blocks": [1, 1, 1, 1]},
}


_QUICK = {"xla_gpu_autotune_level": 0}  # trying kernels takes most of the compilation of a small network


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    if jax.default_backend() == "cpu":
        pytest.skip("jax sees no GPU")


def check_steps(function: Any, model: Any, steps: int = 3) -> None:
    """Each step gives the loss and the state of plain jit's, both from the state that plain jit has reached.

    Products are rounded to TF32, each kernel in its own way, and Adam moves by a whole step where a gradient is nothing but
    rounding. So the update of the whole state is compared by its norm. A stale parameter or a lost update is off by a whole one.
    """
    plain, state, batches = jax.jit(model.step, donate_argnums=0, compiler_options=_QUICK), model.init(), model.batches()
    for _ in range(steps):
        batch = next(batches)
        before = numbers(state)
        ours, metrics = function(fresh(state), batch)
        state, expected = plain(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-3)
        assert _distance(numbers(ours), numbers(state)) <= 0.3 * _distance(before, numbers(state))


def _distance(one: list[Any], other: list[Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.subtract(a, b, dtype=float) ** 2) for a, b in zip(one, other, strict=True))))


@pytest.mark.parametrize("name", _SIZES)
@pytest.mark.parametrize(("budget", "state_memory"), [("70%", "device"), ("45%", "any")])
def test_segments_and_programs_train_as_plain_jit_does(name: str, budget: str, state_memory: Any) -> None:
    model = MODELS[name](**_SIZES[name])
    for launch in ("segments", "auto", "one_program"):
        options: Any = {"launch": launch, "state_memory": state_memory, "compiler_options": _QUICK}
        function = tensile.jit(model.step, budget=budget, donate_argnums=0, **options)
        check_steps(function, model)
        plan, report = running(function).plan, function.report()
        assert plan.budget_bytes is not None and report.peak_bytes <= plan.budget_bytes
        assert report.out_of_memory == 0
        if plan.launches is not None:
            assert launch != "segments" and report.launches == plan.launches < report.segments


def test_two_hundred_steps_of_one_program_with_state_in_host_memory_are_those_of_plain_jit() -> None:
    """A donated state beside asynchronous copies of other state must not be overwritten too early: the loss would be NaN soon."""
    model = MODELS["gpt"](**_SIZES["gpt"])
    options: Any = {"launch": "one_program", "state_memory": "any", "policy": "tensile", "compiler_options": _QUICK}
    function = tensile.jit(model.step, budget="45%", donate_argnums=0, **options)
    plain, batches = jax.jit(model.step, donate_argnums=0, compiler_options=_QUICK), model.batches()
    ours, theirs = model.init(), model.init()
    losses: list[tuple[float, float]] = []
    for _ in range(200):
        batch = next(batches)
        ours, metrics = function(ours, batch)
        theirs, expected = plain(theirs, batch)
        losses.append((float(metrics["loss"]), float(expected["loss"])))
    plan = running(function).plan
    assert (plan.barriers, plan.launches) == ("chain", 1) and places_on_host(ours)
    own, others = np.array(losses).T
    assert np.isfinite(own).all()
    np.testing.assert_allclose(own[:8], others[:8], rtol=1e-2)
    np.testing.assert_allclose(own[-20:].mean(), others[-20:].mean(), rtol=0.1)  # rounding has driven the two apart


@pytest.mark.parametrize("state_memory", ["device", "any"])
def test_state_in_layouts_of_xlas_choice_trains_as_plain_jit_does_and_is_copied_once(
    state_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    relaid: list[Any] = []
    laid_out = Transfer.laid_out
    monkeypatch.setattr(Transfer, "laid_out", lambda self, *given: relaid.append(given) or laid_out(self, *given))
    model = MODELS["resnet50"](**_SIZES["resnet50"])
    options: Any = {"launch": "one_program", "state_layout": "auto", "state_memory": state_memory, "compiler_options": _QUICK}
    function = tensile.jit(model.step, budget="60%", donate_argnums=0, **options)
    check_steps(function, model)
    plan, report = running(function).plan, function.report()
    assert plan.launches == report.launches == 1 and plan.layouts
    assert plan.budget_bytes is not None and report.peak_bytes <= plan.budget_bytes
    relaid.clear()
    state, batches = model.init(), model.batches()
    for _ in range(4):
        state, metrics = function(state, next(batches))
        assert np.isfinite(metrics["loss"])
    assert len(relaid) == len(plan.layouts)
    sums = jax.jit(lambda tree: [jnp.sum(leaf) for leaf in jax.tree.leaves(tree)])(tensile.to_device(state))
    for one, leaf in zip(sums, numbers(state), strict=True):
        np.testing.assert_allclose(one, np.sum(leaf, dtype=float), rtol=1e-2, atol=1e-2)


def test_a_decoder_without_copies_is_one_launch() -> None:
    model = MODELS["gpt"](**_SIZES["gpt"])
    options: Any = {"policy": "checkpoint", "launch": "program", "compiler_options": _QUICK}
    function = tensile.jit(model.step, budget="70%", donate_argnums=0, **options)
    check_steps(function, model)
    assert function.report().launches == 1


def test_gradients_of_dense_layers_need_no_memory() -> None:
    params, x, labels = dense_network()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    function = tensile.jit(dense_step, budget=int(1.1 * state_bytes), donate_argnums=0, compiler_options=_QUICK)
    plain, state = jax.jit(dense_step, compiler_options=_QUICK), params
    for i in range(5):
        rows = jnp.roll(x, i, axis=0)
        ours, own = function(fresh(state), rows, labels)
        before = numbers(state)
        state, loss = plain(state, rows, labels)
        np.testing.assert_allclose(own, loss, rtol=1e-3)
        assert _distance(numbers(ours), numbers(state)) <= 0.1 * _distance(before, numbers(state))
    plan, report = running(function).plan, function.report()
    assert not plan.swapped_out_bytes and report.peak_bytes <= 1.1 * state_bytes and report.out_of_memory == 0


def test_plans_are_renewed_and_train_as_plain_jit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "WORTH", 0.0)  # a new plan is due as soon as latencies have drifted
    model = MODELS["gpt"](**_SIZES["gpt"])
    function = tensile.jit(
        model.step, budget="60%", donate_argnums=0, launch="segments", renew_above=0.02, compiler_options=_QUICK
    )
    for _ in range(10):
        check_steps(function, model, steps=5)
        if function.report().plans > 1:
            break
        time.sleep(1.0)  # a plan is made beside the training
    plan, report = running(function).plan, function.report()
    assert report.plans > 1, f"latencies have drifted by {report.drift}"
    assert plan.budget_bytes is not None and report.peak_bytes <= plan.budget_bytes


def test_jobs_share_a_gpu_and_train_as_plain_jit_does() -> None:
    models = [MODELS[name](**_SIZES[name]) for name in ("gpt", "resnet50")]
    steps, peaks, expected = 6, 0, []
    for model in models:
        plain = jax.jit(model.step, donate_argnums=0, compiler_options=_QUICK)
        compiled = plain.lower(model.state_shape, model.batch_shape).compile()
        peaks += peak_of(compiled)
        state, batches, losses = model.init(), model.batches(), []
        for _ in range(steps):
            state, metrics = compiled(state, next(batches))
            losses.append(float(metrics["loss"]))
        expected.append(losses)
    seen: list[list[float]] = [[] for _ in models]
    budget = int(0.6 * peaks)
    with tensile.Runtime(budget=budget) as runtime:
        jobs = [
            runtime.submit(
                model.step,
                model.init(),
                model.batches,
                steps=steps,
                on_step=lambda _, metrics, losses=losses: losses.append(float(metrics["loss"])),
            )
            for model, losses in zip(models, seen, strict=True)
        ]
    for job, losses, wanted in zip(jobs, seen, expected, strict=True):
        assert job.exception() is None
        np.testing.assert_allclose(losses, wanted, rtol=2e-2)
    assert runtime.peak_bytes <= budget
