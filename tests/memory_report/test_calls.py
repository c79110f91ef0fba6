"""What a user may name to `memory`, `assert_peak` and `max_batch`: steps on NNX objects, and options that have an effect."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tensile_jax as tensile
from tests.memory_report.small_functions import IMAGES, STATE, scanned, shape, train_step
from tests.nnx.objects import copy_of, expect_same

ROWS, WIDTH = 64, 32
KERNEL = 4 * WIDTH * WIDTH
X = shape(ROWS, WIDTH)


class Stack(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x

    @nnx.jit
    def loss(self, x: jax.Array) -> jax.Array:
        return jnp.mean(self(x) ** 2)


def nnx_step(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def objects() -> tuple[Stack, nnx.Optimizer]:
    model = Stack()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def split_by_hand() -> tuple[Callable[..., Any], Any]:
    """The step as a function of a state, and the state."""
    graph, state = nnx.split(objects())

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss = nnx_step(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    return step, state


JITS: dict[str, Callable[..., Any]] = {
    "flax.nnx.jit": nnx.jit,
    "flax.nnx.jit, without graph updates": lambda step, **options: nnx.jit(step, graph_updates=False, **options),
    "tensile_jax.nnx.jit": tensile.nnx.jit,
}


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": (0, 1)}, {"donate_argnames": ("model", "optimizer")}])
@pytest.mark.parametrize("name", [*JITS, "a function of objects"])
def test_the_report_on_a_step_of_nnx_objects_has_the_users_names_roles_and_donation(name: str, donated: dict[str, Any]) -> None:
    if name in JITS:
        report = tensile.memory(JITS[name](nnx_step, **donated), *objects(), X, device_profile="cpu")
    else:
        report = tensile.memory(nnx_step, *objects(), X, device_profile="cpu", **donated)
    assert report.program == "nnx_step"
    roles = {tensor.name: tensor.role for tensor in report.tensors if tensor.nbytes == KERNEL and not tensor.made_by}
    assert {name: role for name, role in roles.items() if "layers[1]" in name} == {
        "model.layers[1].kernel": "parameter",
        "optimizer.opt_state[0].mu.layers[1].kernel": "optimizer_state",
        "optimizer.opt_state[0].nu.layers[1].kernel": "optimizer_state",
    }
    missed = {m.name: m.remedy for m in report.missed_donations}
    if donated:
        assert missed == {}
    else:
        assert missed["model.layers[1].kernel"] == "Pass donate_argnums=0 to nnx.jit."
        assert missed["optimizer.opt_state[0].mu.layers[1].kernel"] == "Pass donate_argnums=1 to nnx.jit."


def test_the_peak_of_a_step_of_nnx_objects_is_that_of_the_step_split_by_hand() -> None:
    step, state = split_by_hand()
    by_hand = tensile.memory(step, state, X, donate_argnums=0, compile=True, device_profile="cpu")
    ours = tensile.memory(nnx_step, *objects(), X, donate_argnums=(0, 1), compile=True, device_profile="cpu")
    assert (ours.predicted_peak_bytes, ours.compiled_peak_bytes) == (by_hand.predicted_peak_bytes, by_hand.compiled_peak_bytes)


@pytest.mark.parametrize("name", JITS)
def test_a_report_changes_neither_the_objects_nor_the_step(name: str) -> None:
    ours = objects()
    theirs = copy_of(ours)
    step = JITS[name](nnx_step, donate_argnames=("model", "optimizer"))
    tensile.memory(step, *ours, X, compile=True)
    expect_same(ours, theirs)
    x = jnp.ones((ROWS, WIDTH))
    assert jnp.array_equal(step(*ours, x), JITS[name](nnx_step)(*copy_of(theirs), x))
    tensile.memory(step, *ours, X)  # also after a call


def test_objects_may_be_abstract_and_arguments_may_be_named() -> None:
    concrete = tensile.memory(nnx.jit(nnx_step), *objects(), X, device_profile="cpu")
    assert tensile.memory(nnx.jit(nnx_step), *nnx.eval_shape(objects), X, device_profile="cpu") == concrete
    model, optimizer = objects()
    named = tensile.memory(nnx.jit(nnx_step), model, kwargs={"x": X, "optimizer": optimizer}, device_profile="cpu")
    assert named.predicted_peak_bytes == concrete.predicted_peak_bytes
    assert "Pass donate_argnames='optimizer' to nnx.jit." in {m.remedy for m in named.missed_donations}


def test_static_arguments_are_given_again() -> None:
    def repeated(layer: nnx.Linear, times: int, x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = jnp.tanh(layer(x))
        return x

    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    plain = tensile.memory(repeated, layer, 3, X, static_argnums=1)
    jitted = tensile.memory(nnx.jit(repeated, static_argnums=1), layer, 3, X, static_argnums=1)
    assert plain == jitted and sum(t.made_by == "dot_general" for t in plain.tensors) == 3


def test_static_arguments_count_in_the_option_that_donates() -> None:
    def scaled(by: int, w: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
        return w * by, layer

    (missed,) = tensile.memory(scaled, 3, X, jnp.ones(()), static_argnums=0).missed_donations[:1]
    assert (missed.name, missed.remedy) == ("w", "Pass donate_argnums=1.")
    objects_too = tensile.memory(scaled, 3, X, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), static_argnames="by")
    remedies = {m.name: m.remedy for m in objects_too.missed_donations}
    assert remedies["layer.kernel"] == "Pass donate_argnums=2 to nnx.jit."


def test_a_jitted_method_is_a_step_of_its_object() -> None:
    report = tensile.memory(Stack().loss, X)
    assert {"self.layers[0].kernel", "x"} <= {tensor.name for tensor in report.tensors}


def test_a_step_of_nnx_objects_has_a_limit_and_a_largest_batch() -> None:
    step, given = nnx.jit(nnx_step, donate_argnums=(0, 1)), objects()
    peak = tensile.memory(step, *given, X, compile=True).peak_bytes
    assert tensile.assert_peak(step, *given, X, at_most=peak).peak_bytes == peak
    with pytest.raises(AssertionError, match=r"(?s)'nnx_step' is .* model.layers\[1\].kernel"):
        tensile.assert_peak(step, *given, X, at_most=8 * KERNEL)

    def make(batch_size: int) -> tuple[Any, tuple[Any, ...]]:
        return step, (*given, shape(batch_size, WIDTH))

    options: dict[str, Any] = {"budget": "128KiB", "most": 64, "device_profile": "cpu", "progress": False}
    found = tensile.max_batch(make, **options)
    assert 0 < found.plain_batch_size <= found.batch_size and found.model == "nnx_step"
    assert tensile.max_batch(step, *given, X, batch_axis={2: 0}, **options) == found


def test_a_state_of_nnx_is_a_pytree_as_before() -> None:
    step, state = split_by_hand()
    report = tensile.memory(step, state, X)
    assert {m.remedy for m in report.missed_donations} == {"Pass donate_argnums=0."}


def test_what_flax_cannot_make_a_pure_function_of_is_refused() -> None:
    with pytest.raises(ValueError, match="in_shardings=.* says where arrays lie"):
        tensile.memory(nnx_step, *objects(), X, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    kept = nnx.jit_partial(nnx_step, *objects(), graph_updates=False)
    with pytest.raises(TypeError, match="'nnx_step' comes from nnx.jit_partial"):
        tensile.memory(kept, X)


@pytest.mark.parametrize("jit", [lambda step: step, jax.jit, tensile.jit])
@pytest.mark.parametrize("report_on", [tensile.memory, tensile.assert_peak])
def test_an_option_that_is_not_known_is_refused(report_on: Any, jit: Any) -> None:
    given: dict[str, Any] = {"at_most": "1GiB"} if report_on is tensile.assert_peak else {}
    with pytest.raises(
        TypeError, match=r"nonsense is no option of this function, and none of jax.jit, which takes static_argnums, "
    ):
        report_on(jit(train_step), STATE, IMAGES, nonsense=3, **given)
    with pytest.raises(TypeError, match=r"policy='none' is an option of tensile_jax.jit, and this function does not take it"):
        report_on(jit(train_step), STATE, IMAGES, policy="none", **given)


@pytest.mark.parametrize("option", ["donate_argnums", "donate_argnames", "inline", "compiler_options"])
@pytest.mark.parametrize("jit", [jax.jit, tensile.jit, nnx.jit, tensile.nnx.jit])
def test_an_option_of_a_jitted_function_that_would_change_nothing_is_refused(jit: Any, option: str) -> None:
    given: dict[str, Any] = {option: 0}
    with pytest.raises(TypeError, match=rf"{option}=0 would change nothing, because 'train_step' is jitted already"):
        tensile.memory(jit(train_step), STATE, IMAGES, **given)
    with pytest.raises(TypeError, match=f"{option}=0 would change nothing"):
        tensile.max_batch(jit(train_step), STATE, IMAGES, batch_axis={1: 0}, budget="1MiB", **given)


def test_assert_peak_does_not_take_what_only_memory_takes() -> None:
    given: dict[str, Any] = {"budgets": True}
    with pytest.raises(TypeError, match="budgets is no option of this function"):
        tensile.assert_peak(train_step, STATE, IMAGES, at_most="1GiB", **given)


def test_keep_unused_of_a_jitted_function_is_given_again() -> None:
    def step(w: jax.Array, unread: jax.Array) -> jax.Array:
        return jnp.tanh(w)

    given: dict[str, Any] = {"keep_unused": True, "compile": True, "device_profile": "cpu"}
    assert tensile.memory(jax.jit(step, keep_unused=True), IMAGES, IMAGES, **given) == tensile.memory(
        step, IMAGES, IMAGES, **given
    )


def test_loops_are_opened_for_the_plans_of_a_report_and_only_with_them() -> None:
    weights = shape(8, 64, 64)
    with pytest.raises(
        ValueError, match="open_loops=True is for plans, and plain jax.jit runs a loop as it is. Pass budgets=True"
    ):
        tensile.memory(scanned, weights, IMAGES, open_loops=True)
    opened, closed = (
        tensile.memory(scanned, weights, IMAGES, open_loops=opens, budgets=True, device_profile="cpu", progress=False)
        for opens in (True, False)
    )
    assert opened.predicted_peak_bytes == closed.predicted_peak_bytes
    assert opened.smallest_budget_bytes is not None and closed.smallest_budget_bytes is not None
    assert opened.smallest_budget_bytes < closed.smallest_budget_bytes


def test_flax_is_not_imported_for_functions_of_arrays() -> None:
    code = """
import sys, jax.numpy as jnp, tensile_jax as tensile
tensile.memory(lambda x: x + 1, jnp.ones(3))
tensile.check(lambda x: x + 1, jnp.ones(3), steps=1, timed_calls=1, progress=False)
sys.exit("flax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
