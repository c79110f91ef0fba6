"""Makes a model of a convolutional network that classifies photographs: one constructor for all networks of this kind.

Each network has a file of its own, which says what the network is and which sizes were published. Parameters, running
statistics and the loss are float32; `dtype` is the type that the layers compute in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models.inputs import photograph_input
from tensile_models.model import Model, check_dtype, check_sizes
from tensile_models.training import adam_or, build_model


@dataclass(frozen=True)
class Classifier:
    """A network with the sizes that were published. A call makes a model of it, at these sizes or at others.

    Attributes:
        network: makes the module from `classes`, `width`, `blocks` and `dtype`.
        image_size: pixels along each side of an image.
        smallest_image: the fewest pixels along a side from which one pixel is left at the end.
        width: channels of the first convolution, or the number of channels that the network's file says; all others are in
            proportion to it.
        blocks: how many blocks, or layers, each stage has.
        fewest_blocks: how many each stage must have.
        learning_rate: the usual rate of Adam.
    """

    name: str
    network: Callable[..., nn.Module]
    image_size: int
    smallest_image: int
    width: int
    blocks: tuple[int, ...]
    fewest_blocks: int = 1
    learning_rate: float = 1e-3

    def __call__(
        self,
        *,
        batch_size: int,
        image_size: int | None = None,
        classes: int = 1000,
        width: int | None = None,
        blocks: Sequence[int] | None = None,
        dtype: DTypeLike = jnp.float32,
        seed: int = 0,
        learning_rate: float | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Model:
        """The network on crops of photographs, trained with Adam unless `optimizer` is given. None: as published."""
        width = self.width if width is None else width
        blocks = self.blocks if blocks is None else tuple(blocks)
        if len(blocks) != len(self.blocks):
            raise ValueError(f"blocks must be {len(self.blocks)} numbers: got {blocks}. Published are {self.blocks}.")
        check_sizes(width=width)
        check_sizes(at_least=self.fewest_blocks, **{f"blocks[{stage}]": number for stage, number in enumerate(blocks)})
        check_dtype(dtype)
        source = photograph_input(
            batch_size=batch_size,
            image_size=self.image_size if image_size is None else image_size,
            smallest=self.smallest_image,
            classes=classes,
            seed=seed,
        )
        module = self.network(classes=classes, width=width, blocks=blocks, dtype=dtype)
        optimizer = adam_or(optimizer, learning_rate, usual=self.learning_rate)
        return build_model(self.name, module, source, seed=seed, optimizer=optimizer)
