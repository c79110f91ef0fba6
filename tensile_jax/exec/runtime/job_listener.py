"""What becomes of jobs, as the dispatcher tells it: their states, their metrics, their checkpoints, their ends."""

import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tensile_jax.exec.actor.actor import Kept
from tensile_jax.exec.controller.events import Wished
from tensile_jax.exec.controller.state import JobId
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import format_bytes
from tensile_jax.runtime_records import FINAL, LaneName

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime.job import Job
    from tensile_jax.exec.runtime.runtime import Runtime


class JobListener:
    """Hears the dispatcher, and keeps the runtime's jobs up to date.

    The dispatcher's thread must not keep a runtime that nobody else holds. As long as one of its jobs goes on, that job does.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._weak = weakref.ref(runtime)

    @property
    def _runtime(self) -> "Runtime":
        runtime = self._weak()
        assert runtime is not None  # a job goes on
        return runtime

    def admitted(self, job: JobId) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        with runtime._changed:
            one._state, one._note = "running", "" if one._limit is None else one._note
            runtime._tell(one, "started")
            runtime._planning.share_again()

    def stepped(self, job: JobId, metrics: Any, *, us: float) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        values = _scalars(metrics)
        with runtime._changed:
            one._step += 1
            one._step_ends.append(time.perf_counter())
            one._step_us.append(us)
            one._loss = values.get("loss", one._loss)
            runtime._tell(one, "step", "", {**values, "step_us": us})
            if one._limit is not None and one._step >= one._limit:
                runtime._dispatcher.tell(Wished(job, "stop"))
        one._feed.deliver(one._step, metrics)

    def moved(self, job: JobId, lane: LaneName) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        if lane == "out" and one._wish == "run":
            runtime._tell(one, "parked")

    def rested(self, job: JobId, state: Kept, *, steps: int) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        with runtime._changed:
            if one._wish == "run":  # it rested for its checkpoint, which is made while it goes on, one at a time
                if one._saving:
                    runtime._keeping.save(one, steps, state, then=lambda: self._go_on(one))
                else:
                    runtime._keeping.save(one, steps, state)
                    self._go_on(one)
                return
            runtime._keeping.save(one, steps, state)
            if one._state != "paused":  # one that waits for a seat rests already
                one._state = "paused"
                runtime._tell(one, "paused")
            runtime._planning.share_again()

    def _go_on(self, job: "Job") -> None:
        if job._wish == "run":
            self._runtime._dispatcher.tell(Wished(job._number, "run"))

    def renewed(self, job: JobId, *, steps: int) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        with runtime._changed:
            renewed, one._renewed = one._renewed, None
            assert renewed is not None  # the runtime made it
            one._program, plan = renewed, renewed.plan
            one._plans.append((steps, plan))
            if one._state == "queued":
                one._state, one._note = "running", ""
            out = f", {len(renewed.kept_out)} tensors of its state out while others run" if renewed.kept_out else ""
            runtime._tell(one, "renewed", f"{len(plan.segments)} segments, peak {format_bytes(plan.peak_bytes)}{out}")

    def declined(self, job: JobId, demand: MemoryProfile) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        state = runtime._dispatcher.state
        with runtime._changed:
            one._renewed = None
            if one._actor.program.demand.peak_bytes <= state.budget_bytes:
                return  # it goes on as it was
            host = demand.host_bytes + sum(seat.demand.host_bytes for seat in state.seats if seat.job != job)
            one._state = "queued" if one._state == "running" else one._state
            one._note = f"waits: under this budget it needs {format_bytes(host)} on the host, beside the others"
            runtime._tell(one, "queued", one._note, {"device_bytes": demand.peak_bytes, "host_bytes": host})

    def dismissed(self, job: JobId, state: Kept, *, steps: int) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        with runtime._changed:
            done = one._step >= (one._asked.steps if one._limit is None else one._limit)
            kind: Literal["finished", "failed", "cancelled"] = "finished" if done else "cancelled"
            if one._error is not None:
                kind = "failed"
            runtime._keeping.leave(one, kind, state, step=steps, error=one._error)

    def died(self, job: JobId, error: BaseException, state: Kept | None, *, steps: int) -> None:
        runtime, one = self._runtime, self._runtime._jobs[job]
        with runtime._changed:
            if state is None:
                runtime._course.end(one, "failed", error=error)
            else:
                runtime._keeping.leave(one, "failed", state, step=steps, error=error)

    def applied(self, nbytes: int) -> None:
        runtime = self._weak()
        if runtime is None:  # dropped right after its budget was set
            return
        with runtime._changed:
            runtime._budget_bytes = nbytes
            runtime._tell(None, "budget", format_bytes(nbytes), {"budget_bytes": nbytes})
            for one in runtime._jobs.values():
                if one._program is None or one._state in FINAL:
                    continue
                if one._program.demand.peak_bytes > nbytes:
                    runtime._scheduler.call(lambda one=one: runtime._planning.replan(one), soon=True)
                elif one._state == "queued" and runtime._dispatcher.seated(one._number):
                    one._state, one._note = "running", ""
            runtime._planning.share_again()


def _scalars(metrics: Any) -> dict[str, float]:
    """The metrics that are single numbers, by their paths."""
    found: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if getattr(leaf, "size", 0) == 1 and _is_real(leaf.dtype):
            found[".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path) or "loss"] = float(
                leaf
            )
    return found


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))  # bfloat16 as well
