"""Finds the public functions of JAX from which steps can be made, and arguments with which each of them can be called.

A function that is not in `CALLS` is tried with the arguments in `_TRIED`, in order. Functions of which no step is made are listed
in `NOT_CALLED`, so that a test notices a function that comes with a new JAX.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy
from jax import lax
from jax.scipy.optimize import minimize
from jax.sharding import SingleDeviceSharding

X = jnp.linspace(0.1, 0.9, 16).reshape(4, 4)
Y = X[::-1] + 0.05
N = jnp.arange(16).reshape(4, 4) % 5
B = X > 0.5
KEY = jax.random.key(0)
SQUARE = X + 4 * jnp.eye(4)  # well-conditioned

MODULES = ("jax.lax", "jax.lax.linalg", "jax.random", "jax.nn", "jax.ops")
"""Beside the modules of `jax.scipy`."""

_TRIED: tuple[tuple[Any, ...], ...] = (
    (X,), (X, Y), (X, Y, X + 0.05), (N,), (N, N + 1), (B,), (B, B), (X[0],), (X[0], X[1]), (X, 0), (X, (2,)), (X, (0,)),
    (X, N), (KEY,), (KEY, (4,)), (KEY, X), (KEY, X, (4,)), (X[None],), (X + 1j,), (X, X, X, X), (4,), (KEY, 3),
    (KEY, X, Y), (KEY, (4,), 0, 5), (X, N[0]), ((SQUARE, True), X), (X[0], N[0] > 2),
)  # fmt: skip


def _named(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function whose axis has a name inside."""
    return jax.vmap(call, axis_name="i")


def _scatter(f: Callable[..., Any]) -> Callable[..., Any]:
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    return lambda x: f(x, jnp.array([[1], [2]]), x[:2], numbers)


_GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
_IMAGE, _KERNEL = (lambda x: x[None, None]), (lambda x: x[None, None, :2, :2])
_RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])

