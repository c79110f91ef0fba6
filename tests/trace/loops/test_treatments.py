"""The treatment of each loop is found before a step is flattened, by what is around the loop and by the rules."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tensile_jax.trace import Nested
from tensile_jax.trace.loops.rules import treatments_of
from tensile_jax.trace.loops.treatments import find_treatments
from tensile_jax.trace.reading.treatment import Opened, Split, Treatment, Whole

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
HALVES = Split(((0, 4), (4, 8)))


def layers(x: Any, length: int = 8) -> Any:
    return lax.scan(lambda y, _: (jnp.tanh(y @ W), None), x, None, length=length)[0]


def found(function: Any, rule: Any) -> list[Treatment]:
    """The treatments of the loops of a function, in the order in which the loops stand in its jaxpr."""
    nested = Nested(jax.make_jaxpr(function)(X))
    return [treatment for _, treatment in sorted(find_treatments(nested, rule).items())]


def splits(equation: Any, may_split: bool) -> Treatment:
    return HALVES if may_split else Whole()


def test_a_loop_has_one_treatment_wherever_it_stands() -> None:
    def step(x: Any) -> Any:
        return layers(jax.jit(layers)(x))

    assert found(step, splits) == [HALVES, HALVES]
    assert found(step, lambda scan, may_split: Opened()) == [Opened(), Opened()]


def test_the_backward_loop_is_split_as_the_forward_loop_without_asking_the_rule() -> None:
    asked: list[bool] = []

    def rule(scan: Any, may_split: bool) -> Treatment:
        asked.append(bool(scan.params["reverse"]))
        return HALVES

    assert found(jax.grad(lambda x: jnp.sum(layers(x))), rule) == [HALVES, HALVES]
    assert asked == [False]


def test_what_is_in_a_loop_is_treated_only_if_the_loop_is_opened_and_is_never_split() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda y, _: (layers(y), None), x, None, length=3)[0]

    assert found(step, lambda scan, may_split: Whole()) == [Whole()]
    assert found(step, lambda scan, may_split: Opened() if scan.params["length"] == 3 else splits(scan, may_split)) == [
        Opened(),
        Whole(),
    ]


def test_loops_in_every_branch_are_treated_since_the_step_may_say_which_branch_is_taken() -> None:
    def step(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, layers, lambda x: layers(layers(x)), x)

    assert found(step, splits) == [Whole(), HALVES, HALVES, HALVES]


def test_a_loop_on_a_mutable_reference_has_no_treatment() -> None:
    def step(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))

        def body(y: Any, _: None) -> Any:
            total[...] += y.sum()
            return y, None

        return lax.scan(body, x, None, length=8)[0], total[...]

    assert found(step, splits) == []


@pytest.mark.parametrize("bounds", [(), ((1, 4),), ((0, 4), (5, 8)), ((0, 4), (4, 4))])
def test_the_parts_of_a_split_loop_follow_one_another(bounds: Any) -> None:
    with pytest.raises(ValueError, match="must follow one another"):
        Split(bounds)


def test_a_loop_of_too_many_iterations_stays_whole_and_says_how_many_are_opened() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda y, _: (jnp.tanh(y @ jnp.ones((512, 512))), None), x, None, length=300)[0]

    x = jnp.ones((64, 512))
    (treatment,) = treatments_of(Nested(jax.make_jaxpr(step)(x))).values()
    assert isinstance(treatment, Whole) and treatment.too_long is not None
    assert treatment.too_long.iterations == 300 > treatment.too_long.most
