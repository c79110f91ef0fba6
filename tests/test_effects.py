"""Effects: callbacks and prints happen once an iteration, in their order, whatever the plan; references work as in `jax.jit`.

Prints that are not ordered may overtake one another inside one executable, in `jax.jit` too (XLA:CPU runs callbacks in a pool of
threads). So a test either orders them, lets one depend on another, or compares what was printed in an iteration as a multiset.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.ref as jax_ref
import numpy as np
import optax
import pytest
from jax.experimental import checkify, io_callback

import tensile_jax as tensile
from tensile_jax.plan import POLICIES
from tests.builders import (
    batch,
    fresh,
    low_budget,
    numbers,
    optimizer_state,
    slow_but,
    something_happened,
    weights,
    wrap_launches,
)

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 65536 bytes."
STEPS = 3
WAYS: tuple[dict[str, Any], ...] = ({"policy": "none"}, {"budget": "1GiB"})


class Log:
    """What callbacks have said, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float]] = []

    def say(self, tag: str, value: Any) -> None:
        """A callback without results."""
        self.lines.append((tag, round(float(np.asarray(value)), 4)))

    def count(self, tag: str, value: Any) -> Any:
        """A callback that gives how many lines there are."""
        self.say(tag, value)
        return np.int32(len(self.lines))


def talking_step(log: Log) -> Callable[..., Any]:
    """A training step of dense layers with Adam that says in order what it does, and prints at its end."""
    optimizer = optax.adam(1e-2)

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        target = 0.1 * x[:, ::-1]
        for number, w in enumerate(params):
            x = jnp.tanh(x @ w)
            jax.debug.callback(partial(log.say, f"layer {number}"), x.mean(), ordered=True)
        return jnp.mean((x - target) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
        count = io_callback(partial(log.count, "loss"), jax.ShapeDtypeStruct((), jnp.int32), loss, ordered=True)
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        io_callback(partial(log.say, "norm"), None, norm, ordered=True)
        jax.debug.print("line {count}: loss {loss:.4f}", count=count, loss=loss)
        return {"params": params, "opt_state": opt_state}, loss

    return step


def train(function: Callable[..., Any], state: Any, *, steps: int = STEPS) -> Any:
    """The state after some steps, once everything that they do has been done."""
    state = fresh(state)
    for k in range(steps):
        state, _ = function(state, batch(k))
    jax.effects_barrier()
    return jax.block_until_ready(state)


def assert_close(a: Any, b: Any) -> None:
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)  # cut, XLA fuses differently; Adam amplifies that


LAYERS = 8
STATE = optimizer_state(optax.adam(1e-2), weights(LAYERS))


def plainly(capsys: Any) -> tuple[list[tuple[str, float]], str, Any]:
    """What plain `jax.jit` says and prints, and where it ends."""
    log = Log()
    state = train(jax.jit(talking_step(log), donate_argnums=0), STATE)
    return log.lines, capsys.readouterr().out, state


@pytest.mark.smoke
def test_a_step_that_prints_and_calls_back_trains_at_half_the_memory_as_under_jit(capsys: Any) -> None:
    said, printed, expected = plainly(capsys)
    assert len(said) == STEPS * (LAYERS + 2) and printed.count("\n") == STEPS
    log = Log()
    function = tensile.jit(talking_step(log), budget="50%", donate_argnums=0)
    jit_peak = function.jit_peak_bytes(STATE, batch())  # compiled now, so that the share is of this and not of a prediction
    state = train(function, STATE)
    assert log.lines == said
    assert capsys.readouterr().out == printed
    assert_close(state, expected)
    plan = function.plan(STATE, batch())
    assert not plan.whole and any(event.kind == "recompute" for event in plan.events)
    assert plan.peak_bytes <= 0.5 * jit_peak


@pytest.mark.parametrize("policy", slow_but(sorted(POLICIES), "auto", "vdnn", "none"))
@pytest.mark.parametrize("donate", [pytest.param(0, id="donated"), pytest.param(None, id="not donated", marks=pytest.mark.slow)])
def test_under_every_policy_effects_happen_once_and_in_order(policy: Any, donate: int | None, capsys: Any) -> None:
    said, printed, expected = plainly(capsys)
    log = Log()
    low = None
    if policy != "none":
        low = low_budget(talking_step(Log()), STATE, batch(), policy=policy, donate_argnums=donate, part=0.3)
    function = tensile.jit(talking_step(log), policy=policy, budget=low, donate_argnums=donate)
    try:
        state = train(function, STATE)
    except tensile.BudgetTooSmall as error:
        function = tensile.jit(talking_step(log), policy=policy, budget=error.floor_bytes, donate_argnums=donate)
        state = train(function, STATE)
    assert not function.plan(STATE, batch()).whole
    assert log.lines == said
    assert capsys.readouterr().out == printed
    assert_close(state, expected)


