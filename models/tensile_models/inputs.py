"""Makes the input of a model for given sizes: the shapes of a batch, the stream of batches, and the name of the label array.

Each function checks the given sizes, and reads no file before the first batch is needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tensile_models import data
from tensile_models.model import Batch, check_sizes

SMALLEST_DIGIT = 8  # the digits as they are


@dataclass(frozen=True)
class Input:
    """The input of a model.

    Attributes:
        inputs: the names of the batch's arrays that the network reads, in its order.
        labels: the name of the batch's array of labels, one for each row of logits.
        batch_shape: a batch, with a `jax.ShapeDtypeStruct` for each array.
        batches: endless batches as NumPy arrays; the same sequence each time.
        test: inputs and labels to measure accuracy on, loaded when asked for.
    """

    inputs: tuple[str, ...]
    labels: str
    batch_shape: Batch
    batches: Callable[[], Iterator[Batch]]
    test: Callable[[], data.Images] | None = None


def digit_input(*, batch_size: int, image_size: int, seed: int) -> Input:
    """Handwritten digits, grey, enlarged to `image_size`; some of them are kept for a test."""
    check_sizes(at_least=SMALLEST_DIGIT, image_size=image_size)
    return Input(
        *_images(batch_size, image_size, channels=1, seed=seed),
        batches=lambda: data.digit_batches(batch_size=batch_size, image_size=image_size, seed=seed),
        test=lambda: data.digits(test=True, image_size=image_size),
    )


def photograph_input(*, batch_size: int, image_size: int, smallest: int, classes: int, seed: int) -> Input:
    """Crops of photographs, for a network of `classes` that takes images of `smallest` pixels a side or more."""
    check_sizes(batch_size=batch_size)
    check_sizes(at_least=smallest, image_size=image_size)
    check_sizes(at_least=data.PHOTOGRAPHS, classes=classes)
    return Input(
        *_images(batch_size, image_size, channels=3, seed=seed),
        batches=lambda: data.photograph_batches(batch_size=batch_size, image_size=image_size, seed=seed),
    )


def text_input(*, batch_size: int, sequence_length: int, seed: int) -> Input:
    """English text, one token per byte; the label of a token is the next token."""
    check_sizes(at_least=0, seed=seed)
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    return Input(
        ("tokens",),
        "targets",
        {"tokens": tokens, "targets": tokens},
        batches=lambda: data.text_batches(batch_size=batch_size, sequence_length=sequence_length, seed=seed),
    )


def masked_text_input(*, batch_size: int, sequence_length: int, seed: int) -> Input:
    """English text, one token per byte; the labels are what stood at the masked places."""
    check_sizes(at_least=0, seed=seed)
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    masked = jax.ShapeDtypeStruct((batch_size, data.masked_in(sequence_length)), jnp.int32)
    return Input(
        ("tokens", "masked"),
        "targets",
        {"tokens": tokens, "masked": masked, "targets": masked},
        batches=lambda: data.masked_text_batches(batch_size=batch_size, sequence_length=sequence_length, seed=seed),
    )


def _images(batch_size: int, image_size: int, *, channels: int, seed: int) -> tuple[tuple[str, ...], str, Batch]:
    check_sizes(at_least=0, seed=seed)
    shape = (batch_size, image_size, image_size, channels)
    batch = {"image": jax.ShapeDtypeStruct(shape, jnp.float32), "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}
    return ("image",), "label", batch
