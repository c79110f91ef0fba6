"""Replaces the plan of a running step when measured times have drifted from the plan's predictions (TENSILE section IV-E).

`plan/drift.py` decides which iterations are measured, and when a new plan is due. The new plan is then made while training goes
on (`next_plan.py`), most of it in another process (`exec/fitting/renewal.py`).
"""

import time
from collections.abc import Callable
from functools import partial

from tensile_jax.exec.call.next_plan import NextPlan
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.renewal import renew
from tensile_jax.exec.running.executor import Observation
from tensile_jax.plan.drift import Copied, Follower
from tensile_jax.plan_format import Plan

_START_S = 0.5  # what it takes to start the planning process (0.4 s on the CPU of `benchmarks/results/renewal.json`)


class FollowedPlan:
    """The plan in use of one step, and its successors.

    Args:
        name: that of the step.
        threshold: the drift above which a plan is replaced.
        same_settings: as in `NextPlan`.
    """

    def __init__(self, name: str, threshold: float, same_settings: Callable[[], bool]) -> None:
        self._follower = Follower(time.perf_counter(), threshold)
        self._called: float | None = None
        self._next = NextPlan(f"after the latencies of {name!r} had drifted", same_settings)

    def next_plan(self, running: CompiledPlan) -> CompiledPlan | None:
        """The plan that replaces `running` from now on; None if `running` stays. Asked before each call.

        Warns if a plan could not be made.
        """
        return self._next.taken(running)

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
        if not self._next.may_begin or running.choice is None:
            return
        planning_s = running.spent.plan_s + _START_S
        reason = self._follower.reason_to_renew(running.plan, now_s=time.perf_counter(), planning_s=planning_s)
        if reason is not None:
            self._next.begin(running, partial(renew, running, self._follower.tracked, reason))

    def drift(self, plan: Plan) -> float | None:
        """|s' - s| / s of the plan in use; None before anything was measured of it."""
        return self._follower.drift(plan)
