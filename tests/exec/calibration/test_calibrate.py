"""A calibration measures every stage once, goes on where it was interrupted, and is made by itself for unknown devices."""

import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import tensile_jax as tensile
from tensile_jax.cli.main import main
from tensile_jax.device_profiles import calibrations
from tensile_jax.device_profiles.calibrations import SCHEMA_VERSION, Calibration, OperatorSample, Sample
from tensile_jax.exec.calibration import calibrate as module
from tensile_jax.exec.calibration import measure, operators
from tensile_jax.exec.calibration.calibrate import calibrate, profile_of
from tensile_jax.exec.calibration.fit import fit
from tensile_jax.exec.calibration.operators import samples_of
from tensile_jax.exec.calibration.random_layers import random_layer
from tensile_jax.trace.cost.flops import flops_of
from tensile_jax.trace.program import Nested
from tensile_jax.trace.reading.flatten import flatten
from tests.builders import batch, sgd_step, weights

DEVICE: Any = jax.devices()[0]


@pytest.fixture(autouse=True)
def in_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "QUICK_SECONDS", 1.0)
    monkeypatch.setattr(measure, "_COPIED", (2**20, 8 * 2**20, 16 * 2**20, 16 * 2**20))
    monkeypatch.setattr(measure, "_TOUCHED", (8 * 2**20,))
    return tmp_path


class OfKind:
    """A device of another kind."""

    platform = "gpu"

    def __init__(self, kind: str) -> None:
        self.device_kind = kind


def counted(monkeypatch: pytest.MonkeyPatch, fails_in: str | None = None) -> list[str]:
    """Replaces the stages by ones that measure nothing; the list fills with the names of those that ran."""
    ran: list[str] = []
    amounts: dict[str, tuple[str, ...]] = {
        "beside": ("copy", "alone", "together"), "launch": ("launch", "launch"), "memory": ("read and write",),
    }  # fmt: skip

    def stage(name: str) -> Any:
        def run(device: Any, seconds: float) -> Iterator[Sample]:
            ran.append(name)
            if name == fails_in:
                raise KeyboardInterrupt
            whats = amounts.get(name, (name,))
            yield from (Sample(what, 64 * 2**20, 100.0) for what in whats)

        return run

    monkeypatch.setattr(module, "STAGES", {name: stage(name) for name in measure.STAGES})
    monkeypatch.setattr(module, "measured_operators", lambda device, seconds: iter(()))
    return ran


def test_a_calibration_of_this_machine_gives_rates_that_can_be_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", 5.0)  # a slow machine measures no operator in less
    seen: list[tuple[int, int]] = []
    made = calibrate(DEVICE, quick=True, progress=lambda what, done, of: seen.append((done, of)))
    assert made.complete and set(made.stages) == set(measure.STAGES)
    assert seen[0] == (0, 9) and seen[-1] == (9, 9)
    assert made.operators and all(s.us > 0 and s.features for s in made.operators)
    assert 1e3 < made.rates["flops_per_us"] < 1e8 and 1e2 < made.rates["bytes_per_us"] < 1e7
    assert 0.1 < made.rates["launch_us"] < 1e5 and 0 <= made.rates["copy_share"] <= 1
    profile = profile_of(DEVICE)
    assert profile.basis == "measured" and profile.launch_us == made.rates["launch_us"]
    assert all(s.us > 0 for samples in made.stages.values() for s in samples)


