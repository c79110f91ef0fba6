"""Run a step as one executable, compiled by plain `jax.jit`, through the same interface as an `Executor` that runs segments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_leaves, tree_unflatten

from tensile_jax.exec.step.executor import Observation
from tensile_jax.exec.step.transfer import Transfer, on_host
from tensile_jax.trace import TracedStep


@dataclass(frozen=True, slots=True)
class LaunchWhole:
    """The only instruction: run the whole step."""


class WholeStep:
    """Runs a step with one launch for each iteration. `call` takes and returns the trees of the user's function."""

    code = (LaunchWhole(),)

    def __init__(self, call: Callable[..., Any], step: TracedStep, peak_bytes: int, transfer: Transfer) -> None:
        self._call = call
        self._in_tree = step.in_tree
        self._from_host = step.on_host
        graph = step.graph
        self.rest_on_host = frozenset(i for i, t in enumerate(graph.outputs) if graph.tensors[t].in_host_memory)
        self._peak_bytes = peak_bytes
        self._transfer = transfer
        self.passive_swap_ins = 0
        self.out_of_memory = 0
        self.needs_lower_budget = False

    def begin(self, arguments: Sequence[Any], watch: Observation | None = None) -> "WholeIteration":
        """Begin an iteration on `arguments`, which are copied to the device, or to the host if the step takes them from there."""
        ready = [self._brought(place, value) for place, value in enumerate(arguments)]
        return WholeIteration(self, ready, watch)

    def _brought(self, place: int, value: Any) -> Any:
        if place in self._from_host:
            return value if on_host(value) else self._transfer.out(value)
        return value if isinstance(value, jax.Array) and not on_host(value) else self._transfer.into(value)

    def end(self, iteration: "WholeIteration") -> list[Any]:
        """The results, flat."""
        return iteration.env


class WholeIteration:
    """A running iteration. `env` holds the arguments before the launch, and the results after it."""

    def __init__(self, step: WholeStep, arguments: list[Any], watch: Observation | None) -> None:
        self.env = arguments
        self.latest: Any = None
        self._step = step
        self._watch = watch

    def owned(self) -> list[Any]:
        """The values that belong to this iteration alone: after the launch its results, before it nothing."""
        return [] if self.latest is None else self.env

    def perform(self, instruction: LaunchWhole) -> None:
        """Run the step, the only instruction that there is."""
        step = self._step
        args, kwargs = tree_unflatten(step._in_tree, self.env)
        with jax.default_device(step._transfer.device):  # as where it was compiled, so that JAX finds that again
            self.env = tree_leaves(step._call(*args, **kwargs))
        self.latest = self.env[-1] if self.env else None
        if not self.env:  # there is nothing to wait for except the effects
            jax.effects_barrier()
        if self._watch is not None:
            self._watch.peak_bytes = self._watch.live_bytes = step._peak_bytes
