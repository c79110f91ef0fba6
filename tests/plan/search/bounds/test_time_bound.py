"""The bound is below every plan, and says when there can be none."""

import dataclasses
import itertools

import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes, DeviceProfile, Goal, Planner
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.search.bounds.time_bound import least_step_us
from tensile_jax.plan.search.choice import predicted_plan, whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan, unranged
from tests.builders import PROFILE, batch, graph_of, sgd_step, training_graph, weights, with_link
from tests.plan.oracle import Oracle
from tests.plan.small_steps import small_step

SLOW_LINK = with_link(1e-6)


def bound(graph: Graph, budget: float, profile: DeviceProfile = PROFILE, *, state_may_stay_out: bool = False) -> float:
    known = StepModel(graph, profile, state_may_stay_out=state_may_stay_out)
    return least_step_us(known.liveness, known.fusion, known.costs, budget, state_may_stay_out=state_may_stay_out)


def once(graph: Graph) -> Graph:
    """The graph, whose first operator has an effect and so never runs again."""
    first, *others = graph.operators
    return dataclasses.replace(graph, operators=(dataclasses.replace(first, effectful=True), *others))


CHAIN = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(a, d)"],
    inputs="x", outputs="y", sizes={"x": 10, "a": 1000, "b": 100, "c": 300, "d": 100, "y": 100}, flops=50_000,
)  # fmt: skip


def test_with_memory_enough_it_is_the_latencies_and_one_launch() -> None:
    step = StepModel(CHAIN, PROFILE, state_may_stay_out=False)
    assert bound(CHAIN, 10_000) == pytest.approx(sum(step.latencies) + PROFILE.launch_us, rel=1e-5)


def test_what_does_not_fit_runs_again_or_crosses_the_link() -> None:
    """`a` is not read while c and d run: x, b, c and nine tenths of `a` fit, and to run it again takes 500 us."""
    alone = bound(CHAIN, 10_000)
    assert bound(CHAIN, 1_310, SLOW_LINK) == pytest.approx(alone + 0.1 * 500, rel=1e-5)
    assert bound(CHAIN, 1_310) == pytest.approx(alone, rel=1e-5)  # a tenth of its copies hides beside the rest
    assert bound(CHAIN, 1_000, SLOW_LINK) == np.inf  # y reads a and d, which do not fit beside each other


def test_a_copy_that_hides_needs_segments() -> None:
    """A tenth of `a` leaves, in 50 us. Half of that is not hidden, or there are four more segments."""
    chain, link = once(CHAIN), with_link(2.0)
    for launch_us, more_us in ((5.0, 4 * 5.0), (100.0, 25.0)):
        profile = dataclasses.replace(link, launch_us=launch_us)
        assert bound(chain, 1_310, profile) == pytest.approx(bound(chain, 10_000, profile) + more_us, rel=1e-5)


def test_what_leaves_before_a_place_has_only_the_time_before_it() -> None:
    """200 bytes of `a` must be on the host when c begins, after 1,000 us or more, and back when y begins, 1,000 us later."""
    chain = once(CHAIN)
    alone = bound(chain, 10_000)
    assert bound(chain, 1_210, with_link(0.2)) == pytest.approx(alone, rel=1e-5)
    assert bound(chain, 1_210, with_link(0.1)) == pytest.approx(2 * 2_000 + 500, rel=1e-5)  # both copies, then y


def test_a_tensor_needed_in_several_places_runs_again_for_each() -> None:
    """Beside `u` and `v` there is no room for `a`, which runs again after each of them."""
    graph = graph_of(
        ["a = heavy(x)", "u = heavy(x)", "p = heavy(u)", "b = heavy(a, p)", "v = heavy(b)", "q = heavy(v)", "y = heavy(a, q)"],
        inputs="x", outputs="y", sizes={"x": 10, "a": 1000, "u": 1000, "v": 1000, "p": 10, "b": 10, "q": 10, "y": 10},
        flops=50_000,
    )  # fmt: skip
    assert bound(graph, 1_030, SLOW_LINK) == pytest.approx(bound(graph, 10_000) + 2 * 500, abs=25)  # 20 bytes are free


def test_state_that_may_stay_on_the_host_still_crosses_the_link() -> None:
    """The update `n` of `m` is in the way of b, which begins after 1,000 us. A copy takes 2,000 us, and b and y 1,000."""
    graph = once(
        graph_of(
            ["n = heavy(m)", "a = heavy(x)", "b = heavy(a)", "y = heavy(b)"],
            inputs="x m", outputs="n y", sizes={"x": 10, "m": 1000, "n": 1000, "a": 1000, "b": 1000, "y": 10},
            carried={"m": "n"}, donated="m", flops=50_000,
        )
    )  # fmt: skip
    assert bound(graph, 2_020, with_link(0.5)) == pytest.approx(2_000 + 2_000, rel=2e-2)
    assert bound(graph, 2_020, with_link(0.5), state_may_stay_out=True) == pytest.approx(2_000 + 1_000, rel=2e-2)


