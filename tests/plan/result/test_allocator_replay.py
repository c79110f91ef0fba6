"""Replays of plans on the allocator's model: on paper, and of random steps under random limits."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.result.allocator_replay import in_use, whole_in_use
from tensile_jax.plan.result.best_fit_allocator import rounded
from tensile_jax.plan.result.instructions import FinishSwapOut, Free, Instruction, Launch, StartSwapIn, StartSwapOut, decode
from tensile_jax.plan.result.memory_curve import resident_bytes
from tests.builders import graph_of, tensor_named, training_graph
from tests.plan.small_steps import small_step

KIB = 1024


def ids(graph: Graph, names: str) -> tuple[TensorId, ...]:
    return tuple(tensor_named(graph, name) for name in names.split())


def launch(graph: Graph, index: int, reads: str, makes: str, *, donates: str = "", drops: str = "") -> Launch:
    return Launch(index, *(ids(graph, names) for names in (reads, makes, donates, drops)))


CHAIN = graph_of(
    ["y = heavy(x)", "z = heavy(y)", "u = heavy(z)"],
    sizes={"x": 8 * KIB, "y": 6 * KIB, "z": 4 * KIB, "u": 2 * KIB},
    inputs="x",
    outputs="u",
)


def test_a_result_in_a_larger_hole_counts_with_the_whole_hole() -> None:
    """y (6 KiB) is freed between x and z; u, of 2 KiB, would split it, and the temporaries of 4 KiB take it whole."""
    code = [
        launch(CHAIN, 0, "x", "y"),
        launch(CHAIN, 1, "y", "z", drops="y"),
        launch(CHAIN, 2, "z", "u", drops="z"),
    ]
    assert in_use(code[:2], CHAIN, [0, 0], grows=False).segments == (14 * KIB, 18 * KIB)
    found = in_use(code, CHAIN, [0, 0, 4 * KIB], grows=False)
    assert found.segments == (14 * KIB, 18 * KIB, 18 * KIB)  # 8 + 4 + 2, and 4 left of the hole


def test_temporaries_that_fit_a_hole_less_than_twice_as_large_take_it_whole() -> None:
    code = [launch(CHAIN, 0, "x", "y"), launch(CHAIN, 1, "y", "z", drops="y"), launch(CHAIN, 2, "z", "u", drops="z")]
    found = in_use(code, CHAIN, [0, 0, 3 * KIB + 512], grows=False)
    assert found.segments[2] == 8 * KIB + 4 * KIB + 2 * KIB + 4 * KIB


def test_the_memory_of_a_donated_input_becomes_that_of_its_update() -> None:
    graph = graph_of(["v = light(w)"], sizes={"w": KIB, "v": KIB}, inputs="w", outputs="v", carried={"w": "v"}, donated="w")
    found = in_use([launch(graph, 0, "w", "v", donates="w")], graph, [KIB], grows=False)
    assert (found.segments, found.at_begin, found.at_end) == ((2 * KIB,), KIB, KIB)
    assert found.held == frozenset(ids(graph, "v"))


def test_state_that_is_not_donated_is_there_twice_until_the_next_iteration_begins() -> None:
    graph = graph_of(["v = light(w)"], sizes={"w": KIB, "v": KIB}, inputs="w", outputs="v", carried={"w": "v"})
    found = in_use([launch(graph, 0, "w", "v")], graph, [0], grows=False)
    assert (found.segments, found.at_begin, found.at_end) == ((2 * KIB,), KIB, 2 * KIB)


def test_state_that_rests_on_the_host_is_on_the_device_before_the_first_iteration_only() -> None:
    graph = graph_of(
        ["y = heavy(x)", "v = light(w, y)"], sizes={"w": 4 * KIB, "v": 4 * KIB, "x": KIB, "y": KIB}, inputs="x w", outputs="v",
        carried={"w": "v"}, donated="w",
    )  # fmt: skip
    w, v = ids(graph, "w v")
    code: list[Instruction] = [
        launch(graph, 0, "x", "y"),
        StartSwapIn((w,), (0,), (w,)),
        launch(graph, 1, "w y", "v", donates="w", drops="y"),
        StartSwapOut((v,), (1,)),
        FinishSwapOut((v,)),
    ]
    found = in_use(code, graph, [0, 0], grows=False)
    assert found.arguments == 5 * KIB
    assert (found.segments, found.at_begin, found.at_end) == ((2 * KIB, 6 * KIB), KIB, 5 * KIB)


def test_what_an_earlier_iteration_leaves_behind_counts() -> None:
    """Batch x (2 KiB) and state w (1.75 KiB) lie side by side. Once both are freed, the next batch takes their memory whole."""
    state = 7 * 256
    graph = graph_of(
        ["v = heavy(w, x, k)"], sizes={"w": state, "v": state, "x": 2 * KIB, "k": KIB}, inputs="w k x", outputs="v",
        carried={"w": "v"}, donated="w x",
    )  # fmt: skip
    found = in_use([launch(graph, 0, "w x k", "v"), Free(ids(graph, "w x"))], graph, [0], grows=False)
    assert found.arguments == 2 * KIB + state + KIB
    assert found.at_begin == (2 * KIB + state) + state + KIB


def test_an_allocator_that_grows_wastes_most_of_a_region_on_a_large_tensor() -> None:
    mib = 2**20
    graph = graph_of(["y = heavy(x)"], sizes={"x": 392 * mib, "y": mib}, inputs="x", outputs="y")
    code = [launch(graph, 0, "x", "y")]
    assert in_use(code, graph, [0], grows=False).at_begin == 392 * mib
    assert in_use(code, graph, [0], grows=True).at_begin == 512 * mib


def test_a_donated_step_as_one_executable_needs_hardly_more_than_xla_says() -> None:
    graph = training_graph()
    peak = 10**6
    assert peak <= whole_in_use(graph, peak, grows=False) <= peak + 256 * (len(graph.inputs) + len(graph.outputs) + 1)


def test_a_step_with_an_argument_twice_and_a_result_that_is_an_argument_is_replayed() -> None:
    graph = graph_of(["y = heavy(x)"], sizes={"x": KIB, "y": KIB}, inputs="x", outputs="y")
    graph = dataclasses.replace(graph, inputs=graph.inputs * 2, outputs=(*graph.inputs, *graph.outputs))
    assert whole_in_use(graph, 2 * KIB, grows=False) == 2 * KIB


@pytest.mark.parametrize("grows", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 1.0), workspace=st.integers(0, 2**20))
def test_a_replayed_plan_uses_at_least_its_account_and_frees_everything_but_state(
    grows: bool, seed: int, share: float, workspace: int
) -> None:
    graph, profile = small_step(seed)
    planner = Planner(graph, profile, state_memory="any" if seed % 2 else "device")
    measured = CompiledSizes()
    limit = max(share * planner.whole_peak_bytes(measured), planner.floor_bytes(measured))
    found = planner.plan(Goal(limit), measured)
    if found is None or found.plan.whole:
        return
    plan, graph = found.plan, planner.graph
    code = decode(plan, graph)
    rng = random.Random(seed)
    workspaces = [rng.randint(0, workspace) for _ in plan.segments]
    at_begin, *resident, at_end = resident_bytes(code, graph)
    used = in_use(code, graph, workspaces, grows=grows)
    assert all(u >= r + w for u, r, w in zip(used.segments, resident, workspaces, strict=True))
    assert used.at_begin >= at_begin and used.at_end >= at_end
    left = {t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated} | set(graph.outputs)
    assert {t for t in used.held if graph.tensors[t].nbytes} <= left
    assert sum(rounded(graph.tensors[t].nbytes) for t in used.held) >= at_end