CALLS: dict[str, Callable[[Any], Any]] = {
    "jax.lax.after_all": lambda x: (lax.after_all(lax.create_token(), lax.create_token()), x),
    "jax.lax.all_gather": _named(lambda r: lax.all_gather(r, "i")),
    "jax.lax.all_to_all": _named(lambda r: lax.all_to_all(r, "i", 0, 0)),
    "jax.lax.approx_max_k": lambda x: lax.approx_max_k(x, 2),
    "jax.lax.approx_min_k": lambda x: lax.approx_min_k(x, 2),
    "jax.lax.argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "jax.lax.argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "jax.lax.associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "jax.lax.axis_index": _named(lambda r: r + lax.axis_index("i")),
    "jax.lax.axis_size": _named(lambda r: r + lax.axis_size("i")),
    "jax.lax.bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "jax.lax.broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (3, 4, 4), (1, 2)),
    "jax.lax.broadcasted_iota": lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 4), 0),
    "jax.lax.composite": lambda x: lax.composite(jnp.sin, "tensile.sine")(x),
    "jax.lax.cond": lambda x: lax.cond(x.sum() > 0, lambda y: jnp.sin(y) ** 2, lambda y: y + 1, x),
    "jax.lax.conv": lambda x: lax.conv(_IMAGE(x), _KERNEL(x), (1, 1), "SAME"),
    "jax.lax.conv_general_dilated": lambda x: lax.conv_general_dilated(_IMAGE(x), _KERNEL(x), (1, 1), "SAME"),
    "jax.lax.conv_general_dilated_local": lambda x: lax.conv_general_dilated_local(
        _IMAGE(x), jnp.ones((1, 4, 3, 3)) * x[0, 0], (1, 1), "VALID", (2, 2)
    ),
    "jax.lax.conv_general_dilated_patches": lambda x: lax.conv_general_dilated_patches(_IMAGE(x), (2, 2), (1, 1), "VALID"),
    "jax.lax.conv_transpose": lambda x: lax.conv_transpose(
        _IMAGE(x), _KERNEL(x), (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    ),
    "jax.lax.conv_with_general_padding": lambda x: lax.conv_with_general_padding(
        _IMAGE(x), _KERNEL(x), (1, 1), "SAME", None, None
    ),
    "jax.lax.convert_element_type": lambda x: lax.convert_element_type(x, jnp.bfloat16),
    "jax.lax.create_token": lambda x: (lax.create_token(), x),
    "jax.lax.custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda y: 2 * y, x, lambda mv, b: b / 2, transpose_solve=lambda mv, b: b / 2
    ),
    "jax.lax.custom_root": lambda x: lax.custom_root(
        lambda y: y - jnp.cos(x), x, lambda f, y: jnp.cos(x), lambda g, y: y / g(jnp.ones_like(y))
    ),
    "jax.lax.dot_general": lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ()))),
    "jax.lax.dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)),
    "jax.lax.dynamic_slice_in_dim": lambda x: lax.dynamic_slice_in_dim(x, 1, 2),
    "jax.lax.dynamic_update_index_in_dim": lambda x: lax.dynamic_update_index_in_dim(x, x[0], 2, 0),
    "jax.lax.dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (1, 1)),
    "jax.lax.dynamic_update_slice_in_dim": lambda x: lax.dynamic_update_slice_in_dim(x, x[:2], 1, 0),
    "jax.lax.empty": lambda x: lax.dynamic_update_slice(lax.empty((4, 4), jnp.float32), x, (0, 0)),
    "jax.lax.fft": lambda x: lax.fft(x, "RFFT", (4,)),
    "jax.lax.fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y @ x), x),
    "jax.lax.full": lambda x: x + lax.full((4, 4), 2.0),
    "jax.lax.gather": lambda x: lax.gather(x, jnp.array([[1], [2]]), _GATHER, (1, 4)),
    "jax.lax.index_take": lambda x: lax.index_take(x, jnp.array([[0, 2]]), (0,)),
    "jax.lax.iota": lambda x: x + lax.iota(jnp.float32, 4),
    "jax.lax.linalg.cholesky_update": lambda x: lax.linalg.cholesky_update(jnp.linalg.cholesky(SQUARE @ SQUARE.T), x[0]),
    "jax.lax.linalg.householder_product": lambda x: lax.linalg.householder_product(x, x[0]),
    "jax.lax.linalg.lu_pivots_to_permutation": lambda x: (lax.linalg.lu_pivots_to_permutation(jnp.array([1, 2, 3, 3]), 4), x),
    "jax.lax.linalg.ormqr": lambda x: lax.linalg.ormqr(x, x[0], x),
    "jax.lax.linalg.tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[0], x[1] + 4, x[2], x),
    "jax.lax.map": lambda x: lax.map(jnp.sin, x),
    "jax.lax.pad": lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 1))),
    "jax.lax.platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "jax.lax.pmean": _named(lambda r: lax.pmean(r, "i")),
    "jax.lax.ppermute": _named(lambda r: lax.ppermute(r, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])),
    "jax.lax.pshuffle": _named(lambda r: lax.pshuffle(r, "i", [1, 2, 3, 0])),
    "jax.lax.psum_scatter": _named(lambda r: lax.psum_scatter(r, "i")),
    "jax.lax.pswapaxes": _named(lambda r: lax.pswapaxes(r, "i", 0)),
    "jax.lax.ragged_dot": lambda x: lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([1, 3])),
    "jax.lax.ragged_dot_general": lambda x: lax.ragged_dot_general(x, jnp.stack([x, x]), jnp.array([1, 3]), _RAGGED),
    "jax.lax.reduce": lambda x: lax.reduce(x, 0.0, lax.add, (0,)),
    "jax.lax.reduce_and": lambda x: lax.reduce_and(x > 0.5, (0,)),
    "jax.lax.reduce_or": lambda x: lax.reduce_or(x > 0.5, (0,)),
    "jax.lax.reduce_xor": lambda x: lax.reduce_xor(x > 0.5, (0,)),
    "jax.lax.reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "jax.lax.reduce_window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "jax.lax.rng_bit_generator": lambda x: (lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4, 4)), x),
    "jax.lax.scan": lambda x: lax.scan(lambda c, r: (jnp.tanh(c @ x + r), c.sum()), x[0], x),
    "jax.lax.scatter": _scatter(lax.scatter),
    "jax.lax.scatter_add": _scatter(lax.scatter_add),
    "jax.lax.scatter_apply": lambda x: lax.scatter_apply(
        x, jnp.array([[1], [2]]), jnp.sin, lax.ScatterDimensionNumbers((1,), (0,), (0,)), update_shape=(2, 4)
    ),
    "jax.lax.scatter_max": _scatter(lax.scatter_max),
    "jax.lax.scatter_min": _scatter(lax.scatter_min),
    "jax.lax.scatter_mul": _scatter(functools.partial(lax.scatter_mul, unique_indices=True)),
    "jax.lax.scatter_sub": _scatter(lax.scatter_sub),
    "jax.lax.select": lambda x: lax.select(x > 0.5, x, -x),
    "jax.lax.slice": lambda x: lax.slice(x, (1, 1), (3, 3)),
    "jax.lax.slice_in_dim": lambda x: lax.slice_in_dim(x, 1, 3),
    "jax.lax.split": lambda x: lax.split(x, (1, 3)),
    "jax.lax.squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "jax.lax.switch": lambda x: lax.switch(1, [jnp.sin, lambda y: jnp.sin(y) ** 2, lambda y: y @ y], x),
    "jax.lax.tile": lambda x: lax.tile(x, (2, 1)),
    "jax.lax.transpose": lambda x: lax.transpose(x, (1, 0)),
    "jax.lax.while_loop": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ x), (0, x)),
    "jax.lax.with_sharding_constraint": lambda x: lax.with_sharding_constraint(x, SingleDeviceSharding(jax.devices()[0])),
    "jax.nn.one_hot": lambda x: x @ jax.nn.one_hot(N[0], 5),
    "jax.nn.scaled_dot_general": lambda x: jax.nn.scaled_dot_general(x, x, (((1,), (0,)), ((), ()))),
    "jax.ops.segment_max": lambda x: jax.ops.segment_max(x, jnp.array([0, 0, 1, 2]), 3),
    "jax.ops.segment_min": lambda x: jax.ops.segment_min(x, jnp.array([0, 0, 1, 2]), 3),
    "jax.ops.segment_prod": lambda x: jax.ops.segment_prod(x, jnp.array([0, 0, 1, 2]), 3),
    "jax.ops.segment_sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1, 2]), 3),
    "jax.random.ball": lambda x: (jax.random.ball(KEY, 3), x),
    "jax.random.binomial": lambda x: jax.random.binomial(KEY, 5.0, x),
    "jax.random.key_data": lambda x: (jax.random.key_data(KEY), x),
    "jax.random.multinomial": lambda x: jax.random.multinomial(KEY, jnp.float32(5), x),
    "jax.random.multivariate_normal": lambda x: jax.random.multivariate_normal(KEY, x[0], SQUARE @ SQUARE.T),
    "jax.random.triangular": lambda x: jax.random.triangular(KEY, x, x + 1, x + 2),
    "jax.random.wrap_key_data": lambda x: (jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)), x),
    "jax.scipy.linalg.cho_solve": lambda x: jax.scipy.linalg.cho_solve((SQUARE, True), x),
    "jax.scipy.linalg.convolution_matrix": lambda x: jax.scipy.linalg.convolution_matrix(x[0], 4),
    "jax.scipy.linalg.eigh_tridiagonal": lambda x: jax.scipy.linalg.eigh_tridiagonal(x[0], x[1, :3], eigvals_only=True),
    "jax.scipy.linalg.funm": lambda x: jax.scipy.linalg.funm(x, jnp.sin, disp=False),
    "jax.scipy.linalg.leslie": lambda x: jax.scipy.linalg.leslie(x[0], x[1, :3]),
    "jax.scipy.linalg.lu_solve": lambda x: jax.scipy.linalg.lu_solve((SQUARE, jnp.arange(4)), x),
    "jax.scipy.ndimage.map_coordinates": lambda x: jax.scipy.ndimage.map_coordinates(x, [x * 3, x * 2], 1),
    "jax.scipy.optimize.minimize": lambda x: minimize(lambda y: jnp.sum((y - x[0]) ** 2), x[1], method="BFGS"),
    "jax.scipy.signal.stft": lambda x: jax.scipy.signal.stft(x[0], nperseg=4),
    "jax.scipy.special.bessel_jn": lambda x: jax.scipy.special.bessel_jn(x, v=2),
    "jax.scipy.special.sph_harm_y": lambda x: jax.scipy.special.sph_harm_y(
        jnp.array([1]), jnp.array([2]), x[0, :1], x[1, :1], n_max=3
    ),
    "jax.scipy.stats.multinomial.logpmf": lambda x: jax.scipy.stats.multinomial.logpmf(
        jnp.array([1, 2, 0, 2]), 5, x[0] / x[0].sum()
    ),
    "jax.scipy.stats.multinomial.pmf": lambda x: jax.scipy.stats.multinomial.pmf(jnp.array([1, 2, 0, 2]), 5, x[0] / x[0].sum()),
}  # fmt: skip