@pytest.mark.parametrize("layers", [2, 4, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("activation", "donated"), [*itertools.product((1_000, 100_000), (True, False))])
def test_no_plan_is_below_it(layers: int, activation: int, donated: bool) -> None:
    graph = order(training_graph(layers, activation=activation, donated=donated))
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    least = floor_bytes(step, CompiledSizes())
    before = np.inf
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        limit = least + part * (whole_peak(step, CompiledSizes()) - least)
        choice = POLICIES["auto"](step, limit, CompiledSizes())
        assert choice is not None
        below = bound(graph, limit)
        assert below <= before * (1 + 1e-5)  # more memory never takes longer
        before = below
        if not choice.runs_whole:
            assert predicted_plan(step, choice, CompiledSizes()).step_us >= below


@pytest.mark.parametrize("seed", range(6))
def test_the_fastest_of_all_plans_is_not_below_it(seed: int) -> None:
    graph, profile = small_step(seed, most=8)
    oracle = Oracle(graph, profile)
    least, most = oracle.least_peak(), whole_peak(oracle.step, CompiledSizes())
    for part in (0.0, 0.3, 0.6):
        limit = int(least + part * (most - least))
        found = oracle.fastest(limit)
        if found is None or found.layout is None:
            continue
        below = bound(graph, limit, profile)
        assert bound(graph, limit, profile, state_may_stay_out=True) <= below * (1 + 1e-5)
        if below > found.step_us:  # the estimates of workspaces are not exact; then the plan keeps the limit in the estimate only
            assert held(graph, oracle.step.fusion, oracle.plan(found.layout)) > limit


@pytest.mark.parametrize("launch_us", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("state_memory", ["device", "any"])
def test_no_plan_of_any_policy_is_below_it(state_memory: str, launch_us: float) -> None:
    graph, profile = training_graph(5), dataclasses.replace(with_link(200.0), launch_us=launch_us)
    planner = Planner(graph, profile, state_memory=state_memory)  # pyright: ignore[reportArgumentType] # a literal
    for share in (0.8, 0.6, 0.5, 0.4, 0.3):
        limit = int(share * whole_peak(planner.model, CompiledSizes()))
        below = planner.bound_us(limit, CompiledSizes())
        for policy in POLICIES:
            found = planner.with_policy(policy).plan(Goal(limit), CompiledSizes())
            assert found is None or found.plan.step_us >= below or found.plan.peak_bytes > limit


def held(graph: Graph, fusion: Fusion, plan: Plan) -> int:
    """The peak of the plan, if each segment computes what it needs again right before it is first read."""
    begin = find_liveness(graph).begin
    size = [t.nbytes for t in graph.tensors]
    place_of = {op.id: place for place, op in enumerate(graph.operators)}
    most = 0
    for segment in plan.segments:
        there: set[int] = set(segment.inputs)
        again = {place_of[o] for o in unranged(segment.recomputes)}
        sequence: list[int] = []

        def run(place: int, again: set[int] = again, there: set[int] = there, sequence: list[int] = sequence) -> None:
            for t in graph.operators[place].inputs:
                if t not in there and begin[t] in again:
                    run(begin[t])
            there.update(graph.operators[place].outputs)
            sequence.append(place)
            again.discard(place)

        for o in unranged(segment.operators):
            run(place_of[o])
        last = {t: at for at, p in enumerate(sequence) for t in (*graph.operators[p].outputs, *graph.operators[p].inputs)}
        taken_over = {pair.output for pair in graph.carried if pair.input in segment.donated}
        results = set(segment.outputs) - taken_over
        live = held_bytes = 0
        for at, place in enumerate(sequence):
            made = [t for t in graph.operators[place].outputs if t not in taken_over and (t in results or fusion.materialised[t])]
            live += sum(size[t] for t in made)
            held_bytes = max(held_bytes, live)
            touched = {t for p in sequence[: at + 1] for t in graph.operators[p].outputs} - taken_over - results
            live -= sum(size[t] for t in touched if last[t] == at and fusion.materialised[t])
        most = max(most, segment.resident_bytes - sum(size[t] for t in results) + held_bytes)
    return most


def test_a_plan_says_how_far_above_its_bound_it_is() -> None:
    function = tensile.jit(sgd_step, budget=300_000, donate_argnums=0)
    plan = function.plan(weights(), batch())
    assert "bound" not in str(plan)
    below = function.bound_us(weights(), batch())
    assert 0 < below <= plan.step_us
    assert f"this one is {plan.step_us / below - 1:.1%} above" in str(dataclasses.replace(plan, bound_us=below))
