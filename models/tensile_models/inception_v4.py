"""Defines InceptionV4, a larger and more uniform network of parallel branches.

Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning" (2016), figures 3 to 9. Where
the figures and the authors' code differ in the order of a 1x7 and a 7x1 convolution, this file follows the code. With 1000
classes the network has 42,679,816 parameters and 63,168 running statistics.

`blocks` are the numbers of blocks A, B and C, at 35, 17 and 8 pixels a side. Between two of these sizes, one more block halves
the image.
"""

from functools import partial

from tensile_models.classifier import Classifier
from tensile_models.inception import SMALLEST_IMAGE, WIDTH, Conv, Fork, Inception, fork, halve

_VALID_3X3 = Conv(96, (3, 3), padding="VALID")

STEM = (
    halve(32),
    Conv(32, (3, 3), padding="VALID"),
    Conv(64, (3, 3)),
    fork(["max"], [halve(96)]),
    fork([Conv(64), _VALID_3X3], [Conv(64), Conv(64, (1, 7)), Conv(64, (7, 1)), _VALID_3X3]),
    fork([halve(192)], ["max"]),
)

BLOCK_A = fork(
    [Conv(96)],
    [Conv(64), Conv(96, (3, 3))],
    [Conv(64), Conv(96, (3, 3)), Conv(96, (3, 3))],
    ["average", Conv(96)],
)
REDUCTION_A = fork([halve(384)], [Conv(192), Conv(224, (3, 3)), halve(256)], ["max"])

BLOCK_B = fork(
    [Conv(384)],
    [Conv(192), Conv(224, (1, 7)), Conv(256, (7, 1))],
    [Conv(192), Conv(192, (7, 1)), Conv(224, (1, 7)), Conv(224, (7, 1)), Conv(256, (1, 7))],
    ["average", Conv(128)],
)
REDUCTION_B = fork([Conv(192), halve(192)], [Conv(256), Conv(256, (1, 7)), Conv(320, (7, 1)), halve(320)], ["max"])

_WIDE = fork([Conv(256, (1, 3))], [Conv(256, (3, 1))])
BLOCK_C = fork(
    [Conv(256)],
    [Conv(384), _WIDE],
    [Conv(384), Conv(448, (3, 1)), Conv(512, (1, 3)), _WIDE],
    ["average", Conv(256)],
)


def make_blocks(a: int, b: int, c: int) -> tuple[Fork, ...]:
    """All blocks in order."""
    return (*[BLOCK_A] * a, REDUCTION_A, *[BLOCK_B] * b, REDUCTION_B, *[BLOCK_C] * c)


inceptionv4 = Classifier(
    "inceptionv4",
    partial(Inception, stem=STEM, make_blocks=make_blocks),
    image_size=299,
    smallest_image=SMALLEST_IMAGE,
    width=WIDTH,
    blocks=(4, 7, 3),
    fewest_blocks=0,
)
