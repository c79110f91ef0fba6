"""Experiments 1, 2, 3, 6 and 8 on one workload, simulated: peaks and times are predictions for a device profile.

The latencies of a real device differ from the predicted ones. Experiment 1 therefore draws a *true* latency of every operator
around its prediction (`_SPREAD`); a plan of the cold start is made from the predictions, and its time is that of its segments
under the true latencies. The update is made by the product's own code (`tensile_jax.plan.drift`) from what would be measured of
these segments, and its time is again a true one.
"""

import math
import random
import time
from typing import Any

from benchmarks.paper.steps import NOTHING, Figures, ModelStep, figures_of, model_step
from tensile_jax.plan import PolicyName
from tensile_jax.plan.analysis.corrections import Corrections
from tensile_jax.plan.drift import Copied, Tracked, choose_again, corrections_from
from tensile_jax.plan.planner import Goal, Planned, Planner
from tensile_jax.plan.policies.capuchin.passive_mode import passive_iteration

EOR_LOW, EOR_HIGH = 1.10, 1.60
"""The least peak is looked for at which `auto` takes at most so many times plain jit's time."""

BATCH_SIZES = (4, 8, 16, 32, 64)
_SPREAD = (
    0.4  # of the natural logarithm. `make bench-predictor`: half of the predicted latencies are wrong by more than 25 to 30 %
)
_ITERATIONS = 50  # of which the whole of experiment 1 consists
_RENEWED_AFTER = 6  # iterations; `make bench-renewal`: 4 to 7
_EXACT = 0.01  # of plain jit's peak: how exactly the least peak is found
_REPETITIONS = 3


def curve(model: str, device: str) -> list[Figures]:
    """`auto` under budgets from plain jit's peak downwards, in tenths, with the bound that no plan can beat."""
    step = model_step(model, device)
    rows: list[Figures] = []
    for tenth in range(9, 0, -1):
        row = _under(step, tenth / 10)
        if row is None:
            break
        rows.append(row)
    for eor in (EOR_LOW, EOR_HIGH):
        rows += _around(step, rows, eor)
    rows += [_least_share(step, eor) for eor in (EOR_LOW, EOR_HIGH)]
    return sorted(rows, key=lambda row: -row["share"])


def _under(step: ModelStep, share: float) -> Figures | None:
    plan = step.fastest(share * step.jit_peak)
    if plan is None:
        return None
    return {"share": round(share, 4), **figures_of(plan, step), "bound_eor": round(step.bound(share * step.jit_peak), 4)}


def _around(step: ModelStep, rows: list[Figures], eor: float) -> list[Figures]:
    """More budgets, between the lowest one that keeps the EOR and the next one."""
    good = [row["share"] for row in rows if row["eor"] <= eor]
    high = min(good, default=1.0)
    low = max((row["share"] for row in rows if row["share"] < high), default=max(high - 0.1, 0.0))
    found: list[Figures] = []
    while high - low > _EXACT:
        row = _under(step, (low + high) / 2)
        if row is not None:
            found.append(row)
        if row is not None and row["eor"] <= eor:
            high = row["share"]
        else:
            low = (low + high) / 2
    return found


def _least_share(step: ModelStep, eor: float) -> Figures:
    """The share of plain jit's peak below which no plan keeps the EOR, as the bound of the time shows; a row without a plan."""
    low, high = 0.0, 1.0
    while high - low > _EXACT / 2:
        middle = (low + high) / 2
        if step.bound(middle * step.jit_peak) <= eor:
            high = middle
        else:
            low = middle
    return {"share": low, "bound_eor": step.bound(low * step.jit_peak)}  # not rounded: it is just above


def single(model: str, device: str) -> dict[str, Figures]:
    """Every policy with as little memory as it can do with; Capuchin and `auto` with the budget of TENSILE's peak."""
    step = model_step(model, device)
    tensile = step.least("tensile")
    found: dict[str, Figures] = {
        "unplanned": _of(step, "none", math.inf),
        "vdnn": figures_of(step.least("vdnn"), step),
        "capuchin": _of(step, "capuchin", tensile.peak_bytes),
        "tensile": figures_of(tensile, step),
        "checkpoint": figures_of(step.least("checkpoint"), step),
        "auto at tensile's peak": figures_of(step.fastest(tensile.peak_bytes) or step.least("auto"), step),
        "capuchin at its least": figures_of(step.least("capuchin"), step),
        "auto at its least": figures_of(step.least("auto"), step),
    }
    return found


def _of(step: ModelStep, policy: PolicyName, limit: float) -> Figures:
    plan = step.plan(policy, limit)
    return figures_of(step.least(policy) if plan is None else plan, step)


