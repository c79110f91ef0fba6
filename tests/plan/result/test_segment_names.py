"""The names of segments: by part of the step, by scope, short, and no two alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tensile_jax.ir import Graph, Role
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.result.segment_names import LONGEST, segment_names
from tests.builders import graph_of


def names(graph: Graph, boundaries: Sequence[int]) -> list[str]:
    return segment_names(find_liveness(graph), boundaries)


def with_roles(graph: Graph, roles: Mapping[str, Role]) -> Graph:
    return replace(graph, tensors=tuple(replace(t, role=roles.get(t.name, t.role)) for t in graph.tensors))


def network(blocks: int, block: str = "Block_{}", net: str = "Net") -> Graph:
    """One product a block, its two gradients, and the updates in the end: 5 operators a block, and the loss."""
    lines = [f"{net}/{block.format(k)}: a{k} = heavy({f'a{k - 1}' if k else 'x'}, w{k})" for k in range(blocks)]
    lines += [f"loss = reduction(a{blocks - 1})"]
    for k in reversed(range(blocks)):
        gradient = f"e{k + 1}" if k + 1 < blocks else f"a{blocks - 1}"
        lines += [f"backward {net}/{block.format(k)}: g{k} = heavy({gradient}, {f'a{k - 1}' if k else 'x'})"]
        lines += [f"backward {net}/{block.format(k)}: e{k} = heavy({gradient}, w{k})"]
    lines += [line for k in range(blocks) for line in (f"s{k} = light(g{k})", f"v{k} = light(w{k}, s{k})")]
    weights = {f"w{k}": f"v{k}" for k in range(blocks)}
    graph = graph_of(lines, inputs=" ".join((*weights, "x")), outputs=" ".join((*weights.values(), "loss")), carried=weights)
    roles: dict[str, Role] = {**dict.fromkeys(weights.values(), "parameter"), **{f"g{k}": "gradient" for k in range(blocks)}}
    return with_roles(graph, roles)


def test_a_segment_is_named_after_its_part_of_the_step() -> None:
    assert names(network(4), (0, 5, 13, 21)) == ["forward", "backward", "optimizer"]


def test_a_segment_with_some_of_a_part_is_named_after_its_scopes_and_ranges_are_written_short() -> None:
    assert names(network(6), (0, 2, 4, 7, 13, 15, 19, 31)) == [
        "forward Net/Block_0..1",
        "forward Net/Block_2..3",
        "forward Net/Block_4..5",
        "backward Net/Block_3..5",
        "backward Net/Block_2",
        "backward Net/Block_0..1",
        "optimizer",
    ]


def test_a_segment_of_several_parts_names_them_all() -> None:
    assert names(network(4), (0, 7, 21)) == ["forward + backward Net/Block_3", "backward Net/Block_0..2 + optimizer"]


def test_siblings_that_are_no_neighbours_are_named_apart() -> None:
    graph = graph_of(
        [f"Net/{scope}: y{k} = heavy(x)" for k, scope in enumerate(("Stem", "Block_0", "Block_1", "Block_3", "Head", "Tail"))],
        inputs="x",
        outputs="y0 y1 y2 y3 y4 y5",
    )
    assert names(graph, (0, 5, 6)) == ["forward Net/Stem,Block_0..1,Block_3,Head", "forward Net/Tail"]


def test_equal_names_are_numbered() -> None:
    assert names(network(2), (0, 3, 7, 8, 9, 11)) == ["forward", "backward", "optimizer", "optimizer (2)", "optimizer (3)"]


def test_a_step_without_scopes_has_parts_only() -> None:
    graph = graph_of(["backward: y = heavy(x)", "z = heavy(y)"], inputs="x", outputs="z")
    assert names(graph, (0, 1, 2)) == ["backward", "forward"]


def test_a_step_without_a_gradient_is_forward() -> None:
    graph = graph_of(["y = heavy(x)", "v = light(w)"], inputs="w x", outputs="v y", carried={"w": "v"})
    assert names(graph, (0, 1, 2)) == ["forward", "forward (2)"]


def test_what_nothing_but_the_update_reads_is_the_optimizers() -> None:
    graph = network(2)
    decay = graph_of(
        ["Net/A: y = heavy(x, w)", "backward Net/A: g = heavy(x, y)", "d = light(w)", "v = light(g, d)"],
        inputs="w x",
        outputs="v",
    )
    decay = with_roles(decay, {"g": "gradient", "v": "parameter"})
    assert names(decay, (0, 1, 2, 3, 4)) == ["forward", "backward", "optimizer", "optimizer (2)"]
    assert names(graph, (0, 11)) == ["forward + backward + optimizer"]


@pytest.mark.parametrize("length", [1, 10, 20, 30, 60, 200])
def test_names_are_short_and_no_two_are_equal_however_long_the_scopes_are(length: int) -> None:
    graph = network(12, block="x" * length + "_{}" + "y" * length, net="n" * length)
    for step in (1, 2, 3, 5, 8, 30):
        found = names(graph, (*range(0, len(graph.operators), step), len(graph.operators)))
        assert len(set(found)) == len(found)
        assert max(map(len, found)) <= LONGEST
