"""The instructions of a plan: a plan drawn on paper, and properties of the instructions of any plan."""

import dataclasses
import random
from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.result.build import empty_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Launch,
    StartSwapIn,
    StartSwapOut,
    decode,
    on_host_between_iterations,
)
from tensile_jax.plan.result.joined import joined, programs_of
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan.search.choice import predicted_plan, whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Event, EventKind, Plan, Segment
from tests.builders import PROFILE, graph_of
from tests.plan.result.test_memory_curve import random_graph

X, A, B, C, Y = map(TensorId, range(5))
LINES = ["a = heavy(x)", "b = heavy(x)", "c = heavy(b)", "y = heavy(a, c)"]


def segment(index: int, inputs: tuple[TensorId, ...], outputs: tuple[TensorId, ...], frees: tuple[TensorId, ...] = ()) -> Segment:
    return Segment(
        name=str(index), operators=((index, index + 1),), recomputes=(), inputs=inputs, outputs=outputs, donated=(), frees=frees,
        resident_bytes=0, workspace_bytes=0, device_bytes=0, begin_us=0.0, latency_us=0.0, recomputed_us=0.0, stall_us=0.0,
    )  # fmt: skip


def copy(kind: EventKind, tensor: TensorId, trigger: int, until: int) -> Event:
    return Event(kind, tensor, f"t{tensor}", 100, trigger, until, 0.0, 0.0, 0.0, "")


def plan_of(graph: Graph, *events: Event) -> Plan:
    segments = (
        segment(0, (X,), (A,)),
        segment(1, (X,), (B,), (X,)),
        segment(2, (B,), (C,), (B,)),
        segment(3, (A, C), (Y,), (A, C)),
    )
    return dataclasses.replace(empty_plan(graph), segments=segments, events=events)


def test_copies_out_start_before_those_that_must_have_ended_and_copies_in_come_last() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y", donated="x")
    plan = plan_of(graph, copy("swap_in", A, 1, 3), copy("swap_out", A, 0, 1))
    assert decode(plan, graph) == (
        Launch(0, (X,), (A,), (), ()),
        StartSwapOut((A,), (1,)),
        FinishSwapOut((A,)),
        Launch(1, (X,), (B,), (), ()),
        Free((X,)),  # donated, so the caller still names it
        StartSwapIn((A,), (0,), (A,)),
        Launch(2, (B,), (C,), (), (B,)),
        FinishSwapIn((A,)),
        Launch(3, (A, C), (Y,), (), (A, C)),
    )


def test_the_host_keeps_its_copy_until_a_tensor_has_come_back_for_the_last_time() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    plan = plan_of(graph, copy("swap_out", A, 0, 1), copy("swap_in", A, 0, 1), copy("swap_in", A, 2, 3))
    assert [i.forgotten for i in decode(plan, graph) if isinstance(i, StartSwapIn)] == [(), (A,)]


def test_an_iteration_does_not_wait_for_a_copy_in_that_no_segment_reads() -> None:
    graph = graph_of(LINES, inputs="x", outputs="a y")
    plan = plan_of(graph, copy("swap_out", A, 0, 1), copy("swap_in", A, 3, 4))
    assert decode(plan, graph)[-2:] == (Launch(3, (A, C), (Y,), (), (A, C)), StartSwapIn((A,), (1,), (A,)))


def test_state_whose_first_copy_comes_in_and_whose_last_goes_out_is_on_the_host_between_iterations() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    code = decode(plan_of(graph, copy("swap_in", X, -1, 0), copy("swap_out", Y, 3, 4)), graph)
    assert on_host_between_iterations(code) == ({X: "host"}, {Y})
    assert code[0] == StartSwapIn((X,), (0,), (X,)) and code[-1] == FinishSwapOut((Y,))


def test_a_result_that_the_device_frees_after_its_last_copy_in_stays_on_the_host() -> None:
    graph = graph_of(LINES, inputs="x", outputs="a y")
    code = decode(plan_of(graph, copy("swap_out", A, 0, 1), copy("swap_in", A, 1, 3)), graph)
    assert [i.forgotten for i in code if isinstance(i, StartSwapIn)] == [()]
    assert on_host_between_iterations(code) == ({}, {A})


