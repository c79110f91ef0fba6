"""Workloads on images, of the shape (batch, height, width, channels)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.workloads.workload import Workload, applied, cross_entropy, integers, normal, params_of, trained

# -- a diffusion model --------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Two convolutions beside a shortcut, with the time of the diffusion added between them."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.channels)(nn.silu(time))[:, None, None, :]
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(y)))
        return y + (x if x.shape[-1] == self.channels else nn.Conv(self.channels, (1, 1))(x))


class _UNet(nn.Module):
    """Residual blocks on three scales, with shortcuts between the two halves (Ronneberger et al., 2015)."""

    widths: tuple[int, ...] = (32, 64, 96)

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        waves = time[:, None] * jnp.exp(-jnp.arange(16) / 4)
        embedded = nn.Dense(64)(nn.silu(nn.Dense(64)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))))
        x, kept = nn.Conv(self.widths[0], (3, 3))(x), []
        for width in self.widths:
            x = _Residual(width)(x, embedded)
            kept.append(x)
            x = nn.Conv(width, (3, 3), strides=2)(x)
        x = _Residual(self.widths[-1])(x, embedded)
        for width in reversed(self.widths):
            x = jnp.concatenate([nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x), kept.pop()], -1)
            x = _Residual(width)(x, embedded)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


def diffusion() -> Workload:
    """The noise in an image is predicted (Ho et al., 2020), and the weights are averaged."""
    net, optimizer = _UNet(), optax.adam(1e-3)

    def init() -> Any:
        params = params_of(net, normal(0, 1, 32, 32, 3), jnp.zeros(1))
        return params, jax.tree.map(jnp.copy, params), optimizer.init(params), jax.random.key(1)

    def step(state: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        params, average, opt_state, key = state
        key, for_time, for_noise = jax.random.split(key, 3)
        time = jax.random.uniform(for_time, (len(images),))
        noise = jax.random.normal(for_noise, images.shape)
        signal = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noisy = signal * images + jnp.sqrt(1 - signal**2) * noise

        def loss(params: Any) -> jax.Array:
            return jnp.mean((applied(net, params, noisy, time) - noise) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.01)
        return (params, average, opt_state, key), value

    return Workload(step, init, lambda number: normal(number, 8, 32, 32, 3))


# -- classifiers --------------------------------------------------------------------------------------------------------------


class _ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a dense network of one hidden layer (Liu et al., 2022)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm()(nn.Conv(width, (7, 7), feature_group_count=width)(x))
        return x + self.param("scale", nn.initializers.constant(0.1), (width,)) * nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))


class _ConvNeXt(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64, 128):
            x = nn.Conv(width, (2, 2), strides=2)(x)
            for _ in range(2):
                x = _ConvNeXtBlock()(x)
        return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


def _classified(net: nn.Module, batch_size: int, size: int, optimizer: optax.GradientTransformation) -> Workload:
    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        images, labels = batch
        return cross_entropy(applied(net, params, images, rngs={"dropout": key}), labels)

    return trained(
        lambda: params_of(net, normal(0, 1, size, size, 3)),
        loss,
        lambda number: (normal(number, batch_size, size, size, 3), integers(number, 10, batch_size)),
        optimizer=optimizer,
    )


def convnext() -> Workload:
    return _classified(_ConvNeXt(), 16, 64, optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)))


class _VisionTransformer(nn.Module):
    """Patches, attention by `jax.nn.dot_product_attention`, and dropout (Dosovitskiy et al., 2021)."""

    width: int = 96
    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (8, 8), strides=8)(x).reshape(len(x), -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(4):
            y = nn.Dense(3 * self.width)(nn.LayerNorm()(x)).reshape(*x.shape[:2], 3, self.heads, -1)
            y = jax.nn.dot_product_attention(y[:, :, 0], y[:, :, 1], y[:, :, 2]).reshape(x.shape)
            x = x + nn.Dropout(0.1, deterministic=not self.has_rng("dropout"))(nn.Dense(self.width)(y))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def vision_transformer() -> Workload:
    return _classified(_VisionTransformer(), 16, 96, optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4)))


# -- two networks -------------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    """Convolutions down to an eighth of the size, and a vector of the image."""

    outputs: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64, 128):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), strides=2)(nn.relu(nn.Conv(width, (3, 3))(x)))))
        return nn.Dense(self.outputs)(x.reshape(len(x), -1))


class _Decoder(nn.Module):
    """Transposed convolutions from a vector to an image of 32x32 pixels."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.Dense(4 * 4 * 128)(z).reshape(-1, 4, 4, 128)
        for width in (64, 32, 3):
            x = nn.ConvTranspose(width, (4, 4), strides=(2, 2))(nn.relu(nn.GroupNorm(8)(x)))
        return jnp.tanh(x)


