"""Workloads that train one network, a dense one or one of convolutions, in ways that are not loss, gradient and optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import linen as nn
from jax import lax

from benchmarks.workloads.workload import Workload, applied, cross_entropy, integers, normal, params_of, trained

_ROWS, _INPUTS = 1024, 64


class _Dense(nn.Module):
    """Dense layers with layer normalization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(192)(x)))
        return nn.Dense(10)(x)


class _Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def _rows(number: int) -> Any:
    return normal(number, _ROWS, _INPUTS), integers(number, 10, _ROWS)


def _images(number: int, count: int = 32) -> Any:
    return normal(number, count, 32, 32, 3), integers(number, 10, count)


def _loss_of(net: nn.Module) -> Callable[[Any, Any], jax.Array]:
    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(applied(net, params, batch[0]), batch[1])

    return loss


_DENSE = _Dense()
_dense_loss = _loss_of(_DENSE)


def _dense_params() -> Any:
    return params_of(_DENSE, normal(0, 1, _INPUTS))


def _with_optimizer(optimizer: optax.GradientTransformation) -> Workload:
    return trained(_dense_params, lambda params, batch, key: _dense_loss(params, batch), _rows, optimizer=optimizer)


# -- optimizers ---------------------------------------------------------------------------------------------------------------


def muon() -> Workload:
    """Updates are made orthogonal (Jordan et al., 2024)."""
    return _with_optimizer(optax.contrib.muon(1e-2))


def schedule_free() -> Workload:
    """An average of the weights instead of a schedule (Defazio et al., 2024)."""
    return _with_optimizer(optax.contrib.schedule_free_adamw(1e-3))


def every_fourth() -> Workload:
    """Gradients of four steps are one update, unless they are not finite."""
    return _with_optimizer(optax.MultiSteps(optax.apply_if_finite(optax.adamw(1e-3), 5), 4).gradient_transformation())


def line_search() -> Workload:
    """L-BFGS with a line search, which evaluates the loss in a loop (Liu and Nocedal, 1989)."""
    optimizer = optax.lbfgs(memory_size=5)

    def init() -> Any:
        params = _dense_params()
        return params, jax.tree.map(jnp.copy, optimizer.init(params))  # some of its zeros are one array

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state

        def loss(params: Any) -> jax.Array:
            return _dense_loss(params, batch)

        value, gradients = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = optimizer.update(gradients, opt_state, params, value=value, grad=gradients, value_fn=loss)
        return (optax.apply_updates(params, updates), opt_state), jnp.asarray(value)

    return Workload(step, init, _rows)


# -- gradients ----------------------------------------------------------------------------------------------------------------


