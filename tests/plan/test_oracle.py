"""The oracle is exact, and `auto` is never better than it, and how much worse."""

import dataclasses
import random
from typing import Literal

import pytest

from benchmarks.gap import Compared, compare, figures
from tensile_jax.ir import Graph
from tensile_jax.plan import DeviceProfile
from tests.builders import PROFILE, graph_of
from tests.plan.oracle import Oracle
from tests.plan.small_steps import small_step
from tests.plan.unpruned import unpruned

UNIT = 2**16


def chain(seed: int) -> Graph:
    """Four or five operators, the first results read twice."""
    rng = random.Random(seed)
    lines = ["a = heavy(x)", "b = heavy(a)", "c = light(b)", "y = heavy(c, a)"]
    if seed % 2:
        lines = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = light(c, a)", "y = heavy(d, a)"]
    sizes = {name: UNIT * rng.randint(1, 6) for name in "abcdy"} | {"x": 1_000}
    return graph_of(lines, sizes=sizes, inputs="x", outputs="y", flops=rng.choice((50_000, 400_000)))


def tiny_step(seed: int) -> Graph:
    """Donated state that is read, may leave, and is updated."""
    rng = random.Random(seed)
    sizes = {name: UNIT * rng.randint(1, 6) for name in "abg"} | {"x": 1_000, "w": 2 * UNIT, "v": 2 * UNIT}
    return graph_of(
        ["a = heavy(x, w)", "b = heavy(a)", "g = heavy(b)", "v = light(w, g)"],
        sizes=sizes, inputs="x w", outputs="v", carried={"w": "v"}, donated="w", flops=100_000,
    )  # fmt: skip


@pytest.mark.parametrize("rate", [10.0, 300.0])
@pytest.mark.parametrize("graph", [chain(0), chain(2)], ids=["chain", "another"])
def test_the_search_finds_what_looking_at_every_plan_finds(graph: Graph, rate: float) -> None:
    compare_with_every_plan(graph, rate)


@pytest.mark.parametrize("state_memory", ["device", "any"])
def test_the_search_finds_what_looking_at_every_plan_of_a_train_step_finds(state_memory: Literal["device", "any"]) -> None:
    compare_with_every_plan(tiny_step(0), 100.0, state_memory)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("graph", [*map(chain, (1, 3, 4, 5, 6, 7)), *map(tiny_step, range(1, 4))])
def test_the_search_finds_what_looking_at_every_plan_finds_in_many_graphs(graph: Graph, rate: float) -> None:
    compare_with_every_plan(graph, rate)


@pytest.mark.slow
@pytest.mark.parametrize("state_memory", ["device", "any"])
@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_looking_at_every_plan_of_a_small_step_finds(
    seed: int, state_memory: Literal["device", "any"]
) -> None:
    compare_plans(*small_step(seed, most=4), state_memory)


def compare_with_every_plan(graph: Graph, rate: float, state_memory: Literal["device", "any"] = "device") -> None:
    profile = dataclasses.replace(
        PROFILE, device_to_host_bytes_per_us=rate, host_to_device_bytes_per_us=1.5 * rate, copy_share=0.1
    )
    compare_plans(graph, profile, state_memory)


def compare_plans(graph: Graph, profile: DeviceProfile, state_memory: Literal["device", "any"]) -> None:
    oracle = Oracle(graph, profile, state_memory=state_memory)
    plans = unpruned(oracle.step)
    peaks = sorted({peak for peak, _ in plans})
    assert oracle.least_peak() == peaks[0]
    assert oracle.fastest(peaks[0] - 1) is None
    for limit in peaks:
        found = oracle.fastest(limit)
        assert found is not None
        assert found.step_us == pytest.approx(min(us for peak, us in plans if peak <= limit), abs=0.01)
        if found.layout is not None:
            plan = oracle.plan(found.layout)
            assert plan.peak_bytes <= limit
            assert plan.step_us == pytest.approx(found.step_us, abs=0.01)


def test_where_everything_fits_the_step_runs_whole() -> None:
    oracle = Oracle(chain(0), PROFILE)
    assert oracle.fastest(float("inf")) == (oracle.step.whole_us, None)


def test_a_plan_that_is_no_faster_than_a_known_one_is_not_found() -> None:
    oracle = Oracle(chain(0), PROFILE)
    limit = oracle.least_peak()
    found = oracle.fastest(limit)
    assert found is not None
    assert oracle.fastest(limit, upper=found.step_us) is None
    assert oracle.fastest(limit, upper=found.step_us + 1.0) == found


def test_tensors_too_small_to_be_swapped_are_refused() -> None:
    graph = graph_of(["a = heavy(x)", "y = heavy(a)"], sizes={"x": 100, "a": 4_000, "y": UNIT}, inputs="x", outputs="y")
    with pytest.raises(ValueError, match="make the tensors larger"):
        Oracle(graph, PROFILE)


def never_better(compared: list[Compared]) -> bool:
    """Auto may gain a little from copies that the oracle leaves out (`oracle.py`)."""
    return all(c.floor_bytes <= c.auto_floor_bytes for c in compared) and min(g for c in compared for g in c.gaps) > -0.01


def test_auto_is_never_better_than_the_oracle_and_seldom_much_worse() -> None:
    compared = [compare(seed, most=7) for seed in range(36)]
    assert never_better(compared)
    found = figures(compared)
    assert found["gap"]["median"] < 0.005
    assert found["gap"]["95th_percentile"] < 0.15
    assert found["floor_gap"]["95th_percentile"] < 0.01


@pytest.mark.slow
def test_auto_is_never_better_than_the_oracle_on_hundreds_of_steps() -> None:
    compared = [compare(seed, most=8) for seed in range(1_000, 1_200)]
    assert never_better(compared)
    found = figures(compared)
    assert found["gap"]["median"] < 0.005
    assert found["gap"]["95th_percentile"] < 0.15
    assert found["floor_gap"]["95th_percentile"] < 0.1
