"""Steps with loops: their iterations are opened, with the results of `jax.jit`, and planned one by one under a budget.

The first half opens every form of loop and compares results and names of operators. The second half runs trainings under budgets.
"""

import gc
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tensile_jax as tensile
from tensile_jax.plan_format import unranged
from tensile_jax.trace.loops.rules import treatments_of
from tensile_jax.trace.program import Nested, Program
from tensile_jax.trace.reading.flatten import flatten
from tests.builders import batch, device_bytes, fresh, measure_launches, numbers, planned, running, slow_but, weights

LAYERS, WIDTH = 4, 32
X = batch(rows=64)
STACK = jnp.stack(weights(LAYERS))


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w), None


def distance(y: Any, x: Any) -> Any:
    return jnp.mean((y - 0.1 * x[:, ::-1]) ** 2)


def plain(params: Any, x: Any) -> Any:
    return distance(lax.scan(layer, x, params)[0], x)


def with_remat(params: Any, x: Any) -> Any:
    return distance(lax.scan(jax.checkpoint(layer), x, params)[0], x)


def backwards(params: Any, x: Any) -> Any:
    return distance(lax.scan(layer, x, params, reverse=True)[0], x)


def nested(params: Any, x: Any) -> Any:
    pairs = params.reshape(2, LAYERS // 2, WIDTH, WIDTH)
    return distance(lax.scan(lambda y, several: (lax.scan(layer, y, several)[0], None), x, pairs)[0], x)


def with_an_index(params: Any, x: Any) -> Any:
    def body(y: Any, given: Any) -> Any:
        w, i = given
        return jnp.where(i % 2, jnp.tanh(y @ w), y @ w), i * 2

    y, doubled = lax.scan(body, x, (params, jnp.arange(LAYERS)))
    return distance(y, x) + doubled.sum()


def several_carries(params: Any, x: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        count, y, total = carry
        y = jnp.tanh(y @ w)
        return (count + 1, y, {"sum": total["sum"] + y.sum() * count}), y.mean()

    (_, y, total), means = lax.scan(body, (0, x, {"sum": 0.0}), params)
    return distance(y, x) + 1e-3 * total["sum"] + means.sum()


def a_derivative_of_its_own(params: Any, x: Any) -> Any:
    @jax.custom_vjp
    def clipped(y: Any) -> Any:
        return jnp.tanh(y)

    clipped.defvjp(lambda y: (jnp.tanh(y), y), lambda y, g: (jnp.clip(g, -0.01, 0.01) * (1 - jnp.tanh(y) ** 2),))
    return distance(lax.scan(lambda y, w: (clipped(y @ w), None), x, params)[0], x)


def random_keys(params: Any, x: Any) -> Any:
    def body(y: Any, given: Any) -> Any:
        w, key = given
        return jnp.tanh(y @ w) * jax.random.bernoulli(key, 0.9, y.shape), None

    return distance(lax.scan(body, x, (params, jax.random.split(jax.random.key(0), LAYERS)))[0], x)


def a_captured_constant(params: Any, x: Any) -> Any:
    table = jnp.asarray(np.linspace(0.0, 1.0, WIDTH, dtype=np.float32))
    return distance(lax.scan(lambda y, w: (jnp.tanh(y @ w + table), None), x, params)[0], x)


def all_results_are_used(params: Any, x: Any) -> Any:
    def body(y: Any, w: Any) -> Any:
        y = jnp.tanh(y @ w)
        return y, (y, y.sum())

    y, (several, sums) = lax.scan(body, x, params)
    return distance(y, x) + (several[-1] * several[0]).mean() + 1e-3 * (sums[::-1] * jnp.arange(LAYERS)).sum()


def a_turning_loop(params: Any, x: Any) -> Any:
    return distance(lax.fori_loop(0, LAYERS, lambda i, y: jnp.tanh(y @ params[i]), x), x)


def mapped(params: Any, x: Any) -> Any:
    return jnp.mean(lax.map(lambda w: distance(jnp.tanh(x @ w), x), params))


def vmapped(params: Any, x: Any) -> Any:
    return jax.vmap(plain, in_axes=(None, 0))(params, jnp.stack([x, -x])).mean()


def accumulated(params: Any, x: Any) -> Any:
    """The loss of each part of the batch after another; its gradient is accumulated in the loop's carry."""

    def body(total: Any, part: Any) -> Any:
        return total + jax.checkpoint(plain)(params, part), None

    return lax.scan(body, 0.0, x.reshape(4, -1, WIDTH))[0] / 4


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    f.__name__: f
    for f in (
        plain, with_remat, backwards, nested, with_an_index, several_carries, a_derivative_of_its_own, random_keys,
        a_captured_constant, all_results_are_used, a_turning_loop, mapped, vmapped, accumulated,
    )
}  # fmt: skip


def descent(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def train_step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return train_step


def opened(step: Callable[..., Any], *args: Any) -> Program:
    return treated(jax.make_jaxpr(step)(*args), open_loops=True)


def treated(jaxpr: Any, *, open_loops: bool | None = None, splits: bool = False) -> Program:
    """The program of a jaxpr, whose loops are treated by the rules."""
    nested = Nested(jaxpr, open_loops=open_loops)
    return flatten(nested, treatments_of(nested, splits=splits))


def run(program: Program, *args: Any) -> list[Any]:
    """The results of a program, compiled as one."""

    def whole(inputs: Any, constants: Any) -> list[Any]:
        environment: dict[int, Any] = {**dict(zip(program.inputs, inputs, strict=True)), **constants}
        for e in program.equations:
            given = [environment[a] if isinstance(a, int) else a.value for a in e.inputs]
            environment.update(zip(e.outputs, e.run(given), strict=True))
        return [environment[v] for v in program.outputs]

    return jax.jit(whole)(jax.tree.leaves(args), dict(program.constants))


def loops_in(program: Program) -> int:
    return sum(e.primitive.name == "scan" for e in program.equations)


@pytest.mark.smoke
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_loop_is_opened_with_the_results_of_jit(form: str) -> None:
    step = descent(FORMS[form])
    program = opened(step, STACK, X)
    assert loops_in(program) == 0
    for made, expected in zip(run(program, STACK, X), jax.tree.leaves(jax.jit(step)(STACK, X)), strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=2e-6)


EXACT = {"xla_allow_excess_precision": False}
"""An option of XLA. Without it, XLA computes in float32 between bfloat16 operators that it fuses; in segments it fuses others."""


def gradient_and_its_plan(form: str, dtype: Any, **options: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Loss and gradient of plain jit, and those under a low budget."""
    step, args = jax.value_and_grad(FORMS[form]), (STACK.astype(dtype), X.astype(dtype))
    function = planned(step, args, part=0.1, open_loops=True, **options)
    plain_jit = jax.jit(step, **options)
    return [[np.asarray(v, np.float32) for v in jax.tree.leaves(f(*args))] for f in (function, plain_jit)]  # pyright: ignore[reportReturnType]


IN_NARROW_NUMBERS = ("plain", "with_remat", "several_carries", "a_derivative_of_its_own", "nested")
UNLIKE = ("accumulated", "nested", "several_carries", "vmapped", "with_an_index", "with_remat")  # of which the others are parts
FORMS_TO_ROUNDING = [
    *(
        pytest.param(form, jnp.float32, marks=() if form in UNLIKE else pytest.mark.slow)
        for form in sorted(FORMS.keys() - {"random_keys"})
    ),
    *(pytest.param(form, jnp.bfloat16, marks=() if form == "plain" else pytest.mark.slow) for form in IN_NARROW_NUMBERS),
]


@pytest.mark.parametrize(("form", "dtype"), FORMS_TO_ROUNDING)
def test_loss_and_gradient_under_a_low_budget_are_those_of_jit(form: str, dtype: Any) -> None:
    """Most CPUs compute them equal to the bit; some without AVX-512 add the products of a gradient up in another order."""
    ulp = float(jnp.finfo(dtype).eps)
    for own, expected in zip(*gradient_and_its_plan(form, dtype, compiler_options=EXACT), strict=True):
        np.testing.assert_allclose(own, expected, rtol=2 * ulp, atol=8 * ulp * np.abs(expected).max())


@pytest.mark.parametrize("form", slow_but(["plain", "with_remat", "accumulated"], "plain"))
def test_in_bfloat16_xla_rounds_in_other_places_unless_it_is_told_not_to(form: str) -> None:
    for own, expected in zip(*gradient_and_its_plan(form, jnp.bfloat16), strict=True):
        np.testing.assert_allclose(own, expected, rtol=2**-6, atol=2**-8 * np.abs(expected).max())


def test_what_an_iteration_leaves_for_its_gradient_is_never_stacked() -> None:
    program = opened(descent(plain), STACK, X)
    stacked = [e for e in program.equations if any(program.avals[v].shape[:2] == (LAYERS, *X.shape[:1]) for v in e.outputs)]
    assert not stacked
    assert sum(e.primitive.name == "concatenate" for e in program.equations) == 1  # the gradient, which the update reads whole


def test_checkpoint_inside_a_loop_changes_nothing_of_what_is_planned() -> None:
    names = [[e.primitive.name for e in opened(descent(f), STACK, X).equations] for f in (plain, with_remat)]
    assert sorted(names[0]) == sorted(names[1])


def test_the_same_operator_of_each_iteration_has_one_position() -> None:
    program = opened(descent(nested), STACK, X)
    products = [e for e in program.equations if e.primitive.name == "dot_general"]
    forward = [e for e in products if "transpose" not in e.scope]
    assert len({e.position for e in forward}) == 1
    assert [e.iterations for e in forward] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_index_is_an_argument_so_that_iterations_are_equal() -> None:
    program = opened(plain, STACK, X)
    slices = [e for e in program.equations if e.primitive.name == "dynamic_slice"]
    assert len(slices) == LAYERS
    assert all(isinstance(e.inputs[1], int) for e in slices)
    assert sorted(int(program.constants[e.inputs[1]]) for e in slices if isinstance(e.inputs[1], int)) == list(range(LAYERS))


@pytest.mark.parametrize("length", [0, 1])
def test_a_loop_without_turns_and_one_with_one_turn_are_opened(length: int) -> None:
    def step(params: Any, x: Any) -> Any:
        y, sums = lax.scan(lambda y, w: (jnp.tanh(y @ w), y.sum()), x, params[:length])
        return y, sums, distance(y, x)

    program = treated(jax.make_jaxpr(step)(STACK, X))
    assert loops_in(program) == 0
    for made, expected in zip(run(program, STACK, X), jax.jit(step)(STACK, X), strict=True):
        assert made.shape == expected.shape
        np.testing.assert_allclose(made, expected, rtol=1e-6)


def loop_kept_whole(body: Callable[[Any, Any], Any], x: Any, xs: Any) -> bool:
    program = treated(jax.make_jaxpr(lambda x, xs: lax.scan(body, x, xs))(x, xs))
    return loops_in(program) == 1


def test_loops_that_are_worth_it_are_opened_and_others_are_not() -> None:
    large, deep = jnp.zeros((512, 256)), jnp.zeros((LAYERS, 256, 256))
    assert not loop_kept_whole(layer, large, deep)
    assert not loop_kept_whole(layer, large, jnp.zeros((100, 256, 256)))
    assert loop_kept_whole(layer, large, jnp.zeros((1000, 256, 256)))  # too many launches
    assert loop_kept_whole(layer, jnp.zeros((2, 8)), jnp.zeros((LAYERS, 8, 8)))  # too small for a launch
    assert loop_kept_whole(lambda y, w: (y * 2 + w[0, 0], None), large, deep)  # nothing heavy


def test_a_recurrence_is_opened_for_few_steps_only() -> None:
    w = jnp.zeros((256, 256))

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x @ w)
        return h, h

    steps = jnp.zeros((100, 64, 256))
    assert loop_kept_whole(cell, steps[0], steps)
    assert not loop_kept_whole(cell, steps[0], steps[:20])
    assert not loop_kept_whole(lambda total, x: (total + jnp.sum(jnp.tanh(x @ w) @ w), None), 0.0, steps)  # parts of a batch


def test_a_plan_says_which_loops_stay_whole_and_how_to_open_them() -> None:
    plan = tensile.jit(descent(plain), policy="none").plan(jnp.zeros((300, WIDTH, WIDTH)), batch())
    assert not plan.whole
    assert re.match(r"The 2 loops at test_loops\.py:\d+ \(300 iterations of \d+( to \d+)? equations each\) stay", plan.notes[0])
    assert plan.notes[0].endswith("With open_loops=True, tensile_jax.jit opens them.")


def test_loops_whose_number_of_turns_is_not_known_stay_whole() -> None:
    def step(params: Any, x: Any) -> Any:
        turn = lambda y: jnp.tanh(y @ params[0])  # noqa: E731
        turned = lax.fori_loop(0, 2 + x[0, 0].astype(int), lambda i, y: turn(y), x)
        return lax.while_loop(lambda y: jnp.sum(y) > 1e6, turn, turned)

    program = opened(step, STACK, X)
    assert [e.primitive.name for e in program.equations].count("while") == 2


def test_effects_in_a_loop_happen_once_in_each_turn_and_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def step(params: Any, x: Any) -> Any:
        def body(y: Any, given: Any) -> Any:
            w, i = given
            jax.debug.print("turn {}", i, ordered=True)
            return jnp.tanh(y @ w), None

        return params, distance(lax.scan(body, x, (params, jnp.arange(LAYERS)))[0], x)

    function = tensile.jit(step, budget="95%", open_loops=True)
    for call in (function, jax.jit(step)):
        jax.block_until_ready(call(STACK, X))
        jax.effects_barrier()
        assert capfd.readouterr().out.split() == [word for i in range(LAYERS) for word in ("turn", str(i))]


def test_a_carry_that_begins_as_a_number_of_python_keeps_the_types_of_jit() -> None:
    def step(params: Any, x: Any) -> Any:
        return lax.scan(lambda total, w: (total + jnp.sum(x @ w), total), 0.0, params)

    made, expected = tensile.jit(step, open_loops=True)(STACK, X), jax.jit(step)(STACK, X)
    assert jax.tree.map(lambda leaf: leaf.aval, made) == jax.tree.map(lambda leaf: leaf.aval, expected)


@pytest.mark.parametrize("wrong", ["yes", 1, 0.5])
def test_open_loops_must_be_true_or_false(wrong: Any) -> None:
    with pytest.raises(ValueError, match="open_loops must be True, False or None"):
        tensile.jit(plain, open_loops=wrong)


# -- trainings under a budget -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))), None


class Layers(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        one = nn.remat(Layer) if self.remat else Layer
        return nn.scan(one, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()(x, None)[0]


def linen(*, remat: bool, optimizer: Any) -> tuple[Any, Any]:
    """A train step of scanned layers, and its first state."""
    module = Layers(remat)
    params = module.init(jax.random.key(0), batch())

    def train_step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(lambda p: distance(module.apply(p, x), x))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step, (params, optimizer.init(params))


def accumulating() -> tuple[Any, Any]:
    """A train step that adds up the gradients of four parts of the batch in a loop."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def train_step(state: Any, x: Any) -> Any:
        params, opt_state = state

        def part(total: Any, rows: Any) -> Any:
            loss, gradients = jax.value_and_grad(plain)(params, rows)
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        zero = (jnp.zeros(()), jnp.zeros_like(params))
        (loss, gradients), _ = lax.scan(part, zero, x.reshape(4, -1, WIDTH))
        updates, opt_state = optimizer.update(gradients / 4, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss / 4

    return train_step, (STACK, optimizer.init(STACK))


def several_steps() -> tuple[Any, Any]:
    """optax's `MultiSteps`, which updates the parameters in every second step only."""
    optimizer = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)

    def train_step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(plain)(params, x)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step, (STACK, optimizer.init(STACK))


TRAININGS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "layers": lambda: linen(remat=False, optimizer=optax.adam(1e-2)),
    "layers in remat": lambda: linen(remat=True, optimizer=optax.adam(1e-2)),
    "clipped layers": lambda: linen(remat=False, optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
    "accumulation": accumulating,
    "several steps": several_steps,
}


@pytest.mark.parametrize("name", slow_but(TRAININGS, "accumulation", "several steps"))
def test_a_training_under_a_low_budget_gives_the_results_of_jit_and_keeps_its_peak(name: str) -> None:
    step, state = TRAININGS[name]()
    function = planned(step, (state, batch(rows=512)), part=0.1, donate_argnums=0, open_loops=True)
    plan = running(function).plan
    assert len(plan.segments) > 1
    expected, state = fresh(state), fresh(state)
    jitted = jax.jit(step)
    seen = None
    for i in range(10):
        expected, loss = jitted(expected, batch(i, rows=512))
        x = batch(i, rows=512)
        if i == 1:
            gc.collect()  # arrays of earlier tests, which would be gone before the launches are measured
            held = device_bytes() - sum(leaf.nbytes for leaf in jax.tree.leaves((state, x)))
            seen = measure_launches(function, held)
        state, own = function(state, x)
        if i == 1:
            assert seen is not None
            assert plan.budget_bytes is not None
            assert max(seen) <= plan.budget_bytes * 1.01
            assert max(seen) == pytest.approx(plan.peak_bytes, rel=0.01)
        np.testing.assert_allclose(own, loss, rtol=1e-4)
    for a, b in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def test_an_nnx_scan_over_layers_trains_under_a_low_budget() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(jax.nn.gelu(self.up(x)))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    def train_step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_of(model: Any) -> Any:
            y = nnx.scan(lambda y, block: block(y), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)
            return distance(y, x)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    losses: list[list[float]] = []
    for make in (nnx.jit, lambda f: tensile.nnx.jit(f, budget="60%", open_loops=True)):
        model = create(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = make(train_step)
        losses.append([float(step(model, optimizer, batch(i, rows=512))) for i in range(5)])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_equal_layers_share_their_executables(cheap_launches: str) -> None:
    def executables(layers: int) -> tuple[int, int]:
        """The segments of a plan for so many layers, and how many of them differ."""
        params, x = jnp.stack(weights(layers, 64)), jnp.zeros((4096, 64))
        function = tensile.jit(descent(plain), budget="70%", donate_argnums=0, open_loops=True, device_profile=cheap_launches)
        step = function._calls.step((params, x), {})
        segments = function.plan(params, x).segments
        codes = [
            step.builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, s.donated).content for s in segments
        ]
        return len(segments), len(set(codes))

    few, many = executables(8), executables(24)
    assert many[0] >= 2 * 24
    assert many[1] <= few[1] + 2


# -- checkpoints ------------------------------------------------------------------------------------------------------------


def in_checkpoints(params: Any, x: Any) -> Any:
    y = x
    for w in params:
        y = jax.checkpoint(lambda y, w: jnp.tanh(jnp.tanh(y @ w) @ w))(y, w)
    return distance(y, x)


def products_of(step: Callable[..., Any], **options: Any) -> int:
    program = flatten(Nested(jax.make_jaxpr(step)(STACK, X), **options))
    return sum(e.primitive.name == "dot_general" for e in program.equations)


def test_what_a_checkpoint_repeats_is_merged_unless_it_is_to_be_respected() -> None:
    step = descent(in_checkpoints)
    merged, respected = products_of(step), products_of(step, respect_checkpoint=True)
    assert respected == merged + 2 * LAYERS  # the backward pass needs the results of both products of a layer
    program = flatten(Nested(jax.make_jaxpr(step)(STACK, X), respect_checkpoint=True))
    for made, expected in zip(run(program, STACK, X), jax.jit(step)(STACK, X), strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("respect", [False, True])
def test_a_step_with_checkpoints_runs_under_a_budget(respect: bool) -> None:
    step, x = descent(in_checkpoints), batch(rows=2048)
    function = tensile.jit(step, budget="70%", donate_argnums=0, respect_checkpoint=respect)
    np.testing.assert_allclose(function(fresh(STACK), x)[1], jax.jit(step)(STACK, x)[1], rtol=1e-5)


POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
    "one name": jax.checkpoint_policies.save_only_these_names("first"),
    "one on the host": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["second"],
        names_which_can_be_offloaded=["first"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products on the host": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def under_policy(policy: str, *, scan: bool) -> Callable[..., Any]:
    def two_products(y: Any, w: Any) -> Any:
        first = checkpoint_name(jnp.tanh(y @ w), "first")
        return checkpoint_name(jnp.tanh(first @ w), "second") + y, None

    body = jax.checkpoint(two_products, policy=POLICIES[policy])

    def loss(params: Any, x: Any) -> Any:
        y = x
        if scan:
            y, _ = lax.scan(body, y, params)
        else:
            for w in params:
                y, _ = body(y, w)
        return distance(y, x)

    return descent(loss)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("policy", slow_but(POLICIES, "products"))
def test_every_policy_of_checkpoint_is_overridden_or_respected(policy: str, scan: bool) -> None:
    step, x = under_policy(policy, scan=scan), batch(rows=2048)
    expected = jax.jit(step)(STACK, x)
    for respect in (False, True):
        function = tensile.jit(step, budget="60%", donate_argnums=0, respect_checkpoint=respect)
        own = function(fresh(STACK), x)
        for a, b in zip(numbers(own), numbers(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert function.report().peak_bytes == running(function).plan.peak_bytes


@pytest.mark.parametrize("policy", ["one on the host", "products on the host"])
def test_what_a_policy_copies_to_the_host_is_left_to_the_planner_unless_it_is_respected(policy: str) -> None:
    def copies(**options: Any) -> int:
        program = flatten(Nested(jax.make_jaxpr(under_policy(policy, scan=False))(STACK, X), **options))
        return sum(e.primitive.name == "device_put" for e in program.equations)

    assert copies() == 0 < copies(respect_checkpoint=True)


def test_a_copy_to_the_host_that_something_else_reads_stays() -> None:
    def step(x: Any) -> Any:
        away = jax.device_put(x * 2, jax.memory.Space.Host)
        return jax.device_put(away, jax.memory.Space.Device) + 1, away

    program = flatten(Nested(jax.make_jaxpr(step)(X)))
    assert sum(e.primitive.name == "device_put" for e in program.equations) == 2


@pytest.mark.parametrize("wrong", [None, 1, "no"])
def test_respect_checkpoint_must_be_true_or_false(wrong: Any) -> None:
    with pytest.raises(ValueError, match="respect_checkpoint must be True or False"):
        tensile.jit(plain, respect_checkpoint=wrong)


@pytest.mark.smoke
@pytest.mark.parametrize("setting", ["jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"])
def test_the_coming_forms_of_jax_are_opened(setting: str) -> None:
    if not hasattr(jax.config, setting):
        pytest.skip(f"this jax has no {setting}")

    def loss(params: Any, x: Any) -> Any:
        return in_checkpoints(params, x) + a_derivative_of_its_own(params, jax.nn.silu(x))

    before = getattr(jax.config, setting)
    jax.config.update(setting, True)
    try:
        step = descent(loss)
        program = opened(step, STACK, X)
        assert {e.primitive.name for e in program.equations}.isdisjoint({"call_hi_primitive", "optimization_barrier"})
        for made, expected in zip(run(program, STACK, X), jax.jit(step)(STACK, X), strict=True):
            np.testing.assert_allclose(made, expected, rtol=2e-5, atol=2e-6)
    finally:
        jax.config.update(setting, before)
