"""Whatever a state is made of, a job gives what its lonely run gives; and whatever a step returns beside it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import tensile_jax as tensile
from tests.builders import device_bytes
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import Work, assert_lonely, counting, equal, until, wide


def numbers_of(rows: int = 16, width: int = 8) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        rng = np.random.default_rng(7)
        while True:
            yield rng.normal(size=(rows, width)).astype(np.float32)

    return batches


def linen() -> Work:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))

    net = Net()

    def step(state: TrainState, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: (state.apply_fn({"params": p}, batch) ** 2).mean())(state.params)
        return state.apply_gradients(grads=gradients), {"loss": loss}

    params, optimizer = net.init(jax.random.key(0), np.zeros((1, 8), np.float32))["params"], optax.adam(1e-2)
    params = jax.device_get(params)
    return Work(
        step, lambda: TrainState.create(apply_fn=net.apply, params=jax.tree.map(jnp.asarray, params), tx=optimizer), numbers_of()
    )


def of_nnx() -> Work:
    def make() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs))

    structure = nnx.split(make())[0]

    def step(state: Any, batch: Any) -> Any:
        def loss_of(state: Any) -> Any:
            return (nnx.merge(structure, state)(batch) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), {"loss": loss}

    return Work(step, lambda: nnx.split(make())[1], numbers_of())


def keys() -> Work:
    def step(state: Any, batch: Any) -> Any:
        key, use = jax.random.split(state["key"])
        noisy = state["w"] + 0.1 * jax.random.normal(use, state["w"].shape) + batch.mean()
        return {"key": key, "w": noisy}, {"loss": noisy.sum(), "key": use}

    return Work(step, lambda: {"key": jax.random.key(3), "w": jnp.zeros(8)}, numbers_of())


def scalars() -> Work:
    def step(state: Any, batch: Any) -> Any:
        new = {"count": state["count"] + 1, "rate": state["rate"] * 0.5, "on": state["on"], "w": state["w"] + batch.mean()}
        return new, {"loss": new["w"].sum()}

    return Work(step, lambda: {"count": 0, "rate": 1.0, "on": True, "w": jnp.zeros(8)}, numbers_of())


def numpy_leaves() -> Work:
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch.sum(), "v": state["v"] * 2}, {"loss": state["w"].sum()}

    return Work(step, lambda: {"w": np.zeros(8, np.float32), "v": np.ones((4, 64), np.float32)}, numbers_of())


def aliased() -> Work:
    def state() -> Any:
        same = jnp.ones((32, 32))
        return {"params": same, "average": same}

    def step(state: Any, batch: Any) -> Any:
        params = state["params"] - 0.1 * batch.mean()
        return {"params": params, "average": 0.9 * state["average"] + 0.1 * params}, {"loss": params.sum()}

    return Work(step, state, numbers_of())


def empty_arrays() -> Work:
    def step(state: Any, batch: Any) -> Any:
        return {"none": state["none"], "w": state["w"] + batch.mean() + state["none"].sum()}, {"loss": state["w"].sum()}

    return Work(step, lambda: {"none": jnp.zeros((0, 4)), "w": jnp.zeros(8)}, numbers_of())


def low_precision() -> Work:
    def step(state: Any, batch: Any) -> Any:
        w = state["w"] + batch.mean().astype(jnp.bfloat16)
        return {"w": w, "count": state["count"] + 1}, {"loss": w.mean()}

    return Work(step, lambda: {"w": jnp.zeros(8, jnp.bfloat16), "count": jnp.zeros((), jnp.uint8)}, numbers_of())


def passed_on() -> Work:
    """State that comes back as it was given, and constants of the step's own."""
    table = np.arange(4096, dtype=np.float32)

    def step(state: Any, batch: Any) -> Any:
        return {"frozen": state["frozen"], "w": state["w"] + batch.mean() * table[:8]}, {"loss": state["frozen"].sum()}

    return Work(step, lambda: {"frozen": jnp.ones(64), "w": jnp.zeros(8)}, numbers_of())


def stateless() -> Work:
    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": batch.sum()}

    return Work(step, dict, numbers_of())