def test_rates_of_a_gpu_are_those_of_the_bytes_by_which_two_sizes_differ() -> None:
    def grown(what: str, rate: float) -> tuple[Sample, ...]:  # the host takes 70 us of each
        return tuple(Sample(what, n * 2**20, 70 + n * 2**20 / rate) for n in (1, 8, 64, 256))

    stages = {
        "launch": (Sample("launch", 8, 60.0), Sample("launch", 64, 190.0)),
        "kernels": (Sample("kernel", 200, 9.0),),
        "out": (Sample("out, cold", 2**28, 1e6), *grown("out", 5e4)),
        "into": grown("into", 4e4),
        "memory": grown("read and write", 4e6),
        "products": (Sample("product", 3e9, 10.0), Sample("product", 1e9, 10.0)),
        "beside": (Sample("copy", 1, 100.0), Sample("products alone", 1, 50.0), Sample("products and a copy", 1, 52.0)),
    }
    assert measure.rates_of(stages, "gpu") == {
        "flops_per_us": pytest.approx(2e8),
        "bytes_per_us": pytest.approx(4e6),
        "device_to_host_bytes_per_us": pytest.approx(5e4),
        "host_to_device_bytes_per_us": pytest.approx(4e4),
        "copy_share": pytest.approx(0.02),
        "host_launch_us": 190.0,
        "host_kernel_us": 9.0,
    }
    on_cpu = measure.rates_of(stages, "cpu")
    assert on_cpu["launch_us"] == 60.0 and on_cpu["bytes_per_us"] < 1e6 and "host_kernel_us" not in on_cpu


def test_the_kernels_of_a_step_are_timed_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(measure.kernels(DEVICE, 0.01)) == []
    monkeypatch.setattr(measure, "_ones", lambda device, *shape: jnp.ones(shape))  # that device does not exist
    (sample,) = measure.kernels(cast(Any, OfKind("NVIDIA H200")), 0.01)
    assert sample.amount >= 9 * measure._BLOCKS and 0.1 < sample.us < 1e4


def test_on_a_gpu_an_executable_runs_its_operator_several_times() -> None:
    program = flatten(Nested(jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 16)), jnp.ones((16, 4)))))
    (product,) = program.equations
    lowered = operators._lowered(program, product, cast(Any, OfKind("NVIDIA H200")))
    assert lowered.as_text().count("dot_general") == operators._TIMES
    once = operators._lowered(program, product, DEVICE)
    assert once.as_text().count("dot_general") == 1
    several = lowered.compile()(jnp.ones((8, 16)), jnp.ones((16, 4)))
    assert [float(x[0]) for x in several] == [16.0] * operators._TIMES


def test_operators_of_a_real_step_are_measured_each_kind_once() -> None:
    def step(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    program = flatten(Nested(jax.make_jaxpr(jax.grad(step))(jnp.ones((64, 64)), jnp.ones((32, 64)))))
    products = [e for e in program.equations if e.primitive.name == "dot_general"]
    samples = samples_of(DEVICE, program, products)
    assert len(samples) == len(products) and all(s is not None and s.us > 0 and s.load == 0 for s in samples)
    different = {(s.primitive, s.features) for s in samples if s is not None}
    assert len({id(s) for s in samples}) == len(different)


def test_random_layers_are_of_every_kind_and_within_their_size() -> None:
    choice, seen = random.Random(0), set[str]()
    for _ in range(60):
        function, shapes = random_layer(choice, "cpu")
        program = flatten(Nested(jax.make_jaxpr(function)(*shapes)))
        seen |= {e.primitive.name for e in program.equations}
        assert max(flops_of(program, e) for e in program.equations) < 2e10
    assert {"conv_general_dilated", "dot_general", "reduce_window_sum", "gather"} <= seen


def test_a_plan_says_of_how_many_operators_the_time_is_rough(in_no_time: Path) -> None:
    samples = [OperatorSample("dot_general", (float(i % 7), 1.0), 10**6, 10**5, 0.0, 50.0 + i) for i in range(40)]
    rates = {"flops_per_us": 1e5, "bytes_per_us": 1e4, "launch_us": 10.0, "copy_share": 1.0}
    rates |= {"device_to_host_bytes_per_us": 1e3, "host_to_device_bytes_per_us": 1e3}
    stages = {"launch": (Sample("launch", 1, 10.0),)}
    made = Calibration(SCHEMA_VERSION, DEVICE.device_kind, "cpu", version("jaxlib"), "today", False, stages, rates)
    assert calibrations.write(made) is not None
    args = weights(), batch()
    assert not any("rough" in note for note in tensile.jit(sgd_step).plan(*args).notes)  # there is no model
    calibrations.write_model(DEVICE.device_kind, "today", fit(samples, 1e5, 1e4))
    plan = tensile.jit(sgd_step).plan(*args)
    assert plan.device_profile == "calibrated cpu"
    assert any("heavy operators are rough" in note for note in plan.notes)


def test_an_interrupted_calibration_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = counted(monkeypatch, fails_in="both")
    with pytest.raises(KeyboardInterrupt):
        calibrate(DEVICE, quick=True)
    assert ran == ["launch", "kernels", "out", "into", "both"]
    assert profile_of(DEVICE).name == "cpu"
    ran = counted(monkeypatch)
    calibrate(DEVICE, quick=True)
    assert ran == ["both", "memory", "products", "beside"]
    ran = counted(monkeypatch)
    calibrate(DEVICE, quick=True)
    assert ran == list(measure.STAGES)  # a complete one is made anew


def test_a_quick_calibration_does_not_go_on_with_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, fails_in="memory")
    with pytest.raises(KeyboardInterrupt):
        calibrate(DEVICE)
    ran = counted(monkeypatch)
    calibrate(DEVICE, quick=True)
    assert ran == list(measure.STAGES)


