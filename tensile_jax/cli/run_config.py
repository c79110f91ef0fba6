"""What a run of several jobs was begun with, as its folder keeps it in `config.json`: enough to resume it."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tensile_jax.cli.jobs_file import JobsFile
from tensile_jax.cli.refusal import Refusal


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A jobs file that was read, and its budget in bytes.

    `jit_peaks` are the jobs' peaks under plain jit, by name; empty where the budget is no share of their sum.
    """

    jobs_file: JobsFile
    budget_bytes: int
    jit_peaks: dict[str, int] = field(default_factory=dict[str, int])


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`.

    Raises:
        Refusal: it is not the folder of a run of several jobs, or of another version.
    """
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except OSError as error:
        raise Refusal(
            f"--resume={folder}: {path} cannot be read: {error.strerror}. Name the folder that tensile run wrote."
        ) from error
    except msgspec.DecodeError as error:
        raise Refusal(f"--resume={folder}: {path} is not the config of a run of several jobs: {error}.") from error
