"""Reads `jobs.toml`: several training jobs, and the budget of device memory that they share.

    [device]
    budget = "50%"            # of the sum of the jobs' peaks under plain `jax.jit`; or bytes, or "8GiB"
    host_budget = "64GiB"     # of pinned host memory; default: what is free when the run begins, less a reserve

    [defaults]                # values for jobs that leave a key out; every key of a job may be here, except `name`
    steps = 200

    [[jobs]]
    model = "resnet50"
    args = {batch_size = 8}

    [[jobs]]
    entrypoint = "package.module:make_job"
    start_after = "resnet50:100"      # when the job resnet50 has done 100 steps

A job without a `name` is named after its model or its function. A job's own key takes precedence over the default. The `args` of
a job are merged with the default `args`. A job's `model` replaces a default `entrypoint`, and a job's `entrypoint` replaces a
default `model`. The result (`JobsFile`) has every default filled in, and a separate entry for each copy of a job (`count`).
`msgspec.json.encode` can write the result. Reading the file does not import the module of an `entrypoint`, the function that
makes a job. Whether the entrypoint exists, and which `args` it takes, is checked when the job is made.

All mistakes are reported at once, a line for each, which names the file, the line, the key, the value and the remedy:

    jobs.toml, line 7: jobs[1].stpes is not a key of a job. Did you mean steps? Known: args, checkpoint_every, ...

A mistake that only follows from another one is not reported. In this example, nothing says that `steps` is missing.

`jobs[1]` is the second job, because jobs count from zero.
"""

import copy
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from tensile_jax.budget import Budget, parse_budget, parse_host_budget
from tensile_jax.cli.errors import closest, did_you_mean
from tensile_jax.cli.toml_lines import KeyPath, find_lines
from tensile_jax.errors import BudgetError, JobsFileError
from tensile_jax.installed_models import MODELS

# -- what a file that was read says -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """The device's part of the file.

    Attributes:
        budget: for all jobs together; a share is a share of the sum of the jobs' plain-jit peaks.
        host_budget_bytes: of pinned host memory. None: what is free when the run begins, less a reserve.
        device_profile: the name or the file of a profile. None: the profile of this machine's device.
    """

    budget: Budget
    host_budget_bytes: int | None
    device_profile: str | None


@dataclass(frozen=True, slots=True)
class AfterJob:
    """A job starts when `job` has done `step` steps. If `step` is None, it starts when `job` has ended in any way."""

    job: str
    step: int | None


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job of the file.

    Attributes:
        where: file, line and key of the job's table; every message about the job begins with it.
        model, entrypoint: one of the two is given; the other is None.
        priority: the job's weight when jobs share the device.
        start_after: seconds since the run began, or another job.
        max_slowdown: None: not limited.
        renew_above: the drift above which the plan is renewed. None: it is not renewed because of its times.
        checkpoint_every: steps between checkpoints. None: no checkpoints by the number of steps.
        devices: among how many devices the job's state is divided; more than one on a cluster only.
    """

    where: str
    name: str
    model: str | None
    entrypoint: str | None
    args: dict[str, Any]
    steps: int
    priority: float = 1.0
    start_after: float | AfterJob = 0.0
    max_swap_rate: float = 1.0
    max_slowdown: float | None = None
    renew_above: float | None = None
    checkpoint_every: int | None = None
    isolation: Literal["thread", "process"] = "thread"
    policy: str = "auto"
    devices: int = 1


@dataclass(frozen=True, slots=True)
class JobsFile:
    """The content of a jobs file. The jobs are in the order of the file."""

    file: str
    device: DeviceTable
    jobs: tuple[JobEntry, ...]


# -- the keys, what their values may be, in types and in words, and an example of each ------------------------------------------

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_AFTER = rf"\A{_NAME}(:[1-9][0-9]{{0,17}})?\Z"
_ENTRYPOINT = r"\A[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*\Z"
_FINITE = sys.float_info.max
_LONGEST_VALUE = 60
_MOST_COPIES = 1000
_MOST_DIGITS = 18  # an integer of so many digits fits 64 bits, so JAX and readers of JSON accept it


def _meta(must_be: str, example: str, **limits: Any) -> Meta:
    return Meta(description=must_be, examples=[example], **limits)


def _count(example: str) -> Meta:
    return _meta(f"a whole number of at least 1, of at most {_MOST_DIGITS} digits", example, ge=1, lt=10**_MOST_DIGITS)


