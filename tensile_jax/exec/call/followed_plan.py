"""Follows the plan of one step while it runs, and replaces it when its latencies have drifted (TENSILE section IV-E).

    pace        the time from one call to the next one. Where it is unusual, the next calls are watched
    tracked     moving averages of the latencies of segments, from watched calls
    a drift     above the threshold in several watched calls makes a new plan due
    renewal     the new plan is made in a thread, and mostly in a process of its own (`exec/step/renewal.py`). The next call after
                that runs under the new plan

`plan/update.py` decides; this file measures and waits.

If making a plan fails, training goes on under the plan in use, the next call warns, and no further plan is made.
"""

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from tensile_jax.exec.step.executor import Observation, is_watched
from tensile_jax.exec.step.prepared_step import Compiled, RunningPlan
from tensile_jax.exec.step.renewal import Renewed, renew
from tensile_jax.plan.update import WATCHED_AFTER_UNUSUAL, Copied, Pace, Tracked, reason_for

_START_S = 0.5  # what it takes to start the planning process (0.4 s on the CPU of `benchmarks/results/renewal.json`)


class FollowedPlan:
    """The plan in use of one step, and its successors.

    Args:
        threshold: the drift above which a plan is replaced.
        same_settings: whether the settings of JAX in the thread that calls it are those under which the step was traced. Segments
            are compiled in another thread, in which settings of a `with` block do not hold.
    """

    def __init__(self, threshold: float, same_settings: Callable[[], bool]) -> None:
        self.threshold = threshold
        self.tracked = Tracked()
        self._same_settings = same_settings
        self._pace = Pace()
        self._called: float | None = None
        self._calls = 0  # under the plan in use
        self._watch_next = 0
        self._watched = 0
        self._began = time.perf_counter()  # when the plan in use began to run
        self._thread: threading.Thread | None = None
        self._made: tuple[RunningPlan, Renewed] | None = None
        self._failure: BaseException | None = None
        self._given_up = False

    def next_plan(self, running: RunningPlan) -> RunningPlan | None:
        """Called before each call: the plan that replaces `running` from now on; None if `running` goes on.

        Warns if a plan could not be made.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            warnings.warn(
                f"No new plan could be made after the latencies of {running.plan.program!r} had drifted ({failure}). Training "
                "goes on under the plan that it has.",
                RuntimeWarning,
                stacklevel=2,
            )
        made, self._made = self._made, None  # several threads may call
        if made is None:
            return None
        (of, renewed), self._thread = made, None
        if of is not running:  # it was replaced meanwhile, since the device was out of memory
            return None
        self.tracked, self._pace, self._calls, self._began = Tracked(), Pace(), 0, time.perf_counter()
        found = renewed.found
        return RunningPlan(renewed.prepared, found.plan, found.executables, found.choice)

    def watch(self, running: RunningPlan) -> Observation | None:
        """Called when a call begins: what is to be measured in it; None for nothing."""
        now = time.perf_counter()
        if self._called is not None:
            us = (now - self._called) * 1e6
            if self._pace.is_unusual(us, self.threshold) and not self._watch_next:
                self._watch_next = WATCHED_AFTER_UNUSUAL
            self._pace = self._pace.with_iteration(us)
        self._called = now
        self._calls += 1
        watched = is_watched(self._calls) or self._watch_next > 0
        self._watch_next = max(self._watch_next - 1, 0)
        if not watched:
            return None
        plan = running.plan
        swaps = plan.swapped_out_bytes + plan.swapped_in_bytes
        self._watched += 1
        return Observation(copies_timed=swaps > 0 and self._watched % 2 == 0)  # in turn with the time of waiting for copies

    def seen(self, running: RunningPlan, watch: Observation | None) -> None:
        """Called when a call has ended: what was measured in it."""
        if watch is not None and self._calls > 1:  # the first iteration of a plan is slower
            self.tracked = self.tracked.with_iteration(
                running.plan,
                watch.segment_us,
                out=Copied(*watch.out),
                into=Copied(*watch.into),
                threshold=self.threshold,
            )
        if self._thread is not None or self._given_up or running.choice is None:
            return
        run_s = time.perf_counter() - self._began
        if self.tracked.is_due(run_s=run_s, planning_s=running.prepared.plan_s + _START_S):
            self._begin(running)

    def drift(self, running: RunningPlan) -> float | None:
        """|s' - s| / s of the plan in use; None before anything was measured of it."""
        if not self.tracked.segment_us:
            return None
        return self.tracked.drift(running.plan)

    def _begin(self, running: RunningPlan) -> None:
        """Begin to make the next plan."""
        reason = reason_for(
            running.plan,
            self.tracked,
            iterations=self._calls,
            threshold=self.threshold,
        )
        self._thread = threading.Thread(
            target=self._make, args=(running, self.tracked, reason), name="tensile-renewal", daemon=True
        )
        with suppress(RuntimeError):  # the system starts no more threads, or the interpreter ends
            self._thread.start()

    def _make(self, running: RunningPlan, tracked: Tracked, reason: str) -> None:
        """Make the next plan. In a thread of its own."""
        try:
            if not self._same_settings():
                raise RuntimeError("the step was traced under settings of JAX that hold in one thread only")
            assert running.choice is not None
            made = renew(running.prepared, Compiled(running.plan, running.executables, running.choice), tracked, reason)
            self._made = running, made
        except Exception as error:
            self._failure, self._given_up = error, True
