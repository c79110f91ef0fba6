"""`make bench-constants`: what every tuned constant of the planner is worth, for an H200 in simulation. Nothing is compiled.

Each constant is set to other values, one constant at a time, and the same plans are made again: of a decoder, VGG-16 and
ResNet-50 under tight budgets, and of small random steps at limits from their least peak up. Figures are ratios to those with the
constant as it is:

    large        geometric mean of the step times of the plans of these three models that are found both times
    small        the same of the small steps
    without      limits without a plan, more (or less) than before
    least peak   geometric mean of the least peaks
    planning     CPU time of all of it

The constants of the policies of the papers are compared by the plans of these policies, and those of the bound by the bound.
Writes `benchmarks/results/constants.json`, and a table to the terminal.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import click
import jax
from rich.console import Console
from rich.table import Table

from tensile_jax.device_profiles import load_profile
from tensile_jax.installed_models import MODELS
from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, CompiledSizes, DeviceProfile, PolicyName
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.registry import lowest
from tensile_jax.plan.search.bounds.time_bound import least_step_us
from tensile_jax.plan.search.choice import peak_of, step_us, whole_peak
from tensile_jax.plan.search.search import Start
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.trace import trace_step
from tests.plan.small_steps import small_step

_FILE = Path(__file__).parent / "results" / "constants.json"
_BATCH = {"gpt": 64, "vgg16": 16, "resnet50": 16}
_SMALL_STEPS = range(40)
_PARTS = (0.0, 0.2, 0.4, 0.6, 0.8)  # between the least peak and the peak of the whole step

State = Literal["device", "any"]
Kind = Literal["auto", "capuchin", "none", "tensile", "bound"]
_LARGE: Mapping[Kind, Sequence[tuple[str, State, float]]] = {
    "auto": (("gpt", "device", 0.4), ("gpt", "any", 0.3), ("vgg16", "any", 0.6), ("resnet50", "device", 0.5)),
    "capuchin": (("gpt", "any", 0.6), ("gpt", "any", 0.4), ("vgg16", "any", 0.7), ("vgg16", "any", 0.6)),
    "none": (("gpt", "device", 0.8), ("vgg16", "device", 0.8), ("resnet50", "device", 0.8)),
    "tensile": (("gpt", "any", 0.6), ("gpt", "any", 0.4), ("vgg16", "any", 0.7), ("vgg16", "any", 0.6)),
    "bound": (("gpt", "device", 0.4), ("vgg16", "any", 0.6), ("resnet50", "device", 0.5)),
}

# By module below `tensile_jax.plan`: constants and other values for them; None stands for half and twice the value.
CONSTANTS: Mapping[str, Mapping[str, Sequence[Any] | None]] = {
    "policies.auto": {"_EVALUATIONS": None, "_REPAIRS": None, "_TRIES": None},
    "policies.capuchin.policy": {"_PARTS": [(1.0,), (1.0, 0.8, 0.6)], "_LEAST_PARTS": [(0.5, 0.0), (0.0,)]},
    "policies.capuchin.feedback": {"_ITERATIONS": None},
    "policies.none": {"_NEAR_LEAST": [1.0, 1.2], "_NEAR_WHOLE": [0.0, 0.75]},
    "policies.tensile.policy": {"_TARGETS": [(1.0, 0.9, 0.75, 0.5, 0.0), (0.0,)]},
    "search.condensed.possible_boundaries": {"_MOST": None},
    "search.condensed.bundles": {"MOST_TENSORS": [250]},
    "search.condensed.condensed_step": {
        "_SHARE": None, "_SMALL_SHARE": [0.1, 1.0], "_CHEAP_US": None, "_CROSSING": [0.0, 0.05, 0.2],
    },
    "search.starts.segment_boundaries": {
        "_FEW": None, "_MISSES": None, "_FAR_ABOVE": [1.1, 1.5], "_NEAR": None, "_EXCESS_US_PER_BYTE": None,
        "_SPREAD_US_PER_BYTE": [1e-7, 1e-5],
    },
    "policies.segments": {"_TRIES": None},
    "search.moves.lowering_moves": {
        "_TRIED": None, "_LATER": None, "_SENT": None, "_SWAP_RISK": [0.0, 0.025, 0.1], "_ROUGH": None, "_CLOSE": None,
    },
    "search.moves.best_moves": {"_FAR_ABOVE": [2.5, 20.0], "_TRIED_AGAIN": [0, 40], "_AS_GOOD": [1.2, 5.0], "_SEGMENTS": [1, 6]},
    "search.moves.local_search": {
        "_TRUSTED": [20, 80], "_RATED": None, "_LATER_US": None, "_STAGE": [0.88, 0.97], "_REPAIRS": None,
        "_WORTH_KEEPING_US": None, "_STAYING": [0.25, 1.0], "_SHIFTED": [0.1, 0.4],
        "_SHIFTS": [((1, 0), (0, -1), (-1, 0), (0, 1))], "_SHIFTS_ACROSS": [((1, 0), (0, -1), (-1, 0), (0, 1))],
        "_MOVES": [(-1, 1), (-1, 1, -2, 2, -3, 3, -4, 4, -8, 8)], "_FAILED": None, "_WORTH": [0.001, 0.03], "_BEHIND": [1.0, 1.1],
    },
    "search.schedule": {"_MOST_ROUNDS": None},
    "search.cost.segment_evaluator": {"_COMPILING": [0.0, 0.0005, 0.002], "_SHORT": None},
    "search.search": {
        "_STARTS": [
            (Start(0.165), Start(1.2)),
            tuple(Start(price, spread=spread) for spread in (False, True) for price in (0.05, 0.165, 0.36, 1.2)),
        ],
        "_REPAIRS": None, "_LEAST_REPAIRS": None, "_PROMISING": [1.025, 1.1], "_OTHERS": None, "_MOST_OTHERS": None,
        "_TIRED": None, "_LIKELY": [1.1, 1.4],
        "_EVALUATIONS": None, "_FEWEST": None, "_MOST": None, "_MORE_EVALUATIONS": None, "_LOWER": [(0.99, 0.97), (0.94, 0.88)],
        "_NOT_PERTURBED": [1.02, 1.1], "_BEHIND": [1.02, 1.1], "_SMALL": None, "_ALL_EVALUATIONS": None, "_IMPROVED": [1.25, 2.0],
        "_GOOD": [0.95, 1.05], "_ACCEPTABLE": [1.05, 1.2], "_SLOW": [1.1, 1.4],
        "_SHRINK": [0.94, 0.985],
    },
    "search.step_model": {
        "PRICES": [(4.0, 0.36, 0.05), (4.0, 1.0, 0.6, 0.36, 0.25, 0.165, 0.1, 0.05, 0.02, 0.01)],
        "_TURNS": None, "_ENOUGH": [0.97, 0.995],
    },
    "search.swaps": {"SMALLEST": None},
    "search.bounds.time_bound": {"_PLACES": None, "_MOST_ROUNDS": None, "_MOST_COLUMNS": None, "_SMALL": None, "_SLACK": None},
    "analysis.fusion": {"_SMALL": None, "_MOST_LEAVES": None},
    "analysis.operator_order": {"_MUCH": None},
    "analysis.minimum_cut": {
        "_JOIN_PRICE": None, "_OTHER_JOINS": [1.0, 4.0], "_SIZE_EXPONENT": [0.0, 0.2], "_LIGHT_PRICE": None,
    },
}  # fmt: skip
_KIND_OF: Mapping[str, Kind] = {
    "policies.capuchin.policy": "capuchin", "policies.capuchin.feedback": "capuchin", "policies.none": "none",
    "policies.tensile.policy": "tensile", "search.bounds.time_bound": "bound",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planned:
    """Step times (or bounds) by case, None where there is no plan; least peaks in bytes; seconds of CPU time."""

    times: Mapping[str, float | None]
    least: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """One constant with another value, beside the present one."""

    constant: str
    value: str
    present: str
    large: float
    small: float
    without: int
    least_peak: float
    planning: float


@cache
def _graph(name: str) -> Graph:
    model = MODELS[name](batch_size=_BATCH[name])
    return trace_step(jax.jit(model.step, donate_argnums=0), model.step, (model.state_shape, model.batch_shape), {}).graph


@cache
def _limits(seed: int, policy: PolicyName) -> tuple[int, ...]:
    """Those at which the small step is planned; they are the same for every value of a constant."""
    graph, profile = small_step(seed, most=10)
    step = StepModel(order(graph), profile, state_may_stay_out=True)
    nothing = CompiledSizes()
    least, most = peak_of(step, lowest(step, nothing, POLICIES[policy]), nothing), whole_peak(step, nothing)
    return tuple(sorted({int(least + part * (most - least)) for part in _PARTS}))


def _plan_all(kind: Kind) -> Planned:
    times: dict[str, float | None] = {}
    least: dict[str, int] = {}
    nothing, h200 = CompiledSizes(), load_profile("h200")
    began = time.process_time()

    def plan(case: str, graph: Graph, profile: DeviceProfile, state: State, limits: Sequence[float]) -> None:
        step = StepModel(order(graph), profile, state_may_stay_out=state == "any")
        if kind != "bound":
            least[case] = peak_of(step, lowest(step, nothing, POLICIES[kind]), nothing)
        for limit in limits:
            if kind == "bound":
                found = least_step_us(step.liveness, step.fusion, step.costs, limit, state_may_stay_out=state == "any")
                times[f"{case} {limit:.0f}"] = found if found < float("inf") else None
            else:
                choice = POLICIES[kind](step, limit, nothing)
                times[f"{case} {limit:.0f}"] = None if choice is None else step_us(step, choice, nothing)

    for name, state, share in _LARGE[kind]:
        whole = _whole(name)
        plan(f"{name} {state} {share:.0%}", _graph(name), h200, state, (share * whole,))
    for seed in _SMALL_STEPS:
        graph, profile = small_step(seed, most=10)
        plan(f"small step {seed}", graph, profile, "any", _limits(seed, "auto" if kind == "bound" else kind))
    return Planned(times, least, time.process_time() - began)


@cache
def _whole(name: str) -> int:
    return whole_peak(StepModel(order(_graph(name)), load_profile("h200"), state_may_stay_out=False), CompiledSizes())


@contextmanager
def _set(module: str, name: str, value: Any) -> Iterator[Any]:
    """The constant with another value, wherever it was imported to; gives the present value."""
    home = import_module(f"tensile_jax.plan.{module}")
    present = getattr(home, name)
    others = [import_module(f"tensile_jax.plan.{m}") for m in (*CONSTANTS, "policies.tensile.schedule_to_absences")]
    holders = [m for m in dict.fromkeys((home, *others)) if m is home or (not name.startswith("_") and hasattr(m, name))]
    for holder in holders:
        setattr(holder, name, value)
    try:
        yield present
    finally:
        for holder in holders:
            setattr(holder, name, present)


def _half_and_twice(value: Any) -> tuple[Any, Any]:
    return (max(1, value // 2), 2 * value) if isinstance(value, int) else (value / 2, 2 * value)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def _row(constant: str, value: Any, present: Any, now: Planned, then: Planned) -> Row:
    both = [(case, now.times[case], t) for case, t in then.times.items()]
    large, small = (
        _mean([t / n for case, n, t in both if n and t and case.startswith("small") is of_small]) for of_small in (False, True)
    )
    return Row(
        constant, str(value), str(present), round(large, 5), round(small, 5),
        sum(t is None for _, _, t in both) - sum(n is None for _, n, _ in both),
        round(_mean([b / now.least[case] for case, b in then.least.items()]), 5),
        round(then.seconds / now.seconds, 3),
    )  # fmt: skip


@click.command()
@click.option("--constant", "wanted", multiple=True, help="Only constants whose names contain this; nothing is written then.")
def main(wanted: tuple[str, ...]) -> None:
    """Plan with other values of every constant."""
    rows: list[Row] = []
    table = Table("constant", "value", "now", "large", "small", "without", "least peak", "planning")
    now: dict[Kind, Planned] = {}
    for module, constants in CONSTANTS.items():
        kind = _KIND_OF.get(module, "auto")
        for name, values in constants.items():
            constant = f"{module}.{name}"
            if wanted and not any(part in constant for part in wanted):
                continue
            if kind not in now:
                _plan_all(kind)  # traces, and fills every cache
                now[kind] = _plan_all(kind)
                print(f"{kind}: {len(now[kind].times)} plans in {now[kind].seconds:.1f} s", flush=True)
            present = getattr(import_module(f"tensile_jax.plan.{module}"), name)
            for value in _half_and_twice(present) if values is None else values:
                with _set(module, name, value):
                    row = _row(constant, value, present, now[kind], _plan_all(kind))
                rows.append(row)
                figures = (
                    f"{row.large:.4f}",
                    f"{row.small:.4f}",
                    f"{row.without:+d}",
                    f"{row.least_peak:.4f}",
                    f"{row.planning:.2f}",
                )
                table.add_row(constant, row.value, row.present, *figures)
                print(constant, row.value, *figures, flush=True)
    Console(width=160).print(table)
    if not wanted:
        document = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "jax": jax.__version__,
            "command": "make bench-constants",
            "measured_on": "simulation with the device profile h200, and small random steps",
            "rows": [asdict(row) for row in rows],
        }
        _FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
