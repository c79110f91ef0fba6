"""Makes endless streams of batches, without a download, from data that installed packages contain.

    digits       1,797 handwritten digits, 8x8 grey (scikit-learn), fixed train and test split
    photographs  crops of scikit-learn's two sample photographs; the label says which of the two
    text         CPython's own documentation (`pydoc_data.topics`), one token for each byte
    masked text  the same text, with some tokens masked, which the model must fill in

A stream depends on its arguments alone: the same seed gives the same batches. The text comes from
the running interpreter, so the text differs a little between versions of Python.

Batches are dicts of NumPy arrays; images have the shape (batch, height, width, channels).
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]

PHOTOGRAPHS = 2
DIGITS = 10
BYTES = 256
MASK = BYTES  # the token that stands for one that is to be filled in
MASKED = 0.15  # of the tokens of a window are to be filled in, as in BERT
TEST_EVERY = 5  # every fifth digit is a test digit; neighbours are by the same writer

# Mean and standard deviation of ImageNet's channels, the usual normalisation of photographs.
CHANNEL_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
CHANNEL_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
SMALLEST_CROP = 128  # pixels of the photograph along a crop's side


class Images(NamedTuple):
    """Images (number, height, width, channels) as float32, and labels (number,) as int32."""

    images: np.ndarray
    labels: np.ndarray


def digits(*, test: bool, image_size: int = 8) -> Images:
    """The 1,437 train or 360 test digits, grey levels in [0, 1], enlarged to `image_size`."""
    every = load_digits()
    chosen = (np.arange(len(every.labels)) % TEST_EVERY == 0) == test
    nearest = (np.arange(image_size) * every.images.shape[1]) // image_size
    images = every.images[chosen][:, nearest][:, :, nearest]
    return Images(images, every.labels[chosen])


def digit_batches(*, batch_size: int, image_size: int = 8, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of the train digits. Each digit comes once before any digit comes again."""
    train = digits(test=False, image_size=image_size)
    generator = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, generator.permutation(len(train.labels))])
        taken, waiting = waiting[:batch_size], waiting[batch_size:]
        yield {"image": train.images[taken], "label": train.labels[taken]}


def photograph_batches(*, batch_size: int, image_size: int, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of random square crops, half of them mirrored, resized and normalised."""
    photographs = load_photographs()
    generator = np.random.default_rng(seed)
    while True:
        labels = generator.integers(len(photographs), size=batch_size, dtype=np.int32)
        images = np.stack([_crop(photographs[k], image_size, generator) for k in labels])
        yield {"image": images, "label": labels}


def text_batches(*, batch_size: int, sequence_length: int, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of random windows of the text; the target of a token is the next token."""
    generator = np.random.default_rng(seed)
    while True:
        windows = _windows(batch_size, sequence_length, generator)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def masked_in(sequence_length: int) -> int:
    """How many tokens of a window are to be filled in: at least one."""
    return max(1, round(MASKED * sequence_length))


def masked_text_batches(*, batch_size: int, sequence_length: int, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of random windows of the text, with some tokens to be filled in.

    `masked` are the places of these tokens in ascending order, and `targets` what was there. As in BERT, eight of ten are
    replaced by `MASK`, one by a random byte, and one stays.
    """
    generator = np.random.default_rng(seed)
    number = masked_in(sequence_length)
    while True:
        tokens = _windows(batch_size, sequence_length, generator)[:, :-1].copy()
        order = generator.random(tokens.shape).argsort(axis=1)
        masked = np.sort(order[:, :number], axis=1).astype(np.int32)
        targets = np.take_along_axis(tokens, masked, axis=1)
        chance = generator.random(masked.shape)
        other = generator.integers(BYTES, size=masked.shape, dtype=np.int32)
        shown = np.where(chance < 0.8, np.int32(MASK), np.where(chance < 0.9, other, targets))
        np.put_along_axis(tokens, masked, shown, axis=1)
        yield {"tokens": tokens, "masked": masked, "targets": targets}


def _windows(batch_size: int, sequence_length: int, generator: np.random.Generator) -> np.ndarray:
    """Random windows of the text, each one token longer than `sequence_length`."""
    text = _text()
    if sequence_length >= len(text):
        raise ValueError(
            f"sequence_length must be less than the text's {len(text)} bytes: got {sequence_length}. Pass a shorter one."
        )
    begin = generator.integers(len(text) - sequence_length, size=(batch_size, 1))
    return text[begin + np.arange(sequence_length + 1)]


def _crop(photograph: np.ndarray, image_size: int, generator: np.random.Generator) -> np.ndarray:
    height, width, _ = photograph.shape
    side = generator.integers(SMALLEST_CROP, min(height, width), endpoint=True)
    top = generator.integers(height - side, endpoint=True)
    left = generator.integers(width - side, endpoint=True)
    crop = resize(photograph[top : top + side, left : left + side], image_size)
    if generator.random() < 0.5:
        crop = crop[:, ::-1]
    return (crop - CHANNEL_MEAN) / CHANNEL_DEVIATION


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """A square image at another size, by bilinear interpolation between pixel centres."""
    side = len(image)
    position = np.clip((np.arange(size) + 0.5) * side / size - 0.5, 0, side - 1)
    before = position.astype(np.int64)
    after = np.minimum(before + 1, side - 1)
    share = (position - before).astype(np.float32)
    down = share[:, None, None]
    rows = image[before] * (1 - down) + image[after] * down
    across = share[:, None]
    return rows[:, before] * (1 - across) + rows[:, after] * across


@cache
def load_digits() -> Images:
    """All digits, in scikit-learn's order."""
    try:
        from sklearn import datasets  # optional: only the extra `data` has it
    except ModuleNotFoundError as error:
        raise _missing("digits", "scikit-learn", error) from error
    levels, labels = datasets.load_digits(return_X_y=True)
    images = np.asarray(levels, np.float32).reshape(-1, 8, 8, 1) / 16  # levels are 0 to 16
    return Images(images, np.asarray(labels, np.int32))


@cache
def load_photographs() -> tuple[np.ndarray, ...]:
    """Both photographs (height, width, 3), channels in [0, 1]."""
    try:
        import PIL  # noqa: F401  (scikit-learn reads JPEG files with it)
        from sklearn import datasets  # optional, as above
    except ModuleNotFoundError as error:
        raise _missing("photographs", "scikit-learn and pillow", error) from error
    return tuple(image.astype(np.float32) / 255 for image in datasets.load_sample_images().images)


@cache
def _text() -> np.ndarray:
    from pydoc_data.topics import topics  # 700 kB that only the decoder needs

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _missing(what: str, packages: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"The {what} are read with {packages}, and {error.name!r} is not installed. "
        "Install what is missing with: pip install 'tensile_jax[data]'",
        name=error.name,
    )
