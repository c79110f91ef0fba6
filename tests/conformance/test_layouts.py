"""Memory layouts that a caller asks for, or gives arrays in, look the same as under `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from tests.conformance.observation import VARIANTS, Jit, Seen, expect_same, see


def format_of(*major_to_minor: int) -> Format:
    return Format(Layout(major_to_minor), SingleDeviceSharding(jax.devices()[0]))


def step(weights: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(lambda ws: jnp.mean(sum(jnp.tanh(x @ w) for w in ws) ** 2))(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def weights(form: Format | None = None) -> list[jax.Array]:
    made = [jnp.ones((24, 48)) / (i + 2) for i in range(2)]
    return made if form is None else [jax.device_put(w, form) for w in made]


def layouts(jit: Jit) -> list[Seen]:
    columns, rows, x = format_of(1, 0), format_of(0, 1), jnp.ones((16, 24))
    asked = {"out_shardings": ([columns] * 2, None)}
    taken = {"in_shardings": ([columns] * 2, None)}
    return [
        see(jit(step, **asked), weights(), x),
        see(jit(step, donate_argnums=0, **asked), weights(columns), x),
        see(jit(step, donate_argnums=0), weights(columns), x),
        see(jit(step, **taken), weights(), x),
        see(jit(step, **taken), weights(columns), x),
        see(jit(step, **taken), weights(rows), x),
        see(jit(step, out_shardings=Format(Layout.AUTO)), weights(), x),
    ]


@pytest.mark.parametrize("jit", VARIANTS.values(), ids=VARIANTS)
def test_layouts_look_the_same_as_under_jit(jit: Jit) -> None:
    expect_same(layouts, jit)
