"""Measures several jobs at once under every method, in a process of its own. Prints one JSON object.

    python -m benchmarks.paper.several '{"model": "resnet50", "batch_size": 16, "sizes": {}}' '...' --repetitions 3

Jobs of TENSILE, vDNN and `checkpoint` have each the smallest budget that the policy can keep. Capuchin's jobs save as much as
TENSILE's did, as in the paper, or as much as they can. All of `auto`'s jobs share the peak that TENSILE's jobs reached, and with
`--budget-share` also that share of the sum of plain jit's peaks.

The jobs of a method are planned once. Between the repetitions they are paused, and plain jit is measured.
"""

import fcntl
import json
import random
import statistics
from typing import Any

import click
import jax

import tensile_jax as tensile
from benchmarks.jobs_case import Alone, Together, build, compare, together
from benchmarks.paper.metrics import metrics
from tensile_jax.plan import PolicyName

_PLAIN_S = 0.5
AT_THEIR_LEAST: tuple[PolicyName, ...] = ("tensile", "vdnn", "checkpoint")


@click.command()
@click.argument("jobs", nargs=-1, required=True)
@click.option("--repetitions", default=3)
@click.option("--seconds", default=3.0, help="How long the jobs are measured in each repetition.")
@click.option("--apart", type=float, help="Seconds between the beginnings of two jobs, in random order.")
@click.option("--budget-share", type=float)
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--lock", help="A file that is locked until the end: nothing else is timed or compiled.")
@click.option("--least", default="{}", help="By policy the least budget of each job alone, as far as it is known; as JSON.")
def main(
    jobs: tuple[str, ...],
    repetitions: int,
    seconds: float,
    apart: float | None,
    budget_share: float | None,
    cache: str | None,
    lock: str | None,
    least: str,
) -> None:
    """Measure every method."""
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    locked = open(lock, "a") if lock else None  # noqa: SIM115 # until the process ends
    if locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
    known: dict[str, Alone] = {}
    for job in jobs:
        if job not in known:
            asked = json.loads(job)
            known[job] = build(f"{asked['model']}:{asked['batch_size']}", asked["sizes"], plain_s=_PLAIN_S)
    alone = [known[job] for job in jobs]
    whole = sum(one.peak_bytes for one in alone)

    def least_of(policy: PolicyName) -> list[int]:
        known_of = json.loads(least).get(policy)
        if known_of is not None:
            return known_of
        by_job = {id(one): _least(one, policy) for one in alone}
        return [by_job[id(one)] for one in alone]

    def measured(policy: PolicyName, budget: int, caps: list[int]) -> dict[str, Any]:
        """All repetitions. What jobs that plan together need may be more than what they need alone: `caps` are then raised."""
        while True:
            with together(alone, budget, policy=policy, caps=caps) as jobs:
                if jobs.too_small is None:
                    return _metrics(repeated(jobs), whole)
                raised = [max(cap, floor or 0) for cap, floor in zip(caps, jobs.too_small, strict=True)] if caps else caps
                if raised == caps:
                    return {"too_small": jobs.too_small}
                caps = raised

    def plain() -> list[tuple[float, float]]:
        """By job, the times of its step under plain jit; equal jobs are measured once."""
        measured_now = {id(one): one.measure() for one in known.values()}
        return [measured_now[id(one)] for one in alone]

    def repeated(jobs: Together) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        before = plain()
        for seed in range(repetitions):
            order = list(range(len(alone)))
            if apart is not None:
                random.Random(seed).shuffle(order)
            rows.append(jobs.round(seconds, order, apart))
            after = plain()
            compare(rows[-1], before, after)
            before = after
        return rows

    found: dict[str, Any] = {}
    roomy = 4 * whole
    for policy in AT_THEIR_LEAST:
        found[policy] = measured(policy, roomy, least_of(policy))
    if "msr" in found["tensile"]:
        peak = found["tensile"]["peak_bytes"]
        found["capuchin"] = measured("capuchin", roomy, [int(one.peak_bytes * peak / whole) for one in alone])
        found["auto"] = measured("auto", peak, [])
    if budget_share is not None:
        found[f"auto, budget {budget_share:.0%}"] = measured("auto", int(budget_share * whole), [])
    print(json.dumps(found))


def _least(one: Alone, policy: PolicyName) -> int:
    """The smallest budget that a job under this policy can keep in a runtime, as its refusal names it."""
    with tensile.Runtime(4 * one.peak_bytes) as runtime:
        job = runtime.submit(one.model.step, one.model.init(), [one.batches[0]], steps=1, policy=policy, budget=1)
        try:
            job.result()
        except tensile.JobFailed as failed:
            if isinstance(failed.__cause__, tensile.BudgetTooSmall):
                return failed.__cause__.floor_bytes
            raise
    raise AssertionError("no job runs in one byte")


def _metrics(rows: list[dict[str, Any]], whole: int) -> dict[str, Any]:
    """The paper's metrics: the worst peak and the median time of all repetitions."""
    peak = max(row["peak_bytes"] for row in rows)
    eor = statistics.median(1 / row["throughput"] for row in rows)
    msr = 1 - peak / whole
    return {
        **metrics(msr, eor),
        "peak_bytes": peak,
        "eors": [round(1 / row["throughput"], 4) for row in rows],
        "idle": round(1 - statistics.median(row["computing"] for row in rows), 4),
        "parks": sum(row["parks"] for row in rows),
        "swapped_bytes": sum(rows[-1]["swapped_bytes"]),
    }


if __name__ == "__main__":
    main()
