"""What loops and branches hold inside is predicted as XLA needs it."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tensile_jax.trace import Equation, Nested, Program
from tensile_jax.trace.cost.body_memory import inner_bytes
from tensile_jax.trace.reading.flatten import flatten

BODIES = ("scan", "while", "cond")
X = np.zeros((256, 64), np.float32)


def bodies(step: Callable[..., Any], *args: Any) -> list[tuple[Program, Equation]]:
    program = flatten(Nested(jax.make_jaxpr(step)(*args)))
    return [(program, e) for e in program.equations if e.primitive.name in BODIES]


def compiled_bytes(program: Program, body: Equation) -> int:
    """What XLA needs beside inputs and outputs for this equation alone."""
    avals = [program.avals[v] if isinstance(v, int) else v.aval for v in body.inputs]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    memory = jax.jit(lambda *values: body.run(values)).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = nn.gelu(nn.Dense(64)(x))
        return nn.Dense(2)(x)


NETWORK = Network()
WEIGHTS = NETWORK.init(jax.random.key(0), X)


def loss_of(weights: Any, x: Any) -> Any:
    return jnp.mean(NETWORK.apply(weights, x) ** 2)  # type: ignore[operator]


def recurrent(cell: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    network, x = nn.RNN(cell(64)), np.zeros((32, 50, 64), np.float32)
    return jax.grad(lambda w, x: jnp.mean(network.apply(w, x) ** 2)), (network.init(jax.random.key(0), x), x)  # type: ignore[operator]


def trained(weights: Any, x: Any) -> Any:
    adam = optax.adam(1e-3)

    def update(_: Any, state: Any) -> Any:
        updates, moments = adam.update(jax.grad(loss_of)(state[0], x), state[1], state[0])
        return optax.apply_updates(state[0], updates), moments

    return jax.lax.fori_loop(0, 100, update, (weights, adam.init(weights)))


def line_search(weights: Any, x: Any) -> Any:
    lbfgs = optax.lbfgs()
    state = lbfgs.init(weights)
    value, gradient = optax.value_and_grad_from_state(lambda w: loss_of(w, x))(weights, state=state)
    return lbfgs.update(gradient, state, weights, value=value, grad=gradient, value_fn=lambda w: loss_of(w, x))[0]


def sometimes(weights: Any, x: Any, now: Any) -> Any:
    return jax.lax.cond(now, lambda w: jax.grad(loss_of)(w, x), lambda w: jax.tree.map(jnp.zeros_like, w), weights)


@pytest.mark.parametrize(
    ("step", "args"),
    [
        pytest.param(*recurrent(nn.LSTMCell), id="lstm"),
        pytest.param(*recurrent(nn.GRUCell), id="gru"),
        pytest.param(trained, (WEIGHTS, X), id="training"),
        pytest.param(line_search, (WEIGHTS, X), id="line search"),
        pytest.param(sometimes, (WEIGHTS, X, True), id="branch"),
    ],
)
def test_a_body_is_predicted_as_xla_compiles_it(step: Any, args: tuple[Any, ...]) -> None:
    ratios = {}
    for program, body in bodies(step, *args):
        needed = compiled_bytes(program, body)
        if needed > 100_000:
            ratios[body.primitive.name, needed] = inner_bytes(program, body) / needed
    assert ratios
    assert all(0.7 < ratio < 1.4 for ratio in ratios.values()), ratios


def test_an_update_of_what_is_carried_needs_no_memory() -> None:
    def decode(cache: Any, x: Any) -> Any:
        def token(carry: Any, place: Any) -> Any:
            cache, x = carry
            cache = cache.at[place].set(x)
            return (cache, jnp.tanh(x + jnp.sum(cache @ x))), x

        return jax.lax.scan(token, (cache, x), jnp.arange(300))[1]

    [(program, body)] = bodies(decode, np.zeros((300, 64), np.float32), np.zeros(64, np.float32))
    assert inner_bytes(program, body) < 10_000  # the cache has 77 KB


def test_an_update_of_what_is_needed_again_needs_a_copy() -> None:
    def step(table: Any, x: Any) -> Any:
        def body(carry: Any, place: Any) -> Any:
            changed = carry.at[place].set(x)
            return carry, jnp.sum(jnp.sin(changed @ x))

        return jax.lax.scan(body, table, jnp.arange(300))[1]

    [(program, body)] = bodies(step, np.zeros((300, 64), np.float32), np.zeros(64, np.float32))
    assert inner_bytes(program, body) >= 300 * 64 * 4


def test_results_of_a_branch_count_as_those_of_the_conditional() -> None:
    def step(x: Any, now: Any) -> Any:
        return jax.lax.cond(now, lambda x: jnp.einsum("ik,jk->ij", x, x), lambda x: jnp.zeros((256, 256)), x)

    [(program, body)] = bodies(step, X, True)
    assert inner_bytes(program, body) == 0
