"""What the result of `tensile_jax.jit` has and can be used for beside being called, as the result of `jax.jit`."""

import copy
import functools
import inspect
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tests.conformance.observation import segments


def product(a: Any, b: Any, n: int = 1) -> Any:
    """Of the module, so that it can be pickled."""
    return a @ b * n


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape or (3, 3))


def test_lower_trace_and_eval_shape_are_those_of_jit() -> None:
    function = tensile.jit(product, budget="80%", static_argnames="n")
    plain = jax.jit(product, static_argnames="n")
    assert function.lower(ones(), ones(), n=2).as_text() == plain.lower(ones(), ones(), n=2).as_text()
    assert str(function.trace(ones(), ones(), n=2).jaxpr) == str(plain.trace(ones(), ones(), n=2).jaxpr)
    assert function.eval_shape(ones(), ones()) == plain.eval_shape(ones(), ones())
    compiled = function.lower(ones(), ones()).compile()
    np.testing.assert_array_equal(compiled(ones(), ones()), plain(ones(), ones()))


def test_it_looks_like_the_function_that_it_wraps() -> None:
    function: Any = tensile.jit(product)
    assert function.__wrapped__ is product
    assert (function.__name__, function.__doc__, function.__module__) == (product.__name__, product.__doc__, product.__module__)
    assert inspect.signature(function) == inspect.signature(product)
    assert isinstance(function, jax.stages.Wrapped)
    assert repr(function) == f"<PlannedFunction of {product!r}>"


def test_attributes_of_a_wrapped_function_do_not_get_in_its_way() -> None:
    """`functools.wraps`, and so `jax.grad`, hands attributes on: those of another planned function must not be taken over."""
    inner = segments(lambda a: a @ a)

    @functools.wraps(inner)
    def outer(a: Any) -> Any:
        return 2 * inner(a)

    np.testing.assert_array_equal(segments(outer)(ones()), 2 * (ones() @ ones()))
    got = segments(jax.grad(lambda a: inner(a).sum()))(ones())
    np.testing.assert_array_equal(got, jax.grad(lambda a: (a @ a).sum())(ones()))


def test_clear_cache_makes_it_trace_and_plan_again() -> None:
    traced: list[int] = []

    def f(a: Any) -> Any:
        traced.append(1)
        return a @ a

    function = segments(f)
    function(ones())
    function(ones())
    assert len(traced) == 1
    function.clear_cache()
    function(ones())
    assert len(traced) == 2


def test_a_pickled_one_does_the_same() -> None:
    options = {"budget": "1GiB", "policy": "tensile", "static_argnames": "n", "donate_argnums": 0}
    function = pickle.loads(pickle.dumps(tensile.jit(product, **options)))
    a = ones()
    np.testing.assert_array_equal(function(a, ones(), n=3), 9 * np.ones((3, 3)))
    assert a.is_deleted()
    assert function.plan(ones(), ones(), n=3).policy == "tensile"
    assert copy.copy(function)(ones(), ones()).shape == (3, 3)


def test_it_is_a_method_of_instances() -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @functools.partial(segments, static_argnums=0)
        def apply(self, a: Any) -> Any:
            return a @ a * self.scale

    two, three = Model(2.0), Model(3.0)
    np.testing.assert_array_equal(two.apply(ones()), 6 * np.ones((3, 3)))
    np.testing.assert_array_equal(three.apply(ones()), 9 * np.ones((3, 3)))
    np.testing.assert_array_equal(Model.apply(two, ones()), 6 * np.ones((3, 3)))


def test_plans_are_refused_inside_another_transformation() -> None:
    function = tensile.jit(product)

    def outer(a: Any) -> Any:
        function.plan(a, a)
        return a

    with pytest.raises(tensile.TraceError, match="only where it is called outermost"):
        jax.jit(outer)(ones())


def test_one_function_called_by_many_threads_at_once_is_prepared_once() -> None:
    traced: list[int] = []

    def f(a: Any, b: Any) -> Any:
        traced.append(1)
        return jnp.tanh(a @ b) @ b

    function = segments(f)
    barrier = threading.Barrier(6)
    results: list[Any] = [None] * 6

    def call(place: int) -> None:
        barrier.wait()
        results[place] = function(ones() * place, ones())

    threads = [threading.Thread(target=call, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traced) == 1
    for place, result in enumerate(results):
        np.testing.assert_allclose(result, jax.jit(f)(ones() * place, ones()), rtol=1e-6)


def test_an_unknown_option_is_refused_as_by_jit() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_option'"):
        tensile.jit(product, no_such_option=1)  # pyright: ignore[reportCallIssue] # that is what is tested
    with pytest.raises(TypeError, match="Expected a callable value"):
        tensile.jit(None)  # pyright: ignore[reportCallIssue, reportArgumentType] # that is what is tested


def test_a_trace_holds_no_array_of_the_callers() -> None:
    function = segments(product)
    a, b = ones(64, 64), ones(64, 64)
    function(a, b)
    held = sum(x.nbytes for x in jax.live_arrays())
    del a, b
    assert held - sum(x.nbytes for x in jax.live_arrays()) >= 2 * 64 * 64 * 4
