"""Keeps what compiling a step has shown for the processes that come after: beside JAX's own persistent compilation cache.

If the user has set `jax_compilation_cache_dir`, the folder `tensile_jax` in it has one JSON file for each program, device and set
of options: the choices whose plans were confirmed by compiling them (`confirmed_plans.py`), the workspaces that XLA reported, the
smallest budget, and plain jit's peak, if that was compiled. A later process then makes the same plan without a search, and what
it compiles is in JAX's cache.

A file that is damaged, or that another version has written, is as good as none. If a file cannot be written, there is a warning,
and training goes on.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import msgspec

from tensile_jax.atomic_file import write_whole
from tensile_jax.exec.step.confirmed_plans import Entry
from tensile_jax.ir import TensorId
from tensile_jax.plan import Choice
from tensile_jax.plan.result.layout import Layout, Residency
from tensile_jax.plan.search.workspace import Compared, SegmentKey
from tensile_jax.plan_format import Barriers

_FOLDER = "tensile_jax"


class _Choice(NamedTuple):
    """An entry: the layout's boundaries and residencies, no boundaries if the step runs whole; the form of one program."""

    limit: float
    peak_bytes: int
    boundaries: tuple[int, ...]
    residencies: dict[TensorId, tuple[Residency, ...]]
    barriers: Barriers | None = None


class _Workspace(NamedTuple):
    """A compiled segment: the places it begins and ends at, what it computes again, what it leaves behind, and its workspace."""

    begin: int
    end: int
    again: tuple[TensorId, ...]
    wanted: tuple[TensorId, ...]
    nbytes: int
    predicted: float


class _Content(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    workspaces: list[_Workspace]
    floor_bytes: int
    whole_bytes: int | None = None


class _File(msgspec.Struct, frozen=True):
    sha256: str
    content: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a program. `floor_bytes` is the smallest budget, as far as these workspaces show, and `whole_bytes` plain
    jit's peak, if plain jit was compiled."""

    choices: Sequence[Entry]
    workspaces: Mapping[SegmentKey, Compared]
    floor_bytes: int
    whole_bytes: int | None = None


def kept_file(program: str) -> Path | None:
    """The file of a program, which is any text that identifies it; None if JAX has no persistent cache in a local folder."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in str(folder):
        return None
    return Path(folder) / _FOLDER / f"{hashlib.sha256(program.encode()).hexdigest()[:32]}.json"


def load(file: Path) -> Kept | None:
    """What the file holds; None if there is no such file, or if it is damaged."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_File)
        if hashlib.sha256(found.content).hexdigest() != found.sha256:
            return None
        content = msgspec.json.decode(found.content, type=_Content)
    except (OSError, msgspec.MsgspecError):
        return None
    workspaces = {
        (w.begin, w.end, frozenset(w.again), frozenset(w.wanted)): Compared(w.nbytes, w.predicted) for w in content.workspaces
    }
    choices = [Entry(c.limit, c.peak_bytes, Choice(_layout(c), c.barriers)) for c in content.choices]
    return Kept(choices, workspaces, content.floor_bytes, content.whole_bytes)


def keep(file: Path, kept: Kept) -> None:
    """Write the file. Warns if that is impossible."""
    content = _Content(
        [_Choice(e.limit, e.peak_bytes, e.choice.boundaries, _residencies(e.choice), e.choice.barriers) for e in kept.choices],
        [
            _Workspace(begin, end, tuple(sorted(again)), tuple(sorted(wanted)), found.nbytes, found.predicted)
            for (begin, end, again, wanted), found in kept.workspaces.items()
        ],
        kept.floor_bytes,
        kept.whole_bytes,
    )
    encoded = msgspec.json.encode(content)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode(_File(hashlib.sha256(encoded).hexdigest(), msgspec.Raw(encoded))))
    except OSError as error:
        warnings.warn(
            f"The plan cannot be kept for later processes: {file}: {error.strerror or error}. They will search for it again. "
            "Training goes on. Make room in that folder, or set jax_compilation_cache_dir to another one.",
            RuntimeWarning,
            stacklevel=2,
        )


def _layout(found: _Choice) -> Layout | None:
    return Layout(found.boundaries, found.residencies) if found.boundaries else None


def _residencies(choice: Choice) -> dict[TensorId, tuple[Residency, ...]]:
    return {} if choice.layout is None else dict(choice.layout.residencies)
