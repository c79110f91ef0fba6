"""What a plan's instructions ask of memory, against the plan itself and against the arrays that lie on the device."""

from functools import cache
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.actor.plan_memory import memory_profile_of, metrics_bytes
from tensile_jax.exec.running.instructions import FinishSwapIn, FinishSwapOut, Launch, instructions_of
from tensile_jax.installed_models import MODELS
from tensile_jax.ir import Graph
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile
from tensile_jax.plan_format import Plan

SIZES = {
    "mlp": {"batch_size": 32, "width": 256},
    "cnn": {"batch_size": 64, "image_size": 16},
    "gpt": {"batch_size": 4, "sequence_length": 64},
}
LONG = {("cnn", "cpu"), ("cnn", "h200"), ("gpt", "cpu"), ("gpt", "h200"), ("mlp", "h200")}  # to plan
STEPS = [
    pytest.param(name, profile, marks=pytest.mark.slow) if (name, profile) in LONG else (name, profile)
    for name in sorted(SIZES)
    for profile in ("cpu", "h200")
]
PARTS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)


@cache
def plans_of(name: str, profile: str) -> list[tuple[Plan, Graph]]:
    """The plans of a model's step with its state donated, at every part of the vanilla peak that can be kept."""
    model = MODELS[name](**SIZES[name])
    shapes = model.state_shape, model.batch_shape
    base = tensile.jit(model.step, donate_argnums=0, policy="none").plan(*shapes)
    found: list[tuple[Plan, Graph]] = []
    for part in PARTS:
        function = tensile.jit(
            model.step, budget=int(base.peak_bytes * part), donate_argnums=0, state_memory="any", device_profile=profile
        )
        try:
            plan = function.plan(*shapes)
        except tensile.BudgetTooSmall:
            continue
        found.append((plan, next(iter(function._calls._traced.values())).step.graph))
    return found


@pytest.mark.parametrize(("name", "profile"), STEPS)
def test_what_is_held_at_each_launch_is_what_the_plan_says(name: str, profile: str) -> None:
    segmented = 0
    for plan, graph in plans_of(name, profile):
        metrics = metrics_bytes(graph)  # those of the last iteration, until they are read
        if plan.whole:
            whole = memory_profile_of(plan, graph, load_profile(profile))
            assert whole.kinds == (INSTANT, LAUNCH, INSTANT)
            assert whole.peak_bytes == plan.peak_bytes + metrics
            continue
        segmented += 1
        calls: list[Any] = [None] * len(plan.segments)
        instructions = instructions_of(plan, graph, calls)
        memory = memory_profile_of(plan, graph, load_profile(profile))
        size = {t.id: t.nbytes for t in graph.tensors}
        assert memory.peak_bytes == plan.peak_bytes + metrics
        assert len(memory.kinds) == len(instructions.code) + 2
        for move, instruction in enumerate(instructions.code, start=1):
            if not isinstance(instruction, Launch):
                continue
            segment = plan.segments[instruction.index]
            made = sum(size[t] for t in segment.outputs) - sum(size[t] for t in segment.donated)
            assert memory.kinds[move] == LAUNCH
            assert memory.holds[move] + made == segment.resident_bytes + metrics
            assert memory.needs[move] == segment.device_bytes + metrics
        waits = sum(isinstance(i, FinishSwapOut | FinishSwapIn) for i in instructions.code)
        assert memory.kinds.count(WAIT) == waits
    assert segmented


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"),
    [("mlp", "h200"), ("cnn", "h200"), ("gpt", "cpu")],
)
def test_state_that_stays_out_is_not_held_between_iterations(name: str, profile: str) -> None:
    out = [(plan, graph) for plan, graph in plans_of(name, profile) if any(e.kind == "swap_out" for e in plan.events)]
    assert out
    for plan, graph in out:
        instructions = instructions_of(plan, graph, [None] * len(plan.segments))
        memory: MemoryProfile = memory_profile_of(plan, graph, load_profile(profile))
        left = sum(instructions.nbytes[slot] for slot in instructions.left_on_host)
        assert memory.idle_bytes == memory.state_bytes - left + metrics_bytes(graph)
        assert memory.host_bytes >= memory.state_bytes and memory.parked_bytes == metrics_bytes(graph)