NOT_CALLED = frozenset({
    # they compute shapes, dtypes or settings
    "jax.lax.ConvGeneralDilatedDimensionNumbers", "jax.lax.PrecisionLike", "jax.lax.conv_dimension_numbers",
    "jax.lax.conv_general_permutations", "jax.lax.conv_general_shape_tuple", "jax.lax.conv_shape_tuple",
    "jax.lax.conv_transpose_shape_tuple", "jax.lax.dtype", "jax.lax.padtype_to_pads", "jax.lax.reduce_window_shape_tuple",
    "jax.nn.get_scaled_dot_general_config", "jax.random.key_dtype", "jax.random.key_impl",
    # they work only inside of `shard_map`, which `tests/sharded` tests
    "jax.lax.pbroadcast", "jax.lax.pcast", "jax.lax.precv", "jax.lax.psend", "jax.lax.psum_scatter_start",
    "jax.lax.ragged_all_to_all",
    # its results are other ones in each call
    "jax.lax.rng_uniform",
    # a CPU cannot run it
    "jax.nn.scaled_matmul",
})  # fmt: skip
"""Functions from which no step is made, with the reason."""


@dataclass(frozen=True)
class Step:
    """A step that calls one function: `function(*arrays)` gives what the function gives, and its gradient, if it has one."""

    name: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]


