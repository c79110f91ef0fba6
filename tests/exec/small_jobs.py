"""Small jobs for tests of the runtime: steps whose plans swap or hold much state, their batches, and their results alone."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tensile_jax as tensile
from tensile_jax.exec.runtime.job import Job
from tests.builders import fresh, numbers, optimizer_state, optimizer_step, weights

PATIENCE_S = 90.0  # for what takes milliseconds, or seconds where a job is planned; much longer on a loaded machine


@dataclass(frozen=True)
class Work:
    """A step with what it begins with and reads; `state` makes a fresh one."""

    step: Callable[..., Any]
    state: Callable[[], Any]
    batches: Callable[[], Iterator[Any]]

    def lonely(self, plans: Sequence[tuple[int, Any]], steps: int) -> Any:
        """The state after `steps` steps under `plans`, each from the step at which it came into use."""
        state, feed = jax.tree.map(_apart, self.state()), self.batches()
        ends = [begin for begin, _ in plans[1:]] + [steps]
        for (begin, plan), end in zip(plans, ends, strict=True):
            function = tensile.jit(self.step, donate_argnums=0, plan=plan, state_memory="any")
            for batch in itertools.islice(feed, end - begin):
                state, _ = function(state, batch)
        return state


def _apart(leaf: Any) -> Any:
    return fresh(leaf) if isinstance(leaf, jax.Array) else leaf  # jax.jit takes no array twice


def wide(seed: int = 0, *, rows: int = 512, width: int = 32, layers: int = 5, pause_s: float = 0.0) -> Work:
    """Activations of 64 KiB and little state: a plan that swaps or recomputes."""
    return _work(seed, rows=rows, width=width, layers=layers, pause_s=pause_s)


def heavy(seed: int = 0, *, rows: int = 32, width: int = 192, layers: int = 3, pause_s: float = 0.0) -> Work:
    """State of 1.3 MB and small activations: worth parking."""
    return _work(seed, rows=rows, width=width, layers=layers, pause_s=pause_s)


def _work(seed: int, *, rows: int, width: int, layers: int, pause_s: float) -> Work:
    optimizer = optax.adam(1e-2)

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(1000 + seed)
        while True:
            if pause_s:
                time.sleep(pause_s)
            yield rng.normal(size=(rows, width)).astype(np.float32)

    def state() -> Any:
        return optimizer_state(optimizer, weights(layers, width, seed=seed))

    return Work(optimizer_step(optimizer), state, batches)


def wordy(seed: int = 0, *, rows: int = 512, words: int = 1024) -> Work:
    """Nearly all memory is that of the logits, 2 MiB, and of their gradient."""
    optimizer = optax.adam(1e-2)

    def loss_of(params: Any, batch: Any) -> Any:
        logits = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": loss}

    def batches() -> Iterator[Any]:
        rng = np.random.default_rng(1000 + seed)
        while True:
            yield {
                "x": rng.normal(size=(rows, 16)).astype(np.float32),
                "label": rng.integers(words, size=rows).astype(np.int32),
            }

    def state() -> Any:
        a, b = jax.random.split(jax.random.key(seed))
        params = {"in": jax.random.normal(a, (16, 16)) / 4, "out": jax.random.normal(b, (16, words)) / 4}
        return params, optimizer.init(params)

    return Work(step, state, batches)


def counting(size: int = 8) -> Work:
    """As small as can be: adds up its batches."""

    def count(state: Any, batch: Any) -> Any:
        return {"total": state["total"] + batch}, {"loss": (state["total"] + batch).sum()}

    def batches() -> Iterator[np.ndarray]:
        for k in itertools.count(1):
            yield np.full(size, k, np.float32)

    return Work(count, lambda: {"total": jnp.zeros(size)}, batches)


def total(job: Job) -> float:
    """The first number of a `counting` job's result."""
    return float(np.asarray(job.result(PATIENCE_S, memory="host")["total"]).ravel()[0])


def equal(a: Any, b: Any) -> bool:
    """Whether two trees agree bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(numbers(a), numbers(b), strict=True))


def assert_lonely(work: Work, job: Job) -> None:
    """The job's result is that of a lonely run of its plans, as far as it got."""
    state = job.result(PATIENCE_S, memory="host")
    assert equal(state, work.lonely(job.plans, job.status.step)), f"{job.name} differs from its lonely run"


def until(what: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


class Gate:
    """Batches that come one for each permit: the test says how far a job may get."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._permits = threading.Semaphore(0)

    def allow(self, count: int) -> None:
        """So many more."""
        self._permits.release(count)

    def open(self) -> None:
        """As many as it likes."""
        self.allow(1000)

    def __call__(self) -> Iterator[Any]:
        for batch in self._work.batches():
            assert self._permits.acquire(timeout=PATIENCE_S)
            yield batch
