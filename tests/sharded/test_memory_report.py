"""The report on a step that runs on several devices has the sizes of one of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of

pytestmark = pytest.mark.several_devices


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def test_sizes_are_those_of_one_device_and_shapes_may_be_sharded() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, copies = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=copies)
    x = jax.ShapeDtypeStruct((8 * 128, 64), jnp.float32, sharding=rows)
    report = tensile.memory(step, w, x, donate_argnums=0, compile=True, device_profile="cpu")
    assert report.devices == 8 and "8 devices" in str(report)
    sizes = {tensor.name: tensor.nbytes for tensor in report.tensors if not tensor.made_by}
    assert sizes == {"w": 4 * 64 * 64, "x": 4 * 128 * 64}
    assert sum(part.nbytes for part in report.at_peak) == report.predicted_peak_bytes
    assert report.compiled_peak_bytes == peak_of(jax.jit(step, donate_argnums=0).lower(w, x).compile())
