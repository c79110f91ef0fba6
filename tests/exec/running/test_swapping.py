"""Swapping changes no bit: the same segments, with and without their copies over the link, agree exactly."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tensile_jax.exec.running.executor import Executor
from tensile_jax.exec.running.instructions import instructions_of
from tensile_jax.exec.running.runner import Runner
from tensile_jax.exec.transfer import Transfer
from tensile_jax.ir import TensorId
from tensile_jax.plan_format import Plan, Segment
from tests.builders import batch, fresh, numbers, optimizer_state, optimizer_step, planned, running, sgd_step, weights


def without_copies(now: Runner) -> Callable[[Sequence[Any]], list[Any]]:
    """Runs the plan's segments on the very same executables, with every tensor left where it is."""
    needed_later: set[TensorId] = set()
    segments: list[Segment] = []
    for segment in reversed(now.plan.segments):  # what the host has may leave the device more than once
        segments.append(dataclasses.replace(segment, frees=tuple(t for t in segment.frees if t not in needed_later)))
        needed_later.update(segment.inputs)
    events = tuple(e for e in now.plan.events if not e.kind.startswith("swap"))
    stripped = dataclasses.replace(now.plan, segments=tuple(reversed(segments)), events=events)
    compiled = now.compiled
    assert compiled.executables is not None
    instructions = instructions_of(stripped, compiled.step.graph, [e.call for e in compiled.executables])
    constants = tuple(compiled.step.traced.program.constants.values())
    return Executor(instructions, constants, Transfer(jax.devices()[0]), run_ahead=False).run


def copies(plan: Plan) -> int:
    return sum(e.kind.startswith("swap") for e in plan.events)


def both_ways(
    fast_link: str, step: Any, state: Any, batches: Callable[[int], Any], iterations: int, part: float = 0.5, **options: Any
) -> None:
    function = planned(step, (state, batches(0)), part=part, donate_argnums=0, device_profile=fast_link, **options)
    now = running(function)
    assert copies(now.plan) >= 2
    plain = without_copies(now)
    swapped, left = fresh(state), fresh(state)
    for i in range(iterations):
        swapped, metrics = function(swapped, batches(i))
        flat = plain(jax.tree.leaves((left, batches(i))))
        left, left_metrics = jax.tree.unflatten(now.compiled.step.traced.out_tree, flat)
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


def test_what_was_copied_once_leaves_and_returns_again_without_another_copy(fast_link: str) -> None:
    optimizer = optax.sgd(1e-3)
    state = optimizer_state(optimizer, weights(6, 256))
    step, batches = optimizer_step(optimizer), lambda i: batch(i, rows=64, width=256)
    options = {"donate_argnums": 0, "device_profile": fast_link, "state_memory": "any"}
    function = planned(step, (state, batches(0)), part=0.05, **options)
    plan = function.plan(state, batches(0))
    returns = Counter(e.tensor for e in plan.events if e.kind == "swap_in")
    assert max(returns.values()) >= 2
    assert max(Counter(e.tensor for e in plan.events if e.kind == "swap_out").values()) == 1
    both_ways(fast_link, step, state, batches, 5, state_memory="any", part=0.05)


def test_launching_ahead_of_the_device_changes_no_bit(fast_link: str) -> None:
    function = planned(sgd_step, (weights(), batch()), part=0.5, donate_argnums=0, device_profile=fast_link)
    assert copies(function.plan(weights(), batch())) >= 2
    executor = running(function).executor
    waited, _ = function(fresh(weights()), batch())
    executor._run_ahead = True
    ahead, _ = function(fresh(weights()), batch())
    for a, b in zip(numbers(waited), numbers(ahead), strict=True):
        np.testing.assert_array_equal(a, b)
