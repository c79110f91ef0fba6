"""Copies and compares NNX objects, and defines a small train step on them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two layers with dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs, *, width: int = 8) -> None:
        self.linear1 = nnx.Linear(4, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.linear2 = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear2(self.dropout(nnx.relu(self.norm(self.linear1(x)))))


def train_step(model: Net, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: dict[str, jax.Array]) -> jax.Array:
    """Changes model, optimizer and metrics in place."""

    def loss_of(model: Net) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def training_objects(*, width: int = 8) -> tuple[Net, nnx.Optimizer, nnx.MultiMetric]:
    """Model, optimizer and metrics of `train_step`."""
    model = Net(nnx.Rngs(0, dropout=1), width=width)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


def batch(number: int, *, rows: int = 6) -> dict[str, jax.Array]:
    """Batch `number` of `train_step`."""
    key = jax.random.key(number)
    return {"x": jax.random.normal(key, (rows, 4)), "label": jax.random.randint(key, (rows,), 0, 3)}


def copy_of(objects: Any) -> Any:
    """Equal objects with arrays of their own, shared where the others are."""
    graphdef, state = nnx.split(objects)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def expect_same(ours: Any, theirs: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Fails unless both have the same structure, sharing, types, metadata and (to the tolerance) numbers."""
    (our_graph, our_state), (their_graph, their_state) = nnx.split(ours), nnx.split(theirs)
    assert our_graph == their_graph
    assert jax.tree.structure(our_state) == jax.tree.structure(their_state)
    pairs = zip(jax.tree.leaves_with_path(our_state), jax.tree.leaves(their_state), strict=True)
    for (path, a), b in pairs:
        expect_same_array(a, b, jax.tree_util.keystr(path), rtol=rtol, atol=atol)


def expect_same_array(a: Any, b: Any, what: str, *, rtol: float, atol: float) -> None:
    """Fails unless both are arrays of one type, and (to the tolerance) of the same numbers."""
    assert type(a) is type(b), what
    assert jax.typeof(a) == jax.typeof(b), what  # shape, dtype, weak type
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if jnp.issubdtype(a.dtype, jnp.floating):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol, err_msg=what)
    else:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=what)
