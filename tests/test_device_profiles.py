"""Which profile a device has, where its rates come from, and what plans say of them."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import jax
import pytest

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import calibrations, load_profile, profile_for, profile_names
from tensile_jax.device_profiles.calibrations import SCHEMA_VERSION, Calibration, Sample
from tests.builders import batch, sgd_step, weights

RATES = {
    "flops_per_us": 2e5,
    "bytes_per_us": 1e4,
    "device_to_host_bytes_per_us": 3e3,
    "host_to_device_bytes_per_us": 3e3,
    "launch_us": 20.0,
    "copy_share": 0.0,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(tmp_path))
    return tmp_path


def calibration(kind: str, **rates: float) -> Calibration:
    stages = {"launch": (Sample("launch", 1, 20.0),)}
    return Calibration(SCHEMA_VERSION, kind, "gpu", version("jaxlib"), "2026-11-23T00:00:00+00:00", False, stages, RATES | rates)


@pytest.mark.parametrize(
    ("kind", "name", "basis"),
    [
        ("cpu", "cpu", "measured"),
        ("NVIDIA H200", "h200", "measured"),
        ("NVIDIA H100 80GB HBM3", "h100", "published"),
        ("NVIDIA A100-SXM4-80GB", "a100", "published"),
        ("NVIDIA B200", "b200", "published"),
        ("NVIDIA L4", "l4", "published"),
        ("NVIDIA GeForce RTX 4090", "rtx4090", "published"),
        ("NVIDIA L40S", "unknown", "unknown"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "unknown", "unknown"),
        ("NVIDIA GH200 480GB", "unknown", "unknown"),
        ("TPU v5 lite", "unknown", "unknown"),
    ],
)
def test_the_profile_is_that_of_the_kind_of_device_and_never_a_guess(cache: Path, kind: str, name: str, basis: str) -> None:
    profile = profile_for(kind)
    assert (profile.name, profile.basis) == (name, basis)


def test_every_profile_says_where_its_rates_come_from() -> None:
    for name in profile_names():
        profile = load_profile(name)
        assert profile.source and (profile.kinds or profile.basis == "unknown")
        assert "data sheet" in profile.source or "white paper" in profile.source or profile.basis != "published"


def test_what_was_measured_of_a_kind_of_device_is_its_profile(cache: Path) -> None:
    assert calibrations.write(calibration("NVIDIA L4")) is not None
    profile = profile_for("NVIDIA L4")
    assert (profile.basis, profile.launch_us, profile.flops_per_us) == ("measured", 20.0, 2e5)
    assert profile.late_weight == load_profile("l4").late_weight  # of the compiler, which was not measured
    assert profile_for("NVIDIA L4", "l4") == load_profile("l4")
    assert profile_for("NVIDIA H200").name == "h200"


SPOILED: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[: len(text) // 2],
    "of another device": lambda text: text.replace("NVIDIA L4", "NVIDIA L40"),
    "of another version": lambda text: text.replace(version("jaxlib"), "0.0.1"),
    "of another schema": lambda text: text.replace('"schema_version": 2', '"schema_version": 7'),
    "with a rate of zero": lambda text: text.replace("20.0\n", "0.0\n").replace('"launch_us": 20.0', '"launch_us": 0.0'),
    "with a text as a rate": lambda text: text.replace('"launch_us": 20.0', '"launch_us": "fast"'),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_calibration_is_ignored_with_a_notice(cache: Path, how: str) -> None:
    file = calibrations.write(calibration("NVIDIA L4"))
    assert file is not None
    file.write_text(SPOILED[how](file.read_text()))
    with pytest.warns(UserWarning, match="is ignored"):
        assert profile_for("NVIDIA L4").name == "l4"
    assert calibrations.write(calibration("NVIDIA L4")) == file
    assert profile_for("NVIDIA L4").launch_us == 20.0


def test_an_incomplete_calibration_is_not_used(cache: Path) -> None:
    calibrations.write(dataclasses.replace(calibration("NVIDIA L4"), rates={}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_for("NVIDIA L4").name == "l4"


def test_without_a_folder_to_write_to_a_calibration_lasts_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(blocked))
    assert calibrations.write(calibration("NVIDIA L4")) is None
    assert profile_for("NVIDIA L4").launch_us == 20.0


def test_plans_say_where_their_times_come_from(tmp_path: Path) -> None:
    args = weights(), batch()
    said = {name: str(tensile.jit(sgd_step, device_profile=name).plan(*args)) for name in ("cpu", "a100", "unknown")}
    assert "rates not measured" not in said["cpu"] and "uncalibrated" not in said["cpu"]
    assert "profile a100, rates not measured" in said["a100"]
    assert "profile unknown, uncalibrated" in said["unknown"] and "step       uncalibrated, " in said["unknown"]
    plan = tensile.jit(sgd_step, device_profile="unknown").plan(*args)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["rates"] == "unknown"


def test_a_share_of_plain_jits_peak_is_one_of_the_prediction_for_another_device() -> None:
    args = weights(), batch()
    function = tensile.jit(sgd_step, budget="80%", device_profile="h200")
    compiled = function.jit_peak_bytes(*args)
    plan = function.plan(*args)
    assert plan.budget_bytes is not None and "predicted" in plan.budget_basis
    here = tensile.jit(sgd_step, budget="80%")
    here.jit_peak_bytes(*args)
    assert here.plan(*args).budget_bytes == Budget(None, 0.8).resolve(compiled) != plan.budget_bytes


@pytest.mark.parametrize(
    ("text", "story"),
    [
        ('basis = "guessed"\n', "basis must be one of measured, published, unknown"),
        ("kinds = [1]\n", "kinds must be texts"),
        ("source = 7\n", "source must be a string"),
    ],
)
def test_a_profile_of_the_users_own_is_checked(tmp_path: Path, text: str, story: str) -> None:
    file = tmp_path / "mine.toml"
    fields = {
        k: v for k, v in dataclasses.asdict(load_profile("cpu")).items() if k not in ("kinds", "basis", "source", "latency_model")
    }
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    assert load_profile(str(file)).basis == "measured"
    file.write_text(file.read_text() + text)
    with pytest.raises(ValueError, match=story):
        load_profile(str(file))


def test_the_profile_of_this_machine_has_the_name_of_its_kind(cache: Path) -> None:
    assert profile_for(jax.devices()[0].device_kind).name == "cpu"


@pytest.mark.parametrize(
    ("environment", "allocator"),
    [
        ({}, "best_fit"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, "best_fit"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "best_fit"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "growing"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "exact"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "exact"),
    ],
)
def test_how_jax_allocates_in_this_process_says_how_memory_of_gpus_is_handed_out(
    environment: dict[str, str], allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load_profile("h200").allocator == allocator
    assert load_profile("cpu").allocator == "exact"


def test_the_file_of_a_profile_may_say_how_memory_is_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    shipped = (files("tensile_jax.device_profiles") / "h200.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(shipped + '\nallocator = "exact"\n')
    assert load_profile(str(file)).allocator == "exact"
    file.write_text(shipped + '\nallocator = "buddy"\n')
    with pytest.raises(ValueError, match="allocator must be one of exact, best_fit, growing, got 'buddy'"):
        load_profile(str(file))
