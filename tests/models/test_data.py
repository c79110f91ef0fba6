"""Data: real, offline, reproducible, and clear about what is missing."""

import sys
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pytest
from tensile_models import data
from tensile_models.data import Batch, digit_batches, digits, masked_text_batches, photograph_batches, text_batches

STREAMS: dict[str, Callable[[int], Iterator[Batch]]] = {
    "digits": lambda seed: digit_batches(batch_size=4, seed=seed),
    "photographs": lambda seed: photograph_batches(batch_size=4, image_size=16, seed=seed),
    "masked text": lambda seed: masked_text_batches(batch_size=4, sequence_length=16, seed=seed),
    "text": lambda seed: text_batches(batch_size=4, sequence_length=16, seed=seed),
}


def same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_one_seed_gives_the_same_batches_and_another_seed_others(stream: Callable[[int], Iterator[Batch]]) -> None:
    first = list(islice(stream(0), 3))
    assert all(map(same, first, islice(stream(0), 3)))
    assert not any(map(same, first, islice(stream(1), 3)))
    assert not same(first[0], first[1])


def test_every_digit_is_either_a_train_digit_or_a_test_digit() -> None:
    train, test = digits(test=False), digits(test=True)
    assert (train.images.shape, test.images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert set(train.labels) == set(test.labels) == set(range(10))


def test_an_enlarged_digit_repeats_its_pixels() -> None:
    small, large = digits(test=True), digits(test=True, image_size=16)
    assert np.array_equal(large.images, small.images.repeat(2, axis=1).repeat(2, axis=2))


def test_each_digit_comes_once_before_any_comes_again() -> None:
    batches = digit_batches(batch_size=479)  # 1,437 in three
    counts = np.bincount(np.concatenate([batch["label"] for batch in islice(batches, 3)]))
    assert np.array_equal(counts, np.bincount(digits(test=False).labels))


def test_a_batch_may_be_larger_than_all_the_digits() -> None:
    assert next(digit_batches(batch_size=3000))["image"].shape == (3000, 8, 8, 1)


@pytest.mark.parametrize("image_size", [1, 32, 500])
def test_photographs_are_cropped_to_any_size_and_normalised(image_size: int) -> None:
    batch = next(photograph_batches(batch_size=8, image_size=image_size))
    assert batch["image"].shape == (8, image_size, image_size, 3)
    assert batch["image"].dtype == np.float32
    assert np.abs(batch["image"]).max() < 3  # (0 - .485) / .229 to (1 - .406) / .225
    assert set(batch["label"]) == {0, 1}


def test_resizing_keeps_a_ramp_a_ramp() -> None:
    ramp = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None], (4, 4, 3))
    halved = data.resize(ramp, 2)
    assert np.array_equal(halved[:, 0, 0], [0.5, 2.5])
    assert np.array_equal(data.resize(ramp, 4), ramp)
    assert np.array_equal(data.resize(ramp, 8)[:, 0, 0], [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])


def test_text_is_english_and_targets_are_one_byte_further_on() -> None:
    batch = next(text_batches(batch_size=2, sequence_length=2000))
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert b" the " in bytes(batch["tokens"][0].astype(np.uint8))


def test_masked_text_hides_some_tokens_and_targets_are_what_was_there() -> None:
    length = 1000
    masked = next(masked_text_batches(batch_size=2, sequence_length=length))
    places, hidden = masked["masked"], np.take_along_axis(masked["tokens"], masked["masked"], axis=1)
    assert places.shape == (2, 150) and np.all(np.diff(places, axis=1) > 0)  # none twice
    assert np.sum(masked["tokens"] == data.MASK) == np.sum(hidden == data.MASK)
    assert 0.7 < np.mean(hidden == data.MASK) < 0.9
    assert np.any(hidden == masked["targets"])
    assert np.any((hidden != masked["targets"]) & (hidden != data.MASK))
    whole = masked["tokens"].copy()
    np.put_along_axis(whole, places, masked["targets"], axis=1)
    assert b" the " in bytes(whole[0].astype(np.uint8))


def test_at_least_one_token_of_a_window_is_masked() -> None:
    assert next(masked_text_batches(batch_size=2, sequence_length=2))["masked"].shape == (2, 1)


def test_a_window_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length must be less than the text's .* bytes: got 100000000"):
        next(text_batches(batch_size=1, sequence_length=10**8))


@pytest.mark.parametrize(
    ("hidden", "stream"),
    [("sklearn", "digits"), ("sklearn", "photographs"), ("PIL", "photographs")],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(hidden: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)  # what makes Python say that it is not there
    for loaded in (data.load_digits, data.load_photographs):
        loaded.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"not installed. Install .* pip install 'tensile_jax\[data\]'"):
        next(STREAMS[stream](0))
