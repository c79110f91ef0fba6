"""All segments of a sharded step as one executable, on eight devices."""

import dataclasses
from typing import Any, get_args

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.plan_format import Barriers
from tests.sharded.decoder import ShardedDecoder, Way

pytestmark = pytest.mark.several_devices

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse,cse_barrier_expander"}  # which XLA for CPUs would drop


def _planned(decoder: ShardedDecoder, **options: Any) -> Any:
    return tensile.jit(decoder.step, donate_argnums=0, compiler_options=KEEP_BARRIERS, **options)


def _losses(step: Any, decoder: ShardedDecoder) -> list[float]:
    state, losses = decoder.state(), []
    for i in range(4):
        state, metrics = step(state, decoder.batch(i))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "data"])  # of "fsdp", no form keeps this budget on a CPU
def test_a_sharded_training_in_one_launch_keeps_its_budget_and_is_that_of_jit(way: Way) -> None:
    decoder = ShardedDecoder(way)
    whole = _planned(decoder).jit_peak_bytes(decoder.state(), decoder.batch(0))
    budget = int(0.8 * whole)
    step = _planned(decoder, budget=budget, launch="program")
    plain = jax.jit(decoder.step, donate_argnums=0)
    np.testing.assert_allclose(_losses(step, decoder), _losses(plain, decoder), rtol=1e-5)
    plan = step.plan(decoder.state(), decoder.batch(0))
    assert (plan.launch, step.report().launches) == ("program", 1)
    assert plan.barriers in ("lag", "live") and len(plan.segments) > 1
    assert step.report().peak_bytes == plan.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(Barriers))
def test_every_form_trains_as_jit_does(form: Barriers) -> None:
    decoder = ShardedDecoder("fsdp", layers=1)
    predicted = _planned(decoder, budget="60%", launch="program").plan(decoder.state(), decoder.batch(0))
    assert predicted.launch == "program"
    saved = dataclasses.replace(predicted, barriers=form, budget_bytes=None)  # whatever this form needs
    step = _planned(decoder, plan=saved)
    losses = _losses(step, decoder)
    np.testing.assert_allclose(losses, _losses(jax.jit(decoder.step, donate_argnums=0), decoder), rtol=1e-5)
    plan = step.plan(decoder.state(), decoder.batch(0))
    assert (plan.barriers, step.report().launches) == (form, 1)
