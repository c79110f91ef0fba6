"""Each policy looks the same everywhere, and like no other one."""

import pytest

from tensile_jax.pages.comparison_page import page_of
from tensile_jax.pages.policy_looks import LOOKS, PLAIN_JIT
from tensile_jax.plan.policies.registry import POLICIES
from tests.pages.builders import comparison


def test_every_policy_and_plain_jit_have_a_look() -> None:
    assert set(LOOKS) == {*POLICIES, PLAIN_JIT}


@pytest.mark.parametrize("part", ["colour", "marker", "symbol"])
def test_no_two_policies_share_a_colour_or_a_mark(part: str) -> None:
    assert len({getattr(look, part) for look in LOOKS.values()}) == len(LOOKS)


def test_the_page_of_a_comparison_draws_policies_with_their_looks() -> None:
    drawn = {trace["name"]: trace["marker"] for trace in page_of(comparison()).traces if trace["name"] in LOOKS}
    assert set(drawn) == {"auto", "none", "vdnn", PLAIN_JIT}
    assert all((mark["color"], mark["symbol"]) == (LOOKS[name].colour, LOOKS[name].symbol) for name, mark in drawn.items())
