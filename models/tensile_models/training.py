"""Makes a train step and its state from a Flax module and an optax optimizer.

One step is the whole iteration: forward pass, backward pass and optimizer update in one function.

    loss     = mean over the batch of -log softmax(logits)[label]
    accuracy = share of the batch whose greatest logit is the label

To initialise all kernels and embeddings, this file draws one long normal sample, cuts it into
pieces and scales them. The Flax module initialises the other parameters (zeros and ones). Flax by
itself would draw a sample for each parameter, which takes XLA several times as long to compile
(ResNet-50: 9 s against 2 s on two cores).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tensile_models.data import Images
from tensile_models.inputs import Input
from tensile_models.model import Batch, Metrics, Model, State

Shape = tuple[int, ...]


def he_deviation(shape: Shape) -> float:
    """sqrt(2 / fan_in): keeps the variance through a layer and its ReLU (He et al., 2015)."""
    return math.sqrt(2 / math.prod(shape[:-1]))


def build_model(
    name: str,
    module: nn.Module,
    source: Input,
    *,
    seed: int,
    optimizer: optax.GradientTransformation,
    deviation: Callable[[Shape], float] = he_deviation,
) -> Model:
    """A `Model` of `module` on the input `source`. The module is called as `module(*inputs, train=...)` and gives logits.

    Args:
        source: the input that the module reads.
        deviation: the standard deviation with which a kernel of a given shape begins.
    """
    samples = [source.batch_shape[name] for name in source.inputs]

    def initial_state(key: jax.Array) -> State:
        # One row is enough: no parameter's shape depends on the size of the batch.
        rows = [jnp.zeros((1, *sample.shape[1:]), sample.dtype) for sample in samples]
        variables = module.init(key, *rows, train=False)
        params = draw_kernels(key, variables["params"], deviation)
        return State(
            params=params,
            batch_stats=variables.get("batch_stats", {}),
            opt_state=optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
        )

    # The key is an argument. If it were a constant, XLA would compute the whole initialisation while it compiles.
    initialise = jax.jit(initial_state)

    def init() -> State:
        return initialise(jax.random.key(seed))

    return Model(
        name=name,
        step=make_step(module, optimizer, inputs=source.inputs, labels=source.labels),
        init=init,
        state_shape=jax.eval_shape(lambda: initial_state(jax.random.key(seed))),
        batch_shape=source.batch_shape,
        batches=source.batches,
        evaluate=None if source.test is None else make_evaluate(module, source.test),
    )


def adam_or(
    optimizer: optax.GradientTransformation | None, learning_rate: float | None, *, usual: float
) -> optax.GradientTransformation:
    """`optimizer`; without one, Adam at `learning_rate`, or at the rate that is usual for the model.

    Raises:
        ValueError: both are given, or the rate is not a positive number.
    """
    if optimizer is None:
        rate = usual if learning_rate is None else learning_rate
        if not isinstance(rate, float | int) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise ValueError(f"learning_rate must be a number above zero: got {rate!r}. The model's own is {usual}.")
        return optax.adam(rate)
    if learning_rate is not None:
        raise ValueError(f"learning_rate={learning_rate} is for Adam, and an optimizer is given. Leave one of them out.")
    return optimizer


def draw_kernels(key: jax.Array, params: Any, deviation: Callable[[Shape], float]) -> Any:
    """`params` with every leaf named `kernel` or `embedding` drawn from N(0, deviation(shape)^2)."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    is_drawn = [getattr(path[-1], "key", "") in ("kernel", "embedding") for path, _ in leaves]
    total = sum(leaf.size for (_, leaf), drawn in zip(leaves, is_drawn, strict=True) if drawn)
    draw = jax.random.normal(key, (total,))
    made, begin = [], 0
    for (_, leaf), drawn in zip(leaves, is_drawn, strict=True):
        if drawn:
            piece = draw[begin : begin + leaf.size].reshape(leaf.shape)
            begin += leaf.size
            leaf = (deviation(leaf.shape) * piece).astype(leaf.dtype)
        made.append(leaf)
    return jax.tree.unflatten(structure, made)


def make_step(
    module: nn.Module, optimizer: optax.GradientTransformation, *, inputs: tuple[str, ...], labels: str
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """One training iteration of `module` as a pure function named `train_step`."""

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        def loss_of(params: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
            logits, updates = module.apply(
                {"params": params, "batch_stats": state.batch_stats},
                *(batch[name] for name in inputs),
                train=True,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[labels])
            return losses.mean(), (updates.get("batch_stats", {}), logits)

        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (batch_stats, logits)), gradients = value_and_grad(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new_state = State(
            params=optax.apply_updates(state.params, updates),
            batch_stats=batch_stats,
            opt_state=opt_state,
            step=state.step + 1,
        )
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch[labels])
        return new_state, {"loss": loss, "accuracy": accuracy}

    return train_step


def make_evaluate(module: nn.Module, test: Callable[[], Images]) -> Callable[[State], float]:
    """A function from a state to its accuracy on the test set, in [0, 1]."""

    @jax.jit
    def accuracy(params: Any, batch_stats: Any, inputs: Any, labels: Any) -> jax.Array:
        variables = {"params": params, "batch_stats": batch_stats}
        logits: Any = module.apply(variables, inputs, train=False)  # a pair only with `mutable`
        return jnp.mean(jnp.argmax(logits, axis=-1) == labels)

    def evaluate(state: State) -> float:
        return float(accuracy(state.params, state.batch_stats, *test()))

    return evaluate
