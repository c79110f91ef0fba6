"""The training steps of `benchmarks/workloads` train under a budget with plain jit's losses, and their reports are true."""

import jax
import pytest

from benchmarks.memory import is_right, program_of
from benchmarks.memory import measured as memory_of
from benchmarks.workloads import PROGRAMS, WORKLOADS
from benchmarks.workloads.case import measured

QUICK = ("replay", "curvature")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WORKLOADS])
def test_a_workload_trains_under_its_budget_with_plain_jits_losses(name: str) -> None:
    found = measured(WORKLOADS[name](), "60%", compared=4, timed_steps=1, improve=None)
    assert found["peak_ratio"] <= (found["budget_ratio"] if found["refused"] else 0.6)
    assert found["loss_difference"] < 1e-3  # gradients are rounded differently, and grow apart over four steps


REPORTED = [pytest.param(n, marks=() if n in (*QUICK, "flax_mnist") else pytest.mark.slow) for n in (*WORKLOADS, *PROGRAMS)]


@pytest.mark.parametrize("name", REPORTED)
def test_the_report_on_a_programs_memory_has_xlas_peak_and_adds_up(name: str) -> None:
    found = memory_of(program_of(name))
    assert is_right(found), found


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_training_step(name: str) -> None:
    workload = WORKLOADS[name]()
    state, batch = jax.eval_shape(workload.init), jax.eval_shape(lambda: workload.batch(0))
    after, loss = jax.eval_shape(workload.step, state, batch)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert loss.shape == ()
