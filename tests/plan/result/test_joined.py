"""Segments are joined into programs wherever the host has nothing to do between them."""

import dataclasses
from typing import get_args

import pytest

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes, Goal, Planner, PolicyName
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.instructions import Launch, StartSwapIn, StartSwapOut, decode
from tensile_jax.plan.result.joined import as_programs, can_be_joined, graph_of_programs, joined, programs_of
from tensile_jax.plan_format import Barriers, Plan, unranged
from tests.builders import PROFILE, graph_of, plan_by_hand, tensor_named, training_graph, with_link


@pytest.mark.parametrize("form", get_args(Barriers))
@pytest.mark.parametrize("policy", ["auto", "tensile", "vdnn", "capuchin", "checkpoint", "none"])
@pytest.mark.parametrize("state_memory", ["device", "any"])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_a_joined_plan_does_what_the_step_does(form: Barriers, policy: PolicyName, state_memory: str, share: float) -> None:
    graph = training_graph(6, weight=70_000)
    planner = Planner(graph, with_link(1000.0), policy=policy, state_memory=state_memory)  # pyright: ignore[reportArgumentType] # pytest
    measured = CompiledSizes()
    limit = max(share * planner.model.unplanned_bytes, planner.floor_bytes(measured))
    found = planner.plan(Goal(limit), measured)
    assert found is not None
    if found.plan.whole:
        return
    plan = as_programs(found.plan, planner.graph, form, planner.profile)
    check(plan, planner.graph)
    programs = programs_of(plan, planner.graph)
    assert [program.first for program in programs] == [0, *(program.end for program in programs[:-1])]
    assert programs[-1].end == len(plan.segments) and len(programs) == plan.launches
    for program in programs:
        launched = [i.index for i in program.code if isinstance(i, Launch)]
        assert launched == list(range(program.first, program.end))
        assert form == "chain" or not any(isinstance(i, StartSwapOut | StartSwapIn) for i in program.code)
    made = joined(plan, programs, planner.graph, planner.profile)
    check(made, graph_of_programs(plan, planner.graph))
    assert len(made.segments) == len(programs) <= len(plan.segments)
    assert [o for s in made.segments for o in unranged(s.operators)] == [o for s in plan.segments for o in unranged(s.operators)]
    # nothing but the host's copies lies between two programs
    copied = {b for e in made.events for b in (e.trigger + 1, e.until)}
    assert set(range(1, len(programs))) <= copied
    if form == "chain" or not any(e.kind in ("swap_out", "swap_in") for e in plan.events):
        assert len(programs) == 1


LINES = [
    "a = heavy(x)",
    "b = heavy(a)",
    "c = heavy(b)",
    "d = heavy(c)",
    "e = heavy(d, a)",
    "f = heavy(e)",
]


def absent(name: str, leave: int, back: int) -> tuple[Plan, Graph]:
    """The plan with a segment for each operator, and a tensor that is absent after operator `leave` until operator `back`.

    Its graph comes second.
    """
    graph = graph_of(LINES, inputs="x", outputs="f", donated="x")
    liveness = find_liveness(graph)
    retention = retain(liveness, {})
    absences = {tensor_named(graph, name): (Absence(tensor_named(graph, name), leave, back, 0.0),)}
    return plan_by_hand(graph, retention, range(len(LINES) + 1), absences), graph


def test_a_copy_out_and_back_is_part_of_a_chain_and_lies_between_other_programs() -> None:
    plan, graph = absent("a", 1, 4)
    assert [e.kind for e in plan.events if e.name == "a" and e.kind.startswith("swap")] == ["swap_out", "swap_in"]
    assert len(programs_of(plan, graph)) > 1
    chain = dataclasses.replace(plan, barriers="chain")
    (program,) = programs_of(chain, graph)
    assert (program.first, program.end) == (0, len(LINES))
    assert program.code == decode(plan, graph)
    made = joined(chain, [program], graph, PROFILE)
    assert not made.events and graph_of_programs(chain, graph) == graph
    assert made.step_us == pytest.approx(plan.step_us - (len(LINES) - 1) * PROFILE.launch_us)


