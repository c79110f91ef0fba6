"""Runs cases (`benchmarks/case.py`), each in processes of its own: one after another, or side by side where there are many cores.

Side by side, a case takes three processes in turn: the first compiles plain jit's step, once for all cases of it; the second
compiles the planned step; the third finds both in the persistent cache, and is timed, alone on the machine. So what the
allocator had in use in the third contains nothing that XLA tried kernels with. Rows are kept in the folder: an interrupted run
that is begun again with the same folder goes on.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from benchmarks.run import run_case

Row = dict[str, Any]

_THREADS = 256  # most of them wait for each other; processes are limited by `at_once`


class Cases:
    """Runs cases and keeps their rows.

    Args:
        folder: for persistent compilation caches, and for rows.
        at_once: how many processes there may be at a time. With 1, a case is one process, and all share one cache.
        compile_only: nothing is timed; rows have no times.

    To be used in a `with` block, at whose end no other case is begun.
    """

    def __init__(self, folder: Path, at_once: int = 1, *, compile_only: bool = False) -> None:
        self.folder, self.at_once, self.compile_only = folder, at_once, compile_only
        self._free = Semaphore(at_once)
        self._threads = ThreadPoolExecutor(_THREADS if at_once > 1 else 1)
        self._known: dict[str, Future[Row]] = {}
        self._starting = Lock()
        self._ended = False
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Cases":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._threads.shutdown(cancel_futures=True)

    def __call__(self, model: str, *options: str) -> Row:
        """The row of a case; `options` are those of `benchmarks.case`."""
        return self.start(model, *options).result()

    def start(self, model: str, *options: str) -> Future[Row]:
        """The row of a case, which is run beside others."""
        return self._once((model, *options), lambda: self._run(model, options))

    def _once(self, key: Sequence[str], run: Callable[[], Row]) -> Future[Row]:
        with self._starting:
            name = json.dumps(key)
            if name not in self._known:
                self._known[name] = self._threads.submit(run)
            return self._known[name]

    def _run(self, model: str, options: Sequence[str]) -> Row:
        if self.at_once == 1:
            return run_case((model, *options), "--cache", str(self.folder))
        mine = self._folder_of("case", (model, *options))
        if not mine.exists() and "--without-plain" not in options:
            plain_options = _only(options, "--batch-size", "--sizes")
            plain = self._once(("plain", model, *plain_options), lambda: self._compile_plain(model, plain_options)).result()
            if "error" in plain:
                return plain
            shutil.copytree(self._folder_of("plain", (model, *plain_options)), mine)
        compiled = self._kept(mine / "compiled.json", (model, *options), "--steps", "0", "--cache", str(mine), *self._lock)
        if self.compile_only or "peak_bytes" not in compiled:
            return compiled
        # the budget that was found is given, since a search for it may find another one when more is known
        found = [part if part != "least" else str(compiled["budget_bytes"]) for part in options]
        timed = self._kept(mine / "timed.json", (model, *found), "--cache", str(mine), *self._lock)
        return timed | {"trace_to_plan_s": compiled["trace_to_plan_s"]} if "error" not in timed else timed

    def _compile_plain(self, model: str, options: Sequence[str]) -> Row:
        mine = self._folder_of("plain", (model, *options))
        budget = ("--budget", "none", "--plain-only")
        return self._kept(mine / "plain.json", (model, *options), *budget, "--cache", str(mine), *self._lock)

    def _kept(self, file: Path, arguments: Sequence[str], *options: str) -> Row:
        file.parent.mkdir(exist_ok=True)
        if file.exists():
            return json.loads(file.read_text())
        with self._free:
            if self._ended:
                return {"error": "interrupted"}
            row = run_case(tuple(arguments), *options)
        if "error" not in row:
            file.write_text(json.dumps(row))
        return row

    @property
    def _lock(self) -> tuple[str, str]:
        return "--lock", str(self.folder / "timing.lock")

    def _folder_of(self, kind: str, key: Sequence[str]) -> Path:
        return self.folder / f"{kind}-{key[0]}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"


def _only(options: Sequence[str], *names: str) -> tuple[str, ...]:
    """These options and their values."""
    return tuple(part for name in names if name in options for part in (name, options[options.index(name) + 1]))
