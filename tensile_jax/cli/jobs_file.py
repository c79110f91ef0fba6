"""Read `jobs.toml`: several jobs, the budget that they share, and what is the same for all of them.

    [device]
    budget = "50%"            # of the sum of the jobs' plain-jit peaks; or bytes, or "8GiB"
    host_budget = "64GiB"     # of pinned host memory; left out: no limit

    [defaults]                # any key of a job but its name
    steps = 200

    [[jobs]]
    model = "resnet50"
    args = {batch_size = 8}

    [[jobs]]
    entrypoint = "package.module:make_job"
    start_after = "resnet50:100"

A job's own key goes before the default; its `args` are added to the default ones, one by one; its `model` puts a default
`entrypoint` out of force, and the other way round. What comes out has every default filled in and every copy (`count`) by
itself; `msgspec.json.encode` writes it. Nothing is imported from where a job comes: whether an entrypoint exists, and which
`args` it takes, is found out when the job is made.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensile_jax.budget import Budget, parse_budget
from tensile_jax.cli.jobs_keys import DEFAULTS_KEYS, DEVICE_KEYS, JOB_KEYS, NAME, Source, shown
from tensile_jax.cli.start_after import AfterJob, check_starts, read_start
from tensile_jax.cli.toml_lines import KeyPath, find_lines
from tensile_jax.errors import BudgetError, JobsFileError
from tensile_jax.plan_format import PolicyName

_TABLES = ("defaults", "device", "jobs")
_SOURCES = ("model", "entrypoint")


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """`budget`: a share is of the sum of the jobs' plain-jit peaks. None: no limit, and this machine's rates."""

    budget: Budget
    host_budget_bytes: int | None
    device_profile: str | None


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job of the file.

    Attributes:
        where: file, line and key of its table, with which a message about it begins.
        model, entrypoint: one of them; the other is None.
        priority: its weight when jobs share.
        start_after: seconds since the run began, or another job.
        max_slowdown: None: not limited. `checkpoint_every`: None: never by the number of steps.
    """

    where: str
    name: str
    model: str | None
    entrypoint: str | None
    args: dict[str, Any]
    steps: int
    priority: float
    start_after: float | AfterJob
    max_swap_rate: float
    max_slowdown: float | None
    checkpoint_every: int | None
    isolation: Literal["thread", "process"]
    policy: PolicyName


@dataclass(frozen=True, slots=True)
class JobsFile:
    """A file that was read, its jobs in the order in which it has them."""

    file: str
    device: DeviceTable
    jobs: tuple[JobEntry, ...]


def read_jobs_file(path: Path | str) -> JobsFile:
    """The jobs that the file asks for.

    Raises:
        JobsFileError: it cannot be read; a table, key or value is not one that there is; jobs do not go together.
    """
    text = _text_of(path)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise JobsFileError(_syntax(str(path), str(error), text)) from error
    source = Source(str(path), find_lines(text))
    source.check_known((), tables, _TABLES, of="table of a jobs file")
    device = _device(source, tables.get("device"))
    defaults = source.check_keys(("defaults",), tables.get("defaults", {}), DEFAULTS_KEYS, of="key of [defaults]")
    _check_args(source, ("defaults",), defaults)
    _check_one_source(source, ("defaults",), defaults)
    return JobsFile(str(path), device, _jobs(source, tables.get("jobs", []), defaults))


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
    """tomllib's story, with its line where all our errors have it."""
    place = re.search(r" \(at line (\d+), (column \d+)\)\Z", story)
    if place:
        return f"{file}, line {place[1]}, {place[2]}: {story[: place.start()]}. Write it as TOML."
    ends = story.endswith(" (at end of document)")
    line = len(text.splitlines()) if ends else 1
    return f"{file}, line {max(line, 1)}: {story.removesuffix(' (at end of document)')}. Write it as TOML."


def _device(source: Source, table: Any) -> DeviceTable:
    known = source.check_keys(("device",), {} if table is None else table, DEVICE_KEYS, of="key of [device]")
    if "budget" not in known:
        raise source.error(
            ("device", "budget"),
            ' is missing: the memory that all jobs share. Add below [device], for example: budget = "8GiB", '
            'or "50%" of the sum of the jobs\' plain-jit peaks',
        )
    budgets: dict[str, Budget] = {}
    for name in [name for name in ("budget", "host_budget") if name in known]:
        try:
            budgets[name] = parse_budget(known[name])
        except BudgetError as error:
            raise source.must_be(("device", name), known[name], DEVICE_KEYS[name]) from error
    host = budgets.get("host_budget")
    if host is not None and host.nbytes is None:
        raise source.must_be(("device", "host_budget"), known["host_budget"], DEVICE_KEYS["host_budget"])
    profile = known.get("device_profile")
    if profile is not None:
        _check_profile(source, profile)
    return DeviceTable(budgets["budget"], None if host is None else host.nbytes, profile)


