"""`assert_peak` fails in one readable message when a peak is too high, and names what has grown."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tensile_jax.memory_report.assert_peak import UPDATE
from tests.memory_report.small_functions import BATCH, IMAGES, WEIGHTS, WIDTH, forward, shape

X = 4 * BATCH * WIDTH


def wider(w: jax.Array, images: jax.Array) -> jax.Array:
    doubled = jnp.concatenate([images, images])
    return forward(w, doubled)


@pytest.fixture
def peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A baseline with the peak of `forward`."""
    monkeypatch.setenv(UPDATE, "1")
    tensile.assert_peak(forward, WEIGHTS, IMAGES, baseline=tmp_path / "peaks.json", name="forward")
    monkeypatch.delenv(UPDATE)
    return tmp_path / "peaks.json"


def test_a_peak_within_the_limit_passes_and_gives_the_report() -> None:
    report = tensile.assert_peak(forward, WEIGHTS, IMAGES, at_most="1MiB")
    assert report.compiled_peak_bytes is not None and report.compiled_peak_bytes <= 2**20


def test_a_peak_above_the_limit_names_the_largest_tensors_and_their_lines() -> None:
    with pytest.raises(AssertionError) as failed:
        tensile.assert_peak(forward, WEIGHTS, IMAGES, at_most=X)
    message = str(failed.value)
    assert message.startswith("The peak of 'forward' is ") and "above at_most=64 KiB" in message
    assert "images float32[256,64]" in message and "dot_general" in message and "small_functions.py:" in message


def test_the_same_function_passes_its_baseline(peaks: Path) -> None:
    tensile.assert_peak(forward, WEIGHTS, IMAGES, baseline=peaks)
    recorded = json.loads(peaks.read_text())["forward"]
    assert recorded["jax"] == jax.__version__ and recorded["tensors"]["images"] == X


def test_a_larger_peak_names_what_is_new_and_what_has_grown(peaks: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        tensile.assert_peak(wider, WEIGHTS, IMAGES, baseline=peaks, name="forward")
    message = str(failed.value)
    assert f"above {json.loads(peaks.read_text())['forward']['peak_bytes'] / 1024:.4g} KiB in {peaks}" in message
    assert "New or larger at the peak:" in message and "was 64 KiB" in message and ", new" in message
    assert "images float32[256,64]" not in message  # it has not grown
    tensile.assert_peak(wider, WEIGHTS, IMAGES, baseline=peaks, name="forward", tolerance=2.0)


def test_a_function_without_an_entry_says_how_to_record_it(peaks: Path, tmp_path: Path) -> None:
    for file in (peaks, tmp_path / "none.json"):
        with pytest.raises(AssertionError, match=f"has no entry for 'wider'.*{UPDATE}=1"):
            tensile.assert_peak(wider, WEIGHTS, IMAGES, baseline=file)
    assert not (tmp_path / "none.json").exists()


def test_updating_keeps_the_other_entries(peaks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UPDATE, "1")
    tensile.assert_peak(wider, WEIGHTS, IMAGES, baseline=peaks)
    assert sorted(json.loads(peaks.read_text())) == ["forward", "wider"]


def test_wrong_arguments_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to compare with"):
        tensile.assert_peak(forward, WEIGHTS, IMAGES)
    with pytest.raises(ValueError, match="share of the peak itself"):
        tensile.assert_peak(forward, WEIGHTS, IMAGES, at_most="50%")
    with pytest.raises(ValueError, match="tolerance must be"):
        tensile.assert_peak(forward, WEIGHTS, IMAGES, at_most=1, tolerance=-1)
    (tmp_path / "peaks.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a file of peaks"):
        tensile.assert_peak(forward, WEIGHTS, shape(1), baseline=tmp_path / "peaks.json")
