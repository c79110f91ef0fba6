"""The jobs of the soak test (`soak.py`): small models with states on the host, and the replay of a job by itself."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import tensile_jax as tensile
from tensile_jax.installed_models import MODELS, Model

_SIZES: tuple[tuple[str, dict[str, int]], ...] = (
    ("mlp", {"batch_size": 32, "width": 64}),
    ("mlp", {"batch_size": 256, "width": 128, "layers": 4}),
    ("cnn", {"batch_size": 16, "image_size": 8}),
    ("cnn", {"batch_size": 64, "image_size": 16}),
    ("gpt", {"batch_size": 8, "sequence_length": 64, "width": 64, "layers": 2}),
    ("gpt", {"batch_size": 16, "sequence_length": 64, "width": 64, "layers": 3}),
)
_KEPT_FUNCTIONS = 24


@dataclass(frozen=True, eq=False)
class Kind:
    """A model of one size. `state` is on the host, so that only the runtime puts arrays on the device."""

    model: Model
    state: Any
    batches: list[Any]

    def feed(self, *, fails_after: int | None = None) -> Iterator[Any]:
        """The batches, repeated without end; an error after `fails_after` batches if that is given."""
        for k, batch in enumerate(itertools.cycle(self.batches)):
            if k == fails_after:
                raise OSError("the soak's batches fail here")
            yield batch

    def fresh(self) -> Any:
        """A copy of the state."""
        return jax.tree.map(np.copy, self.state)


def kinds() -> list[Kind]:
    """All kinds of models that the soak test uses."""
    found: list[Kind] = []
    for name, sizes in _SIZES:
        model = MODELS[name](**sizes)
        feed = model.batches()
        found.append(Kind(model, jax.tree.map(np.array, model.init()), [next(feed) for _ in range(8)]))
    return found


@dataclass
class Replay:
    """Replays jobs alone. What was compiled for a plan is kept for the next job with that plan."""

    kept: deque[tuple[Kind, Any, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_FUNCTIONS))

    def state(self, kind: Kind, plans: tuple[tuple[int, Any], ...], steps: int) -> Any:
        """The state after `steps` steps under `plans`, each from the step at which it came into use."""
        state: Any = kind.fresh()
        ends = [begin for begin, _ in plans[1:]] + [steps]
        feed = kind.feed()
        for (begin, plan), end in zip(plans, ends, strict=True):
            function = self._function(kind, plan)
            for batch in itertools.islice(feed, end - begin):
                state, _ = function(state, batch)
        return state

    def _function(self, kind: Kind, plan: Any) -> Any:
        for one, its_plan, function in self.kept:
            if one is kind and its_plan == plan:
                return function
        function = tensile.jit(kind.model.step, donate_argnums=0, plan=plan, state_memory="any")
        self.kept.append((kind, plan, function))
        return function


def equal(a: Any, b: Any) -> bool:
    """Whether two trees agree bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
