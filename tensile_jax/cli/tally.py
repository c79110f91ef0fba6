"""What a job's events come to, for the table at the end: steps, losses, time, how it ended. Earlier parts of a run count."""

from dataclasses import dataclass

from tensile_jax.runtime_records import JobEvent, JobState


@dataclass(slots=True)
class Tally:
    """One job. `time_s` is from its submission to its last event, in all parts of the run; `state` is None before it ends."""

    step: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    time_s: float = 0.0
    state: JobState | None = None
    note: str = ""
    _since_s: float | None = None
    _before_s: float = 0.0

    def hear(self, event: JobEvent) -> None:
        """The next event of the job."""
        self.step = event.step
        loss = event.values.get("loss")
        match event.kind:
            case "submitted":
                self._since_s, self._before_s = event.time_s, self.time_s
                self.state, self.note = None, ""
            case "step" if loss is not None:
                self.loss_first = loss if self.loss_first is None else self.loss_first
                self.loss_last = loss
            case "finished" | "failed" | "cancelled":
                self.state, self.note = event.kind, event.note
            case _:
                pass
        if self._since_s is not None:
            self.time_s = self._before_s + event.time_s - self._since_s
