"""Writes and reads the folder of one run of several jobs: the configuration, the events, the plans and the outcome of the run.

    config.json             the configuration of the run, with all defaults filled in
    versions.json           the versions of Python and the packages, the device, the date
    plans/JOB-N.plan.json   every plan of a job; N counts the plans of the job from 0
    events.jsonl            one JobEvent per line, written as it happens
    jobs/JOB/log.txt        the events of one job, as text for a person
    jobs/JOB/metrics.jsonl  the number, the time and the metrics of each step of one job
    checkpoints/JOB/        the last states of the job, from which the run is resumed
    outcome.json            how the run ended; `tensile run --json` prints the same
    record.json             the Record of memory and copies, from which `tensile picture` draws
    trace.json              the same Record in the format of Perfetto and chrome://tracing

`RunFolder` writes the folder. The functions below that class read the folder after the run, or after the run was killed. Each
line is written in one call, so that a kill -9 cuts off at most the last line. If a file cannot be written (the disk is full, the
folder is gone), the training must go on: nothing is raised, and `RunFolder.troubles` counts the failure. Only `config.json` is
different: the file is written before anything runs, and a failure is raised. A number that is not finite is written as null.
"""

import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from math import nan
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import msgspec

from tensile_jax.atomic_file import write_whole
from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import event_line
from tensile_jax.cli.jobs_file import JobsFile
from tensile_jax.cli.run.report import JobsOutcome
from tensile_jax.cli.run.trace import trace_events
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import EventName, JobEvent, Record