@pytest.mark.slow
def test_a_saved_plan_of_a_step_with_effects_runs(tmp_path: Path, capsys: Any) -> None:
    said, printed, _ = plainly(capsys)
    step = talking_step(Log())
    made = tensile.jit(step, budget="60%", donate_argnums=0)
    train(made, STATE, steps=1)
    made.plan(STATE, batch()).save(tmp_path / "plan.json")
    capsys.readouterr()
    log = Log()
    function = tensile.jit(talking_step(log), plan=tensile.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    train(function, STATE)
    assert log.lines == said
    assert capsys.readouterr().out == printed


# -- where effects stand ------------------------------------------------------------------------------------------------------


def _scan(say: Callable[..., None], x: jax.Array) -> Any:
    def body(carry: Any, k: Any) -> Any:
        jax.debug.callback(say, carry.sum() + k, ordered=True)
        return jnp.sin(carry), carry.sum()

    return jax.lax.scan(body, x, jnp.arange(3.0))


def _while(say: Callable[..., None], x: jax.Array) -> Any:
    def body(carry: Any) -> Any:
        jax.debug.callback(say, carry[1].sum(), ordered=True)
        return carry[0] + 1, jnp.sin(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))


def _cond(say: Callable[..., None], x: jax.Array) -> Any:
    def loud(y: Any) -> Any:
        jax.debug.callback(say, y.sum(), ordered=True)
        return jnp.sin(y)

    return jax.lax.cond(x.sum() > 0, loud, jnp.cos, x), jax.lax.cond(x.sum() < 0, loud, jnp.cos, x)


def _jit(say: Callable[..., None], x: jax.Array) -> Any:
    @jax.jit
    def inner(y: Any) -> Any:
        jax.debug.callback(say, y.sum(), ordered=True)
        return jnp.sin(y)

    return inner(inner(x))


def _twice_the_same(say: Callable[..., None], x: jax.Array) -> Any:
    for _ in range(2):
        jax.debug.callback(say, x.sum(), ordered=True)
    return jnp.sin(x)


def _results_are_not_used(say: Callable[..., None], x: jax.Array) -> Any:
    io_callback(lambda v: (say(v), v)[1], jax.ShapeDtypeStruct((), jnp.float32), x.sum())
    return jnp.sin(x)


def _checkpointed(say: Callable[..., None], x: jax.Array) -> Any:
    @jax.checkpoint
    def block(y: Any) -> Any:
        jax.debug.callback(say, y.sum())
        return jnp.sin(y @ y)

    return jax.grad(lambda y: block(block(y)).sum())(x)


def _checkpointed_with_a_policy(say: Callable[..., None], x: jax.Array) -> Any:
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
    def block(y: Any) -> Any:
        jax.debug.callback(say, y.sum())
        return jnp.sin(y @ y)

    return jax.grad(lambda y: block(block(y)).sum())(x)


def _custom_vjp(say: Callable[..., None], x: jax.Array) -> Any:
    @jax.custom_vjp
    def f(y: Any) -> Any:
        return jnp.sin(y)

    def forward(y: Any) -> Any:
        jax.debug.callback(say, y.sum())
        return jnp.sin(y), y

    def backward(y: Any, g: Any) -> Any:
        jax.debug.callback(say, g.sum())
        return (g * jnp.cos(y),)

    f.defvjp(forward, backward)
    return f(x), jax.grad(lambda y: f(y).sum())(x)


def _mapped(say: Callable[..., None], x: jax.Array) -> Any:
    def row(y: Any) -> Any:
        jax.debug.callback(say, y.sum())
        return jnp.sin(y)

    return jax.vmap(row)(x)


def _nothing_is_returned(say: Callable[..., None], x: jax.Array) -> Any:
    jax.debug.callback(say, (x @ x).sum(), ordered=True)
    jax.debug.callback(say, jnp.sin(x @ x).sum(), ordered=True)


