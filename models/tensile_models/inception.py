"""Defines the network of which InceptionV3 and InceptionV4 are two forms: blocks of parallel branches, with concatenated results.

A network is given as data, by this grammar:

    Network ::= stem=(Layer*) blocks=(Fork*)
    Layer   ::= Conv | Fork | "max" | "average"
    Fork    ::= (Branch*)                        the channels of all branches, concatenated
    Branch  ::= (Layer*)                         one layer after another

`Conv` is a convolution without a bias, batch norm and ReLU. "max" is the maximum of 3x3 pixels with a stride of two. "average" is
the mean of 3x3 pixels with a stride of one, and includes the zeros around the image. The global average and a linear head follow
the blocks. The auxiliary head and dropout are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models.layers import batch_norm, head

SMALLEST_IMAGE = 75  # five halvings, most of them without zeros around the image, leave one pixel
WIDTH = 32  # channels of the first convolution; the widths in the tables of both networks go with it


@dataclass(frozen=True)
class Conv:
    """A convolution of `width` channels. The kernel is (height, width); "VALID" puts no zeros around the image."""

    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: Literal["SAME", "VALID"] = "SAME"


@dataclass(frozen=True)
class Fork:
    """Branches that read the same image."""

    branches: tuple[tuple["Layer", ...], ...]


Layer = Conv | Fork | Literal["max", "average"]


def halve(width: int) -> Conv:
    """The convolution that halves an image: 3x3 with a stride of two, and no zeros around the image."""
    return Conv(width, (3, 3), stride=2, padding="VALID")


def fork(*branches: Sequence[Layer]) -> Fork:
    """The branches side by side."""
    return Fork(tuple(tuple(branch) for branch in branches))


class Inception(nn.Module):
    """A stem, blocks, global average, linear head."""

    classes: int
    width: int
    blocks: Sequence[int]
    dtype: DTypeLike
    stem: tuple[Layer, ...]
    make_blocks: Callable[..., tuple[Fork, ...]]  # called with the numbers `blocks`

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = Chain(self.stem, self.width, self.dtype, name="Stem")(images, train=train)
        for index, block in enumerate(self.make_blocks(*self.blocks)):
            x = Branches(block, self.width, self.dtype, name=f"Block_{index}")(x, train=train)
        return head(x, self.classes, dtype=self.dtype)


class Branches(nn.Module):
    """The branches of a fork, each on the same image."""

    fork: Fork
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        chains = [
            Chain(branch, self.width, self.dtype, name=f"Branch_{index}") for index, branch in enumerate(self.fork.branches)
        ]
        return jnp.concatenate([chain(x, train=train) for chain in chains], axis=-1)


class Chain(nn.Module):
    """Layers one after another. Each has the name of its place, such as `Conv_2`."""

    layers: tuple[Layer, ...]
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Conv):
                x = ConvNorm(layer, self.width, self.dtype, name=f"Conv_{index}")(x, train=train)
            elif isinstance(layer, Fork):
                x = Branches(layer, self.width, self.dtype, name=f"Fork_{index}")(x, train=train)
            elif layer == "max":
                x = nn.max_pool(x, (3, 3), strides=(2, 2))
            else:
                x = nn.avg_pool(x, (3, 3), padding="SAME")
        return x


class ConvNorm(nn.Module):
    """A convolution, batch norm and ReLU."""

    conv: Conv
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        width = self.conv.width * self.width // WIDTH
        stride, padding = self.conv.stride, self.conv.padding
        x = nn.Conv(width, self.conv.kernel, stride, padding, use_bias=False, dtype=self.dtype, name="Conv")(x)
        return nn.relu(batch_norm("Norm", train=train, dtype=self.dtype, epsilon=1e-3)(x))