_PARTS = ("plans", "jobs")
_PACKAGES = ("tensile_jax", "jax", "jaxlib", "numpy", "flax", "optax")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run, from which the run can be resumed: the content of its jobs file, and its budget in bytes.

    `jit_peaks` are the jobs' peaks under plain jit, by name, if they are known. They are always known if the budget is a share of
    their sum.
    """

    jobs_file: JobsFile
    budget_bytes: int
    jit_peaks: dict[str, int] = field(default_factory=dict[str, int])


class RunFolder:
    """Writes one run's folder. Its methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plans: dict[str, int] = {}
        self._troubles: dict[str, int] = {}
        self._torn: set[Path] = set()
        self._lock = threading.Lock()

    @staticmethod
    def refuse_used(path: str | Path) -> None:
        """Raises: Refusal: `path` is a file, or a folder that is not empty. A folder that does not exist is accepted."""
        folder = Path(path)
        try:
            if folder.exists() and any(folder.iterdir()):
                raise Refusal(f"The run folder {folder} is not empty. Name another folder, or resume the run that is in it.")
        except OSError as error:
            raise Refusal(f"The run folder {folder} cannot be made: {error.strerror}. Name another folder.") from error

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """Make the folder, or use an empty one.

        Raises:
            Refusal: the folder is not empty, or cannot be made.
        """
        folder = Path(path)
        cls.refuse_used(folder)
        try:
            for part in _PARTS:
                (folder / part).mkdir(parents=True)
        except OSError as error:
            cls(folder).discard()
            raise Refusal.of_path(error, f"The run folder {folder} cannot be made", "Name another folder.") from error
        return cls(folder)

    def discard(self) -> None:
        """Remove the folders that `create` has made, if they are empty."""
        for part in (*(self.path / part for part in _PARTS), self.path):
            with suppress(OSError):
                part.rmdir()

    @classmethod
    def reopen(cls, path: str | Path) -> Self:
        """Continue the folder of an earlier run: continue the numbers of plans, and end a last line that was cut off.

        Raises:
            Refusal: `path` is not the folder of a run.
        """
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise Refusal(f"{folder} is not the folder of a run: it has no config.json. Name the folder that the run wrote.")
        made = cls(folder)
        for plan in folder.glob("plans/*.plan.json"):
            stem, _, number = plan.name.removesuffix(".plan.json").rpartition("-")
            if number.isdecimal():
                made._plans[stem] = max(made._plans.get(stem, 0), int(number) + 1)
        for lines in (folder / "events.jsonl", *folder.glob("jobs/*/*")):
            if _is_torn(lines):
                made._torn.add(lines)
        return made

    @property
    def troubles(self) -> tuple[str, ...]:
        """A text for each file that could not be written, with the number of failures; empty if all were written."""
        with self._lock:
            return tuple(f"{text} ({count} times)" if count > 1 else text for text, count in self._troubles.items())

    def write_config(self, config: Any) -> None:
        """Write `config.json`; `config` is anything that msgspec can encode.

        Raises:
            OSError: the file cannot be written. Only this method raises, because nothing runs yet that an error would end.
        """
        write_whole(self.path / "config.json", _indented(config))

    def remove_outcome(self) -> None:
        """Remove the outcome of an earlier part of the run. If this part is killed, that would be read as how this part ended."""
        with suppress(OSError):
            (self.path / "outcome.json").unlink()

    def write_versions(self, *, device_kind: str) -> None:
        """Write `versions.json`. The version of a package that is not installed is null."""
        versions: dict[str, str | None] = {}
        for package in _PACKAGES:
            with suppress(PackageNotFoundError):
                versions[package] = None
                versions[package] = version(package)
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        versions |= {"python": platform.python_version(), "device_kind": device_kind, "date": date}
        self._write_whole("versions.json", lambda: _indented(versions))

    def write_plan(self, job: str, plan: Plan) -> None:
        """Write the next plan of `job`."""
        name = file_name(job)
        with self._lock:
            number = self._plans.get(name, 0)
            self._plans[name] = number + 1
        self._write_whole(f"plans/{name}-{number}.plan.json", lambda: _indented(plan))

    def write_event(self, event: JobEvent) -> None:
        """Append the event to `events.jsonl`, to its job's log and, if it is a step, to its metrics."""
        self._append("events.jsonl", lambda: msgspec.json.encode(event, enc_hook=float))
        if not event.job:  # an event of all jobs, such as a new budget
            return
        job = f"jobs/{file_name(event.job)}"
        self._append(f"{job}/log.txt", lambda: event_line(event).encode())
        if event.kind == "step":
            row = {"step": event.step, "time_s": event.time_s, "values": event.values}
            self._append(f"{job}/metrics.jsonl", lambda: msgspec.json.encode(row, enc_hook=float))

    def write_log(self, job: str, text: str) -> None:
        """Append lines to the log of `job`."""
        self._append(f"jobs/{file_name(job)}/log.txt", lambda: text.rstrip("\n").encode(errors="replace"))

    def write_outcome(self, outcome: Any) -> None:
        """Write `outcome.json`; `outcome` is anything that msgspec can encode."""
        self._write_whole("outcome.json", lambda: _indented(outcome))

    def write_record(self, record: Record) -> None:
        """Write `record.json` and `trace.json`, when the run is over."""
        self._write_whole("record.json", lambda: msgspec.json.encode(record))
        self._write_whole("trace.json", lambda: msgspec.json.encode(trace_events(record)))

    def _append(self, name: str, line: Callable[[], bytes]) -> None:
        """Append a line in one write, so that lines of several threads do not mix and a kill cuts off at most one."""
        path = self.path / name
        with self._lock:
            try:
                text = (b"\n" if path in self._torn else b"") + line() + b"\n"
                if not path.parent.exists() and self.path.exists():
                    path.parent.mkdir(parents=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    written = os.write(descriptor, text)
                finally:
                    os.close(descriptor)
                self._torn.discard(path)
                if written < len(text):
                    self._torn.add(path)
                    self._count(name, "the disk took only a part of a line")
            except (OSError, TypeError, ValueError) as error:
                self._count(name, _why(error))

    def _write_whole(self, name: str, content: Callable[[], bytes]) -> None:
        with self._lock:
            try:
                write_whole(self.path / name, content())
            except (OSError, TypeError, ValueError) as error:
                self._count(name, _why(error))

    def _count(self, name: str, why: str) -> None:
        text = f"{name} in {self.path} could not be written: {why}"
        self._troubles[text] = self._troubles.get(text, 0) + 1


def file_name(job: str) -> str:
    """`job` as the name of a file. Different jobs have different names.

    >>> file_name("gpt-2 b"), file_name("../x"), unquote(file_name("../x"))
    ('gpt-2 b', '%2E.%2Fx', '../x')
    """
    name = quote(job, safe=" ")
    return "%2E" + name[1:] if name.startswith(".") else name


def _is_torn(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _indented(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1) + b"\n"


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


# -- reading a folder again ---------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`.

    Raises:
        Refusal: `folder` is not the folder of a run of several jobs, or another version wrote it.
    """
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}. Name the folder that tensile run wrote.") from error
    except msgspec.DecodeError as error:
        raise Refusal(f"{path} is not the config of a run of several jobs: {error}.") from error


def read_outcome(folder: Path) -> JobsOutcome | None:
    """How the run in `folder` ended; None if it was killed before it could write that.

    Raises:
        Refusal: `outcome.json` cannot be read, or is not the outcome of a run of several jobs.
    """
    path = folder / "outcome.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobsOutcome)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}. Name the folder that tensile run wrote.") from error
    except msgspec.DecodeError as error:
        raise Refusal(f"{path} is not the outcome of a run of several jobs: {error}.") from error


def read_device(folder: Path) -> str:
    """The kind of device on which the run in `folder` ran; "an unknown device" if `versions.json` does not say it."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / "versions.json").read_bytes(), type=_Versions).device_kind
    return "an unknown device"


class _Versions(msgspec.Struct):
    """A part of `versions.json`."""

    device_kind: str


class _Line(msgspec.Struct):
    """A `JobEvent` as it is on disk, where a value that is no finite number is null."""

    time_s: float
    kind: EventName
    job: str
    step: int
    note: str = ""
    values: dict[str, float | None] = {}


def read_events(folder: str | Path) -> tuple[JobEvent, ...]:
    """The events of a run, in order, without lines that a kill or a full disk cut off. A null value is read as NaN.

    Raises:
        Refusal: `events.jsonl` cannot be read, or a line of it is valid JSON but not an event.
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
    """The record of the memory and the link of a run.

    Raises:
        Refusal: the run has not ended, or the file is not a record.
    """
    path = Path(folder) / "record.json"
    try:
        return msgspec.json.decode(_read(path), type=Record)
    except msgspec.DecodeError as error:
        raise Refusal(f"{path} is not the record of a run: {error}. Name a folder that a run wrote.") from error


def read_jit_peaks(folder: str | Path) -> dict[str, int]:
    """Plain jit's peak of each job for which the config of the run, or the first plan of the job, states it.

    Raises:
        PlanFileError: a plan cannot be read.
    """
    peaks: dict[str, int] = {}
    with suppress(OSError, msgspec.DecodeError):  # then the plans alone are read
        peaks.update(msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=_JitPeaks).jit_peaks)
    for path in sorted(Path(folder).glob("plans/*-0.plan.json")):
        peak = Plan.load(path).jit_peak_bytes
        if peak is not None:
            peaks[unquote(path.name.removesuffix("-0.plan.json"))] = peak
    return peaks


class _JitPeaks(msgspec.Struct):
    """A part of a `RunConfig`."""

    jit_peaks: dict[str, int] = {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read: {error.strerror}. Name the folder of a run that has ended: it is written by then."
        ) from error
