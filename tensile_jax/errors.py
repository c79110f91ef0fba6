"""Defines the exception classes of tensile_jax.

    TensileError
    ├── BudgetError (also ValueError)   a budget cannot be read, or no plan keeps it
    │   └── BudgetTooSmall              no plan keeps the budget: names the smallest budget that works
    ├── TraceError (also ValueError)    a step cannot be planned: for example, its devices form no mesh, or it uses mutable
    │                                   references that were made outside of it
    ├── PlanFileError (also ValueError) a saved plan is not readable, of another version, for another program, or above the budget
    ├── JobsFileError (also ValueError) a jobs.toml cannot be read: names the line and the key
    ├── InvalidPlan                     the check refuses a plan; the user sees no error, but gets another plan, with a note
    ├── OutOfMemory (also RuntimeError) the device refused an allocation, and nothing more could be moved to the host
    ├── ProcessDied (also RuntimeError) the process of an isolated job ended, or had to be ended
    ├── JobFailed (also RuntimeError)   a job has no result; its cause is the error that made it fail
    ├── DistributedError (also RuntimeError) processes of jax.distributed disagree, or one of them has failed or does not answer
    ├── ClusterError (also RuntimeError) a Ray cluster cannot be reached, or has died
    └── CheckpointError                 a checkpoint cannot be written, or is not fit to be restored

Errors in a caller's arguments are also `ValueError`s, as they are with `jax.jit`. So code that catches `ValueError` still works.
Beside these classes, the package raises Python's own exceptions: a plain `ValueError` or `TypeError` for an argument that is not
allowed, a `RuntimeError` for a call at the wrong time, and `OSError` and `ImportError` as Python itself does.

The texts of `BudgetTooSmall`, `OutOfMemory` and `TraceError` end with the command that prints their section of docs/errors.md.
"""

from typing import Any


class TensileError(Exception):
    """The root of all errors of this package."""


class _OnPage(TensileError):
    """An error of which a section of docs/errors.md says how to read it, and what to do."""

    @property
    def message(self) -> str:
        """The text without the command that prints the section."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}\nHow to read this, and what helps: tensile errors {type(self).__name__}"


class BudgetError(TensileError, ValueError):
    """A budget that cannot be read or kept."""


class BudgetTooSmall(_OnPage, BudgetError):
    """No plan keeps the budget. The messages of these errors are in `budget_errors.py`.

    Attributes:
        message: the text without the command that prints how to read it.
        budget_bytes: the budget that was given.
        floor_bytes: the smallest budget for which there is a plan.
    """

    def __init__(self, message: str, *, budget_bytes: int, floor_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes


class TraceError(_OnPage, ValueError):
    """A step that cannot be turned into a graph of operators and tensors.

    Attributes:
        message: the text without the command that prints how to read it.
    """


class PlanFileError(TensileError, ValueError):
    """A saved plan that cannot be used."""


class JobsFileError(TensileError, ValueError):
    """A `jobs.toml` that cannot be used. The message has a line for each mistake: the file, the line, the key and the remedy."""


class InvalidPlan(TensileError):
    """A plan that the check of plans refuses, which is an error of this project.

    The check steps through the launches and copies of every plan before the plan is used (`plan/result/check.py`). If it refuses
    a plan, the planner takes its next plan and adds a note to it. If it refuses every plan, a `TensileError` says what to do. If
    it refuses a saved plan, a `PlanFileError` is raised.

    Attributes:
        segment: index of the segment at which the check stopped.
        tensor: name of the tensor concerned, or the empty string.
    """

    def __init__(self, story: str, *, segment: int, tensor: str = "") -> None:
        super().__init__(f"Segment {segment}: {story}")
        self.segment = segment
        self.tensor = tensor


class OutOfMemory(_OnPage, RuntimeError):
    """The device ran out of memory, and again when everything that could be moved to the host had been moved.

    Attributes:
        message: the text without the command that prints how to read it.
    """


class CheckpointError(TensileError):
    """A checkpoint that could not be saved or restored. Older checkpoints are unchanged.

    Attributes:
        folder: the folder of the checkpoint.
        step: the number of steps of the state; None if the error is about the folder as a whole.
    """

    def __init__(self, message: str, *, folder: str, step: int | None) -> None:
        super().__init__(message)
        self.folder = folder
        self.step = step


class ProcessDied(TensileError, RuntimeError):
    """A job's own process has ended, and what it held is lost.

    Attributes:
        job: the name of the job.
        exit_code: the exit code of the process; a negative one is the number of a signal, negated.
    """

    def __init__(self, message: str, *, job: str, exit_code: int) -> None:
        super().__init__(message)
        self.job = job
        self.exit_code = exit_code


class DistributedError(TensileError, RuntimeError):
    """The processes of a step (`jax.distributed`) disagree, or one of them has failed or does not answer.

    Attributes:
        processes: the numbers of the processes that differ from the others, have failed or do not answer; empty if not known.
    """

    def __init__(self, message: str, *, processes: tuple[int, ...]) -> None:
        super().__init__(message)
        self.processes = processes


class ClusterError(TensileError, RuntimeError):
    """A Ray cluster that cannot be reached, or does not answer any more. The jobs' checkpoints are where they were."""


class JobFailed(TensileError, RuntimeError):
    """A job has no result. The error that made it fail is the `__cause__`.

    Attributes:
        job: the name of the job.
        step: how many iterations the job had done.
        state: the job's state after these iterations, where `Job.result` would return it; None if that was lost.
    """

    def __init__(self, message: str, *, job: str, step: int, state: Any = None) -> None:
        super().__init__(message)
        self.job = job
        self.step = step
        self.state = state
