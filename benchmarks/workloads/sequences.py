"""Workloads on signals and time series, of the shape (batch, time, channels)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.workloads.workload import Workload, applied, cross_entropy, integers, normal, params_of, trained


class _Recurrent(nn.Module):
    """Recurrent layers, one after the other, and a dense one at each time."""

    cells: tuple[nn.RNNCellBase, ...]
    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for cell in self.cells:
            x = jnp.asarray(nn.RNN(cell)(x))
        return nn.Dense(self.outputs)(x)


def lstm(*, width: int = 128, texts: int = 32, length: int = 64) -> Workload:
    """The next of 64 letters is predicted (Hochreiter and Schmidhuber, 1997)."""
    net = _Recurrent((nn.OptimizedLSTMCell(width), nn.OptimizedLSTMCell(width)), 64)

    def loss(params: Any, letters: jax.Array, key: jax.Array) -> jax.Array:
        del key
        seen = jax.nn.one_hot(letters[:, :-1], 64)
        return cross_entropy(applied(net, params, seen), letters[:, 1:])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3))
    return trained(
        lambda: params_of(net, normal(0, 1, 4, 64)),
        loss,
        lambda number: integers(number, 64, texts, length + 1),
        optimizer=optimizer,
    )


def speech() -> Workload:
    """Letters without their times are read from a signal (CTC: Graves et al., 2006)."""
    net = _Recurrent((nn.GRUCell(96), nn.GRUCell(96)), 30)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        signal, letters = batch
        logits = applied(net, params, signal)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), letters, jnp.zeros(letters.shape)).mean()

    return trained(
        lambda: params_of(net, normal(0, 1, 4, 20)),
        loss,
        lambda number: (normal(number, 16, 64, 20), 1 + integers(number, 29, 16, 12)),
    )


class _StateSpace(nn.Module):
    """A linear recurrence whose coefficients depend on the input, by an associative scan (Gu and Dao, 2023)."""

    states: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = 2 * x.shape[-1]
        y, gate = jnp.split(nn.Dense(2 * width)(x), 2, -1)
        y = nn.silu(nn.Conv(width, (4,), padding=[(3, 0)], feature_group_count=width)(y))
        rate = nn.softplus(nn.Dense(width)(y))[..., None]
        into, out = nn.Dense(self.states)(y)[..., None, :], nn.Dense(self.states)(y)[..., None, :]
        decay = self.param("decay", lambda _: jnp.log(jnp.tile(jnp.arange(1.0, self.states + 1), (width, 1))))

        def joined(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, states = lax.associative_scan(joined, (jnp.exp(-rate * jnp.exp(decay)), rate * into * y[..., None]), axis=1)
        return nn.Dense(x.shape[-1])(jnp.sum(states * out, -1) * nn.silu(gate))


class _StateSpaces(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 48)(tokens)
        for _ in range(3):
            x = x + _StateSpace()(nn.RMSNorm()(x))
        return nn.Dense(64)(nn.RMSNorm()(x))


def state_space() -> Workload:
    net = _StateSpaces()

    def loss(params: Any, letters: jax.Array, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(applied(net, params, letters[:, :-1]), letters[:, 1:])

    return trained(
        lambda: params_of(net, jnp.zeros((1, 8), jnp.int32)),
        loss,
        lambda number: integers(number, 64, 4, 129),
        optimizer=optax.adamw(1e-3),
    )


class _Dilated(nn.Module):
    """Gated convolutions, each over twice the time of the one before (van den Oord et al., 2016)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, total = nn.Dense(48)(x), jnp.zeros(())
        for layer in range(8):
            y = nn.Conv(96, (2,), kernel_dilation=2**layer, padding="CAUSAL")(x)
            y = nn.tanh(y[..., :48]) * nn.sigmoid(y[..., 48:])
            total, x = total + nn.Dense(48)(y), x + nn.Dense(48)(y)
        return nn.Dense(32)(nn.relu(total))


def sound() -> Workload:
    """The class of the next sample is predicted."""
    net = _Dilated()

    def loss(params: Any, classes: jax.Array, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(applied(net, params, jax.nn.one_hot(classes[:, :-1], 32)), classes[:, 1:])

    return trained(lambda: params_of(net, normal(0, 1, 8, 32)), loss, lambda number: integers(number, 32, 4, 1025))


def differential_equation(*, unknowns: int = 8, width: int = 128, beginnings: int = 512, steps: int = 40) -> Workload:
    """A field is learned from where its flow leads, by Runge-Kutta steps in a loop (Chen et al., 2018)."""
    field = nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(width), nn.tanh, nn.Dense(unknowns)])

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        begin, end = batch

        def slope(x: jax.Array) -> jax.Array:
            return applied(field, params, x)

        def forward(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            h = 1 / steps
            a = slope(x)
            b = slope(x + h / 2 * a)
            c = slope(x + h / 2 * b)
            d = slope(x + h * c)
            return x + h / 6 * (a + 2 * b + 2 * c + d), None

        found, _ = lax.scan(forward, begin, None, length=steps)
        return jnp.mean((found - end) ** 2)

    return trained(
        lambda: params_of(field, normal(0, 1, unknowns)),
        loss,
        lambda number: (normal(number, beginnings, unknowns), normal(number + 1, beginnings, unknowns)),
    )


SEQUENCES: Mapping[str, Callable[[], Workload]] = {
    "lstm": lstm,
    "speech": speech,
    "state_space": state_space,
    "sound": sound,
    "differential_equation": differential_equation,
}
