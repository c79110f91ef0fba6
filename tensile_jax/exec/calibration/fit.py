"""Fits the networks of a latency model to the operators that were measured (TENSILE section IV-A).

For every primitive with enough samples, several MLPs of four layers are fitted at once, from different initial weights. They
predict the logarithm of latency / roofline. The *roofline* of an operator is the time that its operations and bytes take at the
device's measured rates. A large error counts in proportion to its size, not to its square, so a few outliers matter little.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tensile_jax.device_profiles.calibrations import OperatorSample
from tensile_jax.plan.analysis.latency_model import LatencyModel, Network, roofline_us

# `make bench-predictor` on a CPU: with 700 operators, the median error is 18 % with 300 steps, and 22 % with 1,000; wider
# networks, and more of them, gained nothing.
_WIDTH, _NETWORKS, _STEPS = 64, 4, 300
_RATE, _DECAY = 3e-3, 0.3
_FEWEST_SAMPLES = 30  # of a primitive; below that, its latency is the roofline's
_SMALL = 0.1  # standard deviations; errors below it count by their squares


class _Mlp(nn.Module):
    """Four layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = jax.nn.gelu(nn.Dense(_WIDTH)(x))
        return nn.Dense(1)(x)[..., 0]


def fit(samples: Sequence[OperatorSample], flops_per_us: float, bytes_per_us: float) -> LatencyModel:
    """A latency model, fitted to these samples of a device with these rates."""
    networks: dict[str, Network] = {}
    by_form: dict[tuple[str, int], list[OperatorSample]] = {}
    for sample in samples:
        by_form.setdefault((sample.primitive, len(sample.features)), []).append(sample)
    for (primitive, _), several in by_form.items():
        if len(several) >= _FEWEST_SAMPLES:
            networks[primitive] = _fit_one(several, flops_per_us, bytes_per_us)
    return LatencyModel(networks, flops_per_us, bytes_per_us)


def _fit_one(samples: Sequence[OperatorSample], flops_per_us: float, bytes_per_us: float) -> Network:
    inputs = np.array([(*s.features, s.load) for s in samples], np.float32)
    flops, nbytes, us = (np.array([getattr(s, name) for s in samples], float) for name in ("flops", "nbytes", "us"))
    outputs = np.log(us / roofline_us(flops, nbytes, flops_per_us, bytes_per_us)).astype(np.float32)
    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0) + 0.01
    output_mean, output_deviation = float(outputs.mean()), float(outputs.std()) + 0.001
    x, y = jnp.asarray((inputs - mean) / deviation), jnp.asarray((outputs - output_mean) / output_deviation)
    model = _Mlp()
    optimizer = optax.adamw(optax.cosine_decay_schedule(_RATE, _STEPS), weight_decay=_DECAY)

    def loss(params: Any) -> Any:
        return jnp.mean(jnp.sqrt((model.apply(params, x) - y) ** 2 + _SMALL**2))  # pyright: ignore[reportOperatorIssue]

    def train(key: Any) -> Any:
        params = model.init(key, x)

        def update(carry: Any, _: Any) -> Any:
            params, state = carry
            changes, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, changes), state), None

        (params, _), _ = jax.lax.scan(update, (params, optimizer.init(params)), None, _STEPS)
        return params["params"]

    layers = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), _NETWORKS))
    named = [layers[f"Dense_{i}"] for i in range(4)]
    return Network(
        tuple(np.asarray(layer["kernel"]) for layer in named),
        tuple(np.asarray(layer["bias"]) for layer in named),
        mean,
        deviation,
        inputs.min(axis=0),
        inputs.max(axis=0),
        output_mean,
        output_deviation,
    )
