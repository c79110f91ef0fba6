"""State that XLA for GPUs cannot update in place: no segment donates it, and plain jit, to which it is donated, copies it."""

import dataclasses
from collections.abc import Sequence

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes, DeviceProfile
from tensile_jax.plan.planner import Goal, Planner
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, tensor_named

_ON_GPU = dataclasses.replace(PROFILE, fused_reductions=True, kernel_us=5.0)
_SIZE = 100_000
_LINES = ["a = heavy(x)", "b = light(a)", "g = conv(b, a)", "n = light(m, g)", "h = heavy(b)", "u = light(w, h)"]


def _graph(lines: Sequence[str]) -> Graph:
    carried = {"m": "n", "w": "u"}
    sizes = dict.fromkeys("xabgmnhuw", _SIZE)
    return graph_of(lines, inputs="x m w", outputs="n u", carried=carried, donated="m w", sizes=sizes)


def _step(lines: Sequence[str], profile: DeviceProfile) -> StepModel:
    return Planner(_graph(lines), profile, state_memory="device").model


def test_plain_jit_needs_no_memory_for_it_and_takes_the_time_of_a_copy() -> None:
    gpu, cpu = _step(_LINES, _ON_GPU), _step(_LINES, dataclasses.replace(PROFILE, kernel_us=5.0))
    assert len(gpu.liveness.rewritten) == 1 and not cpu.liveness.rewritten
    product = _step([line.replace("conv", "heavy") for line in _LINES], _ON_GPU)
    assert whole_peak(gpu, CompiledSizes()) == whole_peak(product, CompiledSizes())
    copy_us = 2 * _SIZE / _ON_GPU.bytes_per_us + 5.0
    assert gpu.whole_us == sum(gpu.latencies) + copy_us + gpu.profile.launch_us
    assert cpu.whole_us == sum(cpu.latencies) + cpu.profile.launch_us


def test_no_segment_is_given_it() -> None:
    for profile, expected in ((_ON_GPU, {"w"}), (PROFILE, {"m", "w"})):
        planner = Planner(_graph(_LINES), profile, policy="none", state_memory="device")
        found = planner.plan(Goal(float("inf")), CompiledSizes())
        assert found is not None
        plan = found.plan
        donated = {t for s in plan.segments for t in s.donated}
        assert donated == {tensor_named(_graph(_LINES), name) for name in expected}
