"""What describes a heavy operator to those who predict its latency."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tensile_jax.trace.cost.features import features_of
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.program import Nested
from tensile_jax.trace.reading.flatten import flatten


def described(function: Any, *args: Any) -> list[tuple[str, tuple[float, ...]]]:
    program = flatten(Nested(jax.make_jaxpr(function)(*args)))
    return [(e.primitive.name, features_of(program, e)) for e in program.equations if kind_of(e) == "heavy"]


def convolution(layout: str, kernel: str, **options: Any) -> Any:
    numbers = (layout, kernel, layout)
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **options)


def test_a_convolution_is_described_alike_in_every_layout_but_for_the_layout() -> None:
    x, w = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8, 32))
    ((_, last),) = described(convolution("NHWC", "HWIO"), x, w)
    ((_, first),) = described(convolution("NCHW", "OIHW"), x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1))
    assert len(last) == len(first)
    assert last[-3:] == (1.0, 1.0, 1.0) and first[-3:] == (0.0, 0.0, 0.0)
    assert last[5:-3] == first[5:-3] and last[:3] == first[:3]


@pytest.mark.parametrize("options", [{"rhs_dilation": (2, 2)}, {"feature_group_count": 2}])
def test_parameters_of_a_convolution_count(options: dict[str, Any]) -> None:
    x, w = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8 // options.get("feature_group_count", 1), 32))
    ((_, own),) = described(convolution("NHWC", "HWIO", **options), x, w)
    ((_, plain),) = described(convolution("NHWC", "HWIO"), x, jnp.ones((3, 3, 8, 32)))
    assert own[5:] != plain[5:]


def test_operators_of_one_primitive_have_equally_many_numbers() -> None:
    def layer(w: Any, k: Any, x: Any) -> Any:
        y = convolution("NHWC", "HWIO")(x, k)
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        h = y.reshape(len(x), -1) @ w
        return jnp.sum(jnp.einsum("ab,cb->ac", h, h) ** 2) + jnp.sum(jnp.cumsum(h, axis=1))

    args = jnp.ones((8 * 8 * 4, 16)), jnp.ones((3, 3, 3, 4)), jnp.ones((2, 16, 16, 3))
    counts: dict[str, set[int]] = {}
    for primitive, features in described(jax.grad(layer, argnums=(0, 1)), *args):
        counts.setdefault(primitive, set()).add(len(features))
        assert all(np.isfinite(features)) and features
    assert {"conv_general_dilated", "dot_general"} <= counts.keys()
    assert all(len(each) == 1 for each in counts.values())


def test_a_product_is_described_by_its_sizes_and_which_way_its_operands_lie() -> None:
    a, b = jnp.ones((8, 16)), jnp.ones((16, 32))
    ((_, one),) = described(lambda a, b: a @ b, a, b)
    ((_, other),) = described(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))), a.T, b)
    assert one[5:9] == other[5:9] and one[9:] != other[9:]


def test_what_has_no_shape_is_not_described() -> None:
    def step() -> Any:
        return lax.after_all(lax.create_token(), lax.create_token())

    program = flatten(Nested(jax.make_jaxpr(step)()))
    assert program.equations and all(features_of(program, e) == () for e in program.equations)
