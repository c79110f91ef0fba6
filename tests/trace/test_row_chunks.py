"""Losses in chunks of rows: the results of the whole, to rounding, and no rewriting where rows depend on one another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.trace.flatten import Program, flatten
from tensile_jax.trace.row_chunks import find_region, in_row_chunks
from tests.builders import fresh, numbers
from tests.test_loops import run

ROWS, LENGTH, WIDTH, WORDS = 8, 16, 8, 512
RNG = np.random.default_rng(0)
PARAMS = {
    "in": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) / 3, jnp.float32),
    "out": jnp.asarray(RNG.normal(size=(WIDTH, WORDS)) / 3, jnp.float32),
}
X = jnp.asarray(RNG.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(WORDS, size=(ROWS, LENGTH)))


def logits_of(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["in"]) @ params["out"]


def mean_loss(params: Any, x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels).mean()


def loss_in_bf16(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def flat_loss(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x.reshape(-1, WIDTH))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()


def smoothed_loss(params: Any, x: Any, labels: Any) -> Any:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, WORDS), 0.1)
    return optax.softmax_cross_entropy(logits_of(params, x), targets).mean()


def masked_loss(params: Any, x: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels)
    mask = labels > 3
    return jnp.sum(losses * mask) / jnp.sum(mask)


def loss_with_statistics(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() + 1e-4 * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()


LOSSES = [mean_loss, loss_in_bf16, flat_loss, smoothed_loss, masked_loss, loss_with_statistics]


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(params: Any, x: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, labels)
        hits = jnp.argmax(logits_of(params, x), axis=-1) == labels
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value, hits.mean()

    return train_step


def flat(step: Callable[..., Any]) -> Program:
    return flatten(jax.make_jaxpr(step)(PARAMS, X, LABELS))


@pytest.mark.smoke
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunks", [2, 8])
def test_a_loss_in_chunks_of_rows_has_the_results_of_the_whole(loss: Callable[..., Any], chunks: int) -> None:
    step = step_of(loss)
    program = in_row_chunks(flat(step), chunks)
    assert program is not None
    rough = loss is loss_in_bf16
    made, expected = run(program, PARAMS, X, LABELS), jax.jit(step)(PARAMS, X, LABELS)
    for a, b in zip(made, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2 if rough else 2e-5, atol=2e-3 if rough else 1e-6)


@pytest.mark.parametrize("chunks", [2, 8])
def test_no_tensor_has_all_rows_of_the_logits(chunks: int) -> None:
    program = in_row_chunks(flat(step_of(mean_loss)), chunks)
    assert program is not None
    made = [program.avals[v] for e in program.equations for v in e.outputs]
    assert max(aval.size for aval in made if aval.shape) <= ROWS * LENGTH * WORDS // chunks
    assert {e.iterations for e in program.equations if e.iterations} == {(c,) for c in range(chunks)}


@pytest.mark.parametrize("chunks", [0, 1, 3, 16])
def test_rows_are_divided_evenly_or_not_at_all(chunks: int) -> None:
    assert in_row_chunks(flat(step_of(mean_loss)), chunks) is None


def between_rows(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits - logits.mean(0), labels).mean()


def of_the_worst_rows(params: Any, x: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels)
    return jnp.sort(losses.sum(-1))[-2:].mean()


def scaled_by_the_loss(params: Any, x: Any, labels: Any) -> Any:
    return mean_loss(params, x, labels) ** 2


@pytest.mark.parametrize("loss", [between_rows, of_the_worst_rows, scaled_by_the_loss])
def test_a_loss_whose_rows_depend_on_one_another_stays_whole(loss: Callable[..., Any]) -> None:
    assert find_region(flat(step_of(loss))) is None


def test_a_step_with_effects_stays_whole() -> None:
    def step(params: Any, x: Any, labels: Any) -> Any:
        jax.debug.print("step")
        return mean_loss(params, x, labels)

    assert find_region(flat(step)) is None


def test_a_training_in_chunks_gives_the_results_of_jit_and_says_so() -> None:
    """The logits are most of the memory: a low budget can only be kept in chunks."""
    optimizer = optax.adam(1e-2)

    def train_step(state: Any, x: Any, labels: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(mean_loss)(params, x, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    x, labels = jnp.tile(X, (1, 16, 1)), jnp.tile(LABELS, (1, 16))
    function = tensile.jit(train_step, budget="40%", donate_argnums=0)
    state = expected = (PARAMS, optimizer.init(PARAMS))
    state = fresh(state)
    jitted = jax.jit(train_step)
    for i in range(10):
        rows = jnp.roll(x, i, axis=0)
        expected, loss = jitted(expected, rows, labels)
        state, own = function(state, rows, labels)
        np.testing.assert_allclose(own, loss, rtol=1e-5)
    for a, b in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    plan = function.plan(state, x, labels)
    assert "chunks of rows" in plan.notes[0]
    again = tensile.jit(train_step, plan=plan, donate_argnums=0)
    assert again(fresh(state), x, labels)[1] == function(fresh(state), x, labels)[1]
