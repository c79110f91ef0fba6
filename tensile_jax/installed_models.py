"""Finds the models that can be named on the command line and in a jobs file, among all installed packages.

A model is an entry point of the group `tensile_jax.models`. Any installed package can add models in its `pyproject.toml`:

    [project.entry-points."tensile_jax.models"]
    my_model = "my_package.my_module:my_model"

The entry point is a function that takes sizes as keyword arguments and returns a `Model`. Listing the names imports no model.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

GROUP = "tensile_jax.models"


class Model(Protocol):
    """A train step with its first state and its input, all sizes fixed.

    Attributes:
        step: one training iteration, (state, batch) -> (state, metrics); pure.
        init: makes the first state.
        state_shape: the state, with a `jax.ShapeDtypeStruct` for each array.
        batch_shape: a batch, with a `jax.ShapeDtypeStruct` for each array.
        batches: makes an endless iterator of batches, which are NumPy arrays.
        parameters: how many numbers are trained.
        evaluate: gives the accuracy of a state on a test set; None if the model has no test set.
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]: ...
    @property
    def init(self) -> Callable[[], Any]: ...
    @property
    def state_shape(self) -> Any: ...
    @property
    def batch_shape(self) -> Any: ...
    @property
    def batches(self) -> Callable[[], Iterator[Any]]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def evaluate(self) -> Callable[[Any], float] | None: ...


class _Models(Mapping[str, Callable[..., Model]]):
    """The functions that make models, by name; a function is imported when it is first asked for."""

    def __getitem__(self, name: str) -> Callable[..., Model]:
        found = _found()[name]
        if len(found) > 1:
            providers = " and ".join(sorted(f"{point.value} of {point.dist.name if point.dist else '?'}" for point in found))
            raise ImportError(f"The model {name!r} is installed twice: {providers}. Uninstall one of the packages.")
        try:
            return found[0].load()
        except Exception as error:
            raise ImportError(f"The model {name!r} ({found[0].value}) cannot be imported: {error}.") from error

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(_found()))

    def __len__(self) -> int:
        return len(_found())

    def __contains__(self, name: object) -> bool:
        return name in _found()


@cache
def _found() -> Mapping[str, list[EntryPoint]]:
    points = entry_points(group=GROUP)
    # The same distribution can be found twice, in the folder of a checkout and where it is installed.
    return {name: list({point.value: point for point in points if point.name == name}.values()) for name in points.names}


MODELS: Mapping[str, Callable[..., Model]] = _Models()
