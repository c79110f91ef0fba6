"""Steps on NNX objects as jobs of a `Runtime`: the objects hold the job's state when it ends, however it ends."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tensile_jax as tensile
from tensile_jax.exec.actor.local_actor import LocalActor
from tests.nnx.objects import batch, copy_of, expect_same, train_step, training_objects

STEPS = 4


def batches() -> Iterator[dict[str, jax.Array]]:
    """Those of `train_step`, without end."""
    return map(batch, itertools.count())


def fit(layer: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """A step that is quickly compiled."""
    loss, grads = nnx.value_and_grad(lambda layer: jnp.mean((layer(x) - 1) ** 2))(layer)
    optimizer.update(layer, grads)
    return loss


def rows() -> Iterator[jax.Array]:
    """Batches of `fit`, without end."""
    return (jax.random.normal(jax.random.key(number), (3, 2)) for number in itertools.count())


def small_objects() -> tuple[nnx.Linear, nnx.Optimizer]:
    """Those of `fit`."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return layer, nnx.Optimizer(layer, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


fitting = tensile.nnx.jit(fit)


def after(step: Any, objects: Any, given: Iterator[Any], *, steps: int) -> Any:
    """A copy of the objects after so many steps of `flax.nnx.jit`."""
    expected, plain = copy_of(objects), nnx.jit(step)
    for one in itertools.islice(given, steps):
        plain(*expected, one)
    return expected


def test_the_objects_hold_the_state_of_a_job_that_has_finished() -> None:
    objects, step = training_objects(), tensile.nnx.jit(train_step)
    kernel, expected = objects[0].linear1.kernel[...], after(train_step, objects, batches(), steps=STEPS)
    losses: list[float] = []
    with tensile.Runtime("64MiB") as runtime:
        job = runtime.submit(step, objects, batches, steps=STEPS, on_step=lambda number, loss: losses.append(float(loss)))
        result = job.result()
    assert all(ours is given for ours, given in zip(result, objects, strict=True))
    assert job.name == "train_step" and len(losses) == STEPS
    assert kernel.is_deleted()  # given away, as every job's state is
    expect_same(objects, expected, rtol=1e-5, atol=1e-6)
    objects[0].eval()
    assert objects[0](batch(0)["x"]).shape == (6, 3)
    step(*objects, batch(9))  # they go on where the job has ended
    assert int(objects[1].step[...]) == STEPS + 1


def test_objects_that_share_modules_share_them_afterwards() -> None:
    def share(pair: dict[str, nnx.Linear], layer: nnx.Linear, x: jax.Array) -> jax.Array:
        layer.kernel[...] += 1.0
        return pair["a"](x).sum()

    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    before = np.array(layer.kernel[...])
    with tensile.Runtime("64MiB") as runtime:
        runtime.submit(tensile.nnx.jit(share), ({"a": layer}, layer), lambda: [jnp.ones((1, 2))] * 3, steps=3).result()
    np.testing.assert_allclose(layer.kernel[...], before + 3)


def test_names_in_the_plan_are_those_of_the_objects() -> None:
    with tensile.Runtime("64MiB") as runtime:
        job = runtime.submit(fitting, small_objects(), rows, steps=1, policy="none")
        job.result()
        actor = job._stored.actor
    assert isinstance(actor, LocalActor)
    graph = actor.traced.graph
    roles = {graph.tensors[t].name: graph.tensors[t].role for t in graph.inputs}
    assert roles == {
        "layer.bias": "parameter",
        "layer.kernel": "parameter",
        "optimizer.opt_state[0].trace.bias": "optimizer_state",
        "optimizer.opt_state[0].trace.kernel": "optimizer_state",
        "optimizer.step": "state",
        "batch": "batch",
    }
    assert len(graph.carried) == len(roles) - 1


