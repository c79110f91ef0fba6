"""Defines InceptionV3, a convolutional network of parallel branches with factorised convolutions.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2015), table 1 and figures 5 to 7, with the widths of
the authors' code. With 1000 classes and without the auxiliary head it has 23,834,568 parameters and 34,432 running statistics.

`blocks` are the numbers of blocks at 35, 17 and 8 pixels a side. Between two of these sizes, one more block halves the image.
"""

from functools import partial

from tensile_models.classifier import Classifier
from tensile_models.inception import SMALLEST_IMAGE, WIDTH, Conv, Fork, Inception, fork, halve

STEM = (
    halve(32),
    Conv(32, (3, 3), padding="VALID"),
    Conv(64, (3, 3)),
    "max",
    Conv(80),
    Conv(192, (3, 3), padding="VALID"),
    "max",
)


def make_blocks(at_35: int, at_17: int, at_8: int) -> tuple[Fork, ...]:
    """All blocks in order."""
    pooled = [32 if index == 0 else 64 for index in range(at_35)]
    narrow = [128 if index == 0 else 192 if index == at_17 - 1 else 160 for index in range(at_17)]
    return (
        *(block_at_35(width) for width in pooled),
        fork([halve(384)], [Conv(64), Conv(96, (3, 3)), halve(96)], ["max"]),
        *(block_at_17(width) for width in narrow),
        fork([Conv(192), halve(320)], [Conv(192), Conv(192, (1, 7)), Conv(192, (7, 1)), halve(192)], ["max"]),
        *(block_at_8() for _ in range(at_8)),
    )


def block_at_35(pooled: int) -> Fork:
    """The paper's figure 5, with one 5x5 convolution in the second branch, as in the authors' code."""
    return fork(
        [Conv(64)],
        [Conv(48), Conv(64, (5, 5))],
        [Conv(64), Conv(96, (3, 3)), Conv(96, (3, 3))],
        ["average", Conv(pooled)],
    )


def block_at_17(narrow: int) -> Fork:
    """The paper's figure 6 with n = 7: a 7x7 convolution as 1x7 and 7x1."""
    return fork(
        [Conv(192)],
        [Conv(narrow), Conv(narrow, (1, 7)), Conv(192, (7, 1))],
        [Conv(narrow), Conv(narrow, (7, 1)), Conv(narrow, (1, 7)), Conv(narrow, (7, 1)), Conv(192, (1, 7))],
        ["average", Conv(192)],
    )


def block_at_8() -> Fork:
    """The paper's figure 7: 1x3 and 3x1 convolutions side by side."""
    wide = fork([Conv(384, (1, 3))], [Conv(384, (3, 1))])
    return fork(
        [Conv(320)],
        [Conv(384), wide],
        [Conv(448), Conv(384, (3, 3)), wide],
        ["average", Conv(192)],
    )


inceptionv3 = Classifier(
    "inceptionv3",
    partial(Inception, stem=STEM, make_blocks=make_blocks),
    image_size=299,
    smallest_image=SMALLEST_IMAGE,
    width=WIDTH,
    blocks=(3, 4, 2),
    fewest_blocks=0,
)
