"""Trainings with Flax Linen, Flax NNX, Equinox and Keras in 60 % of plain jit's memory, stopped, saved and resumed half way.

Losses and evaluation are those of plain jit without a stop. Cutting a step lets XLA fuse and round differently, which the updates
of Adam enlarge: in 200 such steps, losses differed by up to 2e-7. Dropout masks of other steps change them by a tenth.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import tensile_jax as tensile

STEPS = 40
SAME = 1e-5
WIDTH, LAYERS, CLASSES = 64, 4, 10
X = jax.random.normal(jax.random.key(1), (8, 1024, 32))
Y = jnp.argmax(X[..., :CLASSES], -1)

Make = Callable[[Any], Any]
"""Makes a compiled function of a step, such as `jax.jit`."""


@dataclass(frozen=True)
class Framework:
    """How a framework trains. A state is whatever `start` returns; `step(make)` returns `(state, x, y) -> (state, loss)`."""

    start: Callable[[], Any]
    step: Callable[[Make], Callable[[Any, Any, Any], tuple[Any, Any]]]
    save: Callable[[Path, Any], None]
    restore: Callable[[Path], Any]
    evaluate: Callable[[Any], Any]
    plain: Make = staticmethod(lambda step: jax.jit(step, donate_argnums=0))
    planned: Make = staticmethod(lambda step: tensile.jit(step, budget="60%", donate_argnums=0))


def save_with_orbax(file: Path, tree: Any) -> None:
    saver = ocp.StandardCheckpointer()
    saver.save(file, tree)
    saver.wait_until_finished()


def restore_with_orbax(file: Path, like: Any) -> Any:
    return ocp.StandardCheckpointer().restore(file, like)


def cross_entropy(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def linen() -> Framework:
    from flax import linen as nn
    from flax.training.train_state import TrainState

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            for _ in range(LAYERS):
                x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(WIDTH)(x)))
            return nn.Dense(CLASSES)(x)

    model, key = Mlp(), jax.random.key(0)

    def start() -> TrainState:
        params = model.init(key, X[0], train=False)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState, x: Any, y: Any) -> tuple[TrainState, Any]:
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        loss_of = lambda params: cross_entropy(state.apply_fn(params, x, train=True, rngs=rngs), y)  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return Framework(
        start,
        lambda make: make(step),
        save_with_orbax,
        lambda file: restore_with_orbax(file, start()),
        lambda state: cross_entropy(model.apply(state.params, X[-1], train=False), Y[-1]),
    )


def nnx() -> Framework:
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH if i else 32, WIDTH, rngs=rngs) for i in range(LAYERS)])
            self.dropout, self.head = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = self.dropout(nnx.relu(layer(x)))
            return self.head(x)

    def start() -> Any:
        model = Mlp(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
        optimizer.update(model, gradients)
        return loss

    def in_place(make: Make) -> Any:
        compiled = make(step)

        def call(state: Any, x: Any, y: Any) -> Any:
            state[0].train()
            loss = compiled(*state, x, y)
            state[0].eval()  # as a loop that evaluates does; the next step finds its plan again
            return state, loss

        return call

    def restore(file: Path) -> Any:
        objects = start()
        nnx.update(objects, restore_with_orbax(file, nnx.state(objects)))
        return objects

    return Framework(
        start,
        in_place,
        lambda file, objects: save_with_orbax(file, nnx.state(objects)),
        restore,
        lambda objects: cross_entropy(objects[0](X[-1]), Y[-1]),
        plain=lambda step: nnx.jit(step, donate_argnames=("model", "optimizer")),
        planned=lambda step: tensile.nnx.jit(step, budget="60%", donate_argnames=("model", "optimizer")),
    )


def equinox() -> Framework:
    eqx: Any = pytest.importorskip("equinox")
    dropout = eqx.nn.Dropout(0.1)
    layers = eqx.nn.MLP(32, CLASSES, WIDTH, LAYERS, activation=jax.nn.gelu, key=jax.random.key(0))
    parameters, static = eqx.partition(layers, eqx.is_array)
    optimizer = optax.adamw(1e-3)

    def start() -> Any:
        copied = jax.tree.map(jnp.copy, parameters)
        return copied, optimizer.init(copied), jax.random.PRNGKey(1), jnp.array(0)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, slots, key, count = state

        def loss_of(params: Any) -> Any:
            dropped = dropout(x, key=jax.random.fold_in(key, count))
            return cross_entropy(jax.vmap(eqx.combine(params, static))(dropped), y)

        loss, gradients = eqx.filter_value_and_grad(loss_of)(params)
        updates, slots = optimizer.update(gradients, slots, params)
        return (eqx.apply_updates(params, updates), slots, key, count + 1), loss

    return Framework(
        start,
        lambda make: make(step),
        eqx.tree_serialise_leaves,
        lambda file: eqx.tree_deserialise_leaves(file, start()),
        lambda state: cross_entropy(jax.vmap(eqx.combine(state[0], static))(X[-1]), Y[-1]),
    )


def keras() -> Framework:
    os.environ["KERAS_BACKEND"] = "jax"
    keras: Any = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("keras was imported before with another backend")
    keras.utils.set_random_seed(0)
    of_a_layer = lambda: (keras.layers.Dense(WIDTH), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1))  # noqa: E731
    model = keras.Sequential(
        [keras.Input((32,)), *(one for _ in range(LAYERS) for one in of_a_layer()), keras.layers.Dense(CLASSES)]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = {
        "trainable": model.trainable_variables,
        "others": model.non_trainable_variables,
        "optimizer": optimizer.variables,
    }
    first = jax.tree.map(lambda variable: np.array(variable.value), variables)

    def start() -> Any:
        return jax.tree.map(jnp.array, first)

    def loss_and_others(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        predicted, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of(y, predicted), others

    def step(state: Any, x: Any, y: Any) -> Any:
        differentiated = jax.value_and_grad(loss_and_others, has_aux=True)
        (loss, others), gradients = differentiated(state["trainable"], state["others"], x, y)
        trainable, slots = optimizer.stateless_apply(state["optimizer"], gradients, state["trainable"])
        return {"trainable": trainable, "others": others, "optimizer": slots}, loss

    def evaluate(state: Any) -> Any:
        return loss_of(Y[-1], model.stateless_call(state["trainable"], state["others"], X[-1], training=False)[0])

    return Framework(start, lambda make: make(step), save_with_orbax, lambda file: restore_with_orbax(file, start()), evaluate)


def trained(step: Any, state: Any, begin: int, end: int) -> tuple[Any, list[float]]:
    losses = []
    for i in range(begin, end):
        state, loss = step(state, X[i % 7], Y[i % 7])
        losses.append(float(loss))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize("framework", [linen, nnx, equinox, keras])
def test_a_training_in_less_memory_that_stops_and_resumes_is_that_of_plain_jit(
    framework: Callable[[], Framework], tmp_path: Path
) -> None:
    how = framework()
    expected_state, expected = trained(how.step(how.plain), how.start(), 0, STEPS)
    state, losses = trained(how.step(how.planned), how.start(), 0, STEPS // 2)
    how.save(tmp_path / "state", state)
    state, others = trained(how.step(how.planned), how.restore(tmp_path / "state"), STEPS // 2, STEPS)
    np.testing.assert_allclose([*losses, *others], expected, rtol=SAME)
    np.testing.assert_allclose(how.evaluate(state), how.evaluate(expected_state), rtol=SAME)
    assert expected[-1] < expected[0]
