"""What a kernel takes beside its work, on the device and on the host, and what a launch takes of a host that is not ahead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tensile_jax.plan.analysis.fusion import find_fusion
from tensile_jax.plan.analysis.latency import fused_latencies, rerun_latencies
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.trace import trace_step
from tests.builders import PROFILE, graph_of, training_graph

LINES = ["a = heavy(x, w)", "b = light(a)", "c = heavy(b, w)", "d = light(c)", "y = light(d)"]  # b is written for c


def latencies(**changes: float) -> tuple[list[float], list[float]]:
    """Of each operator of `LINES`, where it runs first and where it runs again."""
    profile = dataclasses.replace(PROFILE, **changes)
    liveness = find_liveness(graph_of(LINES, inputs="x w", outputs="y", flops=100))
    fusion = find_fusion(liveness, fused_reductions=True)
    return list(fused_latencies(liveness, fusion, profile)), rerun_latencies(liveness, fusion, profile).tolist()


def test_every_kernel_takes_its_time_and_what_is_fused_away_takes_none() -> None:
    (first, again), (first_then, again_then) = latencies(), latencies(kernel_us=5.0)
    assert [us > 0 for us in first] == [True, True, True, False, False]  # what the step returns counts where a segment ends
    for before, then in (*zip(first, first_then, strict=True), *zip(again, again_then, strict=True)):
        assert then == pytest.approx(before + 5.0 if before else 0.0)


def test_no_kernel_takes_less_than_the_host_needs_to_issue_it() -> None:
    work, host = latencies(kernel_us=0.5), latencies(kernel_us=0.5, host_kernel_us=3.0)
    assert min(us for us in work[0] if us) < 3.0 < max(latencies(kernel_us=3.0)[0])
    for before, then in zip(work, host, strict=True):
        assert then == pytest.approx([max(us, 3.0) if us else 0.0 for us in before])


def test_a_launch_takes_what_the_host_is_not_ahead() -> None:
    def launch_us(host_kernel_us: float, host_launch_us: float = 50.0) -> float:
        host = {"host_kernel_us": host_kernel_us, "host_launch_us": host_launch_us}
        profile = dataclasses.replace(PROFILE, kernel_us=5.0, **host, bytes_per_us=1e6, flops_per_us=1e12)
        return StepModel(training_graph(), profile, state_may_stay_out=False).profile.launch_us

    assert launch_us(1e9) == PROFILE.launch_us + 50.0  # the device always waits for the host
    assert launch_us(1e-9, 1.0) == PROFILE.launch_us  # never
    several = [launch_us(us) for us in (1.0, 5.0, 6.0, 7.0, 100.0)]
    assert several == sorted(several) and len(set(several)) > 2


@pytest.mark.parametrize(("dtype", "part"), [(jnp.float32, 1.0), (jnp.bfloat16, 0.25), (jnp.float16, 0.25)])
def test_products_of_halves_are_faster_and_others_are_not(dtype: Any, part: float) -> None:
    def latency(**changes: float) -> float:
        profile = dataclasses.replace(PROFILE, bytes_per_us=1e12, flops_per_us=1.0, **changes)
        x = jnp.ones((8, 8), dtype)
        liveness = find_liveness(trace_step(jax.jit(jnp.matmul), jnp.matmul, (x, x), {}).graph)
        fusion = find_fusion(liveness, fused_reductions=True)
        (first,), (again,) = fused_latencies(liveness, fusion, profile), rerun_latencies(liveness, fusion, profile)
        assert first == again
        return first

    assert latency(half_speedup=4.0) == pytest.approx(part * latency())
