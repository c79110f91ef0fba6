"""Finds the training steps that are measured, by their names: models, which have sizes, and workloads, which have none."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from benchmarks.workloads import WORKLOADS
from tensile_jax.installed_models import MODELS


@dataclass(frozen=True)
class TrainingStep:
    """`step` takes a state and a batch, and returns the next state and a dict in which `loss` is a scalar.

    Attributes:
        init: makes the first state; the same one each time.
        state_shape: the state, with a `jax.ShapeDtypeStruct` for each array.
        batches: makes an endless iterator of batches; the same sequence each time.
    """

    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
    init: Callable[[], Any]
    state_shape: Any
    batches: Callable[[], Iterator[Any]]


def training_step(name: str, batch_size: int | None = None, sizes: Mapping[str, Any] | None = None) -> TrainingStep:
    """A model of this batch size and these other sizes, or a workload.

    Raises:
        ValueError: there is no such model or workload, a model has no batch size, or a workload has a size.
    """
    if name not in WORKLOADS:
        if name not in MODELS or batch_size is None:
            known = ", ".join([*MODELS, *WORKLOADS])
            raise ValueError(f"{name!r} is no workload, and no model with a batch size: pass one of {known}.")
        model = MODELS[name](batch_size=batch_size, **(sizes or {}))
        return TrainingStep(model.step, model.init, model.state_shape, model.batches)
    if batch_size is not None or sizes:
        raise ValueError(f"{name} has one size: pass no batch size and no other sizes.")
    workload = WORKLOADS[name]()

    def step(state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, loss = workload.step(state, batch)
        return state, {"loss": loss}

    return TrainingStep(step, workload.init, jax.eval_shape(workload.init), lambda: map(workload.batch, count()))