def _by_gradients(
    gradients_of: Callable[[Any, Any], tuple[jax.Array, Any]], batch: Callable[[int], Any], params: Any
) -> Workload:
    """Adam with the loss and the gradients that `gradients_of` takes from parameters and batch."""
    optimizer = optax.adam(1e-3)

    def init() -> Any:
        first = params()
        return first, optimizer.init(first)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, gradients = gradients_of(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    return Workload(step, init, batch)


def accumulation() -> Workload:
    """The gradient is summed over four parts of the batch, in a loop."""

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        def part(total: Any, rows: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(_dense_loss)(params, rows)), None

        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        total, _ = lax.scan(part, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
        return jax.tree.map(lambda x: x / 4, total)

    return _by_gradients(gradients_of, _rows, _dense_params)


def sharpness_aware() -> Workload:
    """The gradient is that of a point uphill (Foret et al., 2021)."""

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        uphill = jax.grad(_dense_loss)(params, batch)
        scale = 0.05 / optax.tree.norm(uphill)
        return jax.value_and_grad(_dense_loss)(jax.tree.map(lambda p, g: p + scale * g, params, uphill), batch)

    return _by_gradients(gradients_of, _rows, _dense_params)


def private() -> Workload:
    """The gradient of each image is clipped, and noise added (Abadi et al., 2016)."""
    net = _Convolutions()
    loss = _loss_of(net)

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        def clipped(image: jax.Array, label: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, (image[None], label[None]))
            return value, jax.tree.map(lambda g: g * jnp.minimum(1, 1 / optax.tree.norm(gradient)), gradient)

        values, gradients = jax.vmap(clipped)(*batch)
        leaves, tree = jax.tree.flatten(gradients)
        keys = jax.random.split(jax.random.key(jnp.int32(1000 * values[0])), len(leaves))
        noisy = [g.mean(0) + 1e-3 * jax.random.normal(k, g.shape[1:]) for g, k in zip(leaves, keys, strict=True)]
        return values.mean(), jax.tree.unflatten(tree, noisy)

    return _by_gradients(gradients_of, _images, lambda: params_of(net, normal(0, 1, 32, 32, 3)))


def curvature() -> Workload:
    """The gradient, and a product of the Hessian with it, by forward over reverse mode (Pearlmutter, 1994)."""

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, gradients = jax.value_and_grad(_dense_loss)(params, batch)
        _, products = jax.jvp(lambda p: jax.grad(_dense_loss)(p, batch), (params,), (gradients,))
        return value, jax.tree.map(lambda g, h: g - 0.01 * h, gradients, products)

    return _by_gradients(gradients_of, _rows, _dense_params)


# -- several networks ---------------------------------------------------------------------------------------------------------


def meta_learning() -> Workload:
    """The gradient through three inner steps of gradient descent, for eight tasks at once (Finn et al., 2017)."""
    net = _Convolutions()
    loss = _loss_of(net)

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        def after_training(params: Any, seen: Any, unseen: Any) -> jax.Array:
            for _ in range(3):
                params = jax.tree.map(lambda p, g: p - 0.05 * g, params, jax.grad(loss)(params, seen))
            return loss(params, unseen)

        def mean(params: Any) -> jax.Array:
            return jnp.mean(jax.vmap(after_training, in_axes=(None, 0, 0))(params, *batch))

        return jax.value_and_grad(mean)(params)

    def batch(number: int) -> Any:
        images = [_images(2 * number + i, 64) for i in range(2)]
        return tuple(jax.tree.map(lambda x: x.reshape(8, 8, *x.shape[1:]), part) for part in images)

    return _by_gradients(gradients_of, batch, lambda: params_of(net, normal(0, 1, 32, 32, 3)))


def ensemble() -> Workload:
    """Four networks at once, by `jax.vmap`."""

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        values, gradients = jax.vmap(jax.value_and_grad(_dense_loss), in_axes=(0, None))(params, batch)
        return values.mean(), gradients

    def params() -> Any:
        example = normal(0, 1, _INPUTS)
        return jax.vmap(lambda key: _DENSE.init(key, example)["params"])(jax.random.split(jax.random.key(0), 4))

    return _by_gradients(gradients_of, _rows, params)


def distillation() -> Workload:
    """A small network learns what a frozen one says of images; the step captures its weights (Hinton et al., 2015)."""
    net, teacher = _Convolutions(), nn.Sequential([nn.Conv(64, (3, 3)), nn.relu, nn.Conv(64, (3, 3), strides=2), nn.relu])
    head = normal(3, 64, 10)
    frozen = params_of(teacher, normal(0, 1, 32, 32, 3))

    def gradients_of(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        told = nn.softmax(applied(teacher, frozen, images).mean((1, 2)) @ head)

        def loss(params: Any) -> jax.Array:
            logits = applied(net, params, images)
            return cross_entropy(logits, labels) + optax.losses.kl_divergence(nn.log_softmax(logits), told).mean()

        return jax.value_and_grad(loss)(params)

    return _by_gradients(gradients_of, _images, lambda: params_of(net, normal(0, 1, 32, 32, 3)))


PROCEDURES: Mapping[str, Callable[[], Workload]] = {
    "muon": muon,
    "schedule_free": schedule_free,
    "every_fourth": every_fourth,
    "line_search": line_search,
    "accumulation": accumulation,
    "sharpness_aware": sharpness_aware,
    "private": private,
    "curvature": curvature,
    "meta_learning": meta_learning,
    "ensemble": ensemble,
    "distillation": distillation,
}
