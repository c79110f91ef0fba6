"""What the budget adds to `flax.nnx.jit`: plans and reports of NNX objects, and objects that are whole whatever happens."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tensile_jax as tensile
from tensile_jax import PlannedFunction
from tensile_jax.trace import trace_step
from tests.nnx.objects import copy_of, expect_same

ROWS, WIDTH = 512, 32


class Stack(nnx.Module):
    """Dense layers whose activations are the smallest that the planner moves."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(5)])
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def step(model: Stack, optimizer: nnx.Optimizer, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """A train step."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2) * scale)(model)
    optimizer.update(model, grads)
    return loss


def objects() -> tuple[Stack, nnx.Optimizer]:
    """Those of `step`."""
    model = Stack(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
DONATED = ("model", "optimizer")


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, Any]:
    """The function after three steps at 75 %, its objects, and those of `flax.nnx.jit`."""
    ours = objects()
    theirs = copy_of(ours)
    function = tensile.nnx.jit(step, budget="75%", donate_argnames=DONATED)
    function.jit_peak_bytes(*ours, X, scale=2.0)  # compiled now, so that the share is of this and not of a prediction
    plain: Any = nnx.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(function(*ours, X, scale=2.0), plain(*theirs, X, scale=2.0), rtol=1e-5)
    return function, ours, theirs


def test_it_trains_under_its_budget_with_the_results_of_flax(trained: tuple[Any, Any, Any]) -> None:
    function, ours, theirs = trained
    expect_same(ours, theirs, rtol=1e-4, atol=1e-6)
    report, plan = function.report(), function.plan(*ours, X, scale=2.0)
    assert not plan.whole and plan.program == "step"
    assert "model.layers[2].kernel" in {tensor.name for tensor in plan.tensors}
    assert report.peak_bytes <= 0.75 * function.jit_peak_bytes(*ours, X, scale=2.0)
    assert report.iterations == 3


def test_plans_bounds_and_comparisons_are_of_objects_and_change_nothing() -> None:
    @tensile.nnx.jit(budget="1GiB")
    def shift(layer: Any, x: jax.Array) -> jax.Array:
        layer.bias[...] += 1.0
        return layer(x)

    layer, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((2, 2))
    before = copy_of(layer)
    assert 0 < shift.bound_us(layer, x) <= shift.plan(layer, x).step_us
    assert shift.compare(layer, x).program == "shift"
    assert shift.jit_peak_bytes(layer, x) > 0
    with pytest.raises(RuntimeError, match="nothing to report"):
        shift.report()
    expect_same(layer, before)


def test_a_plan_of_abstract_objects_is_that_of_real_ones(trained: tuple[Any, Any, Any]) -> None:
    function, ours, _ = trained
    abstract = nnx.eval_shape(objects)
    fresh = tensile.nnx.jit(step, budget=function.plan(*ours, X, scale=2.0).budget_bytes, donate_argnames=DONATED)
    assert fresh.plan(*abstract, jax.ShapeDtypeStruct(X.shape, X.dtype), scale=2.0) == fresh.plan(*ours, X, scale=2.0)


def test_it_has_what_flax_nnx_jit_has(trained: tuple[Any, Any, Any]) -> None:
    function, ours, _ = trained
    plain: Any = nnx.jit(step)
    assert function.eval_shape(*ours, X).shape == ()
    assert function.trace(*ours, X).lower().as_text() == function.lower(*ours, X).as_text()
    mine = copy_of(ours)
    theirs = copy_of(ours)
    function.lower(*mine, X).compile()(*mine, X)
    plain(*theirs, X)
    expect_same(mine, theirs, rtol=1e-5, atol=1e-6)


def test_inside_other_transformations_it_is_the_plain_step(trained: tuple[Any, Any, Any]) -> None:
    function, ours, _ = trained
    (model, optimizer), theirs = copy_of(ours), copy_of(ours)

    @nnx.jit
    def twice(model: Any, optimizer: Any, x: Any) -> jax.Array:
        return function(model, optimizer, x) + function(model, optimizer, x)

    plain: Any = nnx.jit(step)
    np.testing.assert_allclose(twice(model, optimizer, X), plain(*theirs, X) + plain(*theirs, X), rtol=1e-5)
    expect_same((model, optimizer), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=["graph", "no updates", "tree"])
def test_tensors_have_the_names_of_the_objects_and_variables_are_state(mode: dict[str, Any]) -> None:
    def small(model: Stack, power: int, optimizer: nnx.Optimizer, batch: dict[str, jax.Array], *, scale: float) -> jax.Array:
        return step(model, optimizer, batch["x"] ** power, scale=scale)

    function = tensile.nnx.jit(small, static_argnums=1, **mode)
    seen: dict[str, Any] = {}

    def look(*args: Any, **kwargs: Any) -> None:
        planned = function._planned
        seen["graph"] = trace_step(planned._jitted, planned._function, args, kwargs, static=(1,)).graph

    model, optimizer = objects()
    function._ask(look, (model, 2, optimizer, {"x": X}), {"scale": 2.0})
    graph = seen["graph"]
    role_of = {graph.tensors[t].name: graph.tensors[t].role for t in graph.inputs}
    assert role_of["model.layers[3].kernel"] == "parameter"
    assert role_of["model.count"] == "state"
    assert "optimizer.step" in role_of
    assert (role_of["batch['x']"], role_of["scale"]) == ("batch", "batch")
    moments = "trace['layers'][1]['kernel']" if mode == {"graph": False} else "trace.layers[1].kernel"
    assert role_of[f"optimizer.opt_state[0].{moments}"] == "optimizer_state"
    carried = {graph.tensors[c.input].name for c in graph.carried}
    assert carried == {name for name, role in role_of.items() if role != "batch"}
    assert graph.tensors[graph.outputs[-1 if not mode else 0]].name == "result"


# -- what is never lost ---------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_changes_nothing() -> None:
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    before = copy_of(layer)

    @tensile.nnx.jit(budget=10, donate_argnums=0)
    def grow(layer: nnx.Linear) -> None:
        layer.kernel[...] += 1.0

    with pytest.raises(tensile.BudgetTooSmall):
        grow(layer)
    expect_same(layer, before)


def test_a_step_that_raises_while_it_is_traced_changes_nothing() -> None:
    def broken(model: Stack) -> None:
        model.count[...] += 1
        raise RuntimeError("broken")

    (model, _) = objects()
    with pytest.raises(RuntimeError, match="broken"):
        tensile.nnx.jit(broken)(model)
    assert int(model.count[...]) == 0


@pytest.mark.parametrize("donated", [(), ("model",)], ids=["kept", "donated"])
def test_ctrl_c_before_an_iteration_leaves_the_objects_as_they_were(
    donated: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, model = tensile.nnx.jit(_count, donate_argnames=donated), objects()[0]

    def interrupted(self: PlannedFunction, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was to be interrupted")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PlannedFunction, "__call__", interrupted)
        function(model)
    assert int(model.count[...]) == 0
    function(model)
    assert int(model.count[...]) == 1


@pytest.mark.parametrize("donated", [(), ("model",)], ids=["kept", "donated"])
@pytest.mark.parametrize("when", ["while they are gone", "while they are updated"])
def test_ctrl_c_after_an_iteration_leaves_the_objects_whole(
    donated: tuple[str, ...], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, model = tensile.nnx.jit(_count, donate_argnames=donated), objects()[0]
    run, merge = PlannedFunction.__call__, nnx.MergeContext.unflatten

    def run_and_interrupt(self: PlannedFunction, *args: Any, **kwargs: Any) -> Any:
        results = run(self, *args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return results

    def interrupt_and_merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return merge(self, *args, **kwargs)

    function(model)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if when == "while they are gone":
            patched.setattr(PlannedFunction, "__call__", run_and_interrupt)
        else:
            patched.setattr(nnx.MergeContext, "unflatten", interrupt_and_merge)
        function(model)
    was_lost = when == "while they are gone" and not donated  # the old arrays are all there: as if it had not begun
    assert int(model.count[...]) == (1 if was_lost else 2)
    biases = jax.tree.leaves(nnx.state(model, nnx.PathContains("bias")))
    assert all(np.array_equal(bias, np.full(WIDTH, model.count[...])) for bias in biases) and len(biases) == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _count(model: Any) -> None:
    model.count[...] += 1
    for layer in model.layers:
        layer.bias[...] += 1
