"""Jobs with effects: each iteration has its effects once, in their order, beside other jobs, in this process and in another."""

import itertools
from pathlib import Path
from typing import Any

import jax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tests.exec import talking_jobs
from tests.exec.small_jobs import PATIENCE_S, counting, total

STEPS = 6


def said_by_jit(folder: Path) -> list[str]:
    """What the job writes down under plain `jax.jit`."""
    path = folder / "plain.txt"
    step, state, batches = talking_jobs.make_job(path=str(path))
    function = jax.jit(step, donate_argnums=0)
    for x in itertools.islice(batches(), STEPS):
        state, _ = function(state, x)
    jax.block_until_ready(state)
    jax.effects_barrier()
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("isolation", "budget"),
    [("thread", "60KiB"), ("thread", "64MiB"), ("process", "60KiB"), pytest.param("process", "64MiB", marks=pytest.mark.slow)],
)
def test_a_job_with_effects_has_them_once_an_iteration_in_their_order(isolation: Any, budget: str, tmp_path: Path) -> None:
    expected = said_by_jit(tmp_path)
    assert len(expected) == STEPS * 6
    path, count = tmp_path / "job.txt", counting()
    with tensile.Runtime(budget) as runtime:
        entry = Entrypoint("tests.exec.talking_jobs:make_job", {"path": str(path)})
        job = runtime.submit(entry, steps=STEPS, name="talks", isolation=isolation)
        other = runtime.submit(count.step, count.state(), count.batches, steps=20, name="other")
        job.result(4 * PATIENCE_S)
        assert total(other) == 210
    assert job.plan is not None and job.plan.whole == (budget == "64MiB")
    assert path.read_text().splitlines() == expected
