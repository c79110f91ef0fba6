"""The operator that makes a tensor, and its line, are found also in the body of a loop."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tensile_jax.ir import Origin
from tensile_jax.trace import trace_step

XS = jnp.ones((50, 8))


def origins(function: Any, *args: Any) -> list[Origin]:
    """Those of the results of the only loop of a function, which is not opened."""
    step = trace_step(jax.jit(function), function, args, {})
    (loop,) = [op for op in step.whole_graph.operators if op.primitive == "scan"]
    return [step.whole_origin_of(loop.id, result) for result in range(len(loop.outputs))]


def line_with(text: str) -> str:
    """The line of this file that has this text; the line of this call has it, too, after all others."""
    lines = inspect.getsource(inspect.getmodule(line_with) or line_with).splitlines()
    return f"test_origins.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.sin(h) * x  # new carry
    return h, jnp.exp(h)  # what is stacked


def looped(xs: jax.Array) -> Any:
    return lax.scan(cell, jnp.ones(8), xs)  # the loop


@pytest.mark.smoke
def test_what_a_loop_stacks_is_named_by_the_operator_in_its_body() -> None:
    carried, stacked = origins(lambda xs: looped(xs), XS)  # the caller
    assert (carried.made_by, carried.made_at, carried.stacked_at) == ("scan", line_with("# the loop"), "")
    assert stacked == Origin(
        "exp", line_with("# what is stacked"), "return h, jnp.exp(h)  # what is stacked", line_with("# the loop"),
        line_with("# the caller"),
    )  # fmt: skip


def test_a_stacked_carried_value_is_named_by_the_operator_of_the_iteration_before() -> None:
    def carrying(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(h) + x, h  # carrying

    _, stacked = origins(lambda xs: lax.scan(carrying, jnp.ones(8), xs), XS)
    assert (stacked.made_by, stacked.made_at) == ("add", line_with("# carrying"))


def test_the_search_goes_through_calls_and_changes_of_form_and_loops_in_the_body() -> None:
    @jax.custom_vjp
    def gate(x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(x)  # the gate

    gate.defvjp(lambda x: (gate(x), x), lambda x, g: (g,))

    def nested(h: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        inner = lax.scan(lambda c, _: (c, jnp.cos(c) * c), h, None, length=3)[1]  # the inner loop
        return h + x, (gate(x).reshape(2, 4).astype(jnp.bfloat16), inner)

    _, gated, inner = origins(lambda xs: lax.scan(nested, jnp.ones(8), xs), XS)
    assert (gated.made_by, gated.made_at) == ("logistic", line_with("# the gate"))
    assert (inner.made_by, inner.made_at) == ("mul", line_with("# the inner loop"))


def test_what_is_stacked_for_the_backward_pass_has_the_line_of_the_forward_pass() -> None:
    step = trace_step(jax.jit(jax.grad(lambda xs: looped(xs)[1].sum())), lambda xs: xs, (XS,), {})
    loops = [op for op in step.whole_graph.operators if op.primitive == "scan"]
    forward = [step.whole_origin_of(loops[0].id, result) for result in range(len(loops[0].outputs))]
    assert {line_with("# new carry"), line_with("# what is stacked")} >= {o.made_at for o in forward if o.stacked_at}
    backward = [step.whole_origin_of(loops[1].id, result) for result in range(len(loops[1].outputs))]
    assert any(o.made_by.startswith("backward ") and o.stacked_at == line_with("# the loop") for o in backward)


def test_a_loop_on_mutable_references_names_itself() -> None:
    def step(xs: jax.Array) -> Any:
        total = jax.new_ref(jnp.zeros(8))

        def add(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            total[...] += x
            return h, jnp.exp(x + total[...])

        return lax.scan(add, jnp.ones(8), xs)[1], total[...]  # over a reference

    found = origins(step, XS)
    assert {(o.made_by, o.made_at, o.stacked_at) for o in found} == {("scan", line_with("# over a reference"), "")}