def test_a_device_that_is_not_known_is_calibrated_by_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = counted(monkeypatch)
    unknown: Any = OfKind("Nobody's GPU 9")
    assert profile_of(unknown).basis == "measured" and len(ran) == 8
    assert profile_of(unknown).name == "calibrated nobody-s-gpu-9" and len(ran) == 8
    known: Any = OfKind("NVIDIA A100-SXM4-40GB")
    assert profile_of(known).name == "a100" and len(ran) == 8
    assert profile_of(unknown, "h200").name == "h200"


def test_where_nothing_can_be_written_the_calibration_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(tmp_path / "file"))
    ran = counted(monkeypatch)
    unknown: Any = OfKind("Nobody's GPU 10")
    assert profile_of(unknown).basis == "measured" and profile_of(unknown).basis == "measured"
    assert len(ran) == 8


def test_a_device_that_cannot_be_measured_is_planned_for_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any, seconds: float) -> Iterator[Sample]:
        raise ValueError("no such memory")
        yield

    monkeypatch.setattr(module, "STAGES", {"launch": broken})
    unknown: Any = OfKind("Nobody's GPU 11")
    with pytest.warns(UserWarning, match="could not be measured .*no such memory"):
        assert profile_of(unknown).basis == "unknown"


def test_sizes_for_which_the_device_has_no_memory_are_left_out() -> None:
    def measured(nbytes: int) -> Iterator[Sample]:
        if nbytes > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        yield Sample("copy", nbytes, 1.0)

    assert [s.amount for s in measure._as_far_as_memory_goes((1, 2, 3, 4), measured)] == [1, 2]

    def broken(nbytes: int) -> Iterator[Sample]:
        raise jax.errors.JaxRuntimeError("INTERNAL: a broken device")
        yield

    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        list(measure._as_far_as_memory_goes((1,), broken))


def test_a_clock_that_stands_still_gives_no_time_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 1.0)
    assert measure._timed(lambda: None) > 0


def test_the_command_shows_what_it_measured_and_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    shown = CliRunner().invoke(main, ["calibrate", "--quick", "-o", str(tmp_path / "out.json")])
    assert shown.exit_code == 0 and "link, to the host" in shown.stdout
    assert f"Kept in {calibrations.file_for(DEVICE.device_kind)}" in shown.stdout.replace("\n", "")
    assert (tmp_path / "out.json").exists()
    refused = CliRunner().invoke(main, ["calibrate", "--device", "9"])
    assert refused.exit_code == 2 and "jax.devices() has" in refused.stderr
