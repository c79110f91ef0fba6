"""Every policy on small steps: under a low budget it gives what plain jit gives, and keeps the budget."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import POLICIES
from tests.builders import batch, fresh, kinds_of, low_budget, numbers, optimizer_state, optimizer_step

CHANNELS, LAYERS = 8, 4


def convolutional_loss(kernels: Any, x: jax.Array) -> jax.Array:
    """A stack of convolutions with shortcuts; one activation of 16 images is 128 KiB."""
    for k, kernel in enumerate(kernels):
        with jax.named_scope(f"Block_{k}"), jax.named_scope("Conv"):
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(y) + 0.5 * x
    return jnp.mean((x - 0.1) ** 2)


def convolutional_step(state: Any, x: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(convolutional_loss)(state["params"], x)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    return {"params": jax.tree.map(lambda w, v: w - 0.1 * v, state["params"], velocity), "velocity": velocity}, loss


def convolutional() -> tuple[Any, Any, list[Any]]:
    rng = np.random.default_rng(0)
    kernels = [jnp.asarray(rng.normal(size=(3, 3, CHANNELS, CHANNELS)) / 12, jnp.float32) for _ in range(LAYERS)]
    batches = [jnp.asarray(rng.normal(size=(16, 16, 16, CHANNELS)), jnp.float32) for _ in range(3)]
    return convolutional_step, {"params": kernels, "velocity": jax.tree.map(jnp.zeros_like, kernels)}, batches


def perceptron() -> tuple[Any, Any, list[Any]]:
    optimizer = optax.adam(1e-3)
    return optimizer_step(optimizer), optimizer_state(optimizer), [batch(i) for i in range(3)]


def transformer() -> tuple[Any, Any, list[Any]]:
    model = MODELS["gpt"](batch_size=8, sequence_length=64, width=64, heads=2, layers=2)
    feed = model.batches()
    return model.step, model.init(), [jax.tree.map(jnp.asarray, next(feed)) for _ in range(3)]


@pytest.mark.parametrize("program", [convolutional, perceptron, pytest.param(transformer, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "auto"])
def test_a_policy_gives_what_jit_gives(policy: str, program: Any, fast_link: str) -> None:
    step, state, batches = program()
    options: dict[str, Any] = {"policy": policy, "donate_argnums": 0, "device_profile": fast_link, "state_memory": "any"}
    function, plan = at_low_budget(step, state, batches[0], options)
    assert plan.policy == policy
    assert not plan.whole
    swapped = {"swap_out", "swap_in"} <= kinds_of(plan)
    assert swapped == (policy in ("capuchin", "tensile") or (policy == "vdnn" and program is convolutional))
    assert ("recompute" in kinds_of(plan)) or policy != "checkpoint"
    plain = jax.jit(step)
    ours, theirs = fresh(state), state
    for now in batches:
        ours, metrics = function(ours, now)
        theirs, expected = plain(theirs, now)
        if policy != "tensile":  # the only one of these that schedules across iterations
            assert all(leaf.sharding.memory_kind == "device" for leaf in jax.tree.leaves(ours))
        # XLA fuses a step in segments otherwise than a whole one; Adam's first steps magnify what rounding leaves near zero.
        for a, b in zip(numbers((ours, metrics)), numbers((theirs, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4)
    assert function.report().peak_bytes <= plan.peak_bytes


def at_low_budget(step: Any, state: Any, first: Any, options: dict[str, Any]) -> tuple[tensile.PlannedFunction, tensile.Plan]:
    """The step near the least budget that works, compiled, and its plan."""
    budget = low_budget(step, state, first, **options)
    try:
        function = tensile.jit(step, budget=budget, **options)
        function(fresh(state), first)
    except tensile.BudgetTooSmall as error:
        function = tensile.jit(step, budget=error.floor_bytes, **options)
        function(fresh(state), first)
    return function, function.plan(state, first)
