"""Networks predict the latency of operators like those that they were fitted to, and leave others to the roofline."""

import dataclasses

import numpy as np
import pytest

from tensile_jax.device_profiles import calibrations
from tensile_jax.device_profiles.calibrations import OperatorSample
from tensile_jax.exec.calibration.fit import fit
from tensile_jax.ir import Operator, OperatorId
from tensile_jax.plan.analysis.latency import operator_latency, own_latencies
from tensile_jax.plan.analysis.latency_model import LatencyModel
from tests.builders import PROFILE

RATES = 1e5, 1e4  # operations and bytes per microsecond


def law(side: float, load: float) -> float:
    """A made-up device: 1.5 times the roofline for small sides, 3 times for large ones, and slower under load."""
    return (1.5 if side < 6 else 3.0) * (1 + load)


def samples(count: int, seed: int = 0, primitive: str = "dot_general") -> list[OperatorSample]:
    rng = np.random.default_rng(seed)
    found: list[OperatorSample] = []
    for _ in range(count):
        side, load = rng.uniform(4, 8), float(rng.choice([0.0, 0.0, 0.5, 1.0]))
        flops = int(2 ** (side + 24))
        us = flops / RATES[0] * law(side, load)
        found.append(OperatorSample(primitive, (float(side), 3.0), flops, 1000, load, us))
    return found


def operator(sample: OperatorSample, **changes: object) -> Operator:
    made = Operator(
        OperatorId(0), "net/product", sample.primitive, "heavy", (), (), sample.flops, sample.nbytes, 0, features=sample.features
    )
    return dataclasses.replace(made, **changes)  # pyright: ignore[reportArgumentType] # any field


@pytest.fixture(scope="module")
def model() -> LatencyModel:
    return fit([*samples(300), *samples(10, primitive="sort")], *RATES)


def test_operators_that_were_not_measured_are_predicted_and_so_is_load(model: LatencyModel) -> None:
    for load in (0.0, 1.0):
        others = [s for s in samples(200, seed=1) if abs(s.features[0] - 6) > 0.3]
        predicted = model.predict([operator(s) for s in others], load)
        expected = np.array([s.flops / RATES[0] * law(s.features[0], load) for s in others])
        assert np.median(np.abs(predicted / expected - 1)) < 0.1


def test_operators_unlike_all_that_were_measured_are_left_to_the_roofline(model: LatencyModel) -> None:
    known = operator(samples(1)[0])
    unlike = [
        dataclasses.replace(known, features=(12.0, 3.0)),
        dataclasses.replace(known, features=(6.0, 7.0)),
        dataclasses.replace(known, features=(6.0,)),  # as another version of this package describes it
        dataclasses.replace(known, features=()),
        dataclasses.replace(known, primitive="conv_general_dilated"),
        dataclasses.replace(known, primitive="sort"),  # too few were measured
    ]
    assert np.isnan(model.predict(unlike)).all() and not np.isnan(model.predict([known])).any()
    profile = dataclasses.replace(PROFILE, latency_model=model)
    latencies = own_latencies([*unlike, known], profile)
    assert latencies[:-1].tolist() == [operator_latency(op, profile) for op in unlike]
    assert latencies[-1] == model.predict([known])[0]
    driven = dataclasses.replace(known, least_us=1e9)
    assert own_latencies([driven], profile)[0] == 1e9


def test_a_model_is_kept_beside_its_calibration(model: LatencyModel, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(tmp_path))
    file = calibrations.file_for("A GPU").with_suffix(".npz")
    file.parent.mkdir()
    calibrations.write_model("A GPU", "today", model)
    assert calibrations.read_model("A GPU", "today") is model
    calibrations._models.clear()
    read = calibrations.read_model("A GPU", "today")
    assert read is not None and calibrations.read_model("A GPU", "yesterday") is None
    ops = [operator(s) for s in samples(20, seed=2)]
    np.testing.assert_array_equal(read.predict(ops), model.predict(ops))
    assert file.stat().st_size < 5e6
    calibrations._models.clear()
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="is ignored"):
        assert calibrations.read_model("A GPU", "today") is None


def test_a_profile_with_something_else_as_its_latency_model_is_refused() -> None:
    with pytest.raises(ValueError, match="latency_model must be a LatencyModel"):
        dataclasses.replace(PROFILE, latency_model="fast")  # pyright: ignore[reportArgumentType]