@cache
def random_plans(seed: int, state_memory: str) -> list[tuple[Plan, Graph]]:
    """Plans of every policy for a random graph under two budgets, and with segments joined into programs."""
    rng = random.Random(seed)
    step = StepModel(order(random_graph(rng)), PROFILE, state_may_stay_out=state_memory == "any")
    least = floor_bytes(step, CompiledSizes())
    top = max(least, whole_peak(step, CompiledSizes()))
    found: list[tuple[Plan, Graph]] = []
    for policy in POLICIES.values():
        for part in (rng.random(), 0.0):
            choice = policy(step, least + part * (top - least), CompiledSizes())
            if choice is None or choice.runs_whole:
                continue
            plan = predicted_plan(step, choice, CompiledSizes())
            plan = dataclasses.replace(plan, state_memory="any" if state_memory == "any" else "device")
            found.append((plan, step.graph))
            found.append((joined(plan, programs_of(plan, step.graph), step.graph, PROFILE), step.graph))
    return found


ANY_PLANS = given(seed=st.integers(0, 4), state_memory=st.sampled_from(["device", "any"]))  # few, which the tests share
FEW = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@FEW
@ANY_PLANS
def test_every_tensor_that_a_launch_reads_is_on_the_device_and_has_arrived(seed: int, state_memory: str) -> None:
    for plan, graph in random_plans(seed, state_memory):
        code = decode(plan, graph)
        arriving, left = on_host_between_iterations(code)
        device = {t.id for t in graph.tensors if t.producer is None} - arriving.keys()
        host, leaving, coming = set(arriving), set[TensorId](), set[TensorId]()
        for instruction in code:
            match instruction:
                case StartSwapOut(tensors):
                    assert device >= set(tensors)
                    leaving |= set(tensors)
                    host |= set(tensors)
                case FinishSwapOut(tensors):
                    assert leaving >= set(tensors)
                    leaving -= set(tensors)
                    device -= set(tensors)
                case StartSwapIn(tensors, _, forgotten):
                    assert host >= set(tensors) >= set(forgotten) and device.isdisjoint(tensors)
                    host -= set(forgotten)
                    device |= set(tensors)
                    coming |= set(tensors)
                case FinishSwapIn(tensors):
                    assert coming >= set(tensors)
                    coming -= set(tensors)
                case Launch(_, inputs, outputs, donated, drops):
                    assert device >= {*inputs, *drops} and coming.isdisjoint(inputs) and set(inputs) >= set(donated)
                    device |= set(outputs)
                    device -= {*donated, *drops}
                case Free(tensors):
                    assert graph.donated >= set(tensors) <= device
                    device -= set(tensors)
        assert not leaving and host == left
        assert device | host >= set(graph.outputs)


@FEW
@ANY_PLANS
def test_each_segment_is_launched_and_each_copy_started_once_in_the_order_of_the_plan(seed: int, state_memory: str) -> None:
    for plan, graph in random_plans(seed, state_memory):
        code = decode(plan, graph)
        assert [i.index for i in code if isinstance(i, Launch)] == list(range(len(plan.segments)))
        for kind, start in ("swap_out", StartSwapOut), ("swap_in", StartSwapIn):
            started = [place for i in code if isinstance(i, start) for place in i.events]
            assert started == [place for place, event in enumerate(plan.events) if event.kind == kind]
            assert [t for i in code if isinstance(i, start) for t in i.tensors] == [plan.events[e].tensor for e in started]


@FEW
@ANY_PLANS
def test_resident_bytes_are_those_of_the_checker(seed: int, state_memory: str) -> None:
    """The checker accepts a segment that states these bytes, and names the same number if it states one byte less."""
    for plan, graph in random_plans(seed, state_memory):
        at_begin, *resident, at_end = resident_bytes(decode(plan, graph), graph)
        last = len(plan.segments) - 1
        for index, (part, held) in enumerate(zip(plan.segments, resident, strict=True)):
            needs = held + part.workspace_bytes
            begins = at_begin if index == 0 else 0
            ends = at_end if index == last else 0
            most = max(needs, begins, ends)
            check(stating(plan, index, most), graph)
            if most == begins:
                message = f"begins with {begins} bytes"
            else:
                message = f"needs {needs} bytes" if most == needs else f"holds {ends} bytes in the end"
            with pytest.raises(InvalidPlan, match=f"{message}; it says {most - 1}"):
                check(stating(plan, index, most - 1), graph)


def stating(plan: Plan, index: int, device_bytes: int) -> Plan:
    """The plan in which a segment states so many bytes."""
    segments = list(plan.segments)
    segments[index] = dataclasses.replace(segments[index], device_bytes=device_bytes)
    return dataclasses.replace(plan, segments=tuple(segments))


@FEW
@ANY_PLANS
def test_equal_plans_have_equal_instructions(seed: int, state_memory: str) -> None:
    for plan, graph in random_plans(seed, state_memory):
        again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
        assert again == plan and decode(again, graph) == decode(plan, graph)
        assert hash(decode(again, graph)) == hash(decode(plan, graph))
