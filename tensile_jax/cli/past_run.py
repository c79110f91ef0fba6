"""What a run's folder says once the run is over, or was killed: its events, its record, plain jit's peaks."""

from contextlib import suppress
from math import nan
from pathlib import Path

import msgspec

from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.run_folder import job_name
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import EventName, JobEvent, Record


class _Line(msgspec.Struct):
    """A `JobEvent` as it is on disk, where a value that is no number is null."""

    time_s: float
    kind: EventName
    job: str
    step: int
    note: str = ""
    values: dict[str, float | None] = {}


def read_events(folder: str | Path) -> tuple[JobEvent, ...]:
    """The events of a run, in order, without lines that a kill or a full disk cut short. A null value is read as NaN.

    Raises:
        Refusal: there are none to read, or a whole line is not an event.
    """
    path = Path(folder) / "events.jsonl"
    events: list[JobEvent] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.ValidationError as error:
            raise Refusal(f"{path}, line {number} is not an event: {error}. Name a folder that a run wrote.") from error
        except msgspec.DecodeError:
            continue
        values = {name: nan if value is None else value for name, value in read.values.items()}
        events.append(JobEvent(read.time_s, read.kind, read.job, read.step, read.note, values))
    return tuple(events)


def read_record(folder: str | Path) -> Record:
    """What the run recorded of memory and link.

    Raises:
        Refusal: the run has not ended, or the file is not a record.
    """
    path = Path(folder) / "record.json"
    try:
        return msgspec.json.decode(_read(path), type=Record)
    except msgspec.DecodeError as error:
        raise Refusal(f"{path} is not the record of a run: {error}. Name a folder that a run wrote.") from error


class _Config(msgspec.Struct):
    """What is of interest here of a `RunConfig`."""

    jit_peaks: dict[str, int] = {}


def read_alone(folder: str | Path) -> dict[str, int]:
    """Plain jit's peak of each job for which the run's config or the job's first plan states it.

    Raises:
        PlanFileError: a plan cannot be read.
    """
    alone: dict[str, int] = {}
    with suppress(OSError, msgspec.DecodeError):  # the plans are there as well
        alone.update(msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=_Config).jit_peaks)
    for path in sorted(Path(folder).glob("plans/*-0.plan.json")):
        peak = Plan.load(path).jit_peak_bytes
        if peak is not None:
            alone[job_name(path.name.removesuffix("-0.plan.json"))] = peak
    return alone


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read: {error.strerror}. Name the folder of a run that has ended: it is written by then."
        ) from error
