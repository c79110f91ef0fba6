"""Calls that look the same under `jax.jit` and `tensile_jax.jit`, in whatever way a caller can look at them."""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.conformance.observation import VARIANTS, Jit, Scenario, Seen, expect_same, see


class Mode(enum.IntEnum):
    """A static argument that equals an integer."""

    ONE = 1


class Equal:
    """Static arguments that are all equal."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


def mixed(a: Any, b: Any) -> Any:
    """Two products, so that there is more than one segment."""
    return {"sum": jnp.tanh(a @ b) @ b, "n": a.sum() * 2, "again": b}


def square(n: int = 4, start: float = 0.0) -> jax.Array:
    return jnp.arange(n * n, dtype=jnp.float32).reshape(n, n) / (n * n) + start


# -- static arguments and settings ----------------------------------------------------------------------------------------


def static_arguments_are_told_apart_by_type(jit: Jit) -> list[Seen]:
    f = jit(lambda x, n: (x * n, jnp.asarray(n), jnp.full((2,), n)), static_argnums=1)
    return [see(f, square(), n) for n in (1, True, 1.0, Mode.ONE, np.float32(1), 2, 2.0, False, 0, -0.0, 0.0, 1)]


def static_arguments_by_name(jit: Jit) -> list[Seen]:
    f = jit(lambda x, *, n=3, m=1: x * n + m, static_argnames=("n", "m"))
    return [see(f, square()), see(f, square(), n=2), see(f, square(), m=2, n=2), see(f, square(), n=2.0), see(f, square(), n=[1])]


def static_arguments_by_position_or_name(jit: Jit) -> list[Seen]:
    f = jit(lambda x, n, y: x * n + y, static_argnums=1)
    g = jit(lambda x, n, y: x * n + y, static_argnums=-2)
    h = jit(lambda x, n, y: x * n + y, static_argnames="n")
    seen = [see(one, square(), 2, 1.0) for one in (f, g, h)]
    seen += [see(one, square(), n=2, y=1.0) for one in (f, h)]
    return [*seen, see(f, square()), see(f, square(), [1], 1.0)]


def equal_static_arguments_share(jit: Jit) -> list[Seen]:
    traced: list[int] = []

    def f(x: Any, key: Any) -> Any:
        traced.append(1)
        return x * len(traced)

    jitted = jit(f, static_argnums=1)
    return [see(jitted, square(), Equal()), see(jitted, square(), Equal())]


def settings_of_the_trace(jit: Jit) -> list[Seen]:
    f = jit(lambda x: (jnp.asarray(x) * np.float64(2), jnp.arange(3), jax.random.normal(jax.random.key(0), (2,))))
    seen = [see(f, 1.5)]
    with jax.enable_x64(True):
        seen += [see(f, 1.5), see(f, np.float64(1.5))]
    with jax.default_prng_impl("rbg"):
        seen.append(see(f, 1.5))
    with jax.numpy_dtype_promotion("strict"):
        seen.append(see(f, 1.5))
    with jax.default_matmul_precision("float32"):
        seen.append(see(f, 1.5))
    return [*seen, see(f, 1.5)]


def a_setting_that_no_list_names(jit: Jit) -> list[Seen]:
    f = jit(lambda x: jax.random.normal(jax.random.key(7), (2,)) + x)
    seen = [see(f, 0.0)]
    config: Any = jax.config
    before = config.jax_random_seed_offset
    jax.config.update("jax_random_seed_offset", 5)
    try:
        seen.append(see(f, 0.0))
    finally:
        jax.config.update("jax_random_seed_offset", before)
    return [*seen, see(f, 0.0)]


# -- what arguments and results may be --------------------------------------------------------------------------------------


def numbers_and_arrays_of_every_kind(jit: Jit) -> list[Seen]:
    f = jit(lambda x: (x, x + 1, jnp.zeros_like(x)))
    kinds: list[Any] = [
        1,
        1.0,
        True,
        1j,
        np.float32(1),
        np.int8(1),
        np.bool_(True),
        np.ones(3),
        np.ones(3, np.int32),
        jnp.ones(3),
    ]
    kinds += [jnp.ones((0, 3)), jnp.bfloat16(1), jnp.ones(2, jnp.uint8), jnp.asarray(2), np.array(1.0), jnp.float32(1.0)]
    return [see(f, x) for x in kinds]


def not_arrays(jit: Jit) -> list[Seen]:
    f = jit(lambda x: x)
    return [see(f, x) for x in ("text", object(), np.array(["text"]), None, {"a": None}, [1, "b"], lambda: 0, 2**40, 2**70)]


def keys_are_arguments_and_results(jit: Jit) -> list[Seen]:
    f = jit(lambda key, x: (jax.random.split(key), key, jax.random.normal(key, (3,)) + x), donate_argnums=0)
    seen = [see(f, jax.random.key(1), 1.0), see(f, jax.random.key(1, impl="rbg"), 1.0)]
    return [*seen, see(jit(lambda key: jax.random.split(key)), jax.random.PRNGKey(1))]


def results_that_are_arguments(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: (a, b @ b, a, b))
    a, b = square(), square(start=1.0)
    seen = [see(f, a, b)]
    r = f(a, b)
    r[0].delete()  # nobody else's
    return [*seen, see(f, a, b), see(f, r[2], r[3])]


def donated_results_that_are_arguments(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: (a, b @ b + a, b), donate_argnums=(0, 1))
    return [see(f, square(), square(start=1.0)), see(f, jnp.ones((3, 3)), np.ones((3, 3), np.float32))]


def constants_and_nothing(jit: Jit) -> list[Seen]:
    table = np.arange(4.0)
    f = jit(lambda: (1, 2.0, jnp.ones(2), table, None, jnp.asarray(table)))
    return [see(f), see(jit(lambda: None)), see(jit(lambda x: ()), square()), see(jit(lambda *a, **k: (a, k)), 1, k=square())]


def trees(jit: Jit) -> list[Seen]:
    f = jit(lambda tree, *rest, **more: jax.tree.map(lambda x: x @ x + 1, (tree, rest, more)))
    point = functools.partial(jax.tree_util.Partial, len)
    return [
        see(f, {"b": square(), "a": [square(), (square(),)]}),
        see(f, [square()], square(), k=square()),
        see(f, (), None),
        see(f, point()),
    ]


def weak_types_and_order_of_keywords(jit: Jit) -> list[Seen]:
    f = jit(lambda a=1.0, b=2: (a * 2, b, a + b))
    return [see(f), see(f, b=1, a=2.0), see(f, a=2.0, b=1), see(f, 1), see(f, jnp.float32(1), 1), see(f, c=1), see(f, 1, 2, 3)]


# -- donation ---------------------------------------------------------------------------------------------------------------


def donation_takes_what_is_used_and_fits(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b, c, unused: (a @ a, c.sum()), donate_argnums=(0, 1, 2, 3))
    g = jit(lambda a, b, unused: (a @ a, b + 1, b * 2), donate_argnums=(1, 2), keep_unused=True)
    h = jit(lambda a, b: (a + 1, b + a), donate_argnums=0)
    by_size = (
        (lambda a: a.astype(jnp.int32) + 1, square()),
        (lambda a: (a @ a).reshape(16) * 2, square()),
        (lambda a: (a @ a)[:2], square()),
        (lambda k: (jax.random.uniform(k, (2,)), 1.0), jax.random.key(0)),
        (lambda k: jax.random.key_data(k) + 1, jax.random.key(0)),
        (lambda k: (jax.random.uniform(k, (2,)), 1.0), jax.random.key(0, impl="rbg")),
        (lambda a: (a @ a).astype(jnp.bfloat16), square()),
    )
    return [
        *(see(jit(f, donate_argnums=0), x) for f, x in by_size),
        see(f, square(), square(), jnp.ones(3), square(3)),
        see(f, square(), jnp.ones(5), jnp.ones(3), square(4)),
        see(g, square(), jnp.ones(2), square()),
        see(h, square(), np.ones((4, 4), np.float32)),
        see(h, np.ones((4, 4), np.float32), square()),
    ]


def donation_by_name(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: (a @ b, b + 1), donate_argnames="b")
    return [see(f, square(), square()), see(f, square(), b=square()), see(f, b=square(), a=square())]


def one_buffer_donated_twice(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: (a @ a, b + 1), donate_argnums=(0, 1))
    g = jit(lambda a, b: (a @ a, b + 1), donate_argnums=0)
    x = square()
    other_name = jax.device_put(x, jax.devices()[0])
    y, z = square(), square()
    return [see(f, x, x), see(f, x, other_name), see(g, x, other_name), see(f, {"a": y}, y), see(g, y, z), see(g, z, z)]


def a_captured_array_is_donated(jit: Jit) -> list[Seen]:
    table = square()
    f = jit(lambda a: a @ a + table, donate_argnums=0)
    seen = [see(f, square()), see(f, table), see(f, square())]
    other = square(start=2.0)
    g = jit(lambda a: a @ other)
    seen.append(see(g, square()))
    other.delete()
    return [*seen, see(g, square())]


def a_deleted_argument(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: (a @ b, b + 1), donate_argnums=1)
    gone = square()
    gone.delete()
    alive = square()
    return [see(f, gone, alive), see(f, alive, gone), see(f, alive, square())]


# -- devices ----------------------------------------------------------------------------------------------------------------


def committed_and_not(jit: Jit) -> list[Seen]:
    f = jit(mixed)
    device = jax.devices()[0]
    there = jax.device_put(square(), device)
    seen = [see(f, square(), square()), see(f, there, square()), see(f, square(), there), see(f, square(), square())]
    with jax.default_device(device):
        seen.append(see(f, square(), square()))
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    places = (
        device,
        jax.sharding.SingleDeviceSharding(device),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        jax.memory.Space.Device,
    )
    for place in places:
        seen.append(see(jit(lambda a, place=place: jax.device_put(a @ a, place) + 1), square()))
    for place in places[1:3]:
        seen.append(see(jit(lambda a, place=place: jax.lax.with_sharding_constraint(a @ a, place) + 1), square()))
        seen.append(see(jit(lambda a, place=place: jax.jit(jnp.tanh, out_shardings=place)(a @ a)), square()))
    return seen


def options_that_name_a_device(jit: Jit) -> list[Seen]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [
        see(jit(mixed, in_shardings=sharding), square(), square()),
        see(jit(mixed, out_shardings=sharding), square(), square()),
        see(jit(mixed, in_shardings=(None, sharding)), square(), square()),
    ]


def a_mesh_of_one_device(jit: Jit) -> list[Seen]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    there = jax.device_put(square(), split)
    f = jit(mixed)
    return [see(f, there, there), see(f, square(), there), see(jit(mixed, out_shardings=split), square(), square())]


def arguments_in_another_layout(jit: Jit) -> list[Seen]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    columns_first = jax.device_put(square(), Format(Layout((1, 0)), sharding))
    f = jit(mixed)
    there = jax.device_put(square(), sharding)
    return [see(f, there, there), see(f, columns_first, there), see(f, there, columns_first), see(f, there, there)]


def options_of_the_compiler(jit: Jit) -> list[Seen]:
    f = jit(mixed, compiler_options={"xla_embed_ir_in_executable": True}, inline=True)
    return [see(f, square(), square()), see(jit(mixed, compiler_options={"no_such": 1}), square(), square())]


# -- transformations --------------------------------------------------------------------------------------------------------


def inside_other_transformations(jit: Jit) -> list[Seen]:
    f = jit(lambda a, b: jnp.tanh(a @ b) @ b)
    x = square()

    def loss(a: Any) -> Any:
        return f(a, x).sum()

    return [
        see(jax.jit(lambda a: f(a, a) + f(a, x)), x),
        see(jax.grad(loss), x),
        see(jax.jit(jax.value_and_grad(loss)), x),
        see(jit(jax.grad(lambda a: f(f(a, x), a).sum())), x),
        see(jax.vmap(f, in_axes=(0, None)), jnp.stack([x, x]), x),
        see(jax.vmap(lambda a: f(x, x) + a, axis_name="i"), jnp.ones(3)),
        see(lambda a: jax.lax.scan(lambda c, _: (f(c, x), c.sum()), a, None, length=3), x),
        see(lambda a: jax.eval_shape(f, a, a).shape[0] * a, x),
        see(lambda a: jax.jvp(lambda b: f(b, x), (a,), (a,)), x),
        see(lambda a: jax.checkpoint(f)(a, x), x),
        see(lambda a: jax.make_jaxpr(f)(a, x).out_avals[0].shape[0] * a, x),
    ]


def a_closed_over_tracer(jit: Jit) -> list[Seen]:
    def outer(a: Any) -> Any:
        f = jit(lambda b: a @ b)
        return f(a) + f(square()) + jit(lambda: a * 2)()

    return [see(outer, square()), see(jax.jit(outer), square()), see(jax.grad(lambda a: outer(a).sum()), square())]


def jitted_within_jitted(jit: Jit) -> list[Seen]:
    inner = jit(lambda a, n: a @ a * n, static_argnums=1, donate_argnums=0)
    f = jit(lambda a: inner(a, 2) + inner(a, 3))
    x = square()
    return [see(f, x), see(inner, x, 2)]


def under_disable_jit(jit: Jit) -> list[Seen]:
    ran: list[int] = []

    def f(a: Any) -> Any:
        ran.append(1)
        return a @ a * len(ran)

    jitted = jit(f)
    seen = [see(jitted, square()), see(jitted, square())]
    with jax.disable_jit():
        seen += [see(jitted, square()), see(jitted, square())]
    return [*seen, see(jitted, square())]


# -- errors -----------------------------------------------------------------------------------------------------------------


def errors_of_the_function_itself(jit: Jit) -> list[Seen]:
    def branch(x: Any) -> Any:
        return 1 if x > 0 else 2

    def fail(x: Any) -> Any:
        raise KeyError("mine")

    functions = (branch, fail, lambda x: "text", lambda x: np.asarray(x), lambda x: x @ jnp.ones(7), lambda x: float(x.sum()))
    return [see(jit(f), square()) for f in functions]


def under_debug_nans_and_infs(jit: Jit) -> list[Seen]:
    def f(a: Any, b: Any) -> Any:
        return jnp.log(jnp.tanh(a @ b) - b.sum()) @ b, a + 1

    with jax.debug_nans(True):  # jit settles at the first call whether it donates under debug_nans: it does not
        f_debugged = jit(f, donate_argnums=0)
        seen = [see(f_debugged, square(), square()), see(f_debugged, square(), square(start=-9.0))]
    with jax.debug_infs(True):
        seen += [see(jit(lambda a: a @ a / 0.0), square()), see(jit(lambda a: a @ a), square())]
    return [*seen, see(jit(lambda a: f(a, a)), square())]


def attributes_for_methods(jit: Jit) -> list[Seen]:
    class Layer:
        scale = 2.0

        def __init__(self) -> None:
            self.calls = 0

        @functools.partial(jit, static_argnums=0)
        def by_static_self(self, x: Any) -> Any:
            return x @ x * self.scale

        @staticmethod
        @jit
        def of_no_instance(x: Any) -> Any:
            return x @ x

    layer = Layer()

    @jit
    def named(x: Any, self: Any) -> Any:
        return x @ self

    return [
        see(layer.by_static_self, square()),
        see(layer.by_static_self, x=square()),
        see(layer.of_no_instance, square()),
        see(Layer.of_no_instance, square()),
        see(named, square(), self=square()),
        see(jit(functools.partial(lambda a, b: a @ b, square())), square()),
        see(jit(Layer().__init__)),
    ]


SCENARIOS: list[Scenario] = [
    static_arguments_are_told_apart_by_type, static_arguments_by_name, static_arguments_by_position_or_name,
    equal_static_arguments_share, settings_of_the_trace, a_setting_that_no_list_names, numbers_and_arrays_of_every_kind,
    not_arrays,
    keys_are_arguments_and_results, results_that_are_arguments, donated_results_that_are_arguments, constants_and_nothing, trees,
    weak_types_and_order_of_keywords, donation_takes_what_is_used_and_fits, donation_by_name, one_buffer_donated_twice,
    a_captured_array_is_donated, a_deleted_argument, committed_and_not, options_that_name_a_device, a_mesh_of_one_device,
    arguments_in_another_layout, options_of_the_compiler,
    inside_other_transformations, a_closed_over_tracer, jitted_within_jitted, under_disable_jit,
    errors_of_the_function_itself, under_debug_nans_and_infs, attributes_for_methods,
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_caller_sees_the_same_as_of_jit(scenario: Scenario, variant: str) -> None:
    expect_same(scenario, VARIANTS[variant])
