"""`make bench-mesh`: steps that are sharded over eight NVIDIA H200, compiled without a GPU. Nothing runs.

A decoder (8 layers, width 512, batch 64 x 512, float32, Adam; `sharded_decoder.py`) is divided in three ways. For each way and
budget, the planner's first choice, without copies to the host, is compiled with every segment as an executable of its own, and as
one program with each form of barriers. Beside it stand plain jit and `jax.checkpoint` around every layer, with four policies.
Everything is per device: the peak, the traffic (bytes that kernels read and write), the operations of products, the time of the
kernels (if each takes as long as it reads and writes, or multiplies, at the rates of the device profile h200), and the bytes of
the operands of collectives, with the part of these that kernels overlap. Budgets are shares of plain jit's compiled peak.

Rows `chosen` are what `tensile.jit(..., launch="program")` would run: the fastest program that keeps the budget, of those that
`next_try.py` lets be compiled, and segments where none does. The peak of each policy is a budget, too, unless a program
for less moves and takes as little as the policy.

Seconds are those of this machine: `plan_s` from the traced step to the plan, and `compile_s`. What was compiled before is not
compiled again, which the seconds of rows `chosen` show.
Rows `bound` have a lower bound of the traffic of any plan, according to the planner's model of what kernels read and write: it is
what the linear program of `plan/search/bounds/time_bound.py` says if traffic alone takes time. XLA's kernels are not quite the
model's.

`--planning` plans a decoder of 24 layers on one device and on eight. Writes `benchmarks/results/mesh-h200.json`.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import jax

from benchmarks.h200_device import H200Compiler, cost_of, exchanged, h200s, traffic, write_compiled
from benchmarks.sharded_decoder import POLICIES, WAYS, ShardedDecoder, Way
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import DeviceProfile, load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import CompiledPlan, Options, step_of
from tensile_jax.exec.fitting.find_plan import begin_to_predict, fit, predict
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.plan import CompiledSizes, Goal
from tensile_jax.plan_format import Barriers
from tensile_jax.trace import TracedStep

_RESULTS = Path(__file__).parent / "results" / "mesh-h200.json"
_SHARES = (0.5, 0.4)  # of plain jit's peak
_COMPARED = ("peak_bytes", "traffic_bytes", "kernels_us")
_Row = dict[str, Any]
_T = TypeVar("_T")


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Only these; the others' rows stay.")
@click.option("--planning", is_flag=True, help="Only how long planning takes; the rows of compiled steps stay.")
def main(ways: tuple[Way, ...], planning: bool) -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    kept: _Row = json.loads(_RESULTS.read_text()) if _RESULTS.exists() and (ways or planning) else {}
    cases: list[_Row] = [row for row in kept.get("cases", []) if row["way"] not in ways]
    times: list[_Row] = kept.get("planning", [])
    for way in () if planning else ways or WAYS:
        for row in _rows(way):
            cases.append({"way": way, **row})
            print(json.dumps(cases[-1]), flush=True)
            write_compiled(_RESULTS, "make bench-mesh", devices=8, cases=cases, planning=times)
    if planning or not ways:
        times = list(_planning())
        write_compiled(_RESULTS, "make bench-mesh", devices=8, cases=cases, planning=times)


def _rows(way: Way) -> Iterator[_Row]:
    decoder = ShardedDecoder(way, h200s())
    step = decoder.traced()
    compiler = H200Compiler(decoder.devices[0])
    compile_s, plain = timed(lambda: compiler.compile_whole(step.traced))
    peak, moved = peak_of(plain), traffic(plain)
    yield {"how": "plain", "compile_s": compile_s, **_figures(peak, [plain], peak, moved)}
    by_hand: dict[str, _Row] = {}
    for policy in POLICIES:
        try:
            compile_s, whole = timed(lambda policy=policy: compiler.compile_whole(traced_by_jit(replace(decoder, policy=policy))))
        except jax.errors.JaxRuntimeError as error:  # what XLA says of it is the figure
            yield {"how": "checkpoint", "policy": policy, "failed": str(error).splitlines()[0][:200]}
            continue
        by_hand[policy] = _figures(peak_of(whole), [whole], peak, moved)
        yield {"how": "checkpoint", "policy": policy, "compile_s": compile_s, **by_hand[policy]}
    yield from _bounds(step, compiler, peak, moved)
    for share in _SHARES:
        for row in _forms(fitting_under(step, compiler, int(share * peak), peak), Goal(int(share * peak)), peak, moved):
            yield {"how": "planned", "budget": f"{share:.0%}", **row}
    yield from _chosen(step, compiler, peak, moved, by_hand)


def fitting_under(
    traced: TracedStep, compiler: H200Compiler, budget: int, peak: int | None, profile: DeviceProfile | None = None
) -> Fitting:
    """The step under a budget in bytes. Plain jit's peak is taken as measured; without one, the predicted peak is."""
    options = Options("auto", profile or load_profile("h200"), "device", host_limit=0, launch="program")
    step = step_of(traced, options, compiler)
    known = Knowledge(CompiledSizes(whole=peak or step.planner.whole_peak_bytes(CompiledSizes())))
    return Fitting(step, Budget(budget, None), known)


