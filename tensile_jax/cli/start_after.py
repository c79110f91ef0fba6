"""When a job starts: some seconds after the run, or after another job has ended or come so far.

    start_after = 30.0          seconds since the run began
    start_after = "resnet"      once that job has ended, however it ended
    start_after = "resnet:100"  once that job has done 100 steps

A job waits for one other at most, so a cycle is found by walking from job to job.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Refuse = Callable[[str, str], Exception]
"""From the name of a job and a story of its `start_after` to an error."""


@dataclass(frozen=True, slots=True)
class AfterJob:
    """Once `job` has done `step` steps; None: once it has ended."""

    job: str
    step: int | None


def read_start(value: float | str) -> float | AfterJob:
    """What the value says.

    >>> read_start(30.0), read_start("resnet"), read_start("resnet:100")
    (30.0, AfterJob(job='resnet', step=None), AfterJob(job='resnet', step=100))
    """
    if not isinstance(value, str):
        return float(value)
    job, _, step = value.partition(":")
    return AfterJob(job, int(step) if step else None)


def check_starts(starts: Mapping[str, float | AfterJob], *, steps: Mapping[str, int], refuse: Refuse) -> None:
    """That every job starts some time.

    Raises:
        Exception: what `refuse` makes of a job that waits for one that is not there, does fewer steps, or waits for the first.
    """
    waits = {name: start for name, start in starts.items() if isinstance(start, AfterJob)}
    for name, after in waits.items():
        if after.job not in starts:
            close = difflib.get_close_matches(after.job, starts, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            raise refuse(name, f' waits for "{after.job}", and there is no such job.{guess} Known: {", ".join(starts)}.')
        if after.step is not None and after.step > steps[after.job]:
            raise refuse(
                name, f" waits for step {after.step} of {after.job}, which does {steps[after.job]}. Name one of these steps."
            )
    for name in waits:
        chain = [name]
        seen = {name}
        while (after := waits.get(chain[-1])) is not None and after.job not in seen:
            chain.append(after.job)
            seen.add(after.job)
        if after is not None and after.job == name:
            story = ", which waits for ".join([*chain[1:], name] if chain[1:] else ["itself"])
            raise refuse(name, f": {name} waits for {story}: none would ever start. Let one start by itself: start_after = 0")
