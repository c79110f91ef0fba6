"""vDNN's layers and windows on graphs that fit on paper."""

from tensile_jax.ir import Graph
from tensile_jax.plan import Choice, CompiledSizes
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.policies.none import none
from tensile_jax.plan.policies.segments import Decision, choice_with
from tensile_jax.plan.policies.vdnn import Layer, find_layers, offload, vdnn
from tensile_jax.plan.search.choice import LEAST
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, convolutions, graph_of, tensor_named
from tests.test_properties import planned


def step_of(graph: Graph) -> StepModel:
    return StepModel(graph, PROFILE, state_may_stay_out=True)


def test_a_layer_reads_its_feature_map_forward_and_again_backward() -> None:
    graph = convolutions(3)
    x, y0, y1 = (tensor_named(graph, name) for name in ("x", "y0", "y1"))
    assert find_layers(graph) == (Layer(x, 0, 17), Layer(y0, 2, 13), Layer(y1, 4, 9))


def test_convolutions_side_by_side_are_one_layer_and_what_is_not_read_again_is_none() -> None:
    graph = graph_of(
        ["y = light(x)", "a = conv(y, u)", "b = conv(y)", "c = conv(b)", "d = light(a, c)", "g = conv(y, d)", "h = conv(y, d)"],
        inputs="x u",
        outputs="g h",
    )  # fmt: skip
    assert find_layers(graph) == (Layer(tensor_named(graph, "y"), 2, 5),)


def test_a_feature_map_goes_during_the_next_layer_and_returns_during_the_one_before_it_backwards() -> None:
    """Of y0, copied for 10,000 us each way: out until convolution 4 ends, in from when convolution 9 begins.

    Meanwhile y1 (2,000 us) and a2 (2,010 us) are made; then g2, d2 (2,010 us each) and e1 (2,000 us). Nothing runs between the
    two convolutions that read y1; x is the caller's.
    """
    step = step_of(convolutions(3))
    retention = step.base
    y0 = tensor_named(step.graph, "y0")
    assert offload(retention, find_layers(step.graph), step.latencies, PROFILE) == {
        y0: (Absence(y0, 4, 9, (2000.0 + 2010.0) + (2010.0 + 2010.0 + 2000.0)),)
    }


def test_a_feature_map_that_a_shortcut_reads_too_stays_until_that_is_over() -> None:
    """Of y, which place 3 reads as well; the first heavy operator after it hides the way out, the last before 6 the way in."""
    graph = graph_of(
        ["y = heavy(x)", "a = conv(y, w)", "b = light(a)", "s = light(b, y)", "c = heavy(s)", "d = heavy(c)", "g = conv(y, d)"],
        sizes={name: 100_000 for name in "xyabscd"},
        inputs="x w",
        outputs="g",
    )  # fmt: skip
    step = step_of(graph)
    y = tensor_named(graph, "y")
    absences = offload(step.base, find_layers(graph), step.latencies, PROFILE)
    assert absences == {y: (Absence(y, 4, 5, step.latencies[4] + step.latencies[5]),)}


def test_tiny_feature_maps_stay() -> None:
    step = step_of(convolutions(3, activation=65_535))
    assert offload(step.base, find_layers(step.graph), step.latencies, PROFILE) == {}


def test_every_feature_map_goes_once_and_returns_once_where_segments_let_it() -> None:
    step = step_of(convolutions(5))
    absences = offload(step.base, find_layers(step.graph), step.latencies, PROFILE)
    plan = planned(step, choice_with(Decision(step.base, absences, ()), step.boundaries), "any")
    copies = sorted((e.name, e.kind) for e in plan.events if e.kind.startswith("swap"))
    assert copies == [(y, kind) for y in ("y0", "y1", "y2") for kind in ("swap_in", "swap_out")]
    assert plan.recomputed_us == 0.0
    choice, without = vdnn(step, LEAST, CompiledSizes()), none(step, LEAST, CompiledSizes())
    assert choice is not None and without is not None
    assert planned(step, choice, "any").peak_bytes < planned(step, without, "any").peak_bytes


def test_without_convolutions_it_is_what_none_is() -> None:
    step = step_of(convolutions(3, kernels="heavy"))

    def fields(choice: Choice | None) -> object:
        return None if choice is None else choice.key

    for limit in (LEAST, 500_000.0, 10**9):
        assert fields(vdnn(step, limit, CompiledSizes())) == fields(none(step, limit, CompiledSizes()))
