"""What a plan says that its segments hold is what its replay counts, and never more than its policy has counted."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.result.build import build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.instructions import decode
from tensile_jax.plan.result.memory_curve import waiting_bytes
from tensile_jax.plan.search.choice import LEAST, compared, predicted_plan, schedule_of, whole_peak, workspaces_of
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan, contradictions
from tests.builders import PROFILE, graph_of, header_for, plan_by_hand, tensor_named

_SIZES = (0, 4, 1_000, 65_536, 100_000, 300_000)


def planned(graph: Graph, boundaries: tuple[int, ...], dropped: dict[str, int]) -> Plan:
    """The plan of the graph cut there, without workspaces."""
    retention = retain(find_liveness(graph), {tensor_named(graph, name): last for name, last in dropped.items()})
    return plan_by_hand(graph, retention, boundaries)


def test_donated_state_that_nothing_reads_is_handed_to_the_segment_that_makes_its_update() -> None:
    graph = graph_of(
        ["v = heavy(x)", "y = heavy(v)"], inputs="w x", outputs="v y", carried={"w": "v"}, donated="w", sizes={"w": 7, "v": 7}
    )
    plan = planned(graph, (0, 1, 2), {})
    assert plan.segments[0].donated == (tensor_named(graph, "w"),)
    assert [s.device_bytes for s in plan.segments] == [7 + 100, 7 + 100 + 100]  # w or v, x; y
    check(plan, graph)


def test_donated_state_of_which_a_cast_is_still_there_is_handed_over() -> None:
    """The moment m is read through its cast c only. Dropped after place 2, c is stored where the update's segment begins."""
    graph = graph_of(
        ["c = light(m)", "g = heavy(x)", "u = heavy(c, g)", "p = heavy(c, u)", "n = light(p)"],
        inputs="m x",
        outputs="n",
        carried={"m": "n"},
        donated="m",
        sizes={"m": 10, "n": 10, "c": 20, "u": 20, "p": 20},
    )
    plan = planned(graph, (0, 2, 5), {"c": 2})
    first, last = plan.segments
    assert tensor_named(graph, "m") not in graph.operators[2].inputs
    assert last.donated == (tensor_named(graph, "m"),)
    assert tensor_named(graph, "m") not in (*first.frees, *last.frees)
    assert last.resident_bytes == 10 + 100 + 20 + 100  # m or n, x, c, g
    check(plan, graph)


def test_state_released_before_its_update_is_made_is_not_counted_in_between() -> None:
    graph = graph_of(
        ["c = heavy(m)", "y = heavy(c)", "n = heavy(y)"], inputs="m", outputs="n", carried={"m": "n"}, donated="m",
        sizes={"m": 10, "n": 10},
    )  # fmt: skip
    plan = planned(graph, (0, 1, 2, 3), {})
    assert [s.donated for s in plan.segments] == [(), (), ()]
    assert [s.resident_bytes for s in plan.segments] == [10 + 100, 100 + 100, 100 + 10]
    check(plan, graph)


def test_state_that_comes_back_in_the_place_of_other_state_stays_where_it_is() -> None:
    """The caller owns t, which is the next s; s and r change places. None of them can be sent out as somebody's update."""
    size = 2**17
    graph = graph_of(
        ["a = heavy(s, x)", "b = heavy(a)", "u = heavy(t, b)", "c = heavy(r, q)"],
        inputs="s t r q x",
        outputs="t u q r c",
        carried={"s": "t", "t": "u", "r": "q", "q": "r"},
        donated="s r q",
        sizes=dict.fromkeys("struqabcx", size),
    )
    step = StepModel(order(graph), PROFILE, state_may_stay_out=True)
    for policy in POLICIES.values():
        for limit in (LEAST, 3 * size, 5 * size, 8 * size):
            choice = policy(step, limit, CompiledSizes())
            if choice is not None and not choice.runs_whole:
                check(replace(predicted_plan(step, choice, CompiledSizes()), state_memory="any"), step.graph)


def test_the_host_holds_a_copy_until_the_tensor_is_back_and_state_across_the_iterations() -> None:
    """w is on the host when an iteration begins, and its update v when it ends; a and c are between two uses of theirs."""
    sizes = {"w": 1_000, "v": 1_000, "x": 1, "a": 20, "b": 300, "c": 4_000, "d": 50_000}
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(a, w)", "c = heavy(b)", "v = heavy(c, w)", "d = heavy(a, v)", "e = heavy(c, d)"],
        inputs="w x", outputs="v e", carried={"w": "v"}, donated="w", sizes={**sizes, "e": 1},
    )  # fmt: skip
    w, v, a, c = (tensor_named(graph, name) for name in "wvac")
    absences = {
        w: (Absence(w, -1, 0, 0.0),),
        a: (Absence(a, 2, 4, 0.0),),
        c: (Absence(c, 3, 5, 0.0),),
        v: (Absence(v, 5, 6, 0.0),),
    }
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(7), absences, state_memory="any")
    check(plan, graph)
    copies = [(e.name, e.kind, e.trigger + 1, e.until) for e in plan.events if e.kind.startswith("swap")]
    assert copies == [
        ("w", "swap_in", 0, 1), ("a", "swap_out", 2, 3), ("c", "swap_out", 4, 4), ("a", "swap_in", 4, 4), ("v", "swap_out", 5, 6),
        ("c", "swap_in", 5, 5),
    ]  # fmt: skip
    assert waiting_bytes(decode(plan, graph), graph, "host") == [1_000, 1_000, 20, 20, 4_020, 5_000, 1_000]
    assert plan.host_peak_bytes == 5_000
    with pytest.raises(InvalidPlan, match="needs 5000 bytes in host memory; the plan says 4999"):
        check(replace(plan, host_peak_bytes=4_999), graph)
    with pytest.raises(InvalidPlan, match="needs 5000 bytes in host memory"):
        check(replace(plan, host_budget_bytes=4_999), graph)
    assert next(contradictions(replace(plan, host_budget_bytes=4_999))).startswith("its peak of 5000 bytes in host memory")