@functools.cache
def public_functions() -> dict[str, Callable[..., Any]]:
    """All public functions of the modules, by their names; a function of several names once."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for name in _modules():
        module = importlib.import_module(name)
        for attribute in sorted(dir(module)):
            value = getattr(module, attribute)
            is_function = callable(value) and not isinstance(value, type) and not attribute.startswith("_")
            if is_function and id(value) not in seen:
                seen.add(id(value))
                found[f"{name}.{attribute}"] = value
    return found


def _modules() -> list[str]:
    return [*MODULES, *(module.name for module in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy."))]


def step_for(name: str) -> Step | None:
    """The step of the public function of this name; None if it cannot be called with any of the arguments that are tried."""
    function = public_functions()[name]
    if name in CALLS:
        return step_of(name, CALLS[name], (X,))
    return next((step for given in _TRIED if (step := step_of(name, function, given)) is not None), None)


def step_of(name: str, function: Callable[..., Any], given: Sequence[Any]) -> Step | None:
    """A step that calls the function with these arguments; None if that fails, or gives no array."""
    leaves, tree = jax.tree.flatten(tuple(given))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays = tuple(leaves[i] for i in places)

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        return function(*jax.tree.unflatten(tree, filled))

    floating = tuple(i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))

    def total(*values: Any) -> Any:
        parts = [jnp.real(leaf).sum() for leaf in jax.tree.leaves(call(*values)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return jnp.asarray(sum(parts), jnp.float32)

    def with_gradient(places: Sequence[int]) -> Callable[..., Any]:
        return lambda *values: (call(*values), jax.grad(total, places)(*values))

    for form in (with_gradient(floating), with_gradient(floating[-1:]), call) if floating else (call,):
        try:
            shapes = jax.tree.leaves(jax.eval_shape(form, *arrays))
        except Exception:  # of whatever kind: JAX refuses these arguments
            continue
        if shapes:
            return Step(name, form, arrays)
    return None