def _checked(say: Callable[..., None], x: jax.Array) -> Any:
    def step(y: Any) -> Any:
        checkify.check(y.sum() < 0, "the sum is {s}", s=y.sum())
        jax.debug.callback(say, y.sum())
        return jnp.log(y @ y)

    _, y = checkify.checkify(step, errors=checkify.user_checks | checkify.float_checks)(x)
    return y


PLACES = (
    _scan, _while, _cond, _jit, _twice_the_same, _results_are_not_used, _checkpointed, _checkpointed_with_a_policy, _custom_vjp,
    _mapped, _nothing_is_returned, _checked,
)  # fmt: skip


@pytest.mark.parametrize("step", PLACES, ids=lambda step: step.__name__[1:])
def test_an_effect_happens_as_often_as_under_jit_wherever_it_stands(step: Callable[..., Any]) -> None:
    said: list[list[tuple[str, float]]] = []
    x = jnp.linspace(0.1, 1.0, 16).reshape(4, 4)
    results: list[Any] = []
    for wrap in (jax.jit, partial(tensile.jit, policy="none"), partial(tensile.jit, budget="1GiB")):
        log = Log()
        function = wrap(partial(step, partial(log.say, "x")))
        results.append([function(x) for _ in range(2)])
        jax.effects_barrier()
        said.append(log.lines)
    assert len(said[0]) > 0 and all(Counter(lines) == Counter(said[0]) for lines in said[1:])
    if "ordered=True" in inspect.getsource(step):
        assert said[1] == said[2] == said[0]
    for other in results[1:]:
        assert_close(other, results[0])


def test_the_error_of_checkify_is_that_of_jit() -> None:
    def step(x: Any) -> Any:
        checkify.check(x[0] > 0, "not above zero: {x}", x=x[0])
        return x * 2

    checked = checkify.checkify(step)
    for x in (jnp.ones(3), -jnp.ones(3)):
        (plain, _), (ours, _) = jax.jit(checked)(x), tensile.jit(checked, policy="none")(x)
        assert ours.get() == plain.get()
    with pytest.raises(ValueError, match="checkify"):  # jax's own: the check was not made functional
        jax.jit(step)(jnp.ones(3))
    with pytest.raises(ValueError, match="checkify"):
        tensile.jit(step, policy="none")(jnp.ones(3))


def test_an_error_in_a_callback_reaches_the_user_and_the_callback_ran_once() -> None:
    calls: list[int] = []

    def fails(value: Any) -> Any:
        calls.append(1)
        raise RuntimeError("RESOURCE_EXHAUSTED is what this callback says")

    def step(x: Any) -> Any:
        return io_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), (x @ x).sum()) + x @ x

    with pytest.raises(Exception, match="this callback says"):
        jax.block_until_ready(tensile.jit(step, policy="none")(jnp.ones((4, 4))))
    assert calls == [1]


# -- out of memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", slow_but([0.0, 0.5, 1.0], 0.5), ids=["first segment", "middle", "last segment"])
def test_a_segment_that_is_launched_again_and_a_plan_that_is_renewed_repeat_no_effect(where: float, capsys: Any) -> None:
    said, printed, expected = plainly(capsys)
    log = Log()
    function = tensile.jit(talking_step(log), budget="80%", donate_argnums=0)
    state, _ = function(fresh(STATE), batch(0))
    before = function.plan(STATE, batch())
    assert something_happened(before)
    at, failed = round(where * (len(before.segments) - 1)), []

    def wrap(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            if index == at and not failed:
                failed.append(index)
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            return call(*values)

        return launch

    wrap_launches(function, wrap)
    for k in range(1, STEPS):
        state, _ = function(state, batch(k))
    jax.effects_barrier()
    assert failed and function.report().out_of_memory == 1
    assert function.plan(STATE, batch()).peak_bytes < before.peak_bytes, "the plan was renewed"
    assert log.lines == said
    assert capsys.readouterr().out == printed
    assert_close(state, expected)


# -- mutable references -------------------------------------------------------------------------------------------------------


def _whole(x: Any) -> Any:
    reference = jax.new_ref(x)
    reference[...] = reference[...] * 2 + 1
    old = jax_ref.swap(reference, ..., jnp.sin(reference[...]))
    return jax_ref.freeze(reference), old


def _parts(x: Any) -> Any:
    reference = jax.new_ref(x)
    reference[0] = x[1]
    reference[1, 2] += 3.0
    jax_ref.addupdate(reference, (jnp.array([2, 3]),), jnp.ones((2, 4)))
    view = reference.at[3][:2]
    return reference[...], view, reference[jnp.argmax(x[0])]


def _in_loops(x: Any) -> Any:
    total, trace = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(4))

    def body(k: Any, carry: Any) -> Any:
        total[...] += carry.sum()
        trace[k] = total[...]
        return jnp.sin(carry)

    y = jax.lax.fori_loop(0, 4, body, x)
    jax.lax.cond(total[...] > 0, lambda: total.__setitem__(..., 7.0), lambda: None)
    return y, total[...], trace[...]


