"""Describes in words what a long call is doing, how far the call has come, and about how long it will still take.

A phase is reported as `progress(what, done, of)`: the name of the phase, how many of its parts are done, and how many parts it
has. The phases of a first call:

    tracing -> compiling plain jit -> planning -> compiling segments | compiling programs

A *segment* is a part of the step with an executable of its own; a *program* is one executable for several segments. Planning and
compiling may happen again, because a plan is revised if compiling shows that it exceeds the budget. So the number of plans is
only an estimate. This module reads no clock: callers pass the times, in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

Progress = Callable[[str, int, int], None]
"""Is told a phase: `progress(what, done, of)`."""

TRACING, PLAIN_JIT, PLANNING = "tracing", "compiling plain jit", "planning"
IN_LINE = "waiting to be planned"
"""The phase of a job that was traced, while other jobs are planned."""
BATCHES, POLICIES, BUDGETS = "planning batches, in samples", "planning with every policy", "planning under several budgets"
"""The phases of `max_batch`, of a comparison, and of a report on memory that has the costs of budgets."""
_COMPILING = "compiling "

_FIRST_CALL = 3.4
"""Times plain jit's compilation: about how long a first call takes after it (the median of `make bench-workloads`). It only
decides what is shown while nothing better is known."""


def phase_words(what: str, done: int, of: int) -> str:
    """A phase in words, with the part that is under way.

    >>> phase_words("compiling segments", 2, 12), phase_words("planning", 0, 3), phase_words("tracing", 0, 1)
    ('compiling 3 of 12 segments', 'planning 1 of about 3', 'tracing')
    """
    part = min(done + 1, of)
    if what == PLAIN_JIT:
        return "compiling plain jit's step, to know its peak"
    if what.startswith(_COMPILING):
        return f"compiling {part} of {of} {what.removeprefix(_COMPILING)}"
    if of <= 1:
        return what
    return f"{what} {part} of {'about ' if what in (PLANNING, BATCHES) else ''}{of}"


def phase_title(what: str, of: int) -> str:
    """A phase in words, without how far it is.

    >>> phase_title("compiling segments", 12), phase_title("planning", 3)
    ('compiling 12 segments', 'planning')
    """
    compiles_parts = what.startswith(_COMPILING) and what != PLAIN_JIT
    return f"{_COMPILING}{of} {what.removeprefix(_COMPILING)}" if compiles_parts else phase_words(what, 0, 1)


def is_compiling(words: str) -> bool:
    """Whether the words of a phase, as `phase_words` or `phase_title` give them, say that something is compiled."""
    return words.startswith(_COMPILING)


@dataclass(frozen=True, slots=True)
class CallPhases:
    """What a call was told to be doing.

    Attributes:
        name: what is called.
        began_s: when the call began.
        what, done, of: the phase that was told last.
        since_s: when that phase began.
        told_s: when it was told last.
        plain_jit_s: how long plain jit's step compiled; None if that is not known.
    """

    name: str
    began_s: float
    what: str = "starting"
    done: int = 0
    of: int = 1
    since_s: float = 0.0
    told_s: float = 0.0
    plain_jit_s: float | None = None

    def told(self, what: str, done: int, of: int, now_s: float) -> "CallPhases":
        """The same call, which has been told this now."""
        goes_on = what == self.what and done >= self.done and (of == self.of or done > 0)
        since_s = self.since_s if goes_on else now_s
        plain_jit_s = now_s - since_s if what == PLAIN_JIT and done >= of and goes_on else self.plain_jit_s
        return replace(self, what=what, done=done, of=of, since_s=since_s, told_s=now_s, plain_jit_s=plain_jit_s)

    @property
    def share(self) -> float | None:
        """Which part of the phase is done; None if it has no parts."""
        return self.done / self.of if self.of > 1 else None

    def left_s(self, now_s: float) -> float | None:
        """About how many seconds the phase, or the whole call, will still take; None if that is not known."""
        if self.what != PLANNING and 0 < self.done < self.of:
            each_s = (self.told_s - self.since_s) / self.done
            return max(0.0, each_s * (self.of - self.done) - (now_s - self.told_s))
        if self.plain_jit_s is None:
            return None
        return max(0.0, self.began_s + _FIRST_CALL * self.plain_jit_s - now_s)

    def text(self, now_s: float) -> str:
        """One line about the call.

        >>> begun = CallPhases("train_step", 0.0).told("compiling segments", 0, 12, 10.0)
        >>> begun.told("compiling segments", 3, 12, 16.0).text(17.0)
        'train_step: compiling 4 of 12 segments, 17 s so far, about 17 s more'
        """
        more = self.more_text(now_s)
        so_far = f"{_seconds(now_s - self.began_s)} so far{', ' if more else ''}{more}"
        return f"{self.name}: {phase_words(self.what, self.done, self.of)}, {so_far}"

    def more_text(self, now_s: float) -> str:
        """About how long the phase, or the whole call, will still take; empty if that is not known, or less than a second."""
        left_s = self.left_s(now_s)
        return f"about {_seconds(left_s)} more" if left_s is not None and left_s >= 1 else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