class _DeviceKeys(msgspec.Struct, forbid_unknown_fields=True):
    budget: Annotated[
        int | str | None,
        _meta("a number of bytes above zero, a size, or a share of the sum of the jobs' plain-jit peaks", '"8GiB" or "50%"'),
    ] = None
    host_budget: Annotated[int | str | None, _meta("a number of bytes above zero, or a size", '"64GiB"')] = None
    device_profile: Annotated[str | None, _meta("the name of a profile, or the path of a .toml file", '"h200"')] = None


_Name = Annotated[
    str,
    _meta("1 to 100 letters, digits, _, - and ., and begin with a letter, a digit or _", '"resnet-a"', pattern=rf"\A{_NAME}\Z"),
]
_MODEL = rf"\A({'|'.join(map(re.escape, MODELS))})\Z"
_Model = Annotated[str, _meta(f"a known model: {', '.join(sorted(MODELS))}", '"resnet50"', pattern=_MODEL)]
_Entrypoint = Annotated[str, _meta("a module and a function in it", '"package.module:make_job"', pattern=_ENTRYPOINT)]


class _DefaultKeys(msgspec.Struct, forbid_unknown_fields=True):
    model: _Model | None = None
    entrypoint: _Entrypoint | None = None
    args: Annotated[dict[str, Any] | None, _meta("a table of keyword arguments", "{batch_size = 8, seed = 0}")] = None
    steps: Annotated[int, _count("100")] | None = None
    priority: Annotated[float, _meta("a number above 0", "2.0", gt=0, le=_FINITE)] | None = None
    start_after: Annotated[
        Annotated[float, Meta(ge=0, le=_FINITE)] | Annotated[str, Meta(pattern=_AFTER)] | None,
        _meta("seconds of at least 0, the name of another job, or that and a step of it", '30.0 or "resnet" or "resnet:100"'),
    ] = None
    count: Annotated[int, _meta(f"a whole number from 1 to {_MOST_COPIES}", "3", ge=1, le=_MOST_COPIES)] | None = None
    max_swap_rate: Annotated[float, _meta("a number above 0, at most 1", "0.5", gt=0, le=1)] | None = None
    max_slowdown: Annotated[float, _meta("a number of at least 1", "1.2", ge=1, le=_FINITE)] | None = None
    renew_above: Annotated[float, _meta("a number above 0", "0.3", gt=0, le=_FINITE)] | None = None
    checkpoint_every: Annotated[int, _count("50")] | None = None
    isolation: Annotated[Literal["thread", "process"] | None, _meta('"thread" or "process"', '"process"')] = None
    policy: Annotated[str | None, Meta(examples=['"auto"'])] = None  # `_known_policies` says what it must be
    devices: Annotated[int, _count("4")] | None = None


class _JobKeys(_DefaultKeys, forbid_unknown_fields=True):
    name: _Name | None = None


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    device: _DeviceKeys = msgspec.field(default_factory=_DeviceKeys)
    defaults: _DefaultKeys = msgspec.field(default_factory=_DefaultKeys)
    jobs: list[_JobKeys] = []


_KEYS: Mapping[str, type[msgspec.Struct]] = {"": _Tables, "device": _DeviceKeys, "defaults": _DefaultKeys, "jobs": _JobKeys}
_WHOSE = {"": "table of a jobs file", "device": "key of [device]", "defaults": "key of [defaults]", "jobs": "key of a job"}
_SOURCES = ("model", "entrypoint")
_AT = re.compile(r" - at `\$([^`]*)`\Z")
_UNKNOWN = re.compile(r"\AObject contains unknown field `(.*)`\Z", re.DOTALL)


# -- reading ------------------------------------------------------------------------------------------------------------------


def read_jobs_file(path: Path | str) -> JobsFile:
    """The jobs that the file asks for.

    Raises:
        JobsFileError: the file cannot be read; a table, key or value is not allowed; or the jobs contradict each other.
    """
    text = _text_of(path)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise JobsFileError(_syntax(str(path), str(error), text)) from error
    return _Reader(str(path), text, tables).read()


def refuse_sharded_jobs(jobs: JobsFile) -> None:
    """Raises JobsFileError if a job needs several devices, which only a cluster has for it."""
    for job in jobs.jobs:
        if job.devices > 1:
            raise JobsFileError(
                f"{job.where}.devices = {job.devices}: this command has one device for all jobs. Train the job on a Ray cluster, "
                "which may be this machine alone: tensile submit"
            )