class _Critic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64, 128):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), strides=2)(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def gan() -> Workload:
    """A generator and a critic are trained in one step, each by its own optimizer (Goodfellow et al., 2014)."""
    maker, critic, optimizer = _Decoder(), _Critic(), optax.adam(2e-4, b1=0.5)

    def init() -> Any:
        made, judged = params_of(maker, normal(0, 1, 64)), params_of(critic, normal(0, 1, 32, 32, 3), seed=1)
        return made, judged, optimizer.init(made), optimizer.init(judged), jax.random.key(1)

    def step(state: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        made, judged, made_state, judged_state, key = state
        key, used = jax.random.split(key)
        z = jax.random.normal(used, (len(images), 64))

        def critic_loss(judged: Any) -> jax.Array:
            fakes = applied(maker, made, z)
            real, fake = (applied(critic, judged, x) for x in (images, fakes))
            return jnp.mean(nn.softplus(-real)) + jnp.mean(nn.softplus(fake))

        def maker_loss(made: Any, judged: Any) -> jax.Array:
            return jnp.mean(nn.softplus(-applied(critic, judged, applied(maker, made, z))))

        first, gradients = jax.value_and_grad(critic_loss)(judged)
        updates, judged_state = optimizer.update(gradients, judged_state)
        judged = optax.apply_updates(judged, updates)
        second, gradients = jax.value_and_grad(maker_loss)(made, judged)
        updates, made_state = optimizer.update(gradients, made_state)
        made = optax.apply_updates(made, updates)
        return (made, judged, made_state, judged_state, key), first + second

    return Workload(step, init, lambda number: jnp.tanh(normal(number, 32, 32, 32, 3)))


def autoencoder() -> Workload:
    """Vectors are taken from a table of 256 entries, by a straight-through estimate (van den Oord et al., 2017)."""
    encoder, decoder = _Encoder(8 * 64), _Decoder()

    def params() -> Any:
        table = normal(2, 256, 64, scale=0.1)
        return {
            "encoder": params_of(encoder, normal(0, 1, 32, 32, 3)),
            "decoder": params_of(decoder, normal(0, 1, 512)),
            "table": table,
        }

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        del key
        z = applied(encoder, params["encoder"], images).reshape(len(images), 8, 64)
        table = params["table"]
        distances = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ table.T + jnp.sum(table**2, -1)
        nearest = table[jnp.argmin(distances, -1)]
        passed = z + jax.lax.stop_gradient(nearest - z)
        made = applied(decoder, params["decoder"], passed.reshape(len(images), -1))
        commitment = jnp.mean((jax.lax.stop_gradient(nearest) - z) ** 2) + jnp.mean((nearest - jax.lax.stop_gradient(z)) ** 2)
        return jnp.mean((made - images) ** 2) + 0.25 * commitment

    return trained(params, loss, lambda number: jnp.tanh(normal(number, 32, 32, 32, 3)))


def self_supervised() -> Workload:
    """Two views of an image; the target network follows the trained one (Grill et al., 2020)."""
    encoder, head, optimizer = _Encoder(), nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(64)]), optax.lars(0.1, momentum=0.9)

    def init() -> Any:
        params = {"encoder": params_of(encoder, normal(0, 1, 32, 32, 3)), "head": params_of(head, normal(0, 1, 64), seed=1)}
        return params, jax.tree.map(jnp.copy, params["encoder"]), optimizer.init(params), jax.random.key(1)

    def step(state: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        params, target, opt_state, key = state
        key, *used = jax.random.split(key, 3)
        views = [images[:, :, :: (1, -1)[i]] + 0.1 * jax.random.normal(k, images.shape) for i, k in enumerate(used)]

        def unit(x: Any) -> jax.Array:
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        def loss(params: Any) -> jax.Array:
            mine = [unit(applied(head, params["head"], applied(encoder, params["encoder"], v))) for v in views]
            theirs = [jax.lax.stop_gradient(unit(applied(encoder, target, v))) for v in views]
            return 4 - 2 * jnp.mean(jnp.sum(mine[0] * theirs[1] + mine[1] * theirs[0], -1))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        changed: Any = optax.apply_updates(params, updates)
        return (changed, optax.incremental_update(changed["encoder"], target, 0.01), opt_state, key), value

    return Workload(step, init, lambda number: normal(number, 32, 32, 32, 3))


# -- with running statistics --------------------------------------------------------------------------------------------------


class _Segmenter(nn.Module):
    """Down and up again, with batch normalization; a class for each pixel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept = []
        for width in (16, 32, 64):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3), use_bias=False)(x)))
            kept.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(64, (3, 3), kernel_dilation=2)(x))
        for width in (64, 32, 16):
            x = jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "bilinear")
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3))(jnp.concatenate([x, kept.pop()], -1))))
        return nn.Conv(6, (1, 1))(x)


def segmentation() -> Workload:
    net, optimizer = _Segmenter(), optax.sgd(0.01, momentum=0.9, nesterov=True)

    def init() -> Any:
        variables = jax.jit(net.init)(jax.random.key(0), normal(0, 1, 64, 64, 3))
        return variables["params"], variables["batch_stats"], optimizer.init(variables["params"])

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, statistics, opt_state = state
        images, labels = batch

        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = net.apply(variables, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), changed["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), statistics, opt_state), value

    return Workload(step, init, lambda number: (normal(number, 8, 64, 64, 3), integers(number, 6, 8, 64, 64)))


VISION: Mapping[str, Callable[[], Workload]] = {
    "diffusion": diffusion,
    "convnext": convnext,
    "vision_transformer": vision_transformer,
    "gan": gan,
    "autoencoder": autoencoder,
    "self_supervised": self_supervised,
    "segmentation": segmentation,
}
