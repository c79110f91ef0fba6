"""Tensors that live at the same time do not overlap on a page."""

import random

from tensile_jax.pages.offsets import offsets


def test_tensors_that_live_at_once_never_overlap() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lives = [(b := rng.randrange(20), b + rng.randrange(1, 9), rng.randrange(1, 50)) for _ in range(30)]
        found = offsets(lives)
        for i, (begin, end, size) in enumerate(lives):
            for j, (other_begin, other_end, other_size) in enumerate(lives[:i]):
                if begin < other_end and other_begin < end:
                    assert found[i] + size <= found[j] or found[j] + other_size <= found[i]


def test_memory_is_used_again_once_it_is_free() -> None:
    assert offsets([(0, 2, 5), (2, 4, 5)]) == [0, 0]
    assert offsets([]) == []
