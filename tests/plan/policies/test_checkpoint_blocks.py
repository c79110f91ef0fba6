"""Blocks found by name, and what checkpointing them drops."""

from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.checkpoint_blocks import checkpoint, checkpointed, find_backward_start, find_blocks
from tensile_jax.plan.policies.segments import Decision, choice_with
from tensile_jax.plan.search.choice import LEAST
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, convolutions, graph_of, training_graph
from tests.test_properties import planned

BLOCKS = (
    "Net/Stem: s = heavy(x)",
    "Net/Block_0/Conv: a = heavy(s)",
    "Net/Block_0/Norm: b = light(a)",
    "Net/Block_0: c = light(b, s)",
    "Net/Block_1/Conv: d = heavy(c)",
    "Net/Block_1: e = light(d)",
    "Net/Head: f = heavy(e)",
    "backward Net/Head: g = heavy(f, e)",
    "backward Net/Block_1/Conv: h = heavy(g, d)",
    "backward Net/Block_0/Conv: y = heavy(h, a, b, c, s)",
)


def blocks_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    return find_blocks(graph, find_backward_start(retained(graph)))


def retained(graph: Graph) -> Retention:
    return retain(find_liveness(graph), {})


def dropped_from(graph: Graph) -> dict[str, int]:
    return {graph.tensors[t].name: last for t, last in checkpointed(retained(graph)).dropped.items()}


def test_numbered_siblings_with_scopes_inside_are_the_blocks() -> None:
    assert blocks_of(graph_of(BLOCKS, inputs="x", outputs="y")) == ((1, 2, 3), (4, 5))


def test_what_crosses_a_block_is_kept_and_what_is_inside_is_dropped_after_its_last_read_there() -> None:
    graph = graph_of(BLOCKS, inputs="x", outputs="y")
    assert dropped_from(graph) == {"a": 2, "b": 3, "d": 5}
    retention = checkpointed(retained(graph))
    assert [t.name for t in graph.tensors if retention.stored(t.id, 7)] == ["x", "s", "c", "e", "f"]


def test_what_the_step_returns_is_kept_wherever_it_is_made() -> None:
    assert dropped_from(graph_of(BLOCKS, inputs="x", outputs="y a")) == {"b": 3, "d": 5}


def test_the_shallowest_siblings_count_and_deeper_ones_belong_to_them() -> None:
    names = ["Net/Stage_0/Unit_0/Conv", "Net/Stage_0/Unit_1/Conv", "Net/Stage_1/Unit_0/Conv", "Net/Stage_1/Unit_1/Conv"]
    lines = [f"{name}: t{k + 1} = heavy(t{k})" for k, name in enumerate(names)]
    assert blocks_of(graph_of([*lines, "backward: y = heavy(t4)"], inputs="t0", outputs="y")) == ((0, 1), (2, 3))


def test_without_such_siblings_each_child_of_the_top_module_begins_a_block() -> None:
    """`Net` itself computes places 1, 3 and 5 (activations), the loss at 6 is outside of it."""
    assert blocks_of(convolutions(3)) == ((0, 1), (2, 3), (4, 5))


def test_without_scopes_the_forward_pass_is_cut_into_about_the_root_of_its_heavy_operators() -> None:
    graph = graph_of([f"t{k + 1} = heavy(t{k})" for k in range(9)] + ["backward: y = heavy(t9)"], inputs="t0", outputs="y")
    assert blocks_of(graph) == ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def test_without_any_name_the_backward_pass_begins_where_most_is_stored() -> None:
    """That is once d4 (place 9) is there beside y0 to y3, so that it counts with the forward pass."""
    assert find_backward_start(retained(training_graph(4))) == 10


def test_a_module_that_is_called_twice_is_two_blocks() -> None:
    lines = [
        "Net/Block_0/A: a = heavy(x)",
        "Net/Block_1/A: b = heavy(a)",
        "Net/Block_0/A: c = heavy(b)",
        "backward: y = heavy(c, b, a)",
    ]
    assert blocks_of(graph_of(lines, inputs="x", outputs="y")) == ((0,), (1,), (2,))


def test_what_depends_on_inputs_alone_does_not_end_a_block() -> None:
    lines = [
        "Net/Block_0/A: a = heavy(x)",
        "Net/Block_1/A: m = light(k)",
        "Net/Block_0/A: b = light(a, m)",
        "Net/Block_1/A: c = heavy(b)",
    ]
    assert blocks_of(graph_of([*lines, "backward: y = heavy(c, b, a)"], inputs="x k", outputs="y")) == ((0, 1, 2), (3,))


def test_blocks_are_computed_again_and_nothing_is_swapped() -> None:
    step = StepModel(
        graph_of(BLOCKS, inputs="x", outputs="y", sizes={n: 100_000 for n in "sabcdefghy"}), PROFILE, state_may_stay_out=True
    )
    everywhere = choice_with(Decision(checkpointed(step.base), {}, ()), step.boundaries)
    plan = planned(step, everywhere, "any")
    assert {e.name for e in plan.events if e.kind == "recompute"} == {"a", "b", "d"}
    assert not [e for e in plan.events if e.kind.startswith("swap")]
    choice, without = checkpoint(step, LEAST, CompiledSizes()), POLICIES["none"](step, LEAST, CompiledSizes())
    assert choice is not None and without is not None
    assert planned(step, choice, "any").peak_bytes < planned(step, without, "any").peak_bytes