def phases(model: str, device: str) -> dict[str, dict[str, Figures]]:
    """By policy: the whole, the cold start and after updating, as means over several draws of the true latencies."""
    step = model_step(model, device)
    tensile_peak = step.least("tensile").peak_bytes
    limits: dict[PolicyName, float] = {"tensile": tensile_peak, "auto": tensile_peak}
    return {policy: _phases(step, policy, limit) for policy, limit in limits.items()}


def _phases(step: ModelStep, policy: PolicyName, limit: float) -> dict[str, Figures]:
    planner, goal = step.planner.with_policy(policy), Goal(limit)
    first = planner.plan(goal, NOTHING)
    if first is None:  # its least peak is a little above
        choice = planner.least_choice(NOTHING)
        plan = planner.plan_of(choice, Goal(math.inf), NOTHING)
        assert plan is not None  # every policy has a plan of the least memory
        first, goal = Planned(plan, choice), Goal(float(plan.peak_bytes))
    draws = [_draw(step, planner, first, goal, seed) for seed in range(_REPETITIONS)]
    names = ("msr_cs", "eor_cs", "msr_up", "eor_up", "changed")
    mean = {name: sum(draw[name] for draw in draws) / len(draws) for name in names}
    whole = (_RENEWED_AFTER * mean["eor_cs"] + (_ITERATIONS - _RENEWED_AFTER) * mean["eor_up"]) / _ITERATIONS
    return {
        "whole": {"msr": min(mean["msr_cs"], mean["msr_up"]), "eor": whole},
        "cold start": {"msr": mean["msr_cs"], "eor": mean["eor_cs"]},
        "updated": {"msr": mean["msr_up"], "eor": mean["eor_up"], "changed": mean["changed"]},
    }


def _draw(step: ModelStep, planner: Planner, first: Planned, goal: Goal, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    factors = tuple(math.exp(rng.gauss(0.0, _SPREAD)) for _ in planner.graph.operators)
    truth = planner.corrected(Corrections(factors, factors))

    def true_plan(found: Planned) -> Any:
        plan = truth.plan_of(found.choice, goal, NOTHING)
        assert plan is not None  # it was verified, and only its times are others
        return plan

    cold = true_plan(first)
    measured = tuple(segment.latency_us + cold.launch_us for segment in cold.segments)
    tracked = Tracked().with_iteration(first.plan, measured, out=Copied(), into=Copied(), threshold=0.0)
    chosen = choose_again(planner, corrections_from(planner, first.plan, tracked), first.choice, goal, NOTHING)
    updated = true_plan(Planned(first.plan, chosen.choice))
    true_us = truth.model.whole_us
    return {
        "msr_cs": 1 - cold.peak_bytes / step.jit_peak,
        "eor_cs": cold.step_us / true_us,
        "msr_up": 1 - updated.peak_bytes / step.jit_peak,
        "eor_up": updated.step_us / true_us,
        "changed": float(chosen.changed),
    }


def first(model: str, device: str) -> Figures:
    """The first iteration: of the plans of the cold start, and of Capuchin in passive mode; and what planning takes here."""
    step = model_step(model, device)
    limit = step.least("tensile").peak_bytes
    passive = passive_iteration(step.planner.model, limit)
    row: Figures = {"capuchin": round(passive.step_us / step.jit_us, 4), "capuchin_swapped_bytes": passive.swapped_out_bytes}
    for policy in ("tensile", "auto"):
        began = time.process_time()
        fresh = Planner(step.planner.graph, step.planner.profile, policy=policy, state_memory="any")  # remembers nothing
        planned = fresh.plan(Goal(limit), NOTHING)
        row[f"{policy}_planning_s"] = round(time.process_time() - began, 3)
        plan = fresh.least_plan(NOTHING) if planned is None else planned.plan  # its least peak may be a little above
        row[policy] = round(plan.step_us / step.jit_us, 4)
    return row


def batch(model: str, device: str) -> list[Figures]:
    """TENSILE with as little memory as it can do with, and `auto` and Capuchin with that peak, for several batch sizes."""
    rows: list[Figures] = []
    for size in BATCH_SIZES:
        step = model_step(model, device, size)
        tensile = step.least("tensile")
        rows.append(
            {
                "batch_size": size,
                "tensile": figures_of(tensile, step),
                "capuchin": _of(step, "capuchin", tensile.peak_bytes),
                "auto": _of(step, "auto", tensile.peak_bytes),
                "checkpoint": figures_of(step.least("checkpoint"), step),
            }
        )
    return rows
