"""A donated array that is used again: the error of JAX has a note that names the argument, the call and the option."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tensile_jax.exec.call.donated_before import Donations, explain_deleted
from tests.builders import batch, planned, sgd_step, weights


def error_of(function: Any, *arguments: Any, **named: Any) -> Exception:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function(*arguments, **named)
    return caught.value


def notes_of(error: Exception) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if "was donated" in note]


ARGUMENTS = weights(3, 128), batch(rows=256, width=128)


def in_segments() -> Any:
    return planned(sgd_step, ARGUMENTS, part=0.5, donate_argnums=0)


def whole() -> Any:
    return tensile.jit(sgd_step, donate_argnums=0)


@pytest.mark.parametrize(("make", "number"), [(in_segments, 2), (whole, 1)])  # `planned` has made a first call
def test_a_second_call_with_the_same_state_names_the_call_that_it_was_donated_to(make: Any, number: int) -> None:
    step = make()
    state, x = weights(3, 128), ARGUMENTS[1]
    new, _ = step(state, x)
    step(new, x)
    error = error_of(step, state, x)
    plain = jax.jit(sgd_step, donate_argnums=0)
    state = weights(3, 128)
    plain(state, x)
    want = error_of(plain, state, x)
    assert type(error) in (type(want), RuntimeError) and "deleted" in str(error)
    (note,) = notes_of(error)
    begins = f"Argument state[0] of 'sgd_step' was donated to call {number} of 'sgd_step', at test_donated_before.py:"
    assert note.startswith(begins)
    assert note.endswith(
        "as its argument state[0] (donate_argnums=0). That call has deleted it. Use what the call returned, or leave out "
        "donate_argnums."
    )


def test_another_function_that_is_given_a_donated_array_names_the_step_that_it_was_donated_to() -> None:
    step = tensile.jit(sgd_step, donate_argnames="state")
    evaluate = tensile.jit(lambda model, x: jnp.sum(x @ model[-1]))
    state, x = weights(3, 128), ARGUMENTS[1]
    evaluate(state, x)
    states = [state]
    for _ in range(20):
        states.append(step(states[-1], x)[0])
    (note,) = notes_of(error_of(evaluate, states[-2], x))
    assert "Argument model[0] of '<lambda>' was donated to call 20 of 'sgd_step'" in note
    assert "(donate_argnames='state')" in note


def test_the_state_of_the_first_call_is_remembered_and_holds_no_memory() -> None:
    step, x = whole(), ARGUMENTS[1]
    first = state = weights(3, 128)
    for _ in range(30):
        state, _ = step(state, x)
    assert "to call 1 of 'sgd_step'" in notes_of(error_of(step, first, x))[0]
    given = weights(3, 128)
    donations = Donations("step", "donate_argnums=0")
    donations.note(["a"], [given[0]])
    del given
    gc.collect()
    assert [reference() for one in donations for reference in one.arrays] == [None, None]


def test_an_array_that_was_deleted_in_another_way_gets_no_note() -> None:
    step, x = in_segments(), ARGUMENTS[1]
    step(weights(3, 128), x)
    state = weights(3, 128)
    state[1].delete()
    assert notes_of(error_of(step, state, x)) == []


def test_an_error_about_something_else_gets_no_note() -> None:
    step, x = whole(), ARGUMENTS[1]
    state = weights(3, 128)
    step(state, x)
    error = ValueError("something else")
    explain_deleted(error, _graph(step, x), [*state, x])
    assert notes_of(error) == []


def _graph(step: Any, x: jax.Array) -> Any:
    return step._calls.step((weights(3, 128), x), {}).graph


def test_a_donated_number_or_numpy_array_does_no_harm() -> None:
    step = tensile.jit(lambda w, x: (w * x, x), donate_argnums=(0, 1))
    step(jnp.ones(3), 2.0)
    step(jnp.ones(3), jnp.ones(3))
