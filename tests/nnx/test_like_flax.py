"""Whatever `flax.nnx.jit` does with a step and its objects, `tensile_jax.nnx.jit` does.

Each case runs both on equal copies of the same objects: `policy="none"` runs the step as segments. Compared are results, the
objects' structure, sharing and arrays, and the errors.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import tensile_jax as tensile
from tests.nnx.objects import Net, batch, copy_of, expect_same, train_step, training_objects

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
"""Segments let XLA fuse in other ways: a few units in the last place for each iteration."""


def run_both(
    step: Callable[..., Any],
    objects: tuple[Any, ...],
    *more: Any,
    calls: int = 2,
    named: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Calls of both with the same arguments, compared after each; our objects and our last result."""
    ours, theirs = objects, copy_of(objects)
    planned = tensile.nnx.jit(step, policy="none", **options)
    plain = nnx.jit(step, **options)
    result = None
    for _ in range(calls):
        result = planned(*ours, *more, **(named or {}))
        expect_same((result, ours), (plain(*theirs, *more, **(named or {})), theirs), **ROUNDING)
    return ours, result


MODES = pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=["graph", "no updates", "tree"])


@MODES
def test_a_training_step_changes_model_optimizer_metrics_and_rngs(mode: dict[str, Any]) -> None:
    before = training_objects()
    kernel = np.array(before[0].linear1.kernel[...])
    (model, optimizer, _), _ = run_both(train_step, before, batch(0), calls=3, **mode)
    assert not np.array_equal(kernel, model.linear1.kernel[...])
    assert int(optimizer.step[...]) == 3


@MODES
def test_donated_arrays_are_gone_and_the_others_are_not(mode: dict[str, Any]) -> None:
    one = batch(0)
    model, optimizer, metrics = training_objects()
    given = model.linear1.kernel[...], metrics.loss.total[...]  # pyright: ignore[reportAttributeAccessIssue] # made by name
    tensile.nnx.jit(train_step, policy="none", donate_argnames=("model", "optimizer"), **mode)(model, optimizer, metrics, one)
    assert [array.is_deleted() for array in given] == [True, False]
    assert not model.linear1.kernel[...].is_deleted()


def test_without_donation_nothing_is_deleted() -> None:
    objects = training_objects()
    given = jax.tree.leaves(nnx.state(objects))
    tensile.nnx.jit(train_step, policy="none")(*objects, batch(0))
    assert not any(array.is_deleted() for array in given)


# -- references -------------------------------------------------------------------------------------------------------


