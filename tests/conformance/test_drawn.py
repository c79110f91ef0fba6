"""Calls that nobody thought of look the same as under `jax.jit`: drawn signatures, arguments, donation, settings and pytrees.

A drawn function takes a few arguments, some of them static, some donated, some of them trees, and combines those that it uses.
Each is called once or twice, on arguments that are drawn anew for the same function: committed or not, NumPy or JAX, numbers.
"""

import contextlib
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.conformance.observation import VARIANTS, Jit, Seen, expect_same, see

DTYPES = ("float32", "int32", "bfloat16", "bool", "uint8", "complex64")
STATIC_VALUES = (1, True, 1.0, 2, 2.0, "text", None, (1, 2), np.float32(1), False, 0)
CONTEXTS = ("plain", "x64", "strict precision", "rbg keys", "default device")

_EVERY_CHECK = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)  # compiling takes its time

shapes = st.sampled_from([(), (3,), (4, 4), (0,), (2, 4, 4)])
leaves = st.tuples(
    st.sampled_from(["numpy", "array", "committed", "number", "key", "same"]), shapes, st.sampled_from(DTYPES), st.integers(0, 3)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2), st.tuples(inner, st.none())
    ),
    max_leaves=3,
)


def is_leaf(drawn: Any) -> bool:
    return isinstance(drawn, tuple) and len(drawn) == 4 and isinstance(drawn[0], str)


def made(drawn: Any, made_before: list[Any]) -> Any:
    """The argument that was drawn."""

    def leaf(one: Any) -> Any:
        kind, shape, dtype, seed = one
        if kind == "number":
            return (2, 1.5, True, 1j)[seed]
        if kind == "key":
            return jax.random.key(seed)
        if kind == "same" and made_before:
            return made_before[seed % len(made_before)]
        numbers = np.random.default_rng(seed).integers(0, 3, shape).astype(jnp.dtype(dtype))
        if kind == "numpy":
            return numbers
        array = jax.device_put(numbers, jax.devices()[0]) if kind == "committed" else jnp.asarray(numbers)
        made_before.append(array)
        return array

    return jax.tree.map(leaf, drawn, is_leaf=is_leaf)


def combined(x: Any) -> Any:
    """Something of every type of number; products make segments."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.uniform(x, (2,))
    if x.dtype == jnp.bool_:
        return ~x
    return jnp.matmul(x, x) + x if x.ndim >= 2 else x * 2 - x


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    static = draw(st.sets(st.integers(0, count - 1), max_size=1))
    dynamic = [i for i in range(count) if i not in static]
    calls = [
        [draw(st.sampled_from(STATIC_VALUES)) if i in static else draw(trees) for i in range(count)]
        for _ in range(draw(st.integers(1, 2)))
    ]
    return {
        "used": draw(st.sets(st.sampled_from(dynamic))) if dynamic else set(),
        "passed": draw(st.sets(st.sampled_from(dynamic), max_size=2)) if dynamic else set(),
        "donated": draw(st.sets(st.sampled_from(dynamic), max_size=2)) if dynamic else set(),
        "static": static,
        "keep_unused": draw(st.booleans()),
        "named": draw(st.booleans()),
        "contexts": [draw(st.sampled_from(CONTEXTS)) for _ in calls],
        "calls": calls,
    }


def context(name: str) -> Any:
    return {
        "plain": contextlib.nullcontext,
        "x64": lambda: jax.enable_x64(True),
        "strict precision": lambda: jax.default_matmul_precision("float32"),
        "rbg keys": lambda: jax.default_prng_impl("rbg"),
        "default device": lambda: jax.default_device(jax.devices()[0]),
    }[name]()


def holds_for(case: dict[str, Any], jit: Jit) -> None:
    def drawn_calls(jit: Jit) -> list[Seen]:
        def function(*args: Any, last: Any = 1.0) -> Any:
            values = [arg for i, arg in enumerate(args) if i in case["used"]]
            static = [repr(args[i]) if i < len(args) else "" for i in sorted(case["static"])]
            results = jax.tree.map(combined, values)
            return {"made": results, "passed": [args[i] for i in sorted(case["passed"])], "n": len("".join(static)), "last": last}

        jitted = jit(
            function,
            static_argnums=tuple(case["static"]) or None,
            donate_argnums=tuple(case["donated"]) or None,
            keep_unused=case["keep_unused"],
        )
        seen: list[Seen] = []
        for name, call in zip(case["contexts"], case["calls"], strict=True):
            with context(name):
                before: list[Any] = []
                args = [arg if i in case["static"] else made(arg, before) for i, arg in enumerate(call)]
                seen.append(see(jitted, *args, **({"last": 2} if case["named"] else {})))
        return seen

    expect_same(drawn_calls, jit)


def test_drawn_calls_look_the_same_as_of_jit() -> None:
    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=_EVERY_CHECK)
    @given(cases())
    def hold(case: dict[str, Any]) -> None:
        holds_for(case, VARIANTS["segments"])

    hold()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_drawn_calls_look_the_same_as_of_jit(variant: str) -> None:
    @settings(max_examples=300, deadline=None, suppress_health_check=_EVERY_CHECK)
    @given(cases())
    def hold(case: dict[str, Any]) -> None:
        holds_for(case, VARIANTS[variant])

    hold()
