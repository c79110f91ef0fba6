"""Runs cases (`case.py`), each in processes of its own: one after another, or side by side where there are many cores.

Side by side, a case takes three processes in turn: the first compiles plain jit's step, once for all cases of it; the second
compiles the planned step; the third finds both in the persistent cache, and is timed, alone on the machine. So what the
allocator had in use in the third contains nothing that XLA tried kernels with. Cases that are asked for first are compiled first,
and a case is timed when none waits to be compiled. Rows are kept in the folder: an interrupted run that is begun again with the
same folder goes on.

When the time is up, processes that still run are killed, and no other is begun. Those that only compile end earlier, so that what
is compiled can be timed. Rows that are missing then have the error `TIME_IS_UP`.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Condition, Lock
from typing import Any

from benchmarks.run import TIME_IS_UP, run_case

Row = dict[str, Any]

_THREADS = 256  # most of them wait for each other; processes are limited by `at_once`
_COMPILING = 0.6  # of the time, if cases are compiled side by side; most of a case's time, divided by the processes at a time
_SAME_PLAIN = ("--batch-size", "--sizes", "--xla-flags")  # plain jit's executable is the same if these are


class Cases:
    """Runs cases and keeps their rows.

    Args:
        folder: for persistent compilation caches, and for rows.
        at_once: how many processes there may be at a time. With 1, a case is one process, and all share one cache.
        compile_only: nothing is timed; rows have no times.
        seconds: after which the time is up. None: never.

    To be used in a `with` block, at whose end no other case is begun.
    """

    def __init__(self, folder: Path, at_once: int = 1, *, compile_only: bool = False, seconds: float | None = None) -> None:
        self.folder, self.at_once, self.compile_only = folder, at_once, compile_only
        self._seconds = seconds
        self._began = time.monotonic()
        self._turns = Condition()
        self._waiting: list[tuple[bool, int]] = []  # those that compile come first, in the order of their cases
        self._running = 0
        self._threads = ThreadPoolExecutor(_THREADS if at_once > 1 else 1)
        self._known: dict[str, Future[Row]] = {}
        self._starting = Lock()
        self._ended = False
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Cases":
        return self

    def __exit__(self, *_: object) -> None:
        with self._turns:
            self._ended = True
            self._turns.notify_all()
        self._threads.shutdown(cancel_futures=True)

    def __call__(self, name: str, *options: str) -> Row:
        """The row of a case; `options` are those of `benchmarks.case`."""
        return self.start(name, *options).result()

    def start(self, name: str, *options: str) -> Future[Row]:
        """The row of a case, which is run beside others."""
        return self._once((name, *options), lambda order: self._run(name, options, order))

    def start_program(self, program: str, *arguments: str) -> Future[Row]:
        """The row that another program prints, in one process beside others. It takes the options `--cache` and `--lock`."""
        shared = ("--cache", str(self.folder), *self._lock)
        return self._once((program, *arguments), lambda order: self._in_turn(arguments, *shared, order=order, program=program))

    def seconds_left(self, part: float = 1.0) -> float | None:
        """How long there is still time, of this part of all time; None if that is not limited."""
        return None if self._seconds is None else max(self._began + part * self._seconds - time.monotonic(), 0.0)

    def _once(self, key: Sequence[str], run: Callable[[int], Row], order: int | None = None) -> Future[Row]:
        with self._starting:
            name = json.dumps(key)
            if name not in self._known:
                self._known[name] = self._threads.submit(run, len(self._known) if order is None else order)
            return self._known[name]

    def _run(self, name: str, options: Sequence[str], order: int) -> Row:
        if self.at_once == 1:
            return self._in_turn((name, *options), "--cache", str(self.folder), order=order)
        mine = self._folder_of("case", (name, *options))
        if not mine.exists() and "--without-plain" not in options:
            same = _only(options, *_SAME_PLAIN)
            plain = self._once(("plain", name, *same), lambda order: self._compile_plain(name, same, order), order).result()
            if "error" in plain:
                return plain
            shutil.copytree(self._folder_of("plain", (name, *same)), mine)
        cache = ("--cache", str(mine), *self._lock)
        compiled = self._kept(mine / "compiled.json", (name, *options), "--steps", "0", *cache, order=order, compiles=True)
        if self.compile_only or ("peak_bytes" not in compiled and "--plain-only" not in options):
            return compiled
        # the budget that was found is given, since a search for it may find another one when more is known
        found = [part if part != "least" else str(compiled["budget_bytes"]) for part in options]
        timed = self._kept(mine / "timed.json", (name, *found), *cache, order=order)
        planned = {key: compiled[key] for key in ("trace_to_plan_s",) if key in compiled}
        return timed | planned if "error" not in timed else timed

    def _compile_plain(self, name: str, options: Sequence[str], order: int) -> Row:
        mine = self._folder_of("plain", (name, *options))
        only = ("--budget", "none", "--plain-only", "--steps", "0", "--cache", str(mine), *self._lock)
        return self._kept(mine / "plain.json", (name, *options), *only, order=order, compiles=True)

    def _kept(self, file: Path, arguments: Sequence[str], *options: str, order: int, compiles: bool = False) -> Row:
        file.parent.mkdir(exist_ok=True)
        if file.exists():
            return json.loads(file.read_text())
        row = self._in_turn(arguments, *options, order=order, compiles=compiles)
        if not {"error", "cut_off"} & set(row):
            file.write_text(json.dumps(row))
        return row

    def _in_turn(
        self, arguments: Sequence[str], *options: str, order: int, compiles: bool = False, program: str = "benchmarks.case"
    ) -> Row:
        """Run a program as soon as fewer than `at_once` are running and it is the first of those that wait."""
        part = _COMPILING if compiles and not self.compile_only else 1.0
        with self._turns:
            me = (not compiles, order)
            self._waiting.append(me)
            self._turns.wait_for(
                lambda: self._ended or (self._running < self.at_once and me == min(self._waiting)), self.seconds_left(part)
            )
            self._waiting.remove(me)
            self._running += 1
            self._turns.notify_all()
        try:
            left = self.seconds_left(part)
            if self._ended or left == 0.0:
                return {"error": TIME_IS_UP}
            return run_case(tuple(arguments), *options, program=program, seconds=left)
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()

    @property
    def _lock(self) -> tuple[str, str]:
        return "--lock", str(self.folder / "timing.lock")

    def _folder_of(self, kind: str, key: Sequence[str]) -> Path:
        return self.folder / f"{kind}-{key[0]}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"


def _only(options: Sequence[str], *names: str) -> tuple[str, ...]:
    """These options and their values."""
    return tuple(part for name in names if name in options for part in (name, options[options.index(name) + 1]))