class Tied(nnx.Module):
    """An embedding that is its own output layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.out = self.embed

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out.attend(self.embed(x))


def test_a_module_under_two_names_stays_one() -> None:
    model = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Tied, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: (model(tokens) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    (model, _), _ = run_both(step, (model, optimizer), jnp.arange(5))
    assert model.out is model.embed


def test_two_arguments_that_share_a_module_still_share_it() -> None:
    def step(model: Net, part: nnx.Linear, x: jax.Array) -> jax.Array:
        part.kernel[...] += 1.0
        return model.linear1(x).sum()

    model = training_objects()[0]
    (model, part), _ = run_both(step, (model, model.linear1), jnp.ones((2, 4)))
    assert part is model.linear1


def test_a_variable_given_twice_is_one_variable() -> None:
    def step(a: nnx.Variable, b: nnx.Variable) -> jax.Array:
        a[...] += 1.0
        b[...] *= 2.0
        return a[...] + b[...]

    variable = nnx.Variable(jnp.ones(3))
    (a, b), _ = run_both(step, (variable, variable))
    assert a is b is variable


def test_a_model_that_is_its_optimizers_as_well() -> None:
    class Trainer(nnx.Module):
        def __init__(self) -> None:
            self.model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
            self.ema = nnx.Param(jnp.zeros((4, 2)))
            self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

    def step(trainer: Trainer, model: nnx.Linear, x: jax.Array) -> None:
        grads = nnx.grad(lambda model: (model(x) ** 2).sum())(trainer.model)
        trainer.optimizer.update(model, grads)
        trainer.ema[...] = 0.9 * trainer.ema[...] + 0.1 * model.kernel[...]

    trainer = Trainer()
    run_both(step, (trainer, trainer.model), jnp.ones((2, 4)))


def test_what_a_step_returns_of_its_argument_is_that_object() -> None:
    model = training_objects()[0]
    _, result = run_both(lambda model: {"layer": model.linear1, "new": nnx.Linear(1, 2, rngs=nnx.Rngs(0))}, (model,))
    assert result["layer"] is model.linear1
    assert isinstance(result["new"], nnx.Linear)


# -- changes of the graph -----------------------------------------------------------------------------------------------


def test_new_attributes_and_variables_appear_and_deleted_ones_go() -> None:
    def step(model: Any, x: jax.Array) -> None:
        model.seen = nnx.Variable(x.sum())
        model.extra = nnx.Linear(2, 2, rngs=nnx.Rngs(7))
        model.calls = getattr(model, "calls", 0) + 1
        if hasattr(model, "norm"):
            del model.norm

    (model,), _ = run_both(step, (training_objects()[0],), jnp.ones((2, 4)), calls=3)
    assert (float(model.seen[...]), model.calls, hasattr(model, "norm")) == (8.0, 3, False)


def test_submodules_can_change_places() -> None:
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    def swap(pair: Pair) -> None:
        pair.a, pair.b = pair.b, pair.a
        pair.a.kernel[...] += 1.0

    pair = Pair()
    a, b = pair.a, pair.b
    run_both(swap, (pair,), calls=1)
    assert (pair.a, pair.b) == (b, a)


def test_another_graph_is_another_trace_and_the_same_one_is_not() -> None:
    traces: list[str] = []

    def step(model: Net, x: jax.Array) -> jax.Array:
        traces.append("train" if not model.dropout.deterministic else "eval")
        return model(x).sum()

    planned = tensile.nnx.jit(step, policy="none")
    model, x = training_objects()[0], jnp.ones((2, 4))
    planned(model, x), planned(model, x)
    model.eval()
    planned(model, x), planned(model, x)
    model.train()
    planned(model, x)
    assert traces == ["train", "eval"]


def test_variables_of_any_kind_keep_their_values() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.tree = nnx.Variable({"a": jnp.ones(2), "b": (jnp.arange(3, dtype=jnp.uint8),)})
            self.flags = nnx.BatchStat(jnp.array([True, False]))
            self.half = nnx.Param(jnp.ones(2, jnp.bfloat16), note=("kept",))
            self.weak = nnx.Variable(jnp.asarray(1.0) * 1)
            self.rngs = nnx.Rngs(0, noise=jax.random.key(3))
            self.raw = nnx.data(jnp.ones(2))

    def step(odd: Any) -> jax.Array:
        odd.tree.set_value({"a": odd.tree["a"] + 1, "b": (odd.tree["b"][0] + 1,)})
        odd.flags[...] = ~odd.flags[...]
        odd.half[...] += jax.random.normal(odd.rngs.noise(), (2,)).astype(jnp.bfloat16)
        odd.weak[...] = odd.weak[...] * 2
        odd.raw = odd.raw * 3
        return odd.half[...]

    run_both(step, (Odd(),), calls=3)


# -- options ------------------------------------------------------------------------------------------------------------


def scaled(model: Any, x: jax.Array, power: int, *, scale: float = 1.0, name: str = "") -> jax.Array:
    """A step with all kinds of arguments."""
    model.linear1.bias[...] += scale
    return jnp.sum(model.linear1(x) ** power) * scale * (2.0 if name == "double" else 1.0)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"static_argnums": 2}, {}),
        ({"static_argnums": (2,)}, {"scale": 2.0}),
        ({"static_argnames": ("power", "name")}, {"name": "double"}),
        ({"static_argnums": 2, "static_argnames": "name", "donate_argnums": 0}, {"name": "double", "scale": 3}),
        ({"static_argnames": ("power", "name"), "donate_argnames": "model", "keep_unused": True}, {"name": "double"}),
        ({"static_argnums": 2, "graph_updates": False, "donate_argnums": 0}, {}),
    ],
)
def test_static_donated_and_named_arguments(options: dict[str, Any], named: dict[str, Any]) -> None:
    run_both(scaled, (training_objects()[0],), jnp.ones((2, 4)), 3, named=named, **options)


def test_objects_may_be_named_arguments_and_lie_in_containers() -> None:
    def step(parts: dict[str, Any], x: jax.Array, *, rngs: nnx.Rngs) -> jax.Array:
        (layer,) = parts["layers"]
        layer.kernel[...] += jax.random.normal(rngs.noise(), layer.kernel.shape)
        return layer(x).sum() * parts["factor"]

    layer, rngs = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Rngs(0, noise=1)
    theirs, their_rngs = copy_of((layer, rngs))
    x = jnp.ones((2, 4))
    ours = tensile.nnx.jit(step, policy="none")({"layers": (layer,), "factor": 2.0}, x, rngs=rngs)
    expected = nnx.jit(step)({"layers": (theirs,), "factor": 2.0}, x, rngs=their_rngs)
    expect_same((ours, layer, rngs), (expected, theirs, their_rngs), **ROUNDING)


def test_cached_partial_binds_objects() -> None:
    ours = training_objects()
    theirs = copy_of(ours)
    bound = nnx.cached_partial(tensile.nnx.jit(train_step, policy="none"), *ours)
    expected = nnx.cached_partial(nnx.jit(train_step), *theirs)
    for i in range(3):
        expect_same((bound(batch(i)), ours), (expected(batch(i)), theirs), **ROUNDING)


def test_it_decorates_methods() -> None:
    def kind_of(decorate: Callable[..., Any]) -> type[nnx.Module]:
        class Counter(nnx.Module):
            def __init__(self) -> None:
                self.count = nnx.Variable(jnp.zeros(()))

            @decorate
            def add(self, x: jax.Array) -> jax.Array:
                self.count[...] += x
                return self.count[...] * 2

        return Counter

    ours, theirs = kind_of(tensile.nnx.jit(policy="none"))(), kind_of(nnx.jit)()
    assert [float(one.add(3.0)) for one in (ours, ours)] == [float(one.add(3.0)) for one in (theirs, theirs)]  # pyright: ignore[reportAttributeAccessIssue]


def test_it_looks_like_the_step() -> None:
    planned = tensile.nnx.jit(train_step)
    assert (planned.__name__, planned.__doc__, planned.__wrapped__) == ("train_step", train_step.__doc__, train_step)
    assert isinstance(planned, tensile.nnx.NnxFunction)


# -- errors -------------------------------------------------------------------------------------------------------------


def expect_same_error(call: Callable[[Callable[..., Any]], Any]) -> Exception:
    """What `call` raises with either decorator is of the same type."""
    with pytest.raises(Exception) as theirs:
        call(nnx.jit)
    with pytest.raises(type(theirs.value)) as ours:
        call(lambda step, **options: tensile.nnx.jit(step, policy="none", **options))
    assert type(ours.value) is type(theirs.value)
    return ours.value


def test_a_captured_variable_cannot_be_changed() -> None:
    outside = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array) -> jax.Array:
        outside[...] += x
        return x

    assert isinstance(expect_same_error(lambda jit: jit(step)(jnp.ones(()))), TraceContextError)


def test_a_captured_object_cannot_be_returned_without_graph_updates() -> None:
    outside = nnx.Variable(jnp.zeros(()))
    expect_same_error(lambda jit: jit(lambda x: outside, graph_updates=False)(1.0))


def test_a_bound_method_is_refused() -> None:
    expect_same_error(lambda jit: jit(training_objects()[0].__call__))


def test_shared_variables_are_refused_where_modules_are_trees() -> None:
    variable = nnx.Variable(jnp.zeros(()))
    error = expect_same_error(lambda jit: jit(lambda a, b: None, graph=False)(variable, variable))
    assert "Duplicate" in str(error)


def test_text_that_is_not_static_is_refused() -> None:
    expect_same_error(lambda jit: jit(scaled, static_argnums=2)(training_objects()[0], jnp.ones((2, 4)), 2, name="double"))


def test_static_arguments_must_be_hashable() -> None:
    expect_same_error(lambda jit: jit(scaled, static_argnums=2)(training_objects()[0], jnp.ones((2, 4)), [2]))


def test_a_cached_graph_must_not_change() -> None:
    def grow(model: Any) -> None:
        model.extra = nnx.Variable(jnp.zeros(()))

    expect_same_error(lambda jit: nnx.cached_partial(jit(grow), training_objects()[0])())


def test_arguments_that_the_step_does_not_take_are_refused() -> None:
    expect_same_error(lambda jit: jit(train_step)(*training_objects()))


@pytest.mark.parametrize("options", [{"in_shardings": nnx.StateSharding({...: 1})}, {"device": "gpu"}, {"backend": "cpu"}])
def test_options_that_place_arrays_are_refused_in_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*one device.*jax.device_put"):
        tensile.nnx.jit(train_step, **options)


def test_shardings_of_none_say_nothing() -> None:
    objects = training_objects()
    tensile.nnx.jit(train_step, in_shardings=(None, None, None, None), out_shardings=None)(*objects, batch(0))
    assert int(objects[1].step[...]) == 1
