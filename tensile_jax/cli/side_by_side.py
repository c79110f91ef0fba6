"""Jobs under one budget beside the same jobs under plain `jax.jit`, one after another: the table, and what was not kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from tensile_jax.cli.jobs_outcome import JobOutcome, JobsOutcome, losses, percent, size
from tensile_jax.cli.plain_run import PlainJob
from tensile_jax.cli.units import format_share
from tensile_jax.plan_format import format_bytes

_SAME_LOSS = 1e-3  # of the first step, relatively: the same state and batch, and other fusions round differently


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both ways, from the same states on the same batches; jobs in the same order."""

    plain: tuple[PlainJob, ...]
    together: JobsOutcome

    @property
    def pairs(self) -> Sequence[tuple[PlainJob, JobOutcome]]:
        """Each job both ways."""
        return tuple(zip(self.plain, self.together.jobs, strict=True))

    @property
    def plain_peaks_bytes(self) -> int:
        """Plain jit's peaks added up: what the jobs would need at once."""
        return sum(job.peak_bytes for job in self.plain)

    @property
    def plain_s(self) -> float:
        """Plain jit's times added up."""
        return sum(job.time_s for job in self.plain)


def shortcomings(found: SideBySide, *, least_accuracy: Mapping[str, float]) -> list[str]:
    """What was promised and not kept, one line each; `least_accuracy` by job."""
    lines: list[str] = []
    together = found.together
    if together.peak_bytes > together.budget_bytes:
        peak, budget = format_bytes(together.peak_bytes), format_bytes(together.budget_bytes)
        lines.append(f"The measured peak of all jobs, {peak}, is above the budget, {budget}.")
    for plain, job in found.pairs:
        if job.state != "finished":
            lines.append(f"{job.name} {job.state}: {job.note or 'without a reason'}.")
            continue
        if job.loss_first is None or not math.isclose(job.loss_first, plain.loss_first, rel_tol=_SAME_LOSS):
            lines.append(f"{job.name}: the first loss, {job.loss_first or 0.0:.4f}, is not plain jit's, {plain.loss_first:.4f}.")
        least = least_accuracy.get(job.name, 0.0)
        if (job.test_accuracy or 0.0) < least:
            accuracy = job.test_accuracy or 0.0
            lines.append(f"{job.name}: {accuracy:.2%} test accuracy after {job.steps_done} steps, less than {least:.0%}.")
    return lines


def side_by_side_table(found: SideBySide) -> Table:
    """For each job a row with plain jit and one with the shared budget; then the same for all of them."""
    table = Table(title="The same jobs, one after another and at once", title_justify="left", title_style="bold")
    for name in ("job", "how"):
        table.add_column(name, no_wrap=True, min_width=9)
    for name in ("peak", "time", "loss", "test"):
        table.add_column(name, justify="right", no_wrap=True)
    for plain, job in found.pairs:
        table.add_row(
            job.name, "plain jit", format_bytes(plain.peak_bytes), f"{plain.time_s:.1f} s",
            losses(plain.loss_first, plain.loss_last), percent(plain.test_accuracy),
        )  # fmt: skip
        table.add_row(
            f"{job.steps_done} steps", "together", size(job.peak_bytes), f"{job.time_s:.1f} s",
            losses(job.loss_first, job.loss_last), percent(job.test_accuracy), end_section=True,
        )  # fmt: skip
    together = found.together
    table.add_row("all: sum", "plain jit", format_bytes(found.plain_peaks_bytes), f"{found.plain_s:.1f} s")
    table.add_row("all: shared", "together", format_bytes(together.peak_bytes), f"{together.time_s:.1f} s", style="bold")
    return table


def verdict(found: SideBySide) -> list[str]:
    """Below the table."""
    together = found.together
    return [
        f"Together: {format_bytes(together.peak_bytes)} measured of {format_bytes(together.budget_bytes)}, "
        f"{format_share(together.peak_bytes, found.plain_peaks_bytes)} of the sum of plain jit's peaks, in "
        f"{format_share(together.time_s, found.plain_s)} of plain jit's time one after another; compiling and planning counted.",
        "Same first states, same batches; later losses part as rounding grows from step to step. Plain jit's peak is what XLA "
        "states. A job's time together is from its submission to its end.",
    ]
