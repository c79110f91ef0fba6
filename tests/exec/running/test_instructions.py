"""The executor's instructions of a plan drawn on paper: which slots they use."""

import dataclasses
from typing import Any

from tensile_jax.exec.running.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Instruction,
    Launch,
    StartSwapIn,
    StartSwapOut,
    instructions_of,
)
from tensile_jax.plan.result.build import empty_plan
from tests.builders import graph_of
from tests.plan.result.test_instructions import LINES, A, B, C, X, Y, copy, plan_of, segment


def shown(code: tuple[Instruction, ...]) -> list[tuple[Any, ...]]:
    """What each instruction is, and its slots; of a launch its segment and what it reads, writes and drops."""
    return [
        (Launch, i.index, i.inputs, i.outputs, i.drops) if isinstance(i, Launch) else (type(i), *dataclasses.astuple(i))
        for i in code
    ]


def test_the_instructions_are_those_of_the_plan_with_a_slot_for_each_tensor() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y", donated="x")
    swaps = copy("swap_out", A, 0, 1), copy("swap_in", A, 1, 3)
    assert shown(instructions_of(plan_of(graph, *swaps), graph, [None] * 4).code) == [
        (Launch, 0, (0,), slice(1, 2), ()),
        (StartSwapOut, (1,), "host"),
        (FinishSwapOut, (1,)),
        (Launch, 1, (0,), slice(2, 3), ()),
        (Free, (0,)),  # donated, so the caller still names it
        (StartSwapIn, (1,), (1,)),
        (Launch, 2, (2,), slice(3, 4), (2,)),
        (FinishSwapIn, (1,)),
        (Launch, 3, (1, 3), slice(4, 5), (1, 3)),
    ]


def test_what_is_computed_again_has_a_slot_of_its_own() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    segments = (
        segment(0, (X,), (A,)),
        segment(1, (X,), (B,), (A,)),
        segment(2, (B,), (A, C), (B,)),
        segment(3, (A, C), (Y,), (A, C)),
    )
    made = instructions_of(dataclasses.replace(empty_plan(graph), segments=segments), graph, [None] * 4)
    assert [(i.inputs, i.outputs, i.drops) for i in made.code if isinstance(i, Launch)] == [
        ((0,), slice(1, 2), ()),
        ((0,), slice(2, 3), (1,)),
        ((2,), slice(3, 5), (2,)),
        ((3, 4), slice(5, 6), (3, 4)),
    ]
    assert made.nbytes == tuple(graph.tensors[t].nbytes for t in (X, A, B, A, C, Y))


def test_arguments_that_are_not_donated_are_dropped_and_their_memory_is_kept() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    made = instructions_of(plan_of(graph), graph, [None] * 4)
    assert made.keep == {0} and made.inputs == (0,) and made.outputs == (4,)
    assert not any(isinstance(i, Free) for i in made.code)
    assert [i.drops for i in made.code if isinstance(i, Launch)] == [(), (0,), (2,), (1, 3)]


def test_state_whose_first_copy_comes_in_and_whose_last_goes_out_is_on_the_host_between_iterations() -> None:
    graph = graph_of(LINES, inputs="x", outputs="y")
    swaps = copy("swap_in", X, -1, 0), copy("swap_out", Y, 3, 4)
    made = instructions_of(plan_of(graph, *swaps), graph, [None] * 4)
    assert made.arrive_on_host == {0: "host"} and made.left_on_host == {4}
    assert isinstance(made.code[0], StartSwapIn) and isinstance(made.code[-1], FinishSwapOut)
