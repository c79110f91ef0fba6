"""Notes say which loops stay one operator: those of one line of the user's code in one sentence."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tensile_jax.trace import TracedStep, trace_step

W, XS = jnp.ones((128, 128)), jnp.ones((200, 128))


def steps(x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (jnp.tanh(h @ W), None), x, None, length=500)[0]


LINE = f"test_notes.py:{steps.__code__.co_firstlineno + 1}"


def traced(function: Any) -> TracedStep:
    return trace_step(jax.jit(function), function, (XS,), {})


def test_a_note_names_the_line_of_the_loop_and_how_a_plan_opens_it() -> None:
    (note,) = traced(steps).notes
    assert note.startswith(f"The loop at {LINE} (500 iterations of 2 equations) stays one operator")
    assert note.endswith("With open_loops=True, tensile_jax.jit opens it.")


def test_loops_of_one_line_have_one_note() -> None:
    (note,) = traced(lambda x: jax.grad(lambda y: steps(steps(y)).sum())(x)).notes
    assert note.startswith(f"The 4 loops at {LINE} (500 iterations of ") and note.endswith("opens them.")
    assert "stay one operator each" in note


def test_notes_that_are_not_of_a_plan_name_no_option_of_plans() -> None:
    (note,) = traced(steps).loop_notes
    assert "stays one operator" in note and "open_loops" not in note