def random_graph(rng: random.Random) -> Graph:
    """State that is updated directly, through casts, or not from itself at all; that passes through, or changes places."""
    states = [f"s{i}" for i in range(rng.randint(1, 4))]
    sizes = {name: rng.choice(_SIZES) for name in ("x", *states)}
    names, lines = ["x", *states], list[str]()

    def make(kind: str, reads: list[str], nbytes: int | None = None) -> str:
        name = f"t{len(lines)}"
        lines.append(f"{name} = {kind}({', '.join(dict.fromkeys(reads))})")
        sizes[name] = rng.choice(_SIZES) if nbytes is None else nbytes
        names.append(name)
        return name

    def anything() -> None:
        kind = rng.choice(("heavy", "heavy", "light", "light", "reduction"))
        make(kind, [rng.choice(names[-3:]), *rng.sample(names, k=rng.randint(0, 2))])

    for _ in range(rng.randint(1, 12)):
        anything()
    carried: dict[str, str] = {}
    for old in rng.sample(states, k=len(states)):
        gradient = rng.choice(names[-5:])
        form = rng.choice(("direct", "cast", "cast", "unread", "same", "another"))
        if form == "direct":
            new = make("light", [old, gradient], sizes[old])
        elif form == "cast":
            wide = make(rng.choice(("light", "light", "heavy")), [old], 2 * sizes[old])
            sums = [make("light", [wide, gradient], 2 * sizes[old]) for _ in range(rng.randint(1, 2))]
            for _ in range(rng.randint(0, 2)):
                anything()
            new = make("light", [sums[-1]], sizes[old])
        elif form == "unread":
            new = make("light", [gradient], sizes[old])
        else:
            new = old if form == "same" else rng.choice(states)
        if new not in carried.values():
            carried[old] = new
        for _ in range(rng.randint(0, 2)):
            anything()
    results = dict.fromkeys([*carried.values(), *rng.sample(names, k=rng.randint(0, 2)), names[-1]])
    return graph_of(
        lines,
        sizes=sizes,
        inputs=" ".join(["x", *states]),
        outputs=" ".join(results),
        carried=carried,
        donated=" ".join(s for s in ("x", *states) if rng.random() < 0.8),
        flops=rng.choice((0, 10_000, 1_000_000)),
    )


def hold_to_account(rng: random.Random, graph: Graph, state_memory: str) -> None:
    """Every policy's plans at several budgets, before compiling and with workspaces that compiling might have shown."""
    step = StepModel(order(graph), PROFILE, state_may_stay_out=state_memory == "any")
    header = header_for(step.graph, state_memory=state_memory)
    least = floor_bytes(step, CompiledSizes())
    top = max(least, whole_peak(step, CompiledSizes()))
    significant, derived = step.classes
    small = sum(t.nbytes for t in step.graph.tensors if not significant[t.id] and not derived[t.id])
    for policy in POLICIES.values():
        measured = CompiledSizes()
        for part in sorted((rng.random(), rng.random() / 4, 0.0), reverse=True):
            limit = least + part * (top - least)
            choice = policy(step, limit, measured)
            if choice is None or choice.layout is None:
                continue
            schedule = schedule_of(step, choice.layout, measured)
            plan = build_plan(choice.layout, step.liveness, [nbytes for nbytes, _ in workspaces_of(schedule)], step.costs, header)
            check(plan, step.graph)
            assert limit == LEAST or plan.peak_bytes <= limit
            for segment, counted in zip(plan.segments, schedule.peaks, strict=True):
                needed = segment.resident_bytes + segment.workspace_bytes
                assert needed == segment.device_bytes or segment in (plan.segments[0], plan.segments[-1])
                assert abs(segment.device_bytes - counted) <= small  # of small tensors, the search knows no more than a bound
            shown = compared(schedule, [rng.choice((0, 1_000, 65_536)) for _ in plan.segments])
            measured = CompiledSizes({**measured.workspaces, **shown})


ACCOUNTS = given(seed=st.integers(0, 2**32), state_memory=st.sampled_from(["device", "any"]))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@ACCOUNTS
def test_policy_plan_and_replay_agree_on_bytes_for_any_graph(seed: int, state_memory: str) -> None:
    rng = random.Random(seed)
    hold_to_account(rng, random_graph(rng), state_memory)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@ACCOUNTS
def test_policy_plan_and_replay_agree_on_bytes_for_many_graphs(seed: int, state_memory: str) -> None:
    rng = random.Random(seed)
    hold_to_account(rng, random_graph(rng), state_memory)
