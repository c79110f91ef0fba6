"""Defines a runtime's budget that is a share of the sum of its jobs' peaks under plain `jax.jit`.

    budget = share * sum of the plain-jit peaks of the jobs that were submitted, as far as they are known

A peak becomes known when the job's step is compiled with plain `jax.jit`. So the sum grows with each job, in the order of
submission. A job that has ended still counts.
"""

from dataclasses import dataclass, replace

from tensile_jax.units import format_bytes


@dataclass(frozen=True, slots=True)
class ShareOfPeaks:
    """The share, the number of jobs that count, and the sum of their peaks in bytes."""

    share: float
    jobs: int = 0
    peaks_bytes: int = 0

    def with_peak(self, nbytes: int) -> "ShareOfPeaks":
        """The same share, with one job more."""
        return replace(self, jobs=self.jobs + 1, peaks_bytes=self.peaks_bytes + nbytes)

    @property
    def budget_bytes(self) -> int:
        """The budget, at least one byte: before the first job, nothing can run."""
        return max(int(self.share * self.peaks_bytes), 1)

    def __str__(self) -> str:
        """What the budget is of.

        >>> str(ShareOfPeaks(0.6).with_peak(2**30).with_peak(2**30))
        '60% of 2 GiB, the sum of the plain-jit peaks of 2 jobs'
        >>> str(ShareOfPeaks(0.6))
        '60% of the sum of the plain-jit peaks of the jobs, of which none is known yet'
        """
        if not self.jobs:
            return f"{100 * self.share:.4g}% of the sum of the plain-jit peaks of the jobs, of which none is known yet"
        jobs = f"{self.jobs} {'job' if self.jobs == 1 else 'jobs'}"
        return f"{100 * self.share:.4g}% of {format_bytes(self.peaks_bytes)}, the sum of the plain-jit peaks of {jobs}"
