"""Takes a model's name and sizes, gives a `Model`: train step, state and real input.

Plain JAX and Flax, one network a file; nothing here knows the rest of the package. A model is
imported when it is first asked for, so that listing the names loads neither JAX nor Flax.

>>> from tensile_jax.models import MODELS, load
>>> sorted(MODELS)
['cnn', 'gpt', 'mlp', 'resnet50', 'vgg16']
>>> load("mlp")(batch_size=32).parameters
26122
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time this would import JAX
    from tensile_jax.models.model import Model

__all__ = ["MODELS", "load"]

_FILES: Mapping[str, str] = MappingProxyType({"resnet50": "resnet", "vgg16": "vgg", "gpt": "gpt", "cnn": "cnn", "mlp": "mlp"})


def load(name: str) -> "Callable[..., Model]":
    """The function that makes the model called `name`."""
    if name not in _FILES:
        known = ", ".join(sorted(_FILES))
        raise ValueError(f"name must be a known model: got {name!r}. Choose one of: {known}.")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)


class _Models(Mapping[str, "Callable[..., Model]"]):
    def __getitem__(self, name: str) -> "Callable[..., Model]":
        if name not in _FILES:
            raise KeyError(name)
        return load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


MODELS: "Mapping[str, Callable[..., Model]]" = _Models()
