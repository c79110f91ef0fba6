"""Capuchin's first iteration, counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.ir import Graph
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.capuchin.passive_mode import PassiveIteration, observe, passive_iteration
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of
from tests.plan.test_policies import PLANS, networks

SIZES = {name: 100_000 for name in "abcdepqsw"}
CHAIN = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c, b)", "p = heavy(d)", "e = heavy(p, a)"]
"""Each takes 20,000 us, and a copy 10,000 us. With x (100 bytes), d needs 400,100 bytes: a, b and c are there."""


def step_of(lines: list[str], *, outputs: str, inputs: str = "x", donated: str = "") -> StepModel:
    graph = graph_of(lines, sizes=SIZES, inputs=inputs, outputs=outputs, donated=donated, flops=2_000_000)
    return StepModel(graph, PROFILE, state_may_stay_out=False)


def test_kernels_are_heavy_operators_with_the_light_ones_around_them() -> None:
    step = step_of(["a = heavy(x)", "t = light(a)", "b = heavy(t)", "y = light(b, a)"], outputs="y")
    name = [tensor.name for tensor in step.graph.tensors]
    accesses = [([name[t] for t in kernel.inputs], [name[t] for t in kernel.outputs]) for kernel in observe(step)]
    assert accesses == [(["x"], ["a"]), (["a"], ["y"])]


def test_with_room_for_everything_nothing_is_copied() -> None:
    assert passive_iteration(step_of(CHAIN, outputs="e"), 400_100) == PassiveIteration(6 * 20_000.0, 0, 0, 400_100)


def test_what_was_accessed_longest_ago_goes_when_memory_runs_out_and_returns_when_it_is_read() -> None:
    """For d, a goes (x is the caller's); for e it comes back. The computation waits for both copies."""
    expected = PassiveIteration(6 * 20_000.0 + 2 * 10_000.0, 100_000, 100_000, 300_100)
    assert passive_iteration(step_of(CHAIN, outputs="e"), 400_099) == expected


def test_a_second_eviction_needs_no_second_copy() -> None:
    """Once `a` is read for e it is in the way again while q is made from d2, p and e, and once more wanted for s."""
    lines = [*CHAIN, "q = heavy(e, p, d)", "s = heavy(q, a)"]
    found = passive_iteration(step_of(lines, outputs="s"), 400_099)
    assert (found.swapped_out_bytes, found.swapped_in_bytes) == (200_000, 300_000)


def test_state_that_nothing_has_read_yet_goes_first_and_results_are_back_at_the_end() -> None:
    lines = ["a = heavy(x)", "b = heavy(a)", "y = heavy(b)"]
    step = step_of(lines, inputs="x w", donated="w", outputs="y w")
    assert passive_iteration(step, 299_000) == PassiveIteration(3 * 20_000.0 + 2 * 10_000.0, 100_000, 100_000, 200_100)


def test_state_that_comes_back_for_its_update_gives_its_memory_to_it() -> None:
    lines = ["a = heavy(x)", "b = heavy(a)", "v = heavy(b, w)"]
    sizes = {"x": 100, "a": 1_000, "b": 100_000, "w": 100_000, "v": 100_000}
    graph = graph_of(lines, sizes=sizes, inputs="x w", donated="w", outputs="v", carried={"w": "v"}, flops=2_000_000)
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    most = max(kernel.nbytes for kernel in observe(step))
    assert passive_iteration(step, 150_000).peak_bytes <= most


@PLANS
@given(graph=networks(), part=st.floats(0.1, 1.2))
def test_any_first_iteration_ends_under_its_limit_unless_a_kernel_alone_needs_more(graph: Graph, part: float) -> None:
    step = StepModel(order(graph), PROFILE, state_may_stay_out=False)
    kernels = observe(step)
    most = max(kernel.nbytes for kernel in kernels)
    found = passive_iteration(step, part * most)
    copies = found.swapped_out_bytes + found.swapped_in_bytes
    assert found.step_us == pytest.approx(kernels[-1].end_us + copies / PROFILE.device_to_host_bytes_per_us)
    assert found.peak_bytes <= most or copies == 0
    assert copies == 0 or part < 1
