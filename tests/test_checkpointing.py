"""The networks of `benchmarks/blocks.py` train alike, however `jax.checkpoint` is placed in them."""

import jax
import numpy as np
import pytest

from benchmarks.blocks import PLAIN, WAYS, Chain, Way, decoder, mixer, recurrent, resnet
from benchmarks.checkpointing import apart, measured


def small() -> Chain:
    return decoder(layers=4, width=8, texts=2, length=8, words=16)


OTHERS = {
    "mixer": lambda: mixer(layers=4, width=8, images=2, size=16),
    "resnet": lambda: resnet(stages=(1, 1, 1, 1), width=4, images=2, size=32),
    "recurrent": lambda: recurrent(length=4, width=8, texts=2, letters=8),
}


def check_shapes(chain: Chain, way: Way) -> None:
    """The step returns a state like the one that it takes, and a loss."""
    workload = chain.workload(way)
    state = jax.eval_shape(workload.init)
    after, loss = jax.eval_shape(workload.step, state, jax.eval_shape(lambda: workload.batch(0)))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert loss.shape == ()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_network_in_each_way_is_a_training_step(way: Way) -> None:
    check_shapes(small(), way)


@pytest.mark.parametrize("name", OTHERS)
def test_each_network_is_a_training_step(name: str) -> None:
    chain = OTHERS[name]()
    check_shapes(chain, PLAIN)
    check_shapes(chain, next(way for way in reversed(WAYS) if chain.fits(way)))


def test_blocks_that_differ_are_no_loop_and_a_policy_of_names_needs_names() -> None:
    fitting = [way for way in WAYS if OTHERS["resnet"]().fits(way)]
    assert fitting and not any(way.scan or way.needs_names for way in fitting)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing_saveable, sqrt(n) groups", "scan, nothing_saveable, two levels"])
def test_a_network_by_hand_takes_plain_jits_step(name: str) -> None:
    chain = small()
    way = next(way for way in WAYS if way.name == name)
    plain, by_hand = chain.workload(PLAIN), chain.workload(way)
    expected, loss = jax.jit(plain.step)(plain.init(), plain.batch(0))
    state, own_loss = jax.jit(by_hand.step)(by_hand.init(), by_hand.batch(0))
    assert float(own_loss) == pytest.approx(float(loss), rel=1e-5)
    wanted = chain.stacked(expected[2][0].mu) if way.scan else expected[2][0].mu  # a tenth of the gradients
    for a, b in zip(jax.tree.leaves(state[2][0].mu), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_measurement_has_each_way_and_a_budget_of_the_same_bytes() -> None:
    found = measured(decoder(layers=4, width=32, texts=4, length=32, words=64), rounds=1)
    scanned = next(one for one in found if one["how"] == "scan, nothing_saveable")
    assert scanned["peak_ratio"] < 0.9 and scanned["time_ratio"] > 0
    assert {one["how"] for one in found} == {PLAIN.name, *(way.name for way in WAYS), "budget", "the least budget"}
    budgets = [one for one in found if one["how"] == "budget" and "peak_bytes" in one]
    assert budgets and all(one["peak_bytes"] <= one["budget_bytes"] for one in budgets)


def test_peaks_that_are_nearly_the_same_share_a_budget() -> None:
    assert apart([1000, 500, 502]) == [500, 1000]
