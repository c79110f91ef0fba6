"""The pure function that stands for a step on NNX objects, and the pytrees that it takes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.tree_util import keystr

from tensile_jax.nnx_steps.paths import leaves_in
from tensile_jax.nnx_steps.pure_step import jitted_step, plain_step
from tests.nnx.objects import batch, train_step, training_objects


def ask(step: Any, question: Callable[..., Any]) -> Any:
    return step.ask(question, (*training_objects(), batch(0)), {})


@pytest.mark.parametrize("graph_updates", [True, False])
def test_the_pure_function_runs_on_the_pytrees_of_the_objects(graph_updates: bool) -> None:
    wrapper = nnx.jit(train_step, graph_updates=graph_updates)
    step = jitted_step(wrapper)
    assert step is not None
    results = ask(step, lambda args, kwargs: step.function(*args, **kwargs))
    loss = results[2] if graph_updates else results[0]
    assert jnp.array_equal(loss, wrapper(*training_objects(), batch(0)))


def test_the_users_wrapper_keeps_its_jitted_function_even_if_the_question_fails() -> None:
    wrapper: Any = nnx.jit(train_step)
    before, step = wrapper.jitted_fn, jitted_step(wrapper)

    def fails(args: Any, kwargs: Any) -> None:
        assert wrapper.jitted_fn is before
        raise KeyError("asked")

    with pytest.raises(KeyError, match="asked"):
        ask(step, fails)
    assert wrapper.jitted_fn is before
    assert ask(step, lambda args, kwargs: len(args)) == 4


def test_threads_ask_about_one_step_at_the_same_time() -> None:
    step, together = jitted_step(nnx.jit(train_step)), Barrier(2, timeout=60)
    assert step is not None

    def question(args: Any, kwargs: Any) -> Any:
        together.wait()
        return step.function.eval_shape(*args, **kwargs)[2]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ask(step, question), range(2))
    assert first == second and first.shape == ()


def test_only_nnx_objects_make_a_function_a_step_on_them() -> None:
    model, _, _ = training_objects()
    graph, state = nnx.split(model)
    for argument in (model, {"inside": [model]}, nnx.Param(jnp.ones(3)), nnx.Rngs(0)):
        assert plain_step(lambda x: x, (argument,), {}, {}) is not None
        assert plain_step(lambda x: x, (), {"x": argument}, {}) is not None
    for argument in (graph, state, jnp.ones(3), None, "text"):
        assert plain_step(lambda x: x, (argument,), {}, {}) is None
    for function in (jax.jit(train_step), train_step, nnx.value_and_grad(train_step)):
        assert jitted_step(function) is None


def test_leaves_have_their_paths_in_the_objects() -> None:
    class Tied(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.first = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
            self.layers = nnx.List([self.first])

    given = ((Tied(), {"x": jnp.ones(2)}), {"more": nnx.Param([jnp.ones(1), jnp.ones(1)])})
    paths = {keystr(path) for path, leaf in leaves_in(given) if isinstance(leaf, jax.Array)}
    assert paths >= {"[0][0].first.kernel", "[0][1]['x']", "[1]['more'][0]", "[1]['more'][1]"}
