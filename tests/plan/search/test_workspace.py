"""What compiling one segment teaches about the others."""

import dataclasses

import numpy as np
from tensile_jax.plan.search.candidates import Candidates

from tensile_jax.plan import Measured
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.registry import floor
from tensile_jax.plan.search.workspace import workspace_lower_estimates, workspaces
from tests.builders import PROFILE, training_graph


def some_candidates() -> Candidates:
    return Candidates(order(training_graph(6)), PROFILE, state_may_stay_out=False)


def test_nothing_measured_leaves_the_estimates() -> None:
    found = workspaces(candidates := some_candidates(), 0, Measured())
    assert np.array_equal(found, candidates[0].table.estimates(PROFILE.workspace_growth))


def test_what_was_measured_stands_and_what_overlaps_shares_the_error() -> None:
    candidates = some_candidates()
    table = candidates[0].table
    last = len(table.boundaries) - 1
    middle = last // 2
    estimates = table.estimates(PROFILE.workspace_growth)
    beyond = 50_000
    shown = int(estimates[middle, last]) + beyond
    measured = Measured({(0, table.boundaries[middle], table.boundaries[last]): shown})
    found = workspaces(candidates, 0, measured)
    assert found[middle, last] == shown
    assert np.array_equal(found[:middle, : middle + 1], estimates[:middle, : middle + 1])  # nothing in common
    shares = [found[a, last] - estimates[a, last] for a in range(middle, last)]
    assert shares == sorted(shares, reverse=True)  # the less of it, the less of the error
    assert 0 < shares[-1] < beyond
    assert found[0, last] - estimates[0, last] == beyond  # all of it and more


def test_what_one_candidate_has_shown_counts_for_another() -> None:
    candidates = some_candidates()
    other = next(i for i in range(1, len(candidates)) if candidates[i] is not candidates[0])
    table = candidates[0].table
    measured = Measured({(0, 0, table.boundaries[-1]): int(table.estimates(PROFILE.workspace_growth)[0, -1]) + 10_000})
    estimates = candidates[other].table.estimates(PROFILE.workspace_growth)
    assert workspaces(candidates, other, measured)[0, -1] == estimates[0, -1] + 10_000


def test_the_margin_is_asked_of_what_was_not_compiled_only() -> None:
    candidates = some_candidates()
    table = candidates[0].table
    measured = Measured({(0, 0, table.boundaries[1]): 7}, margin=1000)
    plain = workspaces(candidates, 0, dataclasses.replace(measured, margin=0))
    found = workspaces(candidates, 0, measured)
    assert found[0, 1] == 7
    assert np.array_equal(np.delete(found - plain, 1)[:], np.delete(np.full(found.shape, 1000.0), 1))


def test_the_floor_takes_estimates_at_their_word_until_they_are_refuted() -> None:
    candidates = some_candidates()
    least, choice = floor(candidates, Measured())
    a, b = choice.boundaries[0], choice.boundaries[1]
    estimate = workspace_lower_estimates(candidates, choice.candidate, Measured())
    table = candidates[choice.candidate].table
    i, j = table.boundaries.index(a), table.boundaries.index(b)
    refuted = Measured({(choice.candidate, a, b): int(estimate[i, j]) + 10**7})
    found = workspace_lower_estimates(candidates, choice.candidate, refuted)
    assert found[i, j] == estimate[i, j] + 10**7
    found[i, j] = estimate[i, j]
    assert np.array_equal(found, estimate)
    assert floor(candidates, refuted)[0] >= least
    assert floor(candidates, refuted)[1] != choice