def _check_profile(source: Source, name: str) -> None:
    from tensile_jax.profiles import load_profile  # imports NumPy

    try:
        load_profile(name)
    except (ValueError, TypeError, OSError) as error:
        story = str(error).removeprefix("device_profile ")
        raise source.error(("device", "device_profile"), f": {story}") from error


def _jobs(source: Source, tables: Any, defaults: dict[str, Any]) -> tuple[JobEntry, ...]:
    if not isinstance(tables, list) or not tables:
        got = "got one table" if isinstance(tables, dict) else "there is none" if tables == [] else f"got {shown(tables)}"
        raise source.error(("jobs",), f" must be tables, one for each job: {got}. Head each of them with [[jobs]].")
    jobs: dict[str, JobEntry] = {}
    numbers: dict[str, int] = {}
    for number, table in enumerate(tables):
        for job in _copies(source, number, table, defaults):
            if job.name in jobs:
                raise _named_twice(source, job.name, number, numbers[job.name], table)
            jobs[job.name], numbers[job.name] = job, number

    def refuse(name: str, story: str) -> JobsFileError:
        own = "start_after" in tables[numbers[name]]
        return source.error(("jobs", numbers[name], "start_after") if own else ("defaults", "start_after"), story)

    starts = {name: job.start_after for name, job in jobs.items()}
    check_starts(starts, steps={name: job.steps for name, job in jobs.items()}, refuse=refuse)
    return tuple(jobs.values())


def _copies(source: Source, number: int, table: Any, defaults: dict[str, Any]) -> list[JobEntry]:
    path = ("jobs", number)
    own = source.check_keys(path, table, JOB_KEYS, of="key of a job")
    _check_args(source, path, own)
    _check_one_source(source, path, own)
    inherited = {k: v for k, v in defaults.items() if not (k in _SOURCES and any(s in own for s in _SOURCES))}
    keys = {**inherited, **own, "args": {**defaults.get("args", {}), **own.get("args", {})}}
    model, entrypoint = keys.get("model"), keys.get("entrypoint")
    if model is None and entrypoint is None:
        raise source.error(path, ' has neither model nor entrypoint. Add one, for example: model = "resnet50"')
    if "steps" not in keys:
        raise source.error((*path, "steps"), " is missing. Add it here or to [defaults], for example: steps = 100")
    name = own.get("name") or model or re.split("[:.]", entrypoint or "")[-1]
    if not re.fullmatch(NAME, name):  # of the entrypoint: an own one was checked before
        raise source.error((*path, "name"), f" is missing, and {shown(name)} cannot be one. Add one of letters, digits and _")
    count = keys.get("count", 1)
    return [
        JobEntry(
            where=source.where(path),
            name=name if count == 1 else f"{name}-{copy}",
            model=model,
            entrypoint=entrypoint,
            args=keys["args"],
            steps=keys["steps"],
            priority=keys.get("priority", 1.0),
            start_after=read_start(keys.get("start_after", 0.0)),
            max_swap_rate=keys.get("max_swap_rate", 1.0),
            max_slowdown=keys.get("max_slowdown"),
            checkpoint_every=keys.get("checkpoint_every"),
            isolation=keys.get("isolation", "thread"),
            policy=keys.get("policy", "auto"),
        )
        for copy in range(1, count + 1)
    ]


def _check_args(source: Source, path: KeyPath, keys: dict[str, Any]) -> None:
    for name in keys.get("args", {}):
        if not name.isidentifier():
            raise source.error((*path, "args", name), " is not the name of an argument. Use letters, digits and _.")


def _check_one_source(source: Source, path: KeyPath, keys: dict[str, Any]) -> None:
    if all(name in keys for name in _SOURCES):
        later = max(_SOURCES, key=lambda name: source.line_of((*path, name)))
        raise source.error((*path, later), f" = {shown(keys[later])}: model and entrypoint exclude each other. Leave one out.")


def _named_twice(source: Source, name: str, number: int, first: int, table: dict[str, Any]) -> JobsFileError:
    holder = f"jobs[{first}], line {source.line_of(('jobs', first))}"
    if "name" in table:
        return source.error(("jobs", number, "name"), f": {shown(name)} is the name of {holder}, already. Choose another one.")
    return source.error(
        ("jobs", number), f' has no name of its own and would be called "{name}", as is {holder}. Give it one: name = "{name}-b"'
    )
