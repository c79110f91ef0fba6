"""Copies of arguments, and arguments that are moved by one unit in the last place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tensile_jax.checking.ways import Allocated, Arguments, allocator_peak, copy_of, nudged
from tensile_jax.exec.call.signature import SignatureReader
from tensile_jax.exec.checkpoint.leaves import host_copy

DEVICE = jax.devices()[0]
ON_HOST = SingleDeviceSharding(DEVICE, memory_kind="pinned_host")


def arguments(*leaves: Any, donated: tuple[int, ...] = (), fed_back: Any = (), passed_on: tuple[int, ...] = ()) -> Arguments:
    reader = SignatureReader(lambda *args: None)
    return Arguments(reader, leaves, {}, leaves, frozenset(donated), tuple(fed_back), frozenset(passed_on))


VALUES = {
    "uncommitted": jnp.ones(4),
    "committed": jax.device_put(jnp.ones(4), DEVICE),
    "on the host": jax.device_put(jnp.ones(4), ON_HOST),
    "a key": jax.random.key(3),
    "packed": jnp.ones(4, "int4"),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.smoke
def test_a_copy_is_where_the_array_is_and_outlives_it(kind: str) -> None:
    value: Any = VALUES[kind]
    expected = host_copy(value)
    copied = copy_of(value)
    assert (copied.aval, copied.sharding, copied.committed) == (value.aval, value.sharding, value.committed)
    copied.delete()
    np.testing.assert_array_equal(host_copy(value), expected)


def test_each_floating_point_number_moves_to_a_neighbour() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        value = jnp.linspace(-2, 3, 401, dtype=dtype)
        moved, before = (np.asarray(x, "float64") for x in (nudged(value, 0), value))
        eps = float(jnp.finfo(dtype).eps)
        assert ((moved != before) == (before != 0)).all() and (np.abs(moved - before) <= eps * np.abs(before)).all()
        assert (moved > before).any() and (moved < before).any()


def test_what_has_no_neighbours_stays() -> None:
    for value in (jnp.arange(3), jax.random.key(0), np.array([0.0, np.inf, -np.inf], "float32"), 1.5, jnp.zeros((0, 2))):
        assert nudged(value, 0) is value or (np.asarray(nudged(value, 0)) == np.asarray(value)).all()
    largest = np.array([np.finfo("float32").max, -np.finfo("float32").max])
    assert np.isfinite(nudged(largest, 1)).all()
    assert np.isnan(nudged(np.array([np.nan], "float32"), 0)).all()


def test_moved_arguments_are_where_the_others_are_and_the_same_each_time() -> None:
    for value in (jnp.ones(4), jax.device_put(jnp.ones(4), ON_HOST)):
        moved = nudged(value, 0)
        assert (moved.sharding, moved.committed) == (value.sharding, value.committed)
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(nudged(value, 0)))


def test_only_donated_arguments_are_copied() -> None:
    a, b = jnp.ones(3), np.ones(3)
    first, second, third = arguments(a, b, a, donated=(0, 1)).first()
    assert first is not a and second is not b and third is a


def test_results_take_the_places_of_arguments() -> None:
    a, b, new, metrics = (jnp.full(3, i) for i in range(4))
    given = arguments(a, b, donated=(0,), fed_back=[(0, 1)]).following([metrics, new])
    assert given[0] is new and given[1] is b


def test_a_result_that_is_an_argument_or_is_given_twice_is_copied_before_it_is_donated() -> None:
    a, b = jnp.ones(3), jnp.ones(3)
    passed = arguments(a, b, donated=(0,), fed_back=[(0, 0)], passed_on=(0,)).following([b])
    assert passed[0] is not b and passed[1] is b
    new = jnp.ones(3)
    twice = arguments(a, b, donated=(0, 1), fed_back=[(0, 0), (1, 1)]).following([new, new])
    assert twice[0] is new and twice[1] is not new


def test_the_allocators_peak_is_that_of_the_calls_alone() -> None:
    given = arguments(jnp.ones(100), jnp.ones(50), np.ones(7), donated=(0,))  # 400 bytes that are copied, 200 that are not
    before = Allocated(in_use=10_000, peak=11_000)
    assert allocator_peak(before, Allocated(in_use=10_000, peak=13_000), given) == (3_200, False)
    assert allocator_peak(before, Allocated(in_use=10_000, peak=11_000), given) == (1_200, True)
    assert allocator_peak(None, None, given) == (None, False)
    assert (given.copied_bytes, given.uncopied_bytes) == (400, 200)


def test_a_backend_that_counts_nothing_says_so() -> None:
    assert Allocated.on(jax.devices("cpu")[0]) is None
