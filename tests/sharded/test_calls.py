"""Calls on several devices look the same as those of `jax.jit`: results, their shardings, what is deleted, and what is raised."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.conformance.observation import VARIANTS, Jit, Seen, expect_same, see

pytestmark = pytest.mark.several_devices


@cache
def _mesh(kind: str) -> Mesh:
    if kind == "half":
        return Mesh(np.array(jax.devices()[:4]), ("x",))
    if kind == "line":
        return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    types = (AxisType.Explicit,) * 2 if kind == "typed" else (AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=types)


def _square(size: int = 16) -> jax.Array:
    return jnp.arange(float(size * size)).reshape(size, size) / (size * size)


def _on(kind: str, *spec: Any, array: Any = None) -> jax.Array:
    return jax.device_put(_square() if array is None else array, NamedSharding(_mesh(kind), PartitionSpec(*spec)))


def _step(a: Any, b: Any) -> Any:
    return jnp.tanh(a @ b) @ b, a + 1


def divided_arguments(jit: Jit) -> list[Seen]:
    f = jit(_step, donate_argnums=0)
    specs: list[tuple[Any, ...]] = [(), ("x",), (None, "x")]
    return [see(f, _on("line", *s), _on("line", *t)) for s in specs for t in specs]


def grids(jit: Jit) -> list[Seen]:
    f = jit(_step)
    return [
        see(f, _on("grid", "x", "y"), _on("grid", "y", "x")),
        see(f, _on("grid", ("x", "y")), _on("grid", None, "y")),
        see(f, _on("grid", "x"), _square()),
        see(f, _on("grid", "x"), np.ones((16, 16), np.float32)),
    ]


def numbers_beside_divided_arguments(jit: Jit) -> list[Seen]:
    f = jit(lambda a, n: {"r": (a * n).sum(0), "n": n + 1, "same": a})
    return [see(f, _on("line", "x"), n) for n in (3.0, jnp.float32(2), np.float32(2))]


def options(jit: Jit) -> list[Seen]:
    rows, columns = (NamedSharding(_mesh("line"), PartitionSpec(*spec)) for spec in (("x",), (None, "x")))
    return [
        see(jit(_step, in_shardings=rows), _square(), _square()),
        see(jit(_step, in_shardings=(rows, columns)), _square(), _square()),
        see(jit(_step, out_shardings=rows), _square(), _square()),
        see(jit(_step, out_shardings=(None, columns), in_shardings=(rows, None)), _square(), _square()),
        see(jit(_step, in_shardings=(rows, columns), donate_argnums=0), _on("line", "x"), _square()),
        see(jit(_step, in_shardings=rows), _on("line", None, "x"), _square()),
        see(
            jit(lambda d: {"o": d["a"] @ d["b"]}, in_shardings=({"a": rows, "b": columns},), out_shardings={"o": columns}),
            {"a": _square(), "b": _square()},
        ),
    ]


def constraints_in_the_step(jit: Jit) -> list[Seen]:
    rows = NamedSharding(_mesh("line"), PartitionSpec("x"))
    return [see(jit(lambda a, b: (jax.lax.with_sharding_constraint(a @ b, rows) + 1, a)), _square(), _square())]


def meshes_in_force(jit: Jit) -> list[Seen]:
    with jax.set_mesh(_mesh("grid")):
        f = jit(lambda a, b: jax.lax.with_sharding_constraint(a @ b, PartitionSpec("x", "y")) * 2)
        placed = jit(_step, in_shardings=PartitionSpec("x"), out_shardings=PartitionSpec("y"))
        return [
            see(f, _square(), _square()),
            see(f, _on("grid", "x"), _square()),
            see(jit(_step), _square(), _square()),
            see(placed, _square(), _square()),
        ]


def explicit_axes(jit: Jit) -> list[Seen]:
    alone = see(jit(lambda a: (jnp.sin(a) * 2 + jnp.arange(16.0), a.sum(1), jnp.zeros(3))), _on("typed", "x", "y"))
    with jax.set_mesh(_mesh("typed")):
        f = jit(lambda a, b: jnp.tanh(jnp.einsum("ij,jk->ik", a, b, out_sharding=PartitionSpec("x", "y"))).sum(0) + 1)
        return [alone, see(f, _on("typed", "x", "y"), _on("typed", None, "y"))]


def uneven_results(jit: Jit) -> list[Seen]:
    return [see(jit(lambda a: (a[:5] * 2, a.reshape(-1)[:30], jnp.pad(a, ((0, 3), (0, 0))))), _on("line", "x"))]


def keys_integers_and_truth(jit: Jit) -> list[Seen]:
    keys = _on("line", "x", array=jax.random.split(jax.random.key(0), 8))

    def f(k: Any, x: Any) -> Any:
        normal = jax.vmap(lambda k: jax.random.normal(k, (4,)))(k)
        return normal, jax.vmap(jax.random.split)(k)[:, 0], x.astype(jnp.int32), x > 0

    return [see(jit(f), keys, _on("line", "x", array=_square(8)))]


def passed_on(jit: Jit) -> list[Seen]:
    return [see(jit(lambda a, b: (a, b @ a, b), donate_argnums=(0, 1)), _on("line", "x"), _on("line"))]


def captured(jit: Jit) -> list[Seen]:
    divided, whole = _on("line", "x"), _square()
    f = jit(lambda a: (a @ divided + whole).sum(1))
    return [see(f, _on("line", "x")), see(f, _square())]


def a_part_of_the_devices(jit: Jit) -> list[Seen]:
    return [see(jit(_step), _on("half", "x"), _on("half"))]


def different_devices(jit: Jit) -> list[Seen]:
    f = jit(_step)
    return [see(f, _on("half", "x"), _on("line", "x")), see(f, _on("line", "x"), jax.device_put(_square(), jax.devices()[0]))]


def loops(jit: Jit) -> list[Seen]:
    def f(w: Any, x: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            return jnp.tanh(c @ w), c.sum()

        return jax.value_and_grad(lambda w: jax.lax.scan(body, x, w)[0].sum())(w)

    w = jnp.stack([_square()] * 6)
    return [
        see(jit(f), _on("line", None, "x", array=w), _on("line", "x")),
        see(jit(f), _on("grid", None, "y", array=w), _on("grid", "x")),
    ]


def half_precision(jit: Jit) -> list[Seen]:
    return [see(jit(lambda a: (a @ a.T).astype(jnp.bfloat16) * 2), _on("line", "x"))]


def mapped_over_shards(jit: Jit) -> list[Seen]:
    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")

    def g(a: Any, b: Any) -> Any:
        return jax.lax.psum(a @ b, "x"), jnp.tanh(a) * 2

    def h(a: Any) -> Any:
        return jax.lax.all_gather(a, "x").sum(0)

    mapped = jax.shard_map(g, mesh=_mesh("line"), in_specs=(columns, rows), out_specs=(PartitionSpec(), columns))
    gathered = jax.shard_map(h, mesh=_mesh("line"), in_specs=rows, out_specs=rows)
    a, b = _on("line", None, "x"), _on("line", "x")
    return [
        see(jit(lambda a, b: mapped(jnp.sin(a), b)[0] + 1), a, b),
        see(jit(lambda a, b: mapped(a, b)), _square(), _square()),
        see(jit(lambda a: gathered(a * 2) + 1), b),
        see(jit(jax.value_and_grad(lambda a, b: (mapped(jnp.sin(a), b)[0] ** 2).sum())), a, b),
    ]


def pmapped(jit: Jit) -> list[Seen]:
    several = jnp.stack([_square()] * 8)
    return [see(jit(jax.pmap(lambda a, b: a @ b)), several, several)]


SCENARIOS: list[Callable[[Jit], list[Seen]]] = [
    divided_arguments, grids, numbers_beside_divided_arguments, options, constraints_in_the_step, meshes_in_force, explicit_axes,
    uneven_results, keys_integers_and_truth, passed_on, captured, a_part_of_the_devices, different_devices, loops,
    half_precision, mapped_over_shards, pmapped,
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_calls_on_several_devices_look_the_same_as_of_jit(scenario: Callable[[Jit], list[Seen]], variant: str) -> None:
    expect_same(scenario, VARIANTS[variant])


def test_arrays_that_are_deleted_or_donated_and_given_twice_are_refused() -> None:
    """`jax.jit` itself ends the process with a segmentation fault in both cases (jax 0.10.2)."""
    f = VARIANTS["segments"](_step, donate_argnums=0)
    x = _on("line", "x")
    assert see(f, x, x).raised == "refused by Execute"
    assert not x.is_deleted()
    f(x, _on("line", "x"))
    with pytest.raises(RuntimeError, match="has been deleted"):
        f(x, _on("line", "x"))
