"""Replaces the plan of a running step when measured times have drifted from the plan's predictions (TENSILE section IV-E).

`plan/drift.py` decides which iterations are measured, and when a new plan is due. This module then makes the new plan in a
thread. The thread leaves most of the work to another process (`exec/fitting/renewal.py`). The first call after the new plan is
complete runs under that new plan.

If making a plan fails, training goes on under the plan in use. The next call warns, and no further plan is made.
"""

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.renewal import renew
from tensile_jax.exec.running.executor import Observation
from tensile_jax.plan.drift import Copied, Follower, Tracked
from tensile_jax.plan_format import Plan

_START_S = 0.5  # what it takes to start the planning process (0.4 s on the CPU of `benchmarks/results/renewal.json`)


class FollowedPlan:
    """The plan in use of one step, and its successors.

    Args:
        threshold: the drift above which a plan is replaced.
        same_settings: whether the settings of JAX in the thread that calls it are those under which the step was traced. Segments
            are compiled in another thread, in which settings of a `with` block do not hold.
    """

    def __init__(self, threshold: float, same_settings: Callable[[], bool]) -> None:
        self._same_settings = same_settings
        self._follower = Follower(time.perf_counter(), threshold)
        self._called: float | None = None
        self._thread: threading.Thread | None = None
        self._made: tuple[CompiledPlan, CompiledPlan] | None = None
        self._failure: BaseException | None = None
        self._given_up = False

    def next_plan(self, running: CompiledPlan) -> CompiledPlan | None:
        """The plan that replaces `running` from now on; None if `running` stays. Asked before each call.

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
        return renewed if of is running else None  # it was replaced meanwhile, since the device was out of memory

    def restart(self) -> None:
        """Another plan is in use from now on. Nothing is measured of it yet."""
        self._follower = self._follower.restarted(time.perf_counter())

    def watch(self, plan: Plan) -> Observation | None:
        """What is to be measured in the call that begins; None for nothing."""
        now = time.perf_counter()
        if self._called is not None:
            self._follower = self._follower.paced((now - self._called) * 1e6)
        self._called = now
        self._follower = follower = self._follower.begun()
        if not follower.is_watched:
            return None
        swaps = plan.swapped_out_bytes + plan.swapped_in_bytes
        return Observation(copies_timed=swaps > 0 and follower.watched % 2 == 0)  # in turn with the time of waiting for copies

    def seen(self, running: CompiledPlan, watch: Observation | None) -> None:
        """Called when a call has ended: what was measured in it."""
        if watch is not None:
            out, into = Copied(*watch.out), Copied(*watch.into)
            self._follower = self._follower.measured(running.plan, watch.segment_us, out=out, into=into)
        if self._thread is not None or self._given_up or running.choice is None:
            return
        planning_s = running.spent.plan_s + _START_S
        reason = self._follower.reason_to_renew(running.plan, now_s=time.perf_counter(), planning_s=planning_s)
        if reason is not None:
            self._begin(running, reason)

    def drift(self, plan: Plan) -> float | None:
        """|s' - s| / s of the plan in use; None before anything was measured of it."""
        return self._follower.drift(plan)

    def _begin(self, running: CompiledPlan, reason: str) -> None:
        """Begin to make the next plan."""
        arguments = (running, self._follower.tracked, reason)
        self._thread = threading.Thread(target=self._make, args=arguments, name="tensile-renewal", daemon=True)
        with suppress(RuntimeError):  # the system starts no more threads, or the interpreter ends
            self._thread.start()

    def _make(self, running: CompiledPlan, tracked: Tracked, reason: str) -> None:
        """Make the next plan. In a thread of its own."""
        try:
            if not self._same_settings():
                raise RuntimeError("the step was traced under settings of JAX that hold in one thread only")
            self._made = running, renew(running, tracked, reason)
        except Exception as error:
            self._failure, self._given_up = error, True
