"""The model of the allocator, held against what the allocator of an H200 had in use."""

import pytest

from benchmarks.allocator import Run, account_of, replayed, runs

_NEAR = 0.01  # of plain jit's peak: how far the model may be from what was measured


@pytest.mark.parametrize("run", runs(), ids=lambda run: f"{run.policy} {run.budget}")
def test_the_model_has_in_use_what_an_h200_had(run: Run) -> None:
    assert replayed(run) == pytest.approx(run.allocator_bytes, abs=_NEAR * run.jit_peak_bytes)
    assert account_of(run) == pytest.approx(run.account_bytes, abs=_NEAR * run.jit_peak_bytes)
    assert replayed(run) > account_of(run)


def test_without_the_account_of_the_allocator_the_model_is_far_off() -> None:
    """So that the test above can fail: what the plans ask for is 4 % and more of plain jit's peak below what was measured."""
    assert all(account_of(run) < run.allocator_bytes - 0.04 * run.jit_peak_bytes for run in runs())
