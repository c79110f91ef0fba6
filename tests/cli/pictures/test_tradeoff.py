"""The picture of a comparison: EOR over MSR."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tensile_jax.cli.pictures.tradeoff import draw, round_numbers
from tests.pages.builders import comparison, entry


@pytest.mark.parametrize("high", [1.1, 1.3, 2.0, 3.6, 7.0, 13.5, 90.0])
def test_the_axis_has_enough_round_numbers_that_are_apart(high: float) -> None:
    numbers = round_numbers(0.95, high)
    assert 5 <= len(numbers) <= 17
    assert 1.0 in numbers and numbers == sorted(numbers)
    assert numbers[-1] >= high / 1.55  # no part of the axis is without a number


def test_the_labels_are_the_numbers_themselves(tmp_path: Path) -> None:
    made = replace(comparison(), curve=(entry("auto", 4096, 4000, 1.0), entry("auto", 0, 1024, 12.8)))
    png, svg = draw(made, tmp_path / "tradeoff", title="step")
    assert png.read_bytes().startswith(b"\x89PNG")
    labels = re.findall(r"<!-- ([\d.]+) -->", svg.read_text())  # matplotlib draws a text as paths, and keeps it as a comment
    assert {"1", "1.5", "2", "3", "5", "10"} <= set(labels)


def test_a_point_above_the_curve_is_within_the_picture(tmp_path: Path) -> None:
    slow = entry("vdnn", 2048, 2040, 40.0)
    _, svg = draw(replace(comparison(), least=((slow, slow),)), tmp_path / "tradeoff", title="step")
    assert "<!-- 20 -->" in svg.read_text()
