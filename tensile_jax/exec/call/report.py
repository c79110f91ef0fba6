"""Defines `Report`: what was measured while a plan ran. `PlannedFunction.report` returns it."""

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from tensile_jax import html_tables
from tensile_jax.exec.running.runner import Runner


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of the latest plan. Bytes and `_us` times are for one iteration; `_s` times are totals in seconds.

    Attributes:
        peak_bytes: the most bytes on the device for the step: at any launch, its live bytes plus the running segment's workspace;
            and its live bytes whenever copies to the device begin, and when an iteration begins, once state that the plan keeps
            on the host has gone there. For a step that runs whole, XLA's own figure.
        first_step_us: the time of the first iteration under this plan, without planning and compiling.
        step_us: the median time over the watched iterations but the first. None before the second iteration. A watched iteration
            waits for each of its segments, so on a GPU, it takes longer than others.
        pace_us: the median time from the begin of one call to that of the next one, of the latest calls under this plan that were
            not watched; None if there are none. What the caller does between two calls is in it. In a training on a GPU, this is
            the time of a step.
        swapped_bytes: what the plan copies over the link, in both directions added up.
        stall_us: the time spent waiting for copies.
        passive_swap_ins: how many tensors were not on the device when they were needed there, since the plan was made.
        recomputed_us: the measured latency of the segments, times the share that the plan predicts for recomputation.
        out_of_memory: how often the device refused an allocation.
        compile_s: the time that the first call spent on compiling segments and plain jit. An executable that an earlier call of
            the function has compiled is not compiled again.
        tries: how many plans the first call has compiled until one kept the budget; zero for a step that runs whole.
        launches: how many executables an iteration launches.
        plans: how many plans such calls have had so far.
        drift: |s' - s| / s, where s is the sum of the segments' latencies that the plan was made for, and s' the measured one.
            None if the plan is not followed (`renew_above`), or runs the step whole, or nothing was measured yet.
    """

    peak_bytes: int
    step_us: float | None
    swapped_bytes: int
    stall_us: float
    passive_swap_ins: int
    recomputed_us: float
    segments: int
    distinct_segments: int
    out_of_memory: int
    trace_s: float
    plan_s: float
    compile_s: float
    iterations: int
    first_step_us: float = 0.0
    plans: int = 1
    drift: float | None = None
    launches: int = 1
    pace_us: float | None = None
    tries: int = 0

    def _repr_html_(self) -> str:
        return html_tables.of_record(self)


def report_of(runner: Runner, *, trace_s: float, drift: float | None, paces_us: Collection[float] = ()) -> Report:
    """What was measured of the plan in use, of which at least one iteration was watched.

    Args:
        paces_us: from the begin of a call that was not watched to that of the next one.
    """
    compiled, executor, seen = runner.compiled, runner.executor, runner.observations
    plan, spent = compiled.plan, compiled.spent
    settled = seen[1:] or seen
    stalls = [o.stall_us for o in settled if not o.copies_timed] or [0.0]
    segment_us = [statistics.median(us) for us in zip(*(o.segment_us for o in settled), strict=False)]
    shares = [s.recomputed_us / s.latency_us if s.latency_us else 0.0 for s in compiled.launched.segments]
    return Report(
        peak_bytes=max(o.peak_bytes for o in seen),
        step_us=statistics.median(o.step_us for o in settled) if len(seen) > 1 else None,
        swapped_bytes=plan.swapped_out_bytes + plan.swapped_in_bytes,
        stall_us=statistics.median(stalls),
        passive_swap_ins=executor.passive_swap_ins,
        recomputed_us=sum(us * share for us, share in zip(segment_us, shares, strict=False)),
        segments=len(plan.segments),
        distinct_segments=compiled.distinct_segments,
        out_of_memory=runner.out_of_memory,
        trace_s=trace_s,
        plan_s=spent.plan_s + spent.ranking_s,
        compile_s=spent.compile_s,
        iterations=runner.iterations,
        first_step_us=seen[0].step_us,
        plans=len(runner.plans),
        drift=drift,
        launches=len(plan.segments) if plan.launches is None else plan.launches,
        pace_us=statistics.median(paces_us) if paces_us else None,
        tries=spent.tries,
    )