def train_lines() -> list[str]:
    return ["a = heavy(x)", "b = heavy(a)", "c = heavy(b, w)", "v = light(w, c)"]


def test_state_in_host_memory_is_an_argument_and_a_result_of_the_program_there() -> None:
    graph = graph_of(train_lines(), inputs="x w", outputs="c v", carried={"w": "v"}, donated="w")
    w, v = tensor_named(graph, "w"), tensor_named(graph, "v")
    plan = plan_by_hand(
        graph, retain(find_liveness(graph), {}), range(5), {w: (Absence(w, -1, 2, 0.0),), v: (Absence(v, 3, 4, 0.0),)},
        state_memory="any",
    )  # fmt: skip
    chain = dataclasses.replace(plan, barriers="chain")
    seen = graph_of_programs(chain, graph)
    assert [seen.tensors[t].nbytes for t in (w, v)] == [0, 0] and [seen.tensors[t].host_bytes for t in (w, v)] == [100, 100]
    made = joined(chain, programs_of(chain, graph), graph, PROFILE)
    assert made.segments[0].donated == (w,) and made.segments[0].outputs[0] == v
    check(made, seen)


def test_a_program_does_not_copy_arguments_that_it_holds_anyway() -> None:
    """The weight leaves after the first segment and returns for the third one, which frees nothing: the program holds it."""
    graph = graph_of(train_lines(), inputs="x w", outputs="c v", carried={"w": "v"}, donated="w")
    w = tensor_named(graph, "w")
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(5), {w: (Absence(w, 0, 2, 0.0),)})
    assert plan.swapped_out_bytes == plan.swapped_in_bytes == 100
    chain = as_programs(plan, graph, "chain", PROFILE)
    assert chain.swapped_out_bytes == chain.swapped_in_bytes == 0
    assert not any(e.kind in ("swap_out", "swap_in") for e in chain.events)
    check(chain, graph)
    assert chain.segments[1].resident_bytes == plan.segments[1].resident_bytes + 100


def test_a_program_does_not_take_state_in_host_memory_that_the_step_returns_in_device_memory() -> None:
    graph = graph_of(train_lines(), inputs="x w", outputs="c v w", carried={"w": "v"}, donated="w")
    w = tensor_named(graph, "w")
    plan = plan_by_hand(
        graph, retain(find_liveness(graph), {}), range(5), {w: (Absence(w, -1, 2, 0.0),)}, state_memory="any"
    )  # fmt: skip
    assert any(e.kind == "swap_in" and e.tensor == w for e in plan.events)
    assert not can_be_joined(plan, graph, "chain") and can_be_joined(plan, graph, "inputs")


def test_an_argument_that_leaves_twice_stays_once_its_copies_are_gone() -> None:
    """The second time it leaves without a copy, since the host has it still."""
    lines = ["a = heavy(x, w)", "b = heavy(a)", "c = heavy(b, w)", "d = heavy(c)", "v = light(w, d)"]
    graph = graph_of(lines, inputs="x w", outputs="d v", carried={"w": "v"}, donated="w")
    w = tensor_named(graph, "w")
    absences = {w: (Absence(w, 0, 2, 0.0), Absence(w, 2, 4, 0.0))}
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(6), absences)
    assert any(w in segment.frees for segment in plan.segments)
    chain = as_programs(plan, graph, "chain", PROFILE)
    assert not any(w in segment.frees for segment in chain.segments)
    check(chain, graph)


def test_a_program_holds_the_memory_of_its_arguments_until_results_take_it_over() -> None:
    """`x` is donated and has no successor; `w` is read last by the first segment, and its successor is made by the last one."""
    lines = ["a = heavy(x, w)", "b = heavy(a)", "v = heavy(b)"]
    graph = graph_of(lines, inputs="x w", outputs="v", carried={"w": "v"}, donated="x w")
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(4))
    as_one = as_programs(plan, graph, "inputs", PROFILE)
    assert [s.resident_bytes for s in plan.segments] == [300, 200, 200]
    assert [s.resident_bytes for s in as_one.segments] == [300, 400, 300]
    assert as_one.peak_bytes == 400
    check(as_one, graph)


