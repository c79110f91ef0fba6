"""`make bench-constants` names constants that exist."""

from importlib import import_module

import pytest

from benchmarks.constants import CONSTANTS


@pytest.mark.parametrize("module", CONSTANTS)
def test_a_module_has_the_constants_that_are_tried(module: str) -> None:
    assert set(CONSTANTS[module]) <= set(vars(import_module(f"tensile_jax.plan.{module}")))
