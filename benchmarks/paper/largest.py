"""Experiment 8, simulated: the largest batch that trains in a given memory, and the samples per second there.

Plain jit, and the policies `checkpoint`, `capuchin`, `tensile` and `auto`. A plan counts only if it gives at least `_SPEED` of
the samples per second of plain jit with its own largest batch.
"""

from functools import partial
from typing import Any

from benchmarks.paper.steps import ModelStep, model_step
from tensile_jax.memory_report.largest_batch import largest as largest_number
from tensile_jax.plan import PolicyName

MEMORY = {
    "h200": {"bert": 8 * 10**9, "resnet50": 8 * 10**9},
    "rtx_a6000": {"bert": 8 * 10**9, "resnet50": 4 * 10**9},
}
_SPEED = 0.6
_MOST = 16_384
_POLICIES: tuple[PolicyName, ...] = ("checkpoint", "capuchin", "tensile", "auto")


def largest(device: str) -> dict[str, Any]:
    """By model: the memory, plain jit's largest batch, and each policy's, with samples per second."""
    return {model: _of(model, device, memory) for model, memory in MEMORY[device].items()}


def _of(model: str, device: str, memory: int) -> dict[str, Any]:
    def step(size: int) -> ModelStep:
        return model_step(model, device, size)

    plain = largest_number(lambda size: step(size).jit_peak <= memory, most=_MOST, known=0)
    speed = plain / step(plain).jit_us * 1e6
    found: dict[str, Any] = {"jit": {"batch_size": plain, "samples_per_s": round(speed, 1)}}
    for policy in _POLICIES:
        speeds: dict[int, float] = {}

        def fits(size: int, policy: PolicyName, speeds: dict[int, float]) -> bool:
            plan = step(size).plan(policy, memory)
            if plan is None:
                return False
            speeds[size] = size / plan.step_us * 1e6
            return speeds[size] >= _SPEED * speed

        size = largest_number(partial(fits, policy=policy, speeds=speeds), most=_MOST, known=plain)
        found[policy] = {
            "batch_size": size,
            "samples_per_s": round(speeds.get(size, speed), 1),
            "times_jit": round(size / plain, 3),
            "speed": round(speeds.get(size, speed) / speed, 3),
        }
    return {"memory_bytes": memory, "least_speed": _SPEED, "methods": found}