def test_after_a_failure_they_hold_the_last_finished_iteration() -> None:
    def failing(number: int, loss: Any) -> None:
        if number == 2:
            raise RuntimeError("enough")

    objects = small_objects()
    given = copy_of(objects)
    with tensile.Runtime("64MiB") as runtime:
        job = runtime.submit(fitting, objects, rows, steps=100_000, on_step=failing)
        assert isinstance(job.exception(), RuntimeError)
    expect_same(objects, after(fit, given, rows(), steps=job.status.step), rtol=1e-4, atol=1e-5)


def test_after_a_cancellation_they_hold_the_last_finished_iteration() -> None:
    objects = small_objects()
    given = copy_of(objects)
    with tensile.Runtime("64MiB") as runtime:
        job = runtime.submit(fitting, objects, rows, steps=100_000)
        next(event for event in runtime.events() if event.kind == "step")
        job.cancel()
        assert job.result() is not None
    assert 0 < job.status.step < 100_000
    expect_same(objects, after(fit, given, rows(), steps=job.status.step), rtol=1e-4, atol=1e-5)


def test_a_job_that_finds_no_plan_leaves_them_as_they_were() -> None:
    objects = small_objects()
    expected = copy_of(objects)
    with tensile.Runtime(budget=10) as runtime:
        error = runtime.submit(fitting, objects, rows, steps=STEPS).exception()
    assert isinstance(error, tensile.BudgetTooSmall)
    expect_same(objects, expected)


def test_weak_types_and_keys_come_back() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.weak = nnx.Variable(jnp.asarray(1.0) * 1)
            self.rngs = nnx.Rngs(0, noise=jax.random.key(3, impl="rbg"))
            self.half = nnx.Param(jnp.ones(2, jnp.bfloat16))

    def draw(odd: Odd, factor: jax.Array) -> jax.Array:
        odd.weak[...] = odd.weak[...] * 2
        odd.half[...] *= factor.astype(jnp.bfloat16)
        return jax.random.normal(odd.rngs.noise())

    odd = Odd()
    odd.weak.set_value(jnp.asarray(1.0))
    expected = copy_of(odd)
    with tensile.Runtime("64MiB") as runtime:
        runtime.submit(tensile.nnx.jit(draw), (odd,), lambda: [jnp.float32(3)], steps=1).result()
    nnx.jit(draw)(expected, jnp.float32(3))
    expect_same(odd, expected)


def test_a_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first, again = small_objects(), small_objects()
    expected = after(fit, first, rows(), steps=STEPS)
    with tensile.Runtime("64MiB", checkpoints=tmp_path) as runtime:
        runtime.submit(fitting, first, rows, steps=2, name="job").result()
    with tensile.Runtime("64MiB", checkpoints=tmp_path) as runtime:
        runtime.submit(fitting, again, rows, steps=STEPS, name="job", resume=True).result()
    expect_same(nnx.state(again), nnx.state(expected), rtol=1e-5, atol=1e-6)


def test_a_step_that_changes_the_structure_is_refused_with_what_it_changes() -> None:
    def grow(model: Any, x: jax.Array) -> jax.Array:
        model.seen = nnx.Variable(x)
        return x

    with tensile.Runtime("64MiB") as runtime:
        error = runtime.submit(
            tensile.nnx.jit(grow), (nnx.Linear(2, 2, rngs=nnx.Rngs(0)),), lambda: [jnp.ones(2)], steps=1
        ).exception()
    assert isinstance(error, tensile.TraceError) and "model.seen is new" in str(error)


def test_what_is_no_tuple_of_objects_is_refused() -> None:
    with tensile.Runtime("64MiB") as runtime, pytest.raises(TypeError, match="tuple of the objects.*got Linear"):
        runtime.submit(fitting, small_objects()[0], rows, steps=1)


def test_a_process_of_its_own_would_not_have_the_objects() -> None:
    with tensile.Runtime("64MiB") as runtime, pytest.raises(ValueError, match="Entrypoint"):
        runtime.submit(fitting, small_objects(), rows, steps=1, isolation="process")
