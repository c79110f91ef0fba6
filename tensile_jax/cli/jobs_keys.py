"""The keys of a jobs file: what each may be, and what is said of one that is not.

    [device]    budget, host_budget, device_profile
    [defaults]  any key of a job but its name
    [[jobs]]    name, model or entrypoint, args, steps, ...

Every refusal names the file, the line, the key, the value and the remedy:

    jobs.toml, line 7: jobs[1].stpes is not a key of a job. Did you mean steps? Known: args, checkpoint_every, ...

`jobs[1]` is the second job: they count from zero, as elsewhere in Python. Which keys go together, and what the values mean,
is for `jobs_file`.
"""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from tensile_jax.cli.toml_lines import KeyPath
from tensile_jax.errors import JobsFileError
from tensile_jax.installed_models import MODELS
from tensile_jax.plan_format import PolicyName

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_AFTER = rf"\A{NAME}(:[1-9][0-9]{{0,17}})?\Z"
_ENTRYPOINT = r"\A[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*\Z"
_FINITE = sys.float_info.max
_LONGEST_VALUE = 60
_MOST_COPIES = 1000

_MOST_DIGITS = 18  # what is an integer to JAX, and to whatever reads JSON
Count = Annotated[int, Meta(ge=1, lt=10**_MOST_DIGITS)]


@dataclass(frozen=True, slots=True)
class Key:
    """`type`: for msgspec; `must_be`: the same in words; `example`: its value in TOML."""

    type: Any
    must_be: str
    example: str


DEVICE_KEYS: Mapping[str, Key] = {
    "budget": Key(
        int | str, "a number of bytes above zero, a size, or a share of the sum of the jobs' plain-jit peaks", '"8GiB" or "50%"'
    ),
    "host_budget": Key(int | str, "a number of bytes above zero, or a size", '"64GiB"'),
    "device_profile": Key(str, "the name of a profile, or the path of a .toml file", '"h200"'),
}

JOB_KEYS: Mapping[str, Key] = {
    "name": Key(
        Annotated[str, Meta(pattern=rf"\A{NAME}\Z")],
        "1 to 100 letters, digits, _, - and ., and begin with a letter, a digit or _",
        '"resnet-a"',
    ),
    "model": Key(
        Annotated[str, Meta(pattern=rf"\A({'|'.join(MODELS)})\Z")], f"a known model: {', '.join(sorted(MODELS))}", '"resnet50"'
    ),
    "entrypoint": Key(Annotated[str, Meta(pattern=_ENTRYPOINT)], "a module and a function in it", '"package.module:make_job"'),
    "args": Key(dict[str, Any], "a table of keyword arguments", "{batch_size = 8, seed = 0}"),
    "steps": Key(Count, f"a whole number of at least 1, of at most {_MOST_DIGITS} digits", "100"),
    "priority": Key(Annotated[float, Meta(gt=0, le=_FINITE)], "a number above 0", "2.0"),
    "start_after": Key(
        Annotated[float, Meta(ge=0, le=_FINITE)] | Annotated[str, Meta(pattern=_AFTER)],
        "seconds of at least 0, the name of another job, or that and a step of it",
        '30.0 or "resnet" or "resnet:100"',
    ),
    "count": Key(Annotated[int, Meta(ge=1, le=_MOST_COPIES)], f"a whole number from 1 to {_MOST_COPIES}", "3"),
    "max_swap_rate": Key(Annotated[float, Meta(gt=0, le=1)], "a number above 0, at most 1", "0.5"),
    "max_slowdown": Key(Annotated[float, Meta(ge=1, le=_FINITE)], "a number of at least 1", "1.2"),
    "checkpoint_every": Key(Count, f"a whole number of at least 1, of at most {_MOST_DIGITS} digits", "50"),
    "isolation": Key(Literal["thread", "process"], '"thread" or "process"', '"process"'),
    "policy": Key(PolicyName, f"one of: {', '.join(get_args(PolicyName))}", '"auto"'),
}

DEFAULTS_KEYS: Mapping[str, Key] = {name: key for name, key in JOB_KEYS.items() if name != "name"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file's name, and the line of each of its keys."""

    file: str
    lines: Mapping[KeyPath, int]

    def line_of(self, path: KeyPath) -> int:
        """The line of the key, or of the table in which it would be."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def where(self, path: KeyPath) -> str:
        """`jobs.toml, line 7: jobs[1]`."""
        return f"{self.file}, line {self.line_of(path)}: {dotted(path)}"

    def error(self, path: KeyPath, story: str) -> JobsFileError:
        """`story` goes on after the key's name."""
        return JobsFileError(f"{self.where(path)}{story}")

    def check_keys(self, path: KeyPath, table: Any, known: Mapping[str, Key], *, of: str) -> dict[str, Any]:
        """The table's values, each of its key's type.

        Raises:
            JobsFileError: it is no table; it has a key that is not known; a value is not what it must be.
        """
        if not isinstance(table, dict):
            raise self.error(path, f" must be a table: got {shown(table)}. Write its keys below [{dotted(path)}].")
        self.check_known(path, table, known, of=of)
        return {name: self._converted((*path, name), value, known[name]) for name, value in table.items()}

    def check_known(self, path: KeyPath, names: Iterable[str], known: Iterable[str], *, of: str) -> None:
        """Raises: JobsFileError: a name is not among those that are known."""
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                guess = f" Did you mean {close[0]}?" if close else ""
                raise self.error((*path, name), f" is not a {of}.{guess} Known: {', '.join(sorted(known))}.")

    def must_be(self, path: KeyPath, value: Any, key: Key) -> JobsFileError:
        """The value is not what the key must be."""
        return self.error(path, f" must be {key.must_be}: got {shown(value)}. For example: {path[-1]} = {key.example}")

    def _converted(self, path: KeyPath, value: Any, key: Key) -> Any:
        try:
            return msgspec.convert(value, key.type)
        except msgspec.ValidationError as error:
            raise self.must_be(path, value, key) from error


def dotted(path: KeyPath) -> str:
    """A path as one writes it.

    >>> dotted(("jobs", 1, "args", "seed"))
    'jobs[1].args.seed'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """A value about as TOML writes it, cut off where it is long.

    >>> shown(True), shown("a"), shown(float("nan")), shown("b" * 100)[-5:]
    ('true', '"a"', 'nan', 'bb...')
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.replace("NaN", "nan").replace("Infinity", "inf") if isinstance(value, float) else text
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