def test_segments_are_as_they_were_where_every_boundary_has_a_copy() -> None:
    graph = training_graph(4, weight=100_000)
    planner = Planner(graph, with_link(1000.0), policy="tensile", state_memory="any")
    found = planner.plan(Goal(planner.floor_bytes(CompiledSizes())), CompiledSizes())
    assert found is not None
    if len(programs_of(found.plan, planner.graph)) == len(found.plan.segments):
        assert not can_be_joined(found.plan, planner.graph, "inputs") and can_be_joined(found.plan, planner.graph, "chain")
        made = joined(found.plan, programs_of(found.plan, planner.graph), planner.graph, planner.profile)
        for mine, theirs in zip(made.segments, found.plan.segments, strict=True):
            assert (mine.operators, set(mine.outputs), mine.donated) == (theirs.operators, set(theirs.outputs), theirs.donated)


def test_programs_need_what_is_measured_of_them() -> None:
    graph = training_graph(6, weight=70_000)
    planner = Planner(graph, with_link(1000.0), policy="tensile")
    found = planner.plan(Goal(planner.floor_bytes(CompiledSizes())), CompiledSizes())
    assert found is not None
    programs = programs_of(found.plan, planner.graph)
    workspaces = [1000 * (number + 1) for number in range(len(programs))]
    made = joined(found.plan, programs, planner.graph, planner.profile, workspaces)
    assert [s.workspace_bytes for s in made.segments] == workspaces
    assert made.peak_bytes == max(s.device_bytes for s in made.segments)
    check(made, planner.graph)
    lower = dataclasses.replace(made, segments=tuple(dataclasses.replace(s, device_bytes=1) for s in made.segments))
    with pytest.raises(Exception, match="bytes"):
        check(lower, planner.graph)


def test_a_program_takes_over_all_donated_state_also_where_no_segment_does() -> None:
    lines = ["a = heavy(x, w)", "v = light(w, a)", "y = heavy(a, w)", "u = light(s, y)"]
    graph = graph_of(lines, inputs="x w s", outputs="y v u", carried={"w": "v", "s": "u"}, donated="w s")
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(len(lines) + 1))
    w, v, s, u = (tensor_named(graph, name) for name in "wvsu")
    assert [one.donated for one in plan.segments] == [(), (), (), (s,)]  # w is read after v is made
    (segment,) = joined(plan, programs_of(plan, graph), graph, PROFILE).segments
    assert (segment.donated, segment.outputs[:2]) == ((w, s), (v, u))
    assert segment.frees == ()


@pytest.mark.parametrize("donated", ["", "w"])
def test_a_program_does_not_take_over_state_that_it_must_not(donated: str) -> None:
    """Two results cannot take over one memory, nor can one of another size; what is not donated belongs to the caller."""
    lines = ["a = heavy(x, w)", "v = light(w, a)", "y = heavy(a, w, s)"]
    graph = graph_of(lines, inputs="x w s", outputs="y v", carried={"w": "v", "s": "v"}, sizes={"s": 50}, donated=f"{donated} s")
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(len(lines) + 1))
    made = joined(plan, programs_of(plan, graph), graph, PROFILE)
    assert [graph.tensors[t].name for t in made.segments[0].donated] == donated.split()
    assert [graph.tensors[t].name for t in made.segments[0].frees] == ["s"]
    check(made, graph)


def test_two_states_that_become_one_tensor_donate_one_memory() -> None:
    lines = ["a = heavy(x, w, s)", "v = light(w, a)"]
    graph = graph_of(lines, inputs="x w s", outputs="v", carried={"w": "v", "s": "v"}, donated="w s")
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(len(lines) + 1))
    made = joined(plan, programs_of(plan, graph), graph, PROFILE)
    assert [graph.tensors[t].name for t in made.segments[0].donated] == ["w"]
    check(made, graph)
