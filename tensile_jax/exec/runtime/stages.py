"""Follows what each job goes through before its first iteration: it is prepared, compiled, and waits for memory.

    submitted -> preparing -> compiling -> queued -> (its first iteration)

A job may end in any of these stages. It may go back from compiling to preparing, if what XLA has compiled needs too much memory
and another plan is made. After its first iteration has begun, there are no more stages.
"""

from collections import deque
from dataclasses import replace

from tensile_jax.progress.phases import is_compiling
from tensile_jax.runtime_records import JobEvent, Stage, StageName

_MOST = 100_000


class Stages:
    """The latest stages of all jobs. The caller holds a lock."""

    def __init__(self) -> None:
        self._past: deque[Stage] = deque(maxlen=_MOST)
        self._now: dict[str, Stage] = {}

    def add(self, event: JobEvent) -> None:
        """Take the next event."""
        at_us, job = event.time_s * 1e6, event.job
        match event.kind:
            case "submitted":
                self._now[job] = Stage("preparing", job, "its first batch", at_us, at_us)
            case "preparing" | "planned" | "queued" if job in self._now:
                self._end(job, at_us)
                self._now[job] = Stage(_name_of(event), job, event.note, at_us, at_us)
            case "started" if job in self._now:
                self._end(job, at_us)
            case "finished" | "failed" | "cancelled" if job in self._now:
                self._past.append(replace(self._now.pop(job), end_us=at_us, ended=event.kind))
            case _:
                pass

    def _end(self, job: str, at_us: float) -> None:
        self._past.append(replace(self._now.pop(job), end_us=at_us))

    def until(self, now_us: float) -> tuple[Stage, ...]:
        """All stages in order of their begin; those that have not ended last until now."""
        under_way = (replace(stage, end_us=now_us) for stage in self._now.values())
        return tuple(sorted((*self._past, *under_way), key=lambda stage: stage.begin_us))


def _name_of(event: JobEvent) -> StageName:
    """What begins with this event."""
    if event.kind != "preparing":
        return "queued"
    return "compiling" if is_compiling(event.note) else "preparing"
