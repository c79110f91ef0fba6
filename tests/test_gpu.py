"""What only a GPU shows: programs with barriers, and copies that run beside computation (`pytest -m gpu`)."""

from typing import Any

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.installed_models import MODELS
from tests.builders import running

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    if jax.default_backend() == "cpu":
        pytest.skip("jax sees no GPU")


def losses(function: Any, model: Any, steps: int = 4) -> list[float]:
    state, batches, found = model.init(), model.batches(), []
    for _ in range(steps):
        state, metrics = function(state, next(batches))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("name", ["gpt", "gpt_scan", "resnet50"])
@pytest.mark.parametrize("budget", ["75%", "50%"])
def test_segments_and_programs_train_as_plain_jit_does(name: str, budget: str) -> None:
    sizes = {"image_size": 96} if name == "resnet50" else {"sequence_length": 256}
    model = MODELS[name](batch_size=8, **sizes)
    expected = losses(jax.jit(model.step, donate_argnums=0), model)
    for launch in ("segments", "auto"):
        function = tensile.jit(model.step, budget=budget, launch=launch, donate_argnums=0)
        np.testing.assert_allclose(losses(function, model), expected, rtol=2e-2)
        plan, report = running(function).plan, function.report()
        assert plan.budget_bytes is not None and report.peak_bytes <= plan.budget_bytes
        assert report.out_of_memory == 0
        if plan.launches is not None:
            assert launch == "auto" and report.launches == plan.launches < report.segments


def test_a_plan_without_copies_is_one_launch() -> None:
    model = MODELS["gpt"](batch_size=8, sequence_length=256)
    function = tensile.jit(model.step, budget="60%", policy="checkpoint", launch="program", donate_argnums=0)
    losses(function, model, steps=2)
    assert running(function).plan.launch == "segments" or function.report().launches == 1
