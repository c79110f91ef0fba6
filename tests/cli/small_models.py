"""A model that is planned in a second, in the place of `mlp`, for commands that make dozens of plans."""

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optax
import pytest
from tensile_models.mlp import mlp

from tensile_jax.cli import options
from tensile_jax.installed_models import MODELS, Model


def small_mlp(**sizes: Any) -> Model:
    """One hidden layer, trained without moments."""
    return mlp(layers=1, optimizer=optax.sgd(1e-3), **sizes)


@contextmanager
def small_models() -> Iterator[None]:
    """Commands then take `small_mlp` for `mlp`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "MODELS", ChainMap({"mlp": small_mlp}, MODELS))  # pyright: ignore[reportArgumentType] # only read
        yield
