"""Makes the next plan of a running step in a thread, while training goes on.

The first call after the next plan is complete runs under it. If making it fails, training goes on under the plan in use: the next
call warns, and no other plan is made in this way.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

from tensile_jax.exec.compiling.step import CompiledPlan

Make = Callable[[], CompiledPlan | None]


class NextPlan:
    """The next plan of one step.

    Args:
        story: a clause that says of which plan and when, for the warning if it cannot be made.
        same_settings: whether the settings of JAX in the thread that calls it are those under which the step was traced. Segments
            are compiled in another thread, in which settings of a `with` block do not hold.
    """

    def __init__(self, story: str, same_settings: Callable[[], bool]) -> None:
        self._story = story
        self._same_settings = same_settings
        self._thread: threading.Thread | None = None
        self._made: tuple[CompiledPlan, CompiledPlan | None] | None = None
        self._failure: BaseException | None = None
        self._given_up = False

    @property
    def may_begin(self) -> bool:
        """Whether no plan is being made or waits to be taken, and none has failed."""
        return self._thread is None and not self._given_up

    @property
    def is_under_way(self) -> bool:
        """Whether a plan is being made, or waits to be taken."""
        return self._thread is not None and not self._given_up

    def begin(self, running: CompiledPlan, make: Make) -> None:
        """Begin to make the plan that is to replace `running`. If `make` returns None, `running` stays."""
        self._thread = threading.Thread(target=self._make, args=(running, make), name="tensile-next-plan", daemon=True)
        with suppress(RuntimeError):  # the system starts no more threads, or the interpreter ends
            self._thread.start()

    def taken(self, running: CompiledPlan) -> CompiledPlan | None:
        """The plan that replaces `running` from now on; None if `running` stays. Asked before each call.

        Warns if a plan could not be made.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            warnings.warn(
                f"No new plan could be made {self._story} ({failure}). Training goes on under the plan that it has.",
                RuntimeWarning,
                stacklevel=2,
            )
        made, self._made = self._made, None  # several threads may call
        if made is None:
            return None
        (of, found), self._thread = made, None
        return found if of is running else None  # it was replaced meanwhile, since the device was out of memory

    def _make(self, running: CompiledPlan, make: Make) -> None:
        """Make the plan. In a thread of its own."""
        try:
            if not self._same_settings():
                raise RuntimeError("the step was traced under settings of JAX that hold in one thread only")
            self._made = running, make()
        except Exception as error:
            self._failure, self._given_up = error, True
