"""A substitute for a run in tests of the control socket: its jobs change their state on request, and nothing is computed."""

from dataclasses import replace

from tensile_jax.runtime_records import FINAL, JobState, JobStatus, Status

GIB = 2**30


def job(name: str, state: JobState, *, step: int = 40, steps_per_s: float | None = 2.0, note: str = "") -> JobStatus:
    return JobStatus(
        name=name,
        state=state,
        priority=1.0,
        step=step,
        steps=100,
        loss=0.25 if step else None,
        steps_per_s=steps_per_s,
        device_bytes=GIB // 2,
        peak_bytes=GIB,
        planned_bytes=2 * GIB,
        host_bytes=0,
        stall_us=1500.0,
        swapped_bytes=3 * GIB,
        note=note,
    )


STATUS = Status(
    time_s=95.0,
    budget_bytes=4 * GIB,
    host_budget_bytes=64 * GIB,
    device_bytes=GIB,
    peak_bytes=2 * GIB,
    host_bytes=GIB,
    out_share=0.125,
    into_share=0.5,
    jobs=(
        job("cnn", "running"),
        job("gpt", "queued", step=0, steps_per_s=None, note="needs 2 GiB [/bold] more"),
        job("mlp", "paused"),
        job("old", "finished", step=100),
    ),
)


class FakeRun:
    """Obeys, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | int]] = []
        self._status = STATUS

    def status(self) -> Status:
        return self._status

    def pause(self, job: str) -> None:
        self._change(job, "paused", {"running", "queued"})

    def resume(self, job: str) -> None:
        self._change(job, "running", {"paused"})

    def cancel(self, job: str) -> None:
        self._change(job, "cancelled", {"running", "queued", "paused"})

    def set_budget(self, budget: int | str) -> None:
        if budget == 1:
            raise ValueError("budget 1 cannot be kept: cnn alone needs 2 GiB.")
        self.told.append(("budget", budget))

    def _change(self, name: str, state: JobState, before: set[JobState]) -> None:
        found = {one.name: one for one in self._status.jobs}
        if name not in found:
            raise ValueError(f"there is no job {name!r}.")
        if found[name].state not in before:
            raise ValueError(f"{name} is {found[name].state}: it cannot become {state}.")
        self.told.append((state, name))
        found[name] = replace(found[name], state=state, note="final" if state in FINAL else "")
        self._status = replace(self._status, jobs=tuple(found.values()))
