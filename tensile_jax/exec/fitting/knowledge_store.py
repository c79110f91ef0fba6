"""Stores what is known of steps: the `Knowledge` of each kind of step, for this process and for later ones.

Two steps are of one *kind* if they have the same operators and shapes, the same options, and the same sort of device. The whole
process shares one store. If the user has set `jax_compilation_cache_dir`, the store writes a JSON file for each kind of step
into the folder `tensile_jax` there. For each budget that a compiled plan did not exceed, the file holds what the planner chose:
the cuts between segments, and when each tensor is on the device. The file also holds the *workspaces* that XLA reported (what
executables need beside inputs and outputs), the smallest budget that works, and plain jit's peak, if plain jit was compiled. A
later process then makes the same plan without a search, and finds the compiled code in JAX's cache.

A file that is damaged, or that another version has written, is ignored. If a file cannot be written, a warning says so, and
training goes on.
"""

import hashlib
import threading
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

import jax
import msgspec

from tensile_jax.atomic_file import write_whole
from tensile_jax.exec.fitting.knowledge import Entry, Knowledge, Precedent
from tensile_jax.ir import TensorId
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.search.cost.workspace import Compared

_FOLDER = "tensile_jax"
_NOTHING = Knowledge()


class KnowledgeStore:
    """What is known of each kind of step. Any thread may read it and add to it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Knowledge] = {}
        self._forms: dict[Hashable, Hashable] = {}
        self._precedents: dict[Hashable, Precedent] = {}
        self._changing = threading.Lock()

    def known(self, kind: Hashable) -> Knowledge:
        """What this process knows of a kind of step."""
        return self._known.get(kind, _NOTHING)

    def learn(self, kind: Hashable, learned: Callable[[Knowledge], Knowledge]) -> Knowledge:
        """Replace what is known of a kind by what `learned` makes of it, and return that."""
        with self._changing:
            self._known[kind] = found = learned(self.known(kind))
        return found

    def precedent(self, structure: Hashable) -> Precedent | None:
        """The latest plan of a step with these operators, on whatever shapes; None if there is none."""
        return self._precedents.get(structure)

    def form_of(self, structure: Hashable) -> Hashable:
        """The structure of the form for which a step with these operators has its latest plan; None if it has no plan."""
        return self._forms.get(structure)

    def set_precedent(self, origin: Hashable, form: Hashable, precedent: Precedent) -> None:
        """Store the plan of a form of a step, by the structures of the step and of the form."""
        with self._changing:
            self._forms[origin] = form
            self._precedents[form] = precedent

    def forget(self) -> None:
        """Forget everything that this process knows. Files stay."""
        with self._changing:
            self._known.clear()
            self._forms.clear()
            self._precedents.clear()


STORE = KnowledgeStore()
"""The store of this process."""


class _Workspace(NamedTuple):
    """A compiled segment: the places it begins and ends at, what it computes again, what it leaves behind, and its sizes."""

    begin: int
    end: int
    again: tuple[TensorId, ...]
    wanted: tuple[TensorId, ...]
    nbytes: int
    predicted: float
    result_bytes: int


class _Content(msgspec.Struct, frozen=True):
    confirmed: list[Entry]
    workspaces: list[_Workspace]
    floor_bytes: int
    whole_bytes: int | None = None


class _File(msgspec.Struct, frozen=True):
    sha256: str
    content: msgspec.Raw


def kept_file(program: str) -> Path | None:
    """The file of a program, which is any text that identifies it; None if JAX has no persistent cache in a local folder."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in str(folder):
        return None
    return Path(folder) / _FOLDER / f"{hashlib.sha256(program.encode()).hexdigest()[:32]}.json"


def load(file: Path) -> Knowledge | None:
    """What the file holds; None if there is no such file, or if it is damaged."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_File)
        if hashlib.sha256(found.content).hexdigest() != found.sha256:
            return None
        content = msgspec.json.decode(found.content, type=_Content)
    except (OSError, msgspec.MsgspecError):
        return None
    workspaces = {
        (w.begin, w.end, frozenset(w.again), frozenset(w.wanted)): Compared(w.nbytes, w.predicted, w.result_bytes)
        for w in content.workspaces
    }
    return Knowledge(CompiledSizes(workspaces, content.whole_bytes), tuple(content.confirmed), content.floor_bytes)


def keep(file: Path, known: Knowledge, floor_bytes: int) -> None:
    """Write the file, with the smallest budget that `known` shows. Warns if that is impossible."""
    content = _Content(
        list(known.confirmed),
        [
            _Workspace(begin, end, tuple(sorted(again)), tuple(sorted(wanted)), *found)
            for (begin, end, again, wanted), found in known.measured.workspaces.items()
        ],
        floor_bytes,
        known.jit_peak_bytes,
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
