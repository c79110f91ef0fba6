"""Defines `Report`: what was measured while a plan ran, beside what was predicted. `PlannedFunction.report` returns it.

A step has several times, each with a name of its own:

    predicted_step_us      what the plan predicts
    watched_step_us        measured in *watched* iterations, which wait for every segment in order to measure it
    call_to_call_us        measured from the beginning of one call to the beginning of the next one
    step_us                the shorter of `watched_step_us` and `call_to_call_us`, since each contains time that a step alone
                           does not take. For a step that runs as one executable, it is `watched_step_us`, since a call may then
                           return before the device is done
    first_step_us          measured in the first iteration, which is a watched one
    jit_step_us            measured of plain jit; predicted_jit_step_us is predicted
"""

import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tensile_jax.exec.running.runner import Runner
from tensile_jax.html_tables import ShownAsText
from tensile_jax.units import format_bytes, format_count, times_plain_jit


@dataclass(frozen=True, slots=True, repr=False)
class Report(ShownAsText):
    """What was measured of the latest plan. `print(report)` shows it. Bytes and `_us` times are for one iteration; `_s` times are
    totals in seconds.

    Attributes:
        name: that of the function.
        whole: whether the plan runs the step as one executable, exactly as plain `jax.jit` does.
        peak_bytes: the most bytes on the device for the step: at any launch, its live bytes plus the running segment's workspace;
            and its live bytes whenever copies to the device begin, and when an iteration begins, once state that the plan keeps
            on the host has gone there. For a step that runs whole, XLA's own figure.
        budget_bytes: the budget of the plan; None for no limit.
        jit_peak_bytes: the peak of plain `jax.jit`, where it has been compiled.
        predicted_step_us: the time of a step by the plan.
        predicted_jit_step_us: the predicted time of a step of plain `jax.jit`; None if it is not known.
        jit_step_us: the measured time of a step of plain `jax.jit`; None if it is not known. It is what was given to
            `PlannedFunction.report`. For a step that runs whole, it is that of the step.
        watched_step_us: the median time of the watched iterations but the first; None before the second. The first iterations
            are watched, and every fiftieth. They wait for each of their segments, so they take longer than others.
        call_to_call_us: the median time from the begin of one call to that of the next one, of the latest calls under this plan
            that were not watched; None if there are none. What the caller does between two calls is part of it.
        first_step_us: the time of the first iteration under this plan, without planning and compiling.
        swapped_bytes: what the plan copies over the link, in both directions added up.
        stall_us: the time spent waiting for copies, in watched iterations.
        passive_swap_ins: how many tensors were not on the device when they were needed there, since the plan was made.
        recomputed_us: the measured latency of the segments, times the share that the plan predicts for recomputation.
        out_of_memory: how often the device refused an allocation.
        trace_s: the time that tracing has taken.
        plan_s: the time that the first call spent on planning; if its plan was replaced, with that of the later plans.
        compile_s: the same for compiling segments and plain jit. An executable that an earlier call of the function has compiled
            is not compiled again.
        iterations: how many calls have run.
        tries: how many plans the first call has compiled until one kept the budget; zero for a step that runs whole.
        launches: how many executables an iteration launches.
        plans: how many plans such calls have had so far.
        drift: |s' - s| / s, where s is the sum of the segments' latencies that the plan was made for, and s' the measured one.
            None if the plan is not followed (`renew_above`), or runs the step whole, or nothing was measured yet.
        improving: whether a better plan is being sought (`improve`), or waits for the next call.
    """

    name: str
    whole: bool
    peak_bytes: int
    budget_bytes: int | None
    jit_peak_bytes: int | None
    predicted_step_us: float
    predicted_jit_step_us: float | None
    jit_step_us: float | None
    watched_step_us: float | None
    call_to_call_us: float | None
    first_step_us: float
    swapped_bytes: int
    stall_us: float
    passive_swap_ins: int
    recomputed_us: float
    segments: int
    distinct_segments: int
    launches: int
    out_of_memory: int
    trace_s: float
    plan_s: float
    compile_s: float
    iterations: int
    tries: int
    plans: int
    drift: float | None
    improving: bool

    @property
    def step_us(self) -> float | None:
        """The measured time of a step: `watched_step_us` or `call_to_call_us`, whichever is shorter; None before one is known.

        For a step that runs whole, it is `watched_step_us`: other calls may return before the device is done.
        """
        return _step_us(self.watched_step_us, self.call_to_call_us, whole=self.whole)

    @property
    def slowdown(self) -> float | None:
        """The time of a step over that of plain jit: both measured if plain jit's is known, otherwise both predicted."""
        if self.jit_step_us and self.step_us is not None:
            return self.step_us / self.jit_step_us
        return self.predicted_step_us / self.predicted_jit_step_us if self.predicted_jit_step_us else None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report_of(
    runner: Runner,
    *,
    name: str,
    trace_s: float,
    drift: float | None,
    improving: bool = False,
    paces_us: Collection[float] = (),
    jit_step_us: float | None = None,
) -> Report:
    """What was measured of the plan in use, of which at least one iteration was watched.

    Args:
        paces_us: from the begin of a call that was not watched to that of the next one.
        jit_step_us: what the user has measured of plain jit.
    """
    compiled, executor, seen = runner.compiled, runner.executor, runner.observations
    plan, spent = compiled.plan, compiled.spent
    settled = seen[1:] or seen
    stalls = [o.stall_us for o in settled if not o.copies_timed] or [0.0]
    segment_us = [statistics.median(us) for us in zip(*(o.segment_us for o in settled), strict=False)]
    shares = [s.recomputed_us / s.latency_us if s.latency_us else 0.0 for s in compiled.launched.segments]
    watched_us = statistics.median(o.step_us for o in settled) if len(seen) > 1 else None
    call_to_call_us = statistics.median(paces_us) if paces_us else None
    return Report(
        name=name,
        whole=plan.whole,
        peak_bytes=max(o.peak_bytes for o in seen),
        budget_bytes=plan.budget_bytes,
        jit_peak_bytes=plan.jit_peak_bytes,
        predicted_step_us=plan.step_us,
        predicted_jit_step_us=plan.jit_step_us,
        jit_step_us=_step_us(watched_us, call_to_call_us, whole=True) if plan.whole and jit_step_us is None else jit_step_us,
        watched_step_us=watched_us,
        call_to_call_us=call_to_call_us,
        first_step_us=seen[0].step_us,
        swapped_bytes=plan.swapped_out_bytes + plan.swapped_in_bytes,
        stall_us=statistics.median(stalls),
        passive_swap_ins=executor.passive_swap_ins,
        recomputed_us=sum(us * share for us, share in zip(segment_us, shares, strict=False)),
        segments=len(plan.segments),
        distinct_segments=compiled.distinct_segments,
        launches=len(plan.segments) if plan.launches is None else plan.launches,
        out_of_memory=runner.out_of_memory,
        trace_s=trace_s,
        plan_s=spent.plan_s + spent.ranking_s,
        compile_s=spent.compile_s,
        iterations=runner.iterations,
        tries=spent.tries,
        plans=len(runner.plans),
        improving=improving,
        drift=drift,
    )


