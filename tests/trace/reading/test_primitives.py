"""Every primitive means in a segment of its own what it means in `jax.jit`, and its results can cross segments.

Each step runs under a plan in which every operator is a segment, so that every value crosses a boundary, and under the plan of
`policy="none"`. Results are compared with those of plain `jax.jit`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import tensile_jax as tensile
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import Absence, Absences
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan_format import Plan
from tensile_jax.trace import trace_step
from tests.builders import plan_by_hand

X = jnp.linspace(0.1, 1.0, 16).reshape(4, 4)
I = jnp.arange(16).reshape(4, 4)  # noqa: E741  (whole numbers)
KEY = jax.random.key(0)


def in_single_operators(graph: Graph, absences: Absences | None = None) -> Plan:
    """Every operator a segment; nothing is dropped. The graph is ordered."""
    count = len(graph.operators)
    return plan_by_hand(graph, retain(find_liveness(graph), {}), range(count + 1), absences, workspace=2**20)


def assert_as_jit(step: Callable[..., Any], *args: Any) -> None:
    """The step gives what it gives in `jax.jit`."""
    expected = jax.jit(step)(*args)
    graph = order(trace_step(jax.jit(step), step, args, {}).graph)
    options: list[dict[str, Any]] = [{"policy": "none"}]
    if graph.operators:
        options.append({"plan": in_single_operators(graph)})
    for some in options:
        got = tensile.jit(step, **some)(*args)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_same(ours, plain)


def assert_same(ours: Any, plain: Any) -> None:
    if not hasattr(plain, "dtype"):  # a token
        assert type(ours) is type(plain)
        return
    assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
    assert getattr(ours, "weak_type", False) == getattr(plain, "weak_type", False)
    if plain.dtype == jax.dtypes.float0:
        return
    if jnp.issubdtype(plain.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(ours) == jax.random.key_impl(plain)
        ours, plain = jax.random.key_data(ours), jax.random.key_data(plain)
    if jnp.issubdtype(plain.dtype, jnp.floating):
        ours, plain = ours.astype(jnp.float32), plain.astype(jnp.float32)
    # cut, XLA fuses differently
    np.testing.assert_allclose(np.asarray(ours), np.asarray(plain), rtol=2e-5, atol=2e-5)


# -- calls and control flow -----------------------------------------------------------------------------------------------


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def _with_vjp(x: Any) -> Any:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_batching.custom_vmap
def _with_batching(x: Any) -> Any:
    return jnp.sin(x)


_with_batching.def_vmap(lambda size, batched, x: (jnp.sin(x) + 1, batched[0]))


def _repeated(f: Callable[[Any], Any], x: Any) -> Any:
    return lax.scan(lambda carry, _: (f(carry), None), x, None, length=3)[0]


def _shard_map(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec())
    def inner(a: Any) -> Any:
        return lax.psum(jnp.sin(a), "d")

    return inner(x) @ x


def _checkpointed(policy: Any, x: Any) -> Any:
    def inner(y: Any) -> Any:
        return checkpoint_name(jnp.sin(y @ y), "kept").sum()

    return jax.grad(jax.checkpoint(inner, policy=policy))(x)


_OFFLOADING = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
)

CALLS: dict[str, Callable[[Any], Any]] = {
    "shard_map": _shard_map,
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos) @ x,
    "custom_jvp": lambda x: (_repeated(_with_jvp, x), jax.grad(lambda y: _repeated(_with_jvp, y).sum())(x)),
    "custom_vjp": lambda x: (_repeated(_with_vjp, x), jax.grad(lambda y: _repeated(_with_vjp, y).sum())(x)),
    "custom_vmap": lambda x: (jax.vmap(_with_batching)(x), _with_batching(x), _repeated(_with_batching, x)),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(lambda r, y: y * r, lambda r, z: z * r, 2.0, x) @ x,
    "custom_root": lambda x: lax.custom_root(
        lambda y: y - jnp.cos(x), x, lambda f, y: jnp.cos(x), lambda g, y: y / g(jnp.ones_like(y))
    ),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(lambda y: 2 * y, x, lambda mv, b: b / 2) @ x,
    "checkpoint": partial(_checkpointed, None),
    "checkpoint_by_name": partial(_checkpointed, jax.checkpoint_policies.save_only_these_names("kept")),
    "checkpoint_offloading": partial(_checkpointed, _OFFLOADING),
    "jit": lambda x: jax.jit(lambda y: (y @ y, y), donate_argnums=0)(x),
    "map": lambda x: lax.map(jnp.sin, x) @ x,
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "scan": lambda x: jax.grad(lambda y: lax.scan(lambda c, r: (jnp.tanh(c @ y + r), c.sum()), jnp.ones(4), y)[0].sum())(x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x),
    "cond_in_vmap": lambda x: jax.vmap(lambda r: lax.cond(r[0] > 0.3, jnp.sin, jnp.cos, r))(x) @ x,
    "switch": lambda x: lax.switch(2, [jnp.sin, jnp.cos, lambda y: y @ y], x),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ x), (0, x)),
    "pure_callback": lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((4, 4), jnp.float32), x) @ x,
    "token": lambda x: (lax.create_token(), x @ x),
    "after_all": lambda x: (lax.after_all(lax.create_token(), lax.create_token()), x),
    "device_put": lambda x: jax.device_put(x @ x, jax.devices()[0]),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x @ x)),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_and_control_flow(name: str) -> None:
    assert_as_jit(CALLS[name], X)


# -- arithmetic and shapes --------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: (
        lax.clamp(0.2, x, 0.8), lax.select_n(x > 0.5, x, -x), lax.nextafter(x, x + 1), lax.erf(x), lax.lgamma(x),
        lax.rsqrt(x), lax.cbrt(x), lax.atan2(x, x + 1), x**3,
        lax.integer_pow(x, -2), lax.is_finite(1 / x), lax.round(x * 3), lax.rem(x, x / 3), lax.logistic(x),
    ),
    "integers": lambda x: (
        lax.population_count(I), lax.clz(I), I & 3, I | 3, I ^ 3, ~I, I << 2, I >> 1, lax.shift_right_logical(I, 1),
        I // 3, I % 3,
    ),
    "linear_algebra": lambda x: (
        jnp.linalg.cholesky(x @ x.T + jnp.eye(4)), jnp.linalg.qr(x)[1],
        jax.scipy.linalg.solve_triangular(x + jnp.eye(4), x),
    ),
    "sorting": lambda x: (lax.sort((x, -x), num_keys=1), lax.top_k(x, 2), jnp.argsort(-x), jnp.unique(x, size=4)),
    "gathering": lambda x: (
        x[I % 4], x.at[I % 4].add(1.0), x.at[0].set(2.0), jnp.take(x, I % 4, axis=1), x.at[I % 4].min(0.5),
    ),
    "reducing": lambda x: (
        lax.reduce(x, 0.0, lambda a, b: a * b + a, (0,)), lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
        lax.cumsum(x), lax.cummax(x), lax.cumlogsumexp(x), lax.reduce_precision(x, 5, 10),
        jnp.argmax(x), (x > 0.5).any(), jnp.prod(x, 0),
    ),
    "shapes": lambda x: (
        lax.dynamic_slice(x, (1, 1), (2, 2)), lax.dynamic_update_slice(x, x[:2, :2], (1, 1)), lax.rev(x, (0,)),
        lax.split(x, (1, 3)),
        lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 1))), lax.expand_dims(x, (0,)), lax.broadcast(x, (2,)), jnp.eye(3) @ jnp.eye(3),
        lax.bitcast_convert_type(x, jnp.uint8), lax.iota(jnp.int32, 4), jnp.concatenate([x, x]),
    ),
    "convolution": lambda x: jax.grad(lambda k: lax.conv(x[None, None], k, (1, 1), "SAME").sum())(x[None, None, :2, :2]),
    "products": lambda x: (
        lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([1, 3])), jnp.einsum("ij,kj->ik", x, x), jnp.fft.rfft(x),
    ),
    "random": lambda x: (
        lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4, 4)), jax.random.normal(KEY, (4,)),
        jax.random.key_data(KEY), jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)),
    ),
}  # fmt: skip
LONG_TO_COMPILE: dict[str, Callable[[Any], Any]] = {
    "special": lambda x: (
        lax.digamma(x), lax.igamma(x, x), lax.bessel_i0e(x), lax.betainc(x, x, x / 2), lax.zeta(x + 1, x), lax.polygamma(x, x),
    ),
    "decompositions": lambda x: (
        jnp.linalg.svd(x)[1], jnp.linalg.solve(x + jnp.eye(4), x), jax.scipy.linalg.lu(x), jnp.linalg.eigh(x + x.T)[0],
        jnp.linalg.det(x), jnp.linalg.eigvals(x),
    ),
    "draws": lambda x: (jax.random.gamma(KEY, 2.0, (4,)), jax.random.permutation(KEY, x), jax.random.poisson(KEY, 2.0, (4,))),
    "hessian": lambda x: jax.hessian(lambda y: jnp.sum(jnp.tanh(y @ y)))(x[:2, :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_arithmetic_and_shapes(name: str) -> None:
    assert_as_jit(NUMBERS[name], X)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_TO_COMPILE)
def test_what_takes_long_to_compile(name: str) -> None:
    assert_as_jit(LONG_TO_COMPILE[name], X)


def test_two_ways_of_drawing_random_numbers_stay_apart() -> None:
    def step(key: Any) -> Any:
        with jax.threefry_partitionable(True):
            one = jax.random.normal(key, (4, 4))
        with jax.threefry_partitionable(False):
            other = jax.random.normal(key, (4, 4))
        return one, other

    one, other = jax.jit(step)(KEY)
    assert not np.allclose(one, other)
    assert_as_jit(step, KEY)


# -- types of numbers -----------------------------------------------------------------------------------------------------

DTYPES = (
    "int4", "uint4", "int2", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "bool", "int8", "uint32",
    "complex64",
)  # fmt: skip


def _of(dtype: str) -> jax.Array:
    return (I % 2).astype(dtype) if dtype != "complex64" else X + 1j * X[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_of_numbers(dtype: str) -> None:
    def step(a: Any) -> Any:
        wide = a if dtype in ("complex64", "uint32") else a.astype(jnp.float32)
        return (wide @ wide).astype(a.dtype), a.T.reshape(-1)[::2], jnp.where(I > 5, a, a[::-1]), wide @ wide

    assert_as_jit(step, _of(dtype))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "bool", "bfloat16", "float8_e4m3fn"])
def test_state_of_small_numbers_is_carried_donated_and_swapped(dtype: str) -> None:
    """Quantised weights, each on the host between its first use and its update."""
    rng = np.random.default_rng(0)
    state = [jnp.asarray(rng.integers(0, 2, (32, 32)), dtype) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)

    def step(state: Any, x: Any) -> Any:
        for w in state:
            x = jnp.tanh(x @ (w.astype(jnp.float32) * 0.1))
        return [w.T for w in state], x

    graph = order(trace_step(jax.jit(step, donate_argnums=0), step, (state, x), {}).graph)
    activity = find_liveness(graph)
    absences: dict[TensorId, tuple[Absence, ...]] = {}
    for w in graph.inputs[:3]:
        first, last = activity.uses[w][0], activity.uses[w][-1]
        if first + 1 < last - 2:
            absences[w] = (Absence(w, first + 1, last - 2, 0.0),)
    assert len(absences) > 1
    plan = in_single_operators(graph, absences)
    assert plan.swapped_in_bytes == plan.swapped_out_bytes > 0
    function = tensile.jit(step, plan=plan, donate_argnums=0)
    given, plain = [jnp.copy(w) for w in state], state
    for _ in range(2):
        given, y = function(given, x)
        plain, expected = jax.jit(step)(plain, x)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(given, plain, strict=True):
            assert_same(ours, theirs)
    assert function.report().passive_swap_ins == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_those_of_xla(dtype: str) -> None:
    value = jax.ShapeDtypeStruct((7, 9), dtype)
    identity = jax.jit(lambda a: a[::-1])
    graph = trace_step(identity, lambda a: a[::-1], (value,), {}).graph
    memory: Any = identity.lower(value).compile().memory_analysis()
    assert graph.tensors[graph.inputs[0]].nbytes == memory.argument_size_in_bytes
    assert graph.tensors[graph.outputs[0]].nbytes == memory.output_size_in_bytes


def test_values_without_numbers() -> None:
    assert_as_jit(lambda x: (x[:0] @ x, jnp.zeros((0, 3)), jnp.concatenate([x[:0], x]), x[:0].sum()), X)
    assert_as_jit(lambda x: x, jnp.zeros((0, 3)))


def test_gradients_of_whole_numbers() -> None:
    assert_as_jit(lambda x, n: jax.vjp(lambda a, b: (a * b) @ a, x, n)[1](x), X, I)
    assert_as_jit(lambda x, n: jax.vjp(lambda a, b: (a * b) @ a, x, n)[1](x)[1], X, I)


def test_float0_goes_in_and_comes_out() -> None:
    nothing = np.zeros((2, 3), jax.dtypes.float0)
    assert_as_jit(lambda z, x: (z, x @ x), nothing, X)
    assert_as_jit(lambda z, x: (z, z, x @ x), nothing, X)


def test_python_numbers_stay_weak() -> None:
    assert_as_jit(lambda s: (s * 2, s + X, jnp.asarray(s)), 2.0)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.key(1, impl="rbg"), jax.random.split(jax.random.key(1), 3)])
def test_keys_are_carried_used_and_returned(key: Any) -> None:
    def step(key: Any) -> Any:
        first = key.reshape(-1)[0]
        return key, jax.random.split(first, 2), jax.random.normal(first, (4, 4)) @ X, jax.random.clone(first)

    assert_as_jit(step, key)


def test_tokens_go_in_and_come_out() -> None:
    token = jax.jit(lax.create_token)()
    assert_as_jit(lambda t, x: (lax.after_all(t, lax.create_token()), x @ x), token, X)
    assert_as_jit(lambda t, x: (t, x @ x), token, X)


def test_a_step_without_results_has_room_in_any_share_of_its_peak() -> None:
    for budget in ("90%", "1%"):
        assert tensile.jit(lambda x: None, budget=budget)(X) is None
    assert tensile.jit(lambda: None, budget="50%")() is None


def test_keys_in_host_memory_go_into_a_step() -> None:
    """The result of a job is such a key."""
    key = jax.device_put(jax.random.key(3), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    ways: tuple[dict[str, Any], ...] = ({"policy": "none"}, {"budget": "1GiB"})
    for options in ways:
        got = tensile.jit(lambda k: jax.random.normal(k, (4, 4)) @ X, **options)(key)
        np.testing.assert_allclose(got, jax.random.normal(jax.random.key(3), (4, 4)) @ X, rtol=1e-5)
