"""How long tensors are held at the start of a search."""

from tensile_jax.plan.search.starts.start_schedules import last_held
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of

UNIT = 2**16
LAYERS = 200


def test_what_dropped_tensors_are_computed_from_is_held_even_if_they_lead_to_it_on_very_many_paths() -> None:
    """Every layer reads the two before it, as in networks with branches: there are more paths than could be followed."""
    names = ["x", *(f"t{i}" for i in range(LAYERS))]
    lines = [f"{names[i + 1]} = heavy({', '.join(names[max(i - 1, 0) : i + 1])})" for i in range(LAYERS)]
    lines.append(f"y = heavy({names[-1]}, t1)")
    graph = graph_of(lines, inputs="x", outputs="y", sizes={name: UNIT for name in (*names, "y")}, flops=1_000_000)
    evaluator = StepModel(graph, PROFILE, state_may_stay_out=False).evaluator_for(tuple(range(len(lines) + 1)))
    step, bit = evaluator.condensed, {t.name: evaluator.bit[t.id] for t in graph.tensors if t.id in evaluator.bit}
    dropped = {bit[f"t{i}"]: step.made[bit[f"t{i}"]] + 1 for i in range(1, LAYERS)}
    end = last_held(step, dropped)
    last = len(step.reads) - 1
    assert end[bit["t0"]] == last, "the last node needs t1, which is computed from t0 again"
    assert all(end[t] == node for t, node in dropped.items())


def test_a_tensor_is_held_until_it_is_needed_last() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "y = heavy(c, a)"], inputs="x", outputs="y",
        sizes=dict.fromkeys("xabcy", UNIT), flops=1_000_000,
    )  # fmt: skip
    evaluator = StepModel(graph, PROFILE, state_may_stay_out=False).evaluator_for((0, 1, 2, 3, 4))
    bit = {t.name: evaluator.bit[t.id] for t in graph.tensors if t.id in evaluator.bit}
    end = last_held(evaluator.condensed, {})
    assert [end[bit[name]] for name in "abcy"] == [3, 2, 3, 4]