def _step_us(watched_us: float | None, call_to_call_us: float | None, *, whole: bool) -> float | None:
    known = (watched_us,) if whole else (watched_us, call_to_call_us)
    return min((us for us in known if us is not None), default=None)


def _lines(report: Report) -> Iterator[str]:
    """The screen that `print(report)` shows: one headline, and each time in words."""
    yield f"{report.name!r}: {_headline(report)}"
    yield f"  peak            {format_bytes(report.peak_bytes)} measured{_compared(report)}"
    yield "  a step takes"
    for us, words in _times(report):
        yield f"    {f'{us / 1e3:.1f} ms':>12}  {words}"
    if not report.whole:
        yield (
            f"  in it           {report.recomputed_us / 1e3:.1f} ms of computing again, {report.stall_us / 1e3:.1f} ms of "
            "waiting for copies, in watched steps"
        )
        yield f"  copies          {format_bytes(report.swapped_bytes)} a step, both directions added up"
        launches = format_count(report.launches, "launch", "launches")
        yield f"  runs as         {format_count(report.segments, 'segment')} ({report.distinct_segments} different), {launches}"
    tries = f" ({format_count(report.tries, 'plan')})" if report.tries else ""
    compiling = f"{report.compile_s:.1f} s compiling{tries}"
    yield f"  before that     {report.trace_s:.1f} s tracing, {report.plan_s:.1f} s planning, {compiling}"
    plans = f" under {report.plans} plans" if report.plans > 1 else ""
    yield f"  so far          {format_count(report.iterations, 'call')}{plans}"
    if report.drift is not None:
        yield f"  drift           segments take {report.drift:.0%} more or less time than the plan was made for"
    if report.out_of_memory:
        yield f"  out of memory   {format_count(report.out_of_memory, 'allocation')} refused by the device; the step recovered"
    if report.passive_swap_ins:
        yield f"  late copies     {format_count(report.passive_swap_ins, 'tensor')} copied to the device when needed there"


def _headline(report: Report) -> str:
    if report.whole:
        return "runs as plain jit runs it, as one executable"
    if report.jit_step_us and report.step_us is not None:
        return f"{times_plain_jit(report.step_us, report.jit_step_us)}, measured"
    if not report.predicted_jit_step_us:
        return "the time of plain jit is not known"
    return f"{times_plain_jit(report.predicted_step_us, report.predicted_jit_step_us)}, predicted; plain jit was not measured"


def _compared(report: Report) -> str:
    budget = [] if report.budget_bytes is None else [f"budget {format_bytes(report.budget_bytes)}"]
    jit = [] if report.jit_peak_bytes is None else [f"plain jit {format_bytes(report.jit_peak_bytes)}"]
    return f" ({', '.join([*budget, *jit])})" if budget or jit else ""


def _times(report: Report) -> Iterator[tuple[float, str]]:
    """Each time of a step that is known, and what it is."""
    if report.call_to_call_us is not None:
        between = "which may return before the device is done" if report.whole else "with what your program does in between"
        yield report.call_to_call_us, f"measured from one call to the next, {between}"
    if report.watched_step_us is not None:
        waits = "their results" if report.whole else "each segment and so take longer"
        yield report.watched_step_us, f"measured in watched steps, which wait for {waits}"
    yield report.first_step_us, "measured in the first step, without tracing, planning and compiling"
    if not report.whole and report.jit_step_us is not None:
        yield report.jit_step_us, "measured of plain jit"
    yield report.predicted_step_us, "predicted by the plan"
    if not report.whole and report.predicted_jit_step_us is not None:
        yield report.predicted_jit_step_us, "predicted of plain jit"
