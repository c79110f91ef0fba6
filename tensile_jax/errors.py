"""Everything that tensile_jax raises of its own.

    TensileError
    ├── BudgetError (also ValueError)   the budget cannot be read, or no plan keeps it
    │   └── BudgetTooSmall              no plan fits: names the smallest budget that does, and what holds it
    ├── TraceError (also ValueError)    the step cannot be planned: references from outside, several devices
    ├── PlanFileError (also ValueError) a saved plan that is none, of another version, for another program, or above the budget
    ├── JobsFileError (also ValueError) a jobs.toml that cannot be read: names the line and the key
    ├── InvalidPlan                     a plan that its replay refuses; users see the next plan, with a note, in its place
    ├── OutOfMemory (also RuntimeError) the device refused an allocation and nothing more could leave it
    ├── ProcessDied (also RuntimeError) the process of an isolated job ended, or had to be ended
    ├── JobFailed (also RuntimeError)   a job has no result; its cause is what made it fail
    └── CheckpointError                 a checkpoint that cannot be written, or is not fit to be restored

A caller's mistake is also a `ValueError`, as it would be from `jax.jit`, so that code which catches those goes on working.
Wrong types of arguments are plain `TypeError`s. Nothing else is raised on purpose.
"""

from typing import Any


class TensileError(Exception):
    """The root of all errors of this package."""


class BudgetError(TensileError, ValueError):
    """A budget that cannot be read or kept."""


class BudgetTooSmall(BudgetError):
    """No plan keeps the budget. The texts of these errors are in `budget.py`.

    Attributes:
        budget_bytes: what was asked for.
        floor_bytes: the smallest budget for which there is a plan.
    """

    def __init__(self, message: str, *, budget_bytes: int, floor_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes


class TraceError(TensileError, ValueError):
    """A step that cannot be turned into a graph of operators and tensors."""


class PlanFileError(TensileError, ValueError):
    """A saved plan that cannot be used."""


class JobsFileError(TensileError, ValueError):
    """A `jobs.toml` that cannot be used; the message names the file, the line, the key and the remedy."""


class InvalidPlan(TensileError):
    """A plan that does not survive its own replay, which is our own mistake.

    The planner takes its next plan then and leaves a note in it. Where no plan survives, a `TensileError` says what to do. A
    saved plan that does not survive is a `PlanFileError`.

    Attributes:
        segment: index of the segment at which the replay stopped.
        tensor: name of the tensor concerned, or the empty string.
    """

    def __init__(self, story: str, *, segment: int, tensor: str = "") -> None:
        super().__init__(f"Segment {segment}: {story}")
        self.segment = segment
        self.tensor = tensor


class OutOfMemory(TensileError, RuntimeError):
    """The device ran out of memory, and recovery did too."""


class CheckpointError(TensileError):
    """A checkpoint that could not be saved or restored; those that were there before are as they were.

    Attributes:
        folder: where it is, or was to be.
        step: how many steps the state had seen; None where it is about the folder.
    """

    def __init__(self, message: str, *, folder: str, step: int | None) -> None:
        super().__init__(message)
        self.folder = folder
        self.step = step


class ProcessDied(TensileError, RuntimeError):
    """A job's own process is gone, and with it what it held.

    Attributes:
        job: its name.
        exit_code: of the process; below zero it is a signal's number, negated.
    """

    def __init__(self, message: str, *, job: str, exit_code: int) -> None:
        super().__init__(message)
        self.job = job
        self.exit_code = exit_code


class JobFailed(TensileError, RuntimeError):
    """A job has no result. What made it fail is its `__cause__`.

    Attributes:
        job: its name.
        step: how many iterations it had done.
        state: its state after these, in host memory; None where that was lost.
    """

    def __init__(self, message: str, *, job: str, step: int, state: Any = None) -> None:
        super().__init__(message)
        self.job = job
        self.step = step
        self.state = state
