"""What compiling one segment teaches about the others."""

import dataclasses

import numpy as np

from tensile_jax.plan import Ladder, Measured, floor, order
from tensile_jax.plan.search.workspace import hopeful_workspaces, workspaces
from tests.builders import PROFILE, training_graph


def ladder() -> Ladder:
    return Ladder(order(training_graph(6)), PROFILE, state_may_stay_out=False)


def test_nothing_measured_leaves_the_estimates() -> None:
    found = workspaces(rungs := ladder(), 0, Measured())
    assert np.array_equal(found, rungs.rung(0).board.estimates(PROFILE.workspace_growth))


def test_what_was_measured_stands_and_what_overlaps_shares_the_surprise() -> None:
    rungs = ladder()
    board = rungs.rung(0).board
    last = len(board.boundaries) - 1
    middle = last // 2
    estimates = board.estimates(PROFILE.workspace_growth)
    beyond = 50_000
    shown = int(estimates[middle, last]) + beyond
    measured = Measured({(0, board.boundaries[middle], board.boundaries[last]): shown})
    found = workspaces(rungs, 0, measured)
    assert found[middle, last] == shown
    assert np.array_equal(found[:middle, : middle + 1], estimates[:middle, : middle + 1])  # nothing in common
    shares = [found[a, last] - estimates[a, last] for a in range(middle, last)]
    assert shares == sorted(shares, reverse=True)  # the less of it, the less of the surprise
    assert 0 < shares[-1] < beyond
    assert found[0, last] - estimates[0, last] == beyond  # all of it and more


def test_what_one_rung_has_shown_counts_for_another() -> None:
    rungs = ladder()
    other = next(i for i in range(1, len(rungs)) if rungs.rung(i) is not rungs.rung(0))
    board = rungs.rung(0).board
    measured = Measured({(0, 0, board.boundaries[-1]): int(board.estimates(PROFILE.workspace_growth)[0, -1]) + 10_000})
    estimates = rungs.rung(other).board.estimates(PROFILE.workspace_growth)
    assert workspaces(rungs, other, measured)[0, -1] == estimates[0, -1] + 10_000


def test_caution_is_asked_of_what_was_not_compiled_only() -> None:
    rungs = ladder()
    board = rungs.rung(0).board
    measured = Measured({(0, 0, board.boundaries[1]): 7}, caution=1000)
    plain = workspaces(rungs, 0, dataclasses.replace(measured, caution=0))
    found = workspaces(rungs, 0, measured)
    assert found[0, 1] == 7
    assert np.array_equal(np.delete(found - plain, 1)[:], np.delete(np.full(found.shape, 1000.0), 1))


def test_the_floor_takes_estimates_at_their_word_until_they_are_refuted() -> None:
    rungs = ladder()
    least, choice = floor(rungs, Measured())
    a, b = choice.boundaries[0], choice.boundaries[1]
    estimate = hopeful_workspaces(rungs, choice.rung, Measured())
    board = rungs.rung(choice.rung).board
    i, j = board.boundaries.index(a), board.boundaries.index(b)
    refuted = Measured({(choice.rung, a, b): int(estimate[i, j]) + 10**7})
    found = hopeful_workspaces(rungs, choice.rung, refuted)
    assert found[i, j] == estimate[i, j] + 10**7
    found[i, j] = estimate[i, j]
    assert np.array_equal(found, estimate)
    assert floor(rungs, refuted)[0] >= least
    assert floor(rungs, refuted)[1] != choice