def _bounds(step: TracedStep, compiler: H200Compiler, peak: int, moved: int) -> Iterator[_Row]:
    """What no plan can beat according to the planner's own model, if only traffic takes time."""
    profile = replace(load_profile("h200"), flops_per_us=1e15, interconnect_bytes_per_us=1e15, launch_us=1e-6)
    profile = replace(profile, kernel_us=0.0, host_kernel_us=0.0, host_launch_us=0.0)
    for share in _SHARES:
        fitting = fitting_under(step, compiler, int(share * peak), peak, profile)
        more_us = fitting.bound_us() - fitting.planner.model.whole_us
        yield {
            "how": "bound", "budget": f"{share:.0%}", "traffic_ratio": round(1 + more_us * profile.bytes_per_us / moved, 4),
        }  # fmt: skip


def _chosen(step: TracedStep, compiler: H200Compiler, peak: int, moved: int, by_hand: dict[str, _Row]) -> Iterator[_Row]:
    """What would run under each share of plain jit's peak, and under the peak of each policy."""
    budgets = {f"{share:.0%}": int(share * peak) for share in _SHARES} | {
        name: row["peak_bytes"] for name, row in by_hand.items()
    }
    ours: list[_Row] = []
    for name, budget in budgets.items():
        theirs = by_hand.get(name)
        if theirs is not None and any(all(row[key] <= theirs[key] for key in _COMPARED) for row in ours):
            continue
        fitting, rounds = fitting_under(step, compiler, budget, peak), compiler.rounds
        try:
            seconds, found = timed(partial(fit, fitting))
        except BudgetTooSmall as error:
            yield {"how": "chosen", "budget": name, "budget_bytes": budget, "floor_bytes": error.floor_bytes}
            continue
        if not found.plan.whole:
            known = {"how": "chosen", "budget": name, "barriers": found.plan.barriers, "seconds": seconds}
            ours.append({**known, "rounds": compiler.rounds - rounds, **_planned(found, peak, moved)})
            yield ours[-1]


def _forms(fitting: Fitting, goal: Goal, peak: int, moved: int) -> Iterator[_Row]:
    """The planner's first choice, compiled by segments and in each form of a program."""
    plan_s, chosen = timed(partial(fitting.chosen, goal))
    if chosen is None or chosen.plan.whole:
        return
    for barriers in (None, *get_args(Barriers)):
        choice = replace(chosen.choice, barriers=barriers)
        compile_s, found = timed(partial(fitting.compiled, choice, goal))
        if found is not None:
            predicted = round(chosen.plan.peak_bytes / peak, 4)
            known = {"barriers": barriers, "predicted_peak_ratio": predicted, "plan_s": plan_s, "compile_s": compile_s}
            yield {**known, **_planned(found, peak, moved)}


def _planned(found: CompiledPlan, peak: int, moved: int) -> _Row:
    assert found.executables is not None
    figures = _figures(found.plan.peak_bytes, [e.call for e in found.executables], peak, moved)
    return {"segments": len(found.plan.segments), "launches": len(found.executables), **figures}


def traced_by_jit(decoder: ShardedDecoder) -> Any:
    """Plain jit's own trace of the step."""
    return decoder.jitted.trace(decoder.state_shape, decoder.batch_shape)


def _figures(peak: int, executables: list[Any], plain_peak: int, plain_traffic: int) -> _Row:
    """What executables that run one after another need and exchange, beside plain jit's."""
    found = [exchanged(e) for e in executables]
    kinds = {kind: sum(one.by_kind[kind] for one in found) for kind in found[0].by_kind}
    cost = cost_of(executables, load_profile("h200"))
    return {
        "peak_bytes": peak,
        "peak_ratio": round(peak / plain_peak, 4),
        "traffic_bytes": cost.traffic,
        "traffic_ratio": round(cost.traffic / plain_traffic, 4),
        "multiplied": cost.multiplied,
        "kernels_us": round(cost.us, 1),
        "exchanged_bytes": {kind: nbytes for kind, nbytes in kinds.items() if nbytes},
        "overlapped_bytes": sum(one.overlapped for one in found),
    }


def _planning() -> Iterator[_Row]:
    """Seconds of one processor to trace and plan a decoder of 24 layers under half of what plain jit is predicted to need."""
    ways: list[tuple[Way, int]] = [("data", 1), *((way, 8) for way in WAYS)]
    for way, devices in ways:
        decoder = ShardedDecoder(way, h200s()[:devices], layers=24)
        began = time.process_time()
        traced = decoder.traced() if devices > 1 else decoder.traced_whole()
        traced_s = time.process_time() - began
        options, compiler = Options("auto", load_profile("h200"), "device"), H200Compiler(decoder.devices[0])
        predict(begin_to_predict(step_of(traced, options, compiler), Budget(None, 0.5)))
        seconds = time.process_time() - began
        row = {
            "way": way, "devices": devices, "layers": 24, "operators": len(traced.graph.operators),
            "trace_s": round(traced_s, 2), "plan_s": round(seconds - traced_s, 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def timed(function: Callable[[], _T]) -> tuple[float, _T]:
    began = time.perf_counter()
    result = function()
    return round(time.perf_counter() - began, 2), result


if __name__ == "__main__":
    main()