def _text_of(path: Path | str) -> str:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise JobsFileError(f"{path} cannot be read: {error.strerror}. Name a file of jobs.") from error
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise JobsFileError(f"{path}, line {line}: byte {raw[error.start]:#04x} is not UTF-8. Save it as UTF-8.") from error


def _syntax(file: str, story: str, text: str) -> str:
    """The message of `tomllib`, with the line number at the beginning, as in all other errors of this module."""
    place = re.search(r" \(at line (\d+), (column \d+)\)\Z", story)
    if place:
        return f"{file}, line {place[1]}, {place[2]}: {story[: place.start()]}. Write it as TOML."
    ends = story.endswith(" (at end of document)")
    line = len(text.splitlines()) if ends else 1
    return f"{file}, line {max(line, 1)}: {story.removesuffix(' (at end of document)')}. Write it as TOML."


class _Reader:
    """Turns the tables of one file into a `JobsFile`, or raises an error that names all mistakes and their lines."""

    def __init__(self, file: str, text: str, tables: dict[str, Any]) -> None:
        self._file = file
        self._text = text
        self._tables = tables
        self._mistakes: dict[str, int] = {}  # from each message to its line
        self._wrong: set[KeyPath] = set()  # the keys with a mistake: nothing else is said of what they would have been

    def read(self) -> JobsFile:
        tables = self._converted()
        device = self._device(tables.device)
        for path, keys in ((("defaults",), tables.defaults), *((("jobs", i), keys) for i, keys in enumerate(tables.jobs))):
            self._check_args(path, keys)
            self._check_one_source(path, keys)
            self._check_policy(path, keys)
        if not tables.jobs and not self._is_wrong(("jobs",)):
            self._refuse_jobs("there is none")
        jobs: dict[str, tuple[JobEntry, int]] = {}
        every = True  # whether the names of all jobs are known
        for number, own in enumerate(tables.jobs):
            copies = self._copies(number, own, tables.defaults)
            every = every and bool(copies)
            for job in copies:
                if job.name in jobs:
                    self._refuse_second(job.name, number, jobs[job.name][1], own)
                    break
                jobs[job.name] = job, number
        self._check_starts(jobs, every=every)
        if self._mistakes or device is None:
            raise JobsFileError("\n".join(sorted(self._mistakes, key=lambda message: self._mistakes[message])))
        return JobsFile(self._file, device, tuple(job for job, _ in jobs.values()))

    def _converted(self) -> _Tables:
        """The tables of the file without the keys and values that are not allowed, each of which is noted as a mistake."""
        tables = copy.deepcopy(self._tables)
        while True:
            try:
                return msgspec.convert(tables, _Tables)
            except msgspec.ValidationError as error:
                path = self._refuse_as_told(str(error))
            holder: Any = tables
            for part in path[:-1]:
                holder = holder[part]
            if isinstance(path[-1], int):
                holder[path[-1]] = {}  # so that the other jobs keep their numbers
            else:
                del holder[path[-1]]

    def _device(self, keys: _DeviceKeys) -> DeviceTable | None:
        """The device's part of the file; None if it has a mistake."""
        host = budget = None
        if keys.host_budget is not None:
            try:
                host = parse_host_budget(keys.host_budget)
            except BudgetError:
                self._refuse_value(("device", "host_budget"))
        if keys.device_profile is not None:
            from tensile_jax.device_profiles import load_profile  # imports NumPy

            try:
                load_profile(keys.device_profile)
            except (ValueError, TypeError, OSError) as error:
                story = str(error).removeprefix("device_profile ")
                self._refuse(("device", "device_profile"), f": {story}")
        if keys.budget is not None:
            try:
                budget = parse_budget(keys.budget)
            except BudgetError:
                self._refuse_value(("device", "budget"))
        elif not self._is_wrong(("device", "budget")):
            self._refuse(
                ("device", "budget"),
                ' is missing: the memory that all jobs share. Add below [device], for example: budget = "8GiB", '
                'or "50%" of the sum of the jobs\' plain-jit peaks',
            )
        return None if budget is None else DeviceTable(budget, host, keys.device_profile)

    def _copies(self, number: int, own: _JobKeys, defaults: _DefaultKeys) -> Sequence[JobEntry]:
        """The copies of a job; none if its name, its steps or what it trains is not known."""
        path = ("jobs", number)
        given, inherited = _given(own), _given(defaults)
        if any(source in given for source in _SOURCES):
            inherited = {name: value for name, value in inherited.items() if name not in _SOURCES}
        keys = {**inherited, **given, "args": {**(defaults.args or {}), **(own.args or {})}}
        model, entrypoint = keys.setdefault("model", None), keys.setdefault("entrypoint", None)
        if model is None and entrypoint is None and not self._is_wrong_of_job(number, *_SOURCES):
            self._refuse(path, ' has neither model nor entrypoint. Add one, for example: model = "resnet50"')
        if "steps" not in keys and not self._is_wrong_of_job(number, "steps"):
            self._refuse((*path, "steps"), " is missing. Add it here or to [defaults], for example: steps = 100")
        if "steps" not in keys or (model is None and entrypoint is None) or self._is_wrong_of_job(number, "name", "count"):
            return []
        name = keys.pop("name", None) or model or re.split("[:.]", str(entrypoint))[-1]
        if not re.fullmatch(_NAME, name):  # the name of an entrypoint's function: the type has checked a name of its own
            self._refuse((*path, "name"), f" is missing, and {_shown(name)} cannot be one. Add one of letters, digits and _")
            return []
        count = keys.pop("count", 1)
        if isinstance(start := keys.get("start_after"), str):
            job, _, step = start.partition(":")
            keys["start_after"] = AfterJob(job, int(step) if step else None)
        names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
        return [JobEntry(where=self._where(path), name=each, **keys) for each in names]

    # -- what goes together -----------------------------------------------------------------------------------------------------

    def _check_args(self, path: KeyPath, keys: _DefaultKeys) -> None:
        for name in keys.args or {}:
            if not name.isidentifier():
                self._refuse((*path, "args", name), " is not the name of an argument. Use letters, digits and _.")

    def _check_one_source(self, path: KeyPath, keys: _DefaultKeys) -> None:
        if keys.model is not None and keys.entrypoint is not None:
            later = max(_SOURCES, key=lambda name: self._line_of((*path, name)))
            value = _shown(getattr(keys, later))
            self._refuse((*path, later), f" = {value}: model and entrypoint exclude each other. Leave one out.")

    def _check_policy(self, path: KeyPath, keys: _DefaultKeys) -> None:
        if keys.policy is not None and keys.policy not in _known_policies():
            self._refuse_value((*path, "policy"))

    def _refuse_second(self, name: str, number: int, first: int, own: _JobKeys) -> None:
        """Note that the name of a job is that of an earlier job."""
        holder = f"jobs[{first}], line {self._line_of(('jobs', first))}"
        if own.name is not None:
            self._refuse(("jobs", number, "name"), f": {_shown(name)} is the name of {holder}, already. Choose another one.")
            return
        story = f' has no name of its own and would be called "{name}", as is {holder}. Give it one: name = "{name}-b"'
        self._refuse(("jobs", number), story)

    def _check_starts(self, jobs: Mapping[str, tuple[JobEntry, int]], *, every: bool) -> None:
        """Refuse jobs that would never start. A job waits for at most one other job, so following the waits finds every cycle.

        `every` says whether `jobs` are all jobs of the file; otherwise a job that is not there may be one of the others.
        """

        def refuse(name: str, story: str) -> None:
            own = ("jobs", jobs[name][1], "start_after")
            self._refuse(own if "start_after" in self._value_at(own[:2]) else ("defaults", "start_after"), story)

        waits = {name: job.start_after for name, (job, _) in jobs.items() if isinstance(job.start_after, AfterJob)}
        for name, after in waits.items():
            if after.job not in jobs:
                if every:
                    guess = did_you_mean(after.job, jobs)
                    refuse(name, f' waits for "{after.job}", and there is no such job.{guess} Known: {", ".join(jobs)}.')
                continue
            steps = jobs[after.job][0].steps
            if after.step is not None and after.step > steps:
                refuse(name, f" waits for step {after.step} of {after.job}, which does {steps}. Name one of these steps.")
        refused: set[str] = set()
        for name in waits:
            chain = [name]
            while (after := waits.get(chain[-1])) is not None and after.job not in chain:
                chain.append(after.job)
            if after is not None and after.job == name and name not in refused:
                refused.update(chain)
                story = ", which waits for ".join([*chain[1:], name] if chain[1:] else ["itself"])
                story = f": {name} waits for {story}: none would ever start. Let one start by itself: start_after = 0"
                refuse(name, story)

    # -- errors -----------------------------------------------------------------------------------------------------------------

    def _is_wrong(self, path: KeyPath) -> bool:
        """Whether a mistake was noted of the key at `path`, or of a table that it is in."""
        return any(path[:length] in self._wrong for length in range(1, len(path) + 1))

    def _is_wrong_of_job(self, number: int, *keys: str) -> bool:
        """Whether a mistake was noted of one of these keys of a job, of the job itself, or of the default of such a key."""
        return any(self._is_wrong((*table, key)) for key in keys for table in (("jobs", number), ("defaults",)))

    def _refuse_as_told(self, story: str) -> KeyPath:
        """Note the mistake of a message of msgspec, which names the path of a value or an unknown key. Return the path."""
        at = _AT.search(story)
        path: KeyPath = ()
        if at is not None:
            story = story[: at.start()]
            path = tuple(int(number) if number else name for number, name in re.findall(r"\[(\d+)\]|\.([^.\[]+)", at[1]))
        table = str(next(iter(path), ""))
        if unknown := _UNKNOWN.match(story):
            known = _KEYS[table].__struct_fields__
            guess = closest(unknown[1], known)
            if guess is not None:
                self._wrong.add((*path, guess))
            path = (*path, unknown[1])
            meant = did_you_mean(unknown[1], known)
            self._refuse(path, f" is not a {_WHOSE[table]}.{meant} Known: {', '.join(sorted(known))}.")
        elif path == ("jobs",):
            value = self._value_at(path)
            self._refuse_jobs("got one table" if isinstance(value, dict) else f"got {_shown(value)}")
        elif len(path) == 1 or (table == "jobs" and len(path) == 2):
            value = _shown(self._value_at(path))
            self._refuse(path, f" must be a table: got {value}. Write its keys below [{_dotted(path)}].")
        else:
            self._refuse_value(path)
        return path

    def _refuse_value(self, path: KeyPath) -> None:
        """Note that the key at `path` cannot have its value."""
        hint = get_type_hints(_KEYS[str(path[0])], include_extras=True)[str(path[-1])]
        metas = [meta for part in (hint, *get_args(hint)) for meta in getattr(part, "__metadata__", ())]
        meta = next(meta for meta in metas if meta.examples)
        must_be = meta.description or f"one of: {', '.join(_known_policies())}"
        value = self._value_at(path)
        meant = did_you_mean(value, _choices(str(path[-1]))) if isinstance(value, str) else ""
        example = f" For example: {path[-1]} = {''.join(meta.examples or ())}"
        self._refuse(path, f" must be {must_be}: got {_shown(value)}.{meant or example}")

    def _refuse_jobs(self, got: str) -> None:
        self._refuse(("jobs",), f" must be tables, one for each job: {got}. Head each of them with [[jobs]].")

    def _refuse(self, path: KeyPath, story: str) -> None:
        """Note a mistake. Its message is the place of the key followed by `story`."""
        self._wrong.add(path)
        self._mistakes.setdefault(f"{self._where(path)}{story}", self._line_of(path))

    def _where(self, path: KeyPath) -> str:
        """`jobs.toml, line 7: jobs[1]`."""
        return f"{self._file}, line {self._line_of(path)}: {_dotted(path)}"

    @cached_property
    def _lines(self) -> Mapping[KeyPath, int]:
        return find_lines(self._text)

    def _line_of(self, path: KeyPath) -> int:
        """The line of the key, or of the table in which it would be."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _value_at(self, path: KeyPath) -> Any:
        value: Any = self._tables
        for part in path:
            value = value[part]
        return value


def _known_policies() -> tuple[str, ...]:
    """The names of the policies."""
    from tensile_jax.plan import PolicyName  # imports NumPy

    return get_args(PolicyName)


def _choices(key: str) -> tuple[str, ...]:
    """The values from which that of a key is chosen; none if it is free."""
    match key:
        case "model":
            return tuple(MODELS)
        case "policy":
            return _known_policies()
        case "isolation":
            return ("thread", "process")
        case _:
            return ()


def _given(keys: msgspec.Struct) -> dict[str, Any]:
    """The keys that are in the file, which are those that are not None: TOML has no null."""
    return {name: value for name, value in msgspec.structs.asdict(keys).items() if value is not None}


def _dotted(path: KeyPath) -> str:
    """A path in the notation of the error messages.

    >>> _dotted(("jobs", 1, "args", "seed"))
    'jobs[1].args.seed'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _shown(value: Any) -> str:
    """A value about as TOML writes it, cut off if it is long.

    >>> _shown(True), _shown("a"), _shown(float("nan")), _shown("b" * 100)[-5:]
    ('true', '"a"', 'nan', 'bb...')
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.replace("NaN", "nan").replace("Infinity", "inf") if isinstance(value, float) else text
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
