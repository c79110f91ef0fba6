"""The list of rewrites: each of them is done to a step in the same way."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tensile_jax.trace import REWRITES, Program, Rewrite, trace_step


def step(w: Any, x: Any) -> Any:
    return w - x.T @ jnp.tanh(x @ w), jnp.sum(x)


TRACED = trace_step(jax.jit(step), step, (jnp.ones((8, 8)), jnp.ones((4, 8))), {})


def without_the_scope(program: Program) -> Program | None:
    equations = tuple(replace(e, scope="") for e in program.equations)
    return replace(program, equations=equations)


def a_rewrite(name: str, **options: Any) -> Rewrite:
    return Rewrite(name, f"Note on {name}.", without_the_scope, **options)


def test_a_rewritten_step_has_the_notes_of_its_rewrites() -> None:
    first = TRACED.rewritten(a_rewrite("a"))
    assert first is not None and first.notes == ("Note on a.",)
    second = first.rewritten(a_rewrite("b"))
    assert second is not None and second.notes == ("Note on a.", "Note on b.")


def test_a_rewrite_that_starts_anew_takes_the_place_of_those_before() -> None:
    first = TRACED.rewritten(a_rewrite("a"))
    assert first is not None
    second = first.rewritten(a_rewrite("b", starts_anew=True))
    assert second is not None and second.notes == ("Note on b.",)


def test_a_step_in_which_nothing_can_be_rewritten_has_no_rewritten_form() -> None:
    assert TRACED.rewritten(Rewrite("nothing", "", lambda program: None)) is None


def test_names_and_notes_of_rewrites_differ() -> None:
    assert len({rewrite.name for rewrite in REWRITES}) == len({rewrite.note for rewrite in REWRITES}) == len(REWRITES)
