"""Boundaries at a policy's own events: where copies ask for them, and that nothing hidden is exposed by the cut."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.event_boundaries import event_boundaries
from tensile_jax.plan.search.choice import LEAST
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, tensor_named
from tests.plan.test_policies import PLANS, networks
from tests.test_properties import graphs, planned

LINES = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "e = heavy(d)", "f = heavy(e)", "y = heavy(f, a)"]
"""Of a, the needs are at the places 1 and 6."""


def retained(lines: list[str] = LINES, **dropped: int) -> Retention:
    liveness = find_liveness(graph_of(lines, inputs="x", outputs="y"))
    return retain(liveness, {tensor_named(liveness.graph, name): place for name, place in dropped.items()})


def asked(retention: Retention, *absences: Absence, latencies: list[float] | None = None) -> tuple[int, ...]:
    """With 10 us for each operator, and 1 us for a launch."""
    own = latencies or [10.0] * len(retention.reruns)
    by_tensor = {t: tuple(a for a in absences if a.tensor == t) for t in {a.tensor for a in absences}}
    return event_boundaries(retention, by_tensor, StepCosts(PROFILE, tuple(own), tuple(own)))


def test_a_copy_is_issued_after_the_last_need_brought_back_in_time_and_awaited_before_the_next_need() -> None:
    retention = retained()
    a = tensor_named(retention.liveness.graph, "a")
    assert asked(retention, Absence(a, 3, 5, 0.0)) == (2, 5, 6)


def test_without_absences_nothing_is_asked_for() -> None:
    assert asked(retained()) == ()


def test_state_asks_for_its_return_at_the_begin_and_for_its_departure_at_the_end() -> None:
    retention = retained()
    a, b = (tensor_named(retention.liveness.graph, name) for name in "ab")
    assert asked(retention, Absence(a, -1, 0, 0.0)) == (1,), "it is issued when the iteration begins"
    assert asked(retention, Absence(b, 4, 7, 0.0)) == (3,), "and stays on the host"


def test_what_the_host_has_already_asks_for_its_return_only() -> None:
    lines = [*LINES[:4], "e = heavy(d, a)", *LINES[5:]]
    retention = retained(lines)
    a = tensor_named(retention.liveness.graph, "a")
    assert asked(retention, Absence(a, 2, 3, 0.0), Absence(a, 4, 5, 0.0)) == (2, 3, 4, 5, 6)


def test_a_boundary_within_a_launch_of_another_is_left_out() -> None:
    """Place 5 takes half a launch: what is to be there before place 6 can as well be there before place 5. So can a copy that
    may be issued before place 3 be issued before place 4."""
    retention = retained()
    a, c = (tensor_named(retention.liveness.graph, name) for name in "ac")
    assert asked(retention, Absence(a, 3, 5, 0.0), latencies=[10, 10, 10, 10, 10, 0.5, 10]) == (2, 5)
    both = Absence(a, 3, 4, 0.0), Absence(c, 3, 4, 0.0)
    assert asked(retention, *both, latencies=[10, 0.5, 10, 10, 10, 10, 10]) == (2, 4, 6)


def test_what_is_computed_again_in_between_keeps_boundaries_apart() -> None:
    """Place 4 takes half a launch, and 10 us more if b, which place 1 makes, is computed again for it."""
    lines = ["a, z = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "e = heavy(d, b)", "y = heavy(e, z)"]
    latencies = [10, 10, 10, 10, 0.5, 10]
    kept, dropped = retained(lines), retained(lines, b=2)
    z = tensor_named(kept.liveness.graph, "z")
    assert asked(kept, Absence(z, 2, 4, 0.0), latencies=latencies) == (1, 4)
    assert asked(dropped, Absence(z, 2, 4, 0.0), latencies=latencies) == (1, 4, 5)


@PLANS
@given(
    graph=networks() | graphs(),
    rate=st.sampled_from([1.0, 50.0, 1000.0]),
    state_memory=st.sampled_from(["device", "any"]),
    part=st.floats(0, 1),
)
def test_the_cut_of_policy_tensile_exposes_no_copy_that_algorithm_2_has_hidden(
    graph: Graph, rate: float, state_memory: str, part: float
) -> None:
    """Algorithm 2 hides every copy that it schedules, so what a plan waits for is what the cut exposes: a launch for a copy."""
    profile = dataclasses.replace(PROFILE, device_to_host_bytes_per_us=rate, host_to_device_bytes_per_us=rate)
    step = StepModel(order(graph), profile, state_may_stay_out=state_memory == "any")
    least = POLICIES["tensile"](step, LEAST, CompiledSizes())
    assert least is not None
    limit = part * sum(tensor.nbytes for tensor in graph.tensors)
    for choice in (least, POLICIES["tensile"](step, limit, CompiledSizes())):
        if choice is not None and not choice.runs_whole:
            plan = planned(step, choice, state_memory)
            copies = sum(event.kind in ("swap_out", "swap_in") for event in plan.events)
            assert plan.stall_us <= copies * profile.launch_us