KINDS = (
    linen, of_nnx, keys, scalars, numpy_leaves, aliased, empty_arrays, low_precision, passed_on, stateless,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_state_gives_what_a_lonely_run_gives_with_a_pause_between(runtime: MakeRuntime, kind: Callable[[], Work]) -> None:
    work, neighbour = kind(), wide(0)
    with runtime("64MiB", look="always") as run:
        job = run.submit(work.step, work.state(), work.batches, steps=6, name="job")
        run.submit(neighbour.step, neighbour.state(), neighbour.batches, steps=6, name="neighbour")
        for event in run.events():
            if event.job == "job" and event.kind == "step" and event.step in (2, 4):
                try:
                    job.pause()
                except ValueError:
                    assert job.wait(0)
            elif event.kind == "paused":
                job.resume()
    assert job.status.step == 6, job.status.note
    assert_lonely(work, job)


def test_a_state_of_numpy_is_not_written_into(runtime: MakeRuntime) -> None:
    work = numpy_leaves()
    state = work.state()
    with runtime() as run:
        run.submit(work.step, state, work.batches, steps=3)
    assert equal(state, work.state())


@dataclass
class Heard:
    steps: list[int] = field(default_factory=list[int])
    metrics: list[Any] = field(default_factory=list[Any])

    def __call__(self, step: int, metrics: Any) -> None:
        self.metrics.append(metrics)
        self.steps.append(step)


@pytest.mark.parametrize(
    ("metrics_of", "loss"),
    [
        (lambda total: None, None),
        (lambda total: {}, None),
        (lambda total: total.sum(), 48.0),
        (lambda total: {"loss": total.sum(), "note": None}, 48.0),
        (lambda total: {"loss": total.sum().astype(jnp.bfloat16)}, 48.0),
        (lambda total: (total, {"deep": total.sum()}), None),
        (lambda total: {"key": jax.random.key(0)}, None),
        (lambda total: {"none": jnp.zeros((0, 3)), "loss": total.sum()}, 48.0),
    ],
    ids=["none", "empty", "bare", "with none", "bfloat16", "tuple", "key", "zero-sized"],
)
def test_any_metrics_are_told(runtime: MakeRuntime, metrics_of: Callable[[Any], Any], loss: float | None) -> None:
    work, heard = counting(), Heard()

    def step(state: Any, batch: Any) -> Any:
        total = state["total"] + batch
        return {"total": total}, metrics_of(total)

    with runtime() as run:
        job = run.submit(step, work.state(), work.batches, steps=3, on_step=heard)
    assert job.status.state == "finished", job.status.note
    assert job.status.loss == loss
    until(lambda: heard.steps == [1, 2, 3])
    heard.metrics.clear()


def test_large_metrics_that_a_user_keeps_take_no_device_memory(runtime: MakeRuntime) -> None:
    work, heard, before = counting(), Heard(), device_bytes()

    def step(state: Any, batch: Any) -> Any:
        total = state["total"] + batch
        return {"total": total}, {"picture": jnp.broadcast_to(total.sum(), (256, 256)) + total[0]}

    with runtime("2MiB", look="always") as run:
        run.submit(step, work.state(), work.batches, steps=30, on_step=heard)
    until(lambda: len(heard.metrics) == 30)
    assert device_bytes() <= before
    assert run.peak_bytes <= 2 << 20
    assert all(kept["picture"].base is None for kept in heard.metrics)
    assert [kept["picture"][0, 0] for kept in heard.metrics[:3]] == [9.0, 27.0, 54.0]


def test_a_constant_of_the_step_is_the_users_and_stays() -> None:
    table = jnp.arange(8.0)  # of which jax keeps a copy in its caches

    def step(state: Any, batch: Any) -> Any:
        return {"total": state["total"] + batch * table}, {}

    work = counting()
    with tensile.Runtime("1MiB") as run:
        for name in "ab":
            run.submit(step, work.state(), work.batches, steps=2, name=name)
    assert not table.is_deleted()
    for job in run.jobs:
        assert float(job.result()["total"][1]) == 3.0
