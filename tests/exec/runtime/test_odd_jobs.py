"""What a job may be: odd batches, states, metrics and steps give what a plain loop over `jax.jit` gives."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensile_jax.exec.runtime.job import Job
from tests.exec.conftest import MakeRuntime
from tests.exec.isolated_jobs import ODD_STEPS
from tests.exec.small_jobs import PATIENCE_S


class Odd(NamedTuple):
    """A step with what it begins with, and one of its batches."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Callable[[], Any]
    batch: Any


def _one() -> Any:
    return {"a": jnp.arange(4.0)}


ONES = np.ones(4, np.float32)
LARGE = np.ones(5000, np.float32)

ODD: dict[str, Odd] = {
    "a batch of None": Odd(ODD_STEPS["no batch"], _one, None),
    "a batch without leaves": Odd(lambda s, b: ({"a": s["a"] + 1}, s["a"].sum()), _one, {"x": (), "y": None}),
    "a batch of no numbers": Odd(lambda s, b: ({"a": s["a"] + b.sum()}, b), _one, np.zeros((0, 3), np.float32)),
    "a batch of a Python number": Odd(lambda s, b: ({"a": s["a"] * b}, s["a"].sum()), _one, 2.5),
    "a batch that is not used": Odd(lambda s, b: ({"a": s["a"] + 1}, s["a"].sum()), _one, LARGE),
    "a batch that is half used": Odd(lambda s, b: ({"a": s["a"] + b["x"]}, ()), _one, {"x": ONES, "y": LARGE}),
    "a batch that is returned": Odd(lambda s, b: (s, b), _one, ONES),
    "a batch that becomes the state": Odd(lambda s, b: ({"a": b}, s), _one, ONES),
    "no metrics": Odd(lambda s, b: ({"a": s["a"] + b}, None), _one, ONES),
    "metrics without leaves": Odd(lambda s, b: ({"a": s["a"] + b}, {"x": ()}), _one, ONES),
    "metrics that are the state": Odd(lambda s, b: (s, s), _one, ONES),
    "metrics that are constants": Odd(lambda s, b: ({"a": s["a"] + b}, {"rate": 0.1, "n": jnp.int32(3)}), _one, ONES),
    "no state": Odd(lambda s, b: (None, b.sum()), lambda: None, ONES),
    "a state without leaves": Odd(lambda s, b: (s, b.sum()), lambda: ({}, ()), ONES),
    "a state that is not used": Odd(lambda s, b: ({"a": b * 2}, b.sum()), _one, ONES),
    "a state half of which is not used": Odd(
        lambda s, b: ({"a": s["a"] + 1, "big": s["big"]}, None), lambda: {**_one(), "big": jnp.zeros(3000)}, ONES
    ),
    "a state that becomes a constant": Odd(lambda s, b: ({"a": jnp.zeros(4)}, None), _one, ONES),
    "two parts of a state change places": Odd(
        lambda s, b: ({"a": s["b"], "b": s["a"]}, None), lambda: {"a": jnp.ones(3), "b": jnp.zeros(3)}, ONES
    ),
    "one part of a state becomes both": Odd(
        lambda s, b: ({"a": s["a"], "b": s["a"]}, None), lambda: {"a": jnp.ones(3), "b": jnp.zeros(3)}, ONES
    ),
    "a step that does nothing": Odd(lambda s, b: (s, None), _one, None),
    "a step that does nothing with nothing": Odd(lambda s, b: (s, b), lambda: None, None),
    "a typed key": Odd(
        lambda s, b: ({"key": jax.random.fold_in(s["key"], 1)}, jax.random.normal(s["key"])),
        lambda: {"key": jax.random.key(3)},
        None,
    ),
    **{
        f"numbers of {dtype}": Odd(
            lambda s, b: ({"a": s["a"][::-1], "b": s["b"]}, (s["a"].astype("float32") @ b.astype("float32"), b)),
            lambda dtype=dtype: {"a": jnp.tri(4, dtype=dtype), "b": jnp.ones(4, dtype)},
            np.tri(4, dtype=dtype),
        )
        for dtype in map(jnp.dtype, ("int4", "uint2", "float4_e2m1fn", "float8_e4m3fn"))
    },
}


def _bits(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        host = np.asarray(leaf)
        return str(host.dtype), host.shape, host.tobytes()

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("policy", ["auto", "none"])  # as one executable, and in segments
def test_odd_jobs_give_what_plain_loops_give(runtime: MakeRuntime, policy: Any) -> None:
    heard: dict[str, list[Any]] = {f"{name}, {steps}": [] for name in ODD for steps in (1, 3)}
    jobs: dict[str, Job] = {}
    with runtime() as run:
        for name, metrics in heard.items():
            odd, steps = ODD[name.rpartition(",")[0]], int(name[-1])
            jobs[name] = run.submit(
                odd.step, odd.state(), itertools.repeat(odd.batch), steps=steps, name=name, policy=policy,
                on_step=lambda step, given, metrics=metrics: metrics.append(given),
            )  # fmt: skip
    for name, odd in ODD.items():
        state, metrics = odd.state(), list[Any]()
        jitted = jax.jit(odd.step)
        for step in (1, 2, 3):
            state, given = jitted(state, odd.batch)
            metrics.append(given)
            if step == 2:
                continue
            job = jobs[f"{name}, {step}"]
            assert (job.name, job.status.state, job.status.step, job.status.note) == (f"{name}, {step}", "finished", step, "")
            assert _bits(job.result()) == _bits(state), job.name
            assert _bits(heard[job.name]) == _bits(metrics), job.name


def test_a_batch_that_is_not_used_counts_as_memory(runtime: MakeRuntime) -> None:
    """Plain jit leaves it out of its peak, so a budget that plain jit's peak keeps may be too small for it."""
    with runtime("8KiB") as run:
        job = run.submit(ODD["a batch that is not used"].step, _one(), itertools.repeat(LARGE), steps=2)
    assert "too small" in str(job.exception())


@pytest.mark.slow
def test_odd_jobs_in_processes_of_their_own(runtime: MakeRuntime) -> None:
    with runtime() as run:
        jobs = [run.submit(step, _one(), [None] * 3, steps=3, name=name, isolation="process") for name, step in ODD_STEPS.items()]
    for job, step in zip(jobs, ODD_STEPS.values(), strict=True):
        state: Any = _one()
        for _ in range(3):
            state, _ = jax.jit(step)(state, None)
        assert _bits(job.result(PATIENCE_S)) == _bits(state)
