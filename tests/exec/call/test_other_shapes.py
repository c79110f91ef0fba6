"""A call with other shapes than before, which waits for a whole first call again, warns once."""

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tensile_jax as tensile
from tests.builders import ROWS, WIDTH, batch, dense_loss, fresh, sgd_step, weights


def planned_step(step: Any = sgd_step) -> tensile.PlannedFunction:
    """A step that runs segments for the usual batch and for a smaller one."""
    return tensile.jit(step, budget="70%", donate_argnums=0)


def dict_step(params: Any, batch: Any, extra: Any = None) -> Any:
    loss, gradients = jax.value_and_grad(dense_loss)(params, batch["x"])
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss


def test_a_smaller_batch_warns_once_and_names_the_argument_both_shapes_and_what_to_do() -> None:
    function = planned_step(dict_step)
    function(fresh(weights()), {"x": batch()})
    with pytest.warns(UserWarning, match="planned and compiled again") as seen:
        line = inspect.currentframe().f_lineno + 1  # pyright: ignore[reportOptionalMemberAccess]
        function(fresh(weights()), {"x": batch(rows=ROWS // 2)})
    (one,) = seen
    text = str(one.message)
    assert (one.filename, one.lineno) == (__file__, line)
    assert text.startswith("'dict_step' was planned and compiled again, in ")
    assert f"batch['x'] has the shape {(ROWS // 2, WIDTH)}, and had {(ROWS, WIDTH)} before." in text
    assert "(its first call: " in text and "Drop a batch of another shape or pad it." in text
    function(fresh(weights()), {"x": batch(rows=ROWS // 4 * 3)})
    function(fresh(weights()), {"x": batch(rows=ROWS // 2)})


def test_a_budget_that_is_too_small_for_another_shape_alone_says_so() -> None:
    function = planned_step(dict_step)
    with pytest.raises(tensile.BudgetTooSmall) as first:
        tensile.jit(dict_step, budget=100)(fresh(weights()), {"x": batch()})
    function(fresh(weights()), {"x": batch()})
    with pytest.raises(tensile.BudgetTooSmall) as other:
        function(fresh(weights()), {"x": batch(rows=1)})
    assert not hasattr(first.value, "__notes__")
    assert other.value.__notes__ == [
        f"This call needs a plan of its own, since batch['x'] has the shape {(1, WIDTH)}, and had {(ROWS, WIDTH)} before."
    ]


def test_where_a_warning_is_an_error_the_next_such_call_runs() -> None:
    function = planned_step()
    function(fresh(weights()), batch())
    state = fresh(weights())
    with pytest.raises(UserWarning, match="planned and compiled again"):
        function(state, batch(rows=ROWS // 2))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    function(state, batch(rows=ROWS // 2))


@pytest.mark.parametrize("ask", ["plan", "jit_peak_bytes"])
def test_shapes_that_the_user_has_asked_about_before_do_not_warn(ask: str) -> None:
    function = planned_step()
    function(fresh(weights()), batch())
    getattr(function, ask)(weights(), batch(rows=ROWS // 2))
    function(fresh(weights()), batch(rows=ROWS // 2))


def test_only_calls_count_as_calls_before() -> None:
    function = planned_step()
    function.plan(weights(), batch())
    function.lower(weights(), batch())
    function(fresh(weights()), batch(rows=ROWS // 2))


def test_a_step_that_runs_as_plain_jit_does_not_warn() -> None:
    function = tensile.jit(sgd_step, donate_argnums=0)
    for rows in (ROWS, ROWS // 2):
        function(fresh(weights()), batch(rows=rows))
        assert function.plan(weights(), batch(rows=rows)).whole


def test_another_model_another_type_and_another_static_argument_do_not_warn() -> None:
    function = planned_step()
    function(fresh(weights()), batch())
    function(fresh(weights(layers=6)), batch(rows=ROWS // 2))
    wide = [jnp.ones((2 * WIDTH, 2 * WIDTH))] * 5
    function(fresh(jax.tree.unflatten(jax.tree.structure(weights()), wide)), jnp.ones((ROWS, 2 * WIDTH)))


def test_an_nnx_step_names_the_users_argument_and_line() -> None:
    class Layers(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    model = Layers()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = tensile.nnx.jit(train, budget="85%", donate_argnames=("model", "optimizer"))
    step(model, optimizer, batch())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(model, optimizer, batch(rows=2 * ROWS))
    (one,) = [one for one in seen if "planned and compiled again" in str(one.message)]
    assert one.filename == __file__
    assert f"x has the shape {(2 * ROWS, WIDTH)}" in str(one.message)