def _in_calls(x: Any) -> Any:
    reference = jax.new_ref(x)

    @jax.jit
    def add(r: Any, y: Any) -> Any:
        r[0] += y[1]
        return r[1] * 2

    first = add(reference, x)
    second = jax.checkpoint(lambda y: jnp.sin(y) + 1)(first)
    return reference[...], add(reference, reference[...]), second


def _under_a_gradient(x: Any) -> Any:
    def loss(w: Any) -> Any:
        reference = jax.new_ref(jnp.zeros(()))

        def body(carry: Any, _: Any) -> Any:
            reference[...] += (carry * w).sum()
            return jnp.sin(carry), None

        jax.lax.scan(body, x, None, length=2)
        return reference[...]

    return jax.value_and_grad(loss)(x)


def _of_keys_and_small_numbers(x: Any) -> Any:
    key, count = jax.new_ref(jax.random.key(0)), jax.new_ref(0)
    for _ in range(2):
        key[...] = jax.random.split(key[...])[0]
        count[...] += 1
    return jax.random.normal(key[...], (2,)) * count[...], count[...], x


def _weakly_typed(x: Any) -> Any:
    reference = jax.new_ref(2.0)

    def body(carry: Any, _: Any) -> Any:
        reference[...] *= x.sum()
        return carry * reference[...], reference[...]

    y, ys = jax.lax.scan(body, 1.0, None, length=3)
    branch = jax.lax.cond(x.sum() > 0, lambda: reference[...] * 2, lambda: reference[...] * 3)
    return y, ys, branch, branch + 1, reference[...], reference[...] + 1


def _empty(x: Any) -> Any:
    reference = jax_ref.empty_ref(jax.typeof(x))
    reference[...] = x + 1
    jax.debug.callback(lambda v: None, reference[0, 0])
    return reference[...]


REFERENCES = (_whole, _parts, _in_loops, _in_calls, _under_a_gradient, _of_keys_and_small_numbers, _weakly_typed, _empty)


@pytest.mark.parametrize("step", REFERENCES, ids=lambda step: step.__name__[1:])
def test_references_that_a_step_makes_itself_work_as_under_jit(step: Callable[..., Any]) -> None:
    x = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
    expected = jax.jit(step)(x)
    for options in WAYS:
        got = tensile.jit(step, **options)(x)
        assert_close(got, expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert jax.typeof(a) == jax.typeof(b)


@pytest.mark.slow
def test_references_in_a_training_step_train_at_half_the_memory() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            seen, y = jax.new_ref(jnp.zeros(())), x
            for w in params:
                y = jnp.tanh(y @ w)
                seen[...] += jax.lax.stop_gradient(y).mean()
            return jnp.mean((y - 0.1 * x) ** 2) + 0.0 * seen[...], seen[...]

        (loss, seen), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), (loss, seen)

    function = tensile.jit(step, budget="60%", donate_argnums=0)
    got = function(weights(), batch())
    assert something_happened(function.plan(weights(), batch()))
    assert_close(got, jax.jit(step)(weights(), batch()))


def test_references_from_outside_are_refused_by_name_before_anything_has_happened() -> None:
    counter = jax.new_ref(jnp.zeros(()))

    def given(reference: Any, x: Any) -> Any:
        reference[...] += x.sum()
        return 2 * x

    def captured(x: Any) -> Any:
        counter[...] += 1
        return 2 * x

    for options in WAYS:
        with pytest.raises(tensile.TraceError, match="argument reference of the step 'given' is a mutable reference.*jax.jit"):
            tensile.jit(given, **options)(counter, jnp.ones(3))
        with pytest.raises(tensile.TraceError, match="step 'captured' is a mutable reference.*jax.jit"):
            tensile.jit(captured, **options)(jnp.ones(3))
    assert float(counter[...]) == 0.0
