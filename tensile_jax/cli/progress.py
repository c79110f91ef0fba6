"""What is under way, on stderr: a line a phase, with a bar where it is a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Live:
    """Shows phases. `tell` has the signature of `tensile_jax.jit(progress=...)`, so it can be given to that."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._phases: dict[str, TaskID] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def tell(self, what: str, done: int, of: int, note: str = "") -> None:
        """`done` of `of` parts of the phase `what` are over. A phase may begin again with another `of`."""
        self._begin(what)
        self._bars.update(self._phases[what], completed=done, total=of, note=note)
        if done >= of:
            self._end(what, f"{done}/{of} {note}".rstrip())
        else:
            self._ended.discard(what)

    def wait_for(self, what: str) -> None:
        """A phase begins that cannot say how far it is; it lasts until the next one is told of."""
        self._begin(what)

    def _begin(self, what: str) -> None:
        if what in self._phases:
            return
        for earlier, task in self._phases.items():
            if earlier not in self._ended:
                self._bars.update(task, total=1, completed=1)
                self._ended.add(earlier)
        self._phases[what] = self._bars.add_task(what, total=None, note="")
        if not self._console.is_terminal:
            self._console.print(f"{what} ...", markup=False, highlight=False)

    def _end(self, what: str, said: str) -> None:
        if what not in self._ended and not self._console.is_terminal:
            self._console.print(f"{what}: {said}", markup=False, highlight=False)
        self._ended.add(what)
