"""Every policy on random graphs: plans that survive their replay, limits kept, an answer where the least is asked for."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes, DeviceProfile, PolicyName
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search.choice import LEAST, whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, floor_bytes, graph_of, slow_if
from tests.test_properties import graphs, peak_of

PLANS = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def networks(draw: st.DrawFn) -> Graph:
    """Forward, backward and update of blocks of convolutions and others, some with a shortcut, in scopes or without."""
    size = st.sampled_from([1_000, 65_536, 100_000, 300_000])
    scoped = draw(st.booleans())
    lines: list[str] = []
    sizes: dict[str, int] = {"x": draw(size)}
    last, tape = "x", []
    layers = draw(st.lists(st.sampled_from(["conv", "heavy", "light", "join"]), min_size=1, max_size=8))
    for k, kind in enumerate(layers):
        scope = f"Net/Block_{k // 2}/Layer_{k % 2}: " if scoped else ""
        other = draw(st.sampled_from(["x", *(f"y{i}" for i in range(k))]))
        reads = {"conv": f"{last}, w{k}", "heavy": f"{last}, w{k}", "light": last, "join": f"{last}, {other}"}[kind]
        lines.append(f"{scope}y{k} = {'light' if kind == 'join' else kind}({reads})")
        sizes |= {f"y{k}": draw(size), f"w{k}": draw(size)}
        tape.append((k, kind, last, scope and f"backward {scope}"))
        last = f"y{k}"
    lines += [f"loss = reduction({last})", f"d{len(layers)} = light({last})"]
    sizes |= {"loss": 4, f"d{len(layers)}": sizes[last]}
    weights = [k for k, kind in enumerate(layers) if kind in ("conv", "heavy")]
    for k, kind, before, scope in reversed(tape):
        if k in weights:
            lines += [f"{scope}g{k} = {kind}({before}, d{k + 1})", f"{scope}d{k} = {kind}(d{k + 1}, w{k})"]
            lines += [f"v{k} = light(w{k}, g{k})"]
            sizes |= {f"g{k}": sizes[f"w{k}"], f"v{k}": sizes[f"w{k}"]}
        else:
            lines.append(f"{scope}d{k} = light(d{k + 1}, y{k}, {before})")
        sizes[f"d{k}"] = sizes[before]
    return graph_of(
        lines,
        sizes=sizes,
        inputs=" ".join([*(f"w{k}" for k in weights), "x"]),
        outputs=" ".join([*(f"v{k}" for k in weights), "loss"]),
        carried={f"w{k}": f"v{k}" for k in weights},
        donated=" ".join(f"w{k}" for k in weights) if draw(st.booleans()) else "",
        flops=draw(st.sampled_from([0, 10_000, 1_000_000])),
    )


@st.composite
def profiles(draw: st.DrawFn) -> DeviceProfile:
    """Links from hopeless to free, with and without canonical layouts."""
    return dataclasses.replace(
        PROFILE,
        device_to_host_bytes_per_us=draw(st.sampled_from([1.0, 50.0, 10_000.0])),
        host_to_device_bytes_per_us=draw(st.sampled_from([1.0, 50.0, 10_000.0])),
        fused_reductions=draw(st.booleans()),
    )


@pytest.mark.parametrize("name", slow_if(POLICIES, "capuchin"))
@PLANS
@given(
    graph=graphs() | networks(),
    profile=profiles(),
    state_memory=st.sampled_from(["device", "any"]),
    parts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_a_plan_is_valid_and_keeps_its_limit_and_there_is_one_from_the_floor_up(
    name: PolicyName, graph: Graph, profile: DeviceProfile, state_memory: str, parts: list[float]
) -> None:
    policy, measured = POLICIES[name], CompiledSizes()
    step = StepModel(order(graph), profile, state_may_stay_out=state_memory == "any")
    least, lowest = floor_bytes(step, measured, policy), policy(step, LEAST, measured)
    assert lowest is not None
    assert peak_of(step, lowest, state_memory) <= least
    top = max(least, whole_peak(step, measured))
    for part in (0.0, *parts, 1.0):
        limit = least + part * (top - least)
        choice = policy(step, limit, measured)
        assert choice is not None, f"no plan for {limit} bytes, above the floor of {least}"
        assert peak_of(step, choice, state_memory) <= limit
    below = policy(step, 0.9 * least, measured)
    assert below is None or peak_of(step, below, state_memory) <= 0.9 * least


@pytest.mark.parametrize("name", POLICIES)
@settings(PLANS, max_examples=5)
@given(graph=networks(), profile=profiles())
def test_what_a_policy_chooses_does_not_depend_on_what_it_was_asked_before(
    name: PolicyName, graph: Graph, profile: DeviceProfile
) -> None:
    policy, measured = POLICIES[name], CompiledSizes()

    def ask(limits: list[float]) -> tuple[tuple[int, ...], int] | None:
        step = StepModel(order(graph), profile, state_may_stay_out=False)
        choices = [policy(step, limit, measured) for limit in limits]
        return None if choices[-1] is None else (choices[-1].boundaries, peak_of(step, choices[-1], "device"))

    limit = 0.8 * floor_bytes(StepModel(order(graph), profile, state_may_stay_out=False), measured, POLICIES["none"])
    assert ask([LEAST, 2 * limit, limit]) == ask([limit])


@pytest.mark.parametrize("name", slow_if(POLICIES, "capuchin"))
@settings(PLANS, max_examples=10)
@given(graph=networks(), profile=profiles(), part=st.floats(0, 1))
def test_a_job_that_may_not_swap_gets_a_plan_without_swaps_from_every_policy(
    name: PolicyName, graph: Graph, profile: DeviceProfile, part: float
) -> None:
    step = StepModel(order(graph), profile, state_may_stay_out=True, host_limit=0)
    for limit in (LEAST, part * whole_peak(step, CompiledSizes())):
        choice = POLICIES[name](step, limit, CompiledSizes())
        if choice is not None and choice.layout is not None:
            assert not any(r.leaves or r.arrival == COPIED for several in choice.layout.residencies.values() for r in several)
