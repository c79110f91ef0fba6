"""Workloads on graphs, fields, points and tables."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.workloads.workload import Workload, applied, cross_entropy, integers, normal, params_of, trained


def _dense(*widths: int) -> nn.Sequential:
    layers: list[Any] = []
    for width in widths[:-1]:
        layers += [nn.Dense(width), nn.silu]
    return nn.Sequential([*layers, nn.Dense(widths[-1])])


# -- graphs -------------------------------------------------------------------------------------------------------------------


class _Messages(nn.Module):
    """Messages along edges are summed at the nodes (Gilmer et al., 2017)."""

    @nn.compact
    def __call__(self, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        x = nn.Dense(64)(nodes)
        for _ in range(4):
            messages = _dense(128, 64)(jnp.concatenate([x[senders], x[receivers]], -1))
            received = jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))
            x = nn.LayerNorm()(x + _dense(128, 64)(jnp.concatenate([x, received], -1)))
        return nn.Dense(8)(x)


def graph() -> Workload:
    """A class for each of 1,024 nodes with 8,192 edges."""
    net = _Messages()

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        *graph, labels = batch
        return cross_entropy(applied(net, params, *graph), labels)

    def batch(number: int) -> Any:
        senders, receivers = integers(number, 1024, 2, 8192)
        return normal(number, 1024, 16), senders, receivers, integers(number, 8, 1024)

    return trained(lambda: params_of(net, *batch(0)[:3]), loss, batch)


# -- fields -------------------------------------------------------------------------------------------------------------------


class _Spectral(nn.Module):
    """Waves of low frequency are multiplied by learned matrices (Li et al., 2021)."""

    modes: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, modes = x.shape[-1], self.modes
        waves = jnp.fft.rfft2(x, axes=(1, 2))
        real, imaginary = (
            self.param(name, nn.initializers.normal(1 / width), (modes, modes, width, width)) for name in ("real", "imaginary")
        )
        low = jnp.einsum("bxyi,xyio->bxyo", waves[:, :modes, :modes], real + 1j * imaginary)
        return jnp.fft.irfft2(jnp.zeros_like(waves).at[:, :modes, :modes].set(low), s=x.shape[1:3], axes=(1, 2))


class _Operator(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(24)(x)
        for _ in range(4):
            x = nn.gelu(_Spectral()(x) + nn.Dense(24)(x))
        return nn.Dense(1)(nn.gelu(nn.Dense(64)(x)))


def fourier_operator() -> Workload:
    net = _Operator()

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        return jnp.mean((applied(net, params, batch[0]) - batch[1]) ** 2)

    return trained(
        lambda: params_of(net, normal(0, 1, 64, 64, 1)),
        loss,
        lambda number: (normal(number, 8, 64, 64, 1), normal(number + 1, 8, 64, 64, 1)),
    )


def physics() -> Workload:
    """The heat equation at random points, with second derivatives of a network (Raissi et al., 2019)."""
    net = _dense(96, 96, 96, 1)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        inside, border = batch

        def u(point: jax.Array) -> jax.Array:
            return applied(net, params, point)[0]

        def residual(point: jax.Array) -> jax.Array:
            return jax.grad(u)(point)[0] - 0.1 * jax.hessian(u)(point)[1, 1]

        return jnp.mean(jax.vmap(residual)(inside) ** 2) + jnp.mean((jax.vmap(u)(border) - jnp.sin(jnp.pi * border[:, 1])) ** 2)

    return trained(
        lambda: params_of(net, normal(0, 2)), loss, lambda number: (normal(number, 1024, 2), normal(number + 1, 256, 2))
    )


# -- densities ----------------------------------------------------------------------------------------------------------------


def gaussian_process() -> Workload:
    """The likelihood of 512 values by a Cholesky decomposition, over a learned kernel (Wilson et al., 2016)."""
    net = _dense(64, 64, 4)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        points, values = batch
        z = applied(net, params["net"], points)
        distances = jnp.sum((z[:, None] - z[None]) ** 2, -1)
        kernel = jnp.exp(params["scale"] - distances) + (1e-3 + jnp.exp(params["noise"])) * jnp.eye(len(points))
        lower = jnp.linalg.cholesky(kernel)
        white = jax.scipy.linalg.solve_triangular(lower, values, lower=True)
        return 0.5 * jnp.sum(white**2) / len(points) + jnp.mean(jnp.log(jnp.diagonal(lower)))

    return trained(
        lambda: {"net": params_of(net, normal(0, 1, 6)), "scale": jnp.zeros(()), "noise": jnp.zeros(())},
        loss,
        lambda number: (normal(number, 512, 6), normal(number + 1, 512)),
    )


class _Coupling(nn.Module):
    """Half of the numbers are scaled and moved as a network says that sees the other half (Dinh et al., 2017)."""

    @nn.compact
    def __call__(self, x: jax.Array, *, swapped: bool) -> tuple[jax.Array, jax.Array]:
        a, b = jnp.split(x, 2, -1)
        a, b = (b, a) if swapped else (a, b)
        scale, move = jnp.split(_dense(192, 192, 2 * a.shape[-1])(a), 2, -1)
        scale = jnp.tanh(scale)
        b = b * jnp.exp(scale) + move
        return jnp.concatenate([b, a] if swapped else [a, b], -1), scale.sum(-1)


class _Flow(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        total = jnp.zeros(len(x))
        for layer in range(6):
            x, logarithm = _Coupling()(x, swapped=layer % 2 == 1)
            total = total + logarithm
        return total - 0.5 * jnp.sum(x**2, -1)


def flow() -> Workload:
    """The likelihood of points under an invertible network."""
    net = _Flow()

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        del key
        return -jnp.mean(applied(net, params, batch))

    return trained(lambda: params_of(net, normal(0, 1, 32)), loss, lambda number: normal(number, 2048, 32))


# -- tables -------------------------------------------------------------------------------------------------------------------


class _Recommender(nn.Module):
    """Tables of entries, their products in pairs, and dense networks (Naumov et al., 2019)."""

    @nn.compact
    def __call__(self, entries: jax.Array, numbers: jax.Array) -> jax.Array:
        found = [nn.Embed(4096, 32)(entries[:, i]) for i in range(entries.shape[1])]
        x = jnp.stack([*found, _dense(128, 32)(numbers)], 1)
        pairs = jnp.einsum("bik,bjk->bij", x, x)[:, *jnp.triu_indices(x.shape[1], 1)]
        return _dense(256, 128, 1)(jnp.concatenate([pairs, x[:, -1]], -1))[:, 0]


def recommender() -> Workload:
    """Which of 2,048 offers are taken."""
    net = _Recommender()

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        *seen, taken = batch
        return optax.sigmoid_binary_cross_entropy(applied(net, params, *seen), taken).mean()

    def batch(number: int) -> Any:
        return integers(number, 4096, 2048, 12), normal(number, 2048, 13), integers(number, 2, 2048).astype(jnp.float32)

    return trained(lambda: params_of(net, *batch(0)[:2]), loss, batch, optimizer=optax.adagrad(0.01))


SCIENCE: Mapping[str, Callable[[], Workload]] = {
    "graph": graph,
    "fourier_operator": fourier_operator,
    "physics": physics,
    "gaussian_process": gaussian_process,
    "flow": flow,
    "recommender": recommender,
}
