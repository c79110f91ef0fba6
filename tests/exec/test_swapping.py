"""Swapping changes no bit: the same segments, with and without their copies over the link, agree exactly."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tensile_jax.exec.executor import Executor
from tensile_jax.exec.instructions import instructions_of
from tensile_jax.exec.prepare import RunningPlan
from tensile_jax.exec.transfer import Transfer
from tensile_jax.schedule import Plan
from tests.builders import batch, fresh, numbers, optimizer_state, optimizer_step, planned, running, sgd_step, weights


def without_copies(now: RunningPlan) -> Callable[[Sequence[Any]], list[Any]]:
    """Runs the plan's segments on the very same executables, with every tensor left where it is."""
    stripped = dataclasses.replace(now.plan, events=tuple(e for e in now.plan.events if not e.kind.startswith("swap")))
    executables = now.prepared.compile(now.plan)
    instructions = instructions_of(stripped, now.prepared.graph, [e.call for e in executables])
    constants = tuple(now.prepared.step.program.constants.values())
    executor = Executor(
        instructions,
        constants,
        [s.workspace_bytes for s in now.plan.segments],
        Transfer(jax.devices()[0]),
        run_ahead=False,
    )
    return executor.run


def copies(plan: Plan) -> int:
    return sum(e.kind.startswith("swap") for e in plan.events)


def both_ways(fast_link: str, step: Any, state: Any, batches: Callable[[int], Any], iterations: int, **options: Any) -> None:
    function = planned(step, (state, batches(0)), part=0.5, donate_argnums=0, device_profile=fast_link, **options)
    now = running(function)
    assert copies(now.plan) >= 2
    plain = without_copies(now)
    swapped, left = fresh(state), fresh(state)
    for i in range(iterations):
        swapped, metrics = function(swapped, batches(i))
        flat = plain(jax.tree.leaves((left, batches(i))))
        left, left_metrics = jax.tree.unflatten(now.prepared.step.out_tree, flat)
        for a, b in zip(numbers((swapped, metrics)), numbers((left, left_metrics)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.smoke
def test_swapping_activations_changes_no_bit(fast_link: str) -> None:
    both_ways(fast_link, sgd_step, weights(), batch, 20)


def test_swapping_moments_changes_no_bit(fast_link: str) -> None:
    optimizer = optax.adam(1e-3)
    state = optimizer_state(optimizer, weights(6, 128))
    both_ways(fast_link, optimizer_step(optimizer), state, lambda i: batch(i, rows=128, width=128), 10)


def test_keeping_state_on_the_host_between_iterations_changes_no_bit(fast_link: str) -> None:
    optimizer = optax.adam(1e-3)
    state = optimizer_state(optimizer, weights(4, 128))
    both_ways(fast_link, optimizer_step(optimizer), state, lambda i: batch(i, rows=128, width=128), 10, state_memory="any")


def test_launching_ahead_of_the_device_changes_no_bit(fast_link: str) -> None:
    function = planned(sgd_step, (weights(), batch()), part=0.5, donate_argnums=0, device_profile=fast_link)
    assert copies(function.plan(weights(), batch())) >= 2
    executor = running(function).executor
    assert executor is not None
    waited, _ = function(fresh(weights()), batch())
    executor._run_ahead = True
    ahead, _ = function(fresh(weights()), batch())
    for a, b in zip(numbers(waited), numbers(ahead), strict=True):
        np.testing.assert_array_equal(a, b)
