"""Writes every plan that a function uses into a folder, in the order of use: `plan-000.json`, `plan-001.json`, and so on.

Files in the folder are never replaced: new numbers continue after the highest one. Two processes may use one folder. If a plan
cannot be written, a warning says so, and training goes on.
"""

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path

from tensile_jax.atomic_file import try_to_write
from tensile_jax.plan_format import Plan

_NAME = re.compile(r"plan-(\d{3,})\.json\Z")


class PlanFolder:
    """A folder for plans. It is made if it does not exist.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        try_to_write(self._folder / "plan-000.json")

    def add(self, plan: Plan) -> None:
        """Write the next plan. Warns if that is impossible."""
        path: Path | None = None
        try:
            path = self._new_file()
            plan.save(path)
        except OSError as error:
            if path is not None:
                with suppress(OSError):
                    path.unlink()  # it is empty
            warnings.warn(
                f"keep_plans: the plan cannot be written to {self._folder}: {error.strerror or error}. Training goes on.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _new_file(self) -> Path:
        """A new, empty file with the next number."""
        numbers = [int(found[1]) for name in os.listdir(self._folder) if (found := _NAME.match(name))]
        number = max(numbers, default=-1) + 1
        while True:
            path = self._folder / f"plan-{number:03d}.json"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:  # another process was faster
                number += 1
            else:
                return path
