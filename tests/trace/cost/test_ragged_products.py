"""What XLA writes for products of ragged groups, and how many operations it makes of them, is known before compiling."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.fitting import find_plan
from tensile_jax.trace import Equation, Nested, Program
from tensile_jax.trace.cost import ragged_products
from tensile_jax.trace.cost.body_memory import inner_bytes
from tensile_jax.trace.cost.flops import flops_of
from tensile_jax.trace.cost.traffic import relayout_bytes
from tensile_jax.trace.reading.flatten import flatten
from tests.builders import fresh

ROWS, WIDTH, OUT, GROUPS = 512, 64, 128, 8
SHAPES = {"x": (ROWS, WIDTH), "experts": (GROUPS, WIDTH, OUT), "cotangent": (ROWS, OUT)}


def product(x: jax.Array, experts: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, experts, jnp.full(GROUPS, ROWS // GROUPS, jnp.int32))


def of_rows(x: jax.Array, experts: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: product(x, experts), x)[1](cotangent)[0]


def of_experts(x: jax.Array, experts: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jax.vjp(lambda experts: product(x, experts), experts)[1](cotangent)[0]


def forward(x: jax.Array, experts: jax.Array, cotangent: jax.Array) -> jax.Array:
    return product(x, experts)


def traced(step: Callable[..., Any], dtype: Any) -> tuple[Program, Equation]:
    program = flatten(Nested(jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES.values()))))
    (found,) = [e for e in program.equations if e.primitive.name == ragged_products.RAGGED_PRODUCT]
    return program, found


@pytest.mark.parametrize("step", [forward, of_rows, of_experts])
def test_what_is_written_beside_operands_and_result_is_what_xla_says(step: Callable[..., Any]) -> None:
    program, equation = traced(step, jnp.float32)
    compiled = jax.jit(step).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values())).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert inner_bytes(program, equation) == pytest.approx(memory.temp_size_in_bytes, rel=0.02)


@pytest.mark.parametrize("step", [forward, of_rows, of_experts])
def test_each_group_costs_as_much_as_all_rows(step: Callable[..., Any]) -> None:
    assert flops_of(*traced(step, jnp.float32)) == 2 * GROUPS * ROWS * WIDTH * OUT


def test_numbers_of_16_bits_are_widened_on_a_cpu() -> None:
    program, equation = traced(forward, jnp.bfloat16)
    assert relayout_bytes(program, equation) == 2 * inner_bytes(program, equation)


def test_a_kernel_that_reads_groups_where_they_are_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    option = SimpleNamespace(jax_ragged_dot_use_gpu_pallas_triton_lowering=True)
    monkeypatch.setattr(ragged_products, "jax", SimpleNamespace(config=option))
    program, equation = traced(forward, jnp.float32)
    assert inner_bytes(program, equation) == 0
    assert flops_of(program, equation) == 2 * ROWS * WIDTH * OUT


@pytest.mark.slow
def test_a_mixture_of_experts_trains_within_its_budget_as_under_plain_jit() -> None:
    optimizer = optax.adam(1e-3)
    keys = jax.random.split(jax.random.key(0), 7)
    layers = [
        {
            "router": jax.random.normal(keys[2 * i], (32, 4)),
            "in": jax.random.normal(keys[2 * i], (4, 32, 64)) / 6,
            "out": jax.random.normal(keys[2 * i + 1], (4, 64, 32)) / 8,
        }
        for i in range(3)
    ]

    def loss_of(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            weight, expert = jax.lax.top_k(jax.nn.softmax(x @ layer["router"]), 1)
            order = jnp.argsort(expert[:, 0])
            sizes = jnp.bincount(expert[:, 0], length=4)
            hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], layer["in"], sizes))
            made = jax.lax.ragged_dot(hidden, layer["out"], sizes)
            x += jnp.zeros_like(x).at[order].set(made) * weight
        return jnp.mean((x - 1) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        layers, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(layers, x)
        updates, moments = optimizer.update(gradients, moments, layers)
        return (optax.apply_updates(layers, updates), moments), loss

    x = jax.random.normal(keys[6], (512, 32))
    state = layers, optimizer.init(layers)
    plain = jax.jit(step, donate_argnums=0)
    peak = tensile.jit(step, donate_argnums=0).jit_peak_bytes(state, x)
    ours = tensile.jit(step, budget=int(0.5 * peak), donate_argnums=0)
    mine, theirs = fresh(state), fresh(state)
    for _ in range(4):
        mine, loss = ours(mine, x)
        theirs, expected = plain(theirs, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    plan = ours.plan(state, x)
    assert not plan.whole and ours.report().peak_bytes <= 0.5 * peak
    # 1.4 times what was predicted; without the copies of rows for each expert, it would be 3.1 times
    assert find_plan._shown_ratio(find_plan.begin(ours._calls.step((state, x), {}), None)) < 2
