"""Stores what `tensile calibrate` has measured: one JSON file for each kind of device and version of jaxlib.

Beside each JSON file is a NumPy file (`.npz`): the model that was fitted to the measurements and predicts latencies. The folder
is `calibrations` in the user's cache folder for this package, or in the one that the environment variable `TENSILE_CACHE_DIR`
names. A file that cannot be read is ignored, with a warning, and is written anew by the next calibration. If the folder cannot be
written, a calibration lasts as long as the process.
"""

import io
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import platformdirs

from tensile_jax.atomic_file import write_whole
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.latency_model import LatencyModel, Network

SCHEMA_VERSION = 2
_FOLDER = "TENSILE_CACHE_DIR"

_only_here: dict[Path, "Calibration"] = {}  # those that could not be written
_models: dict[Path, tuple[str, LatencyModel]] = {}  # those in use, and of which calibration they are


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: what was done, by how many bytes or operations, and the least microseconds that it took."""

    what: str
    amount: float
    us: float


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """The least microseconds that an operator took as an executable of its own, while other work took `load` of the device.

    `features` describe the operator (`trace/cost/features.py`).
    """

    primitive: str
    features: tuple[float, ...]
    flops: int
    nbytes: int
    load: float
    us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured of one kind of device.

    Attributes:
        made: when, in UTC.
        quick: whether less time was taken than by default.
        stages: by the name of each stage that is complete, its samples.
        operators: heavy operators that were measured, to which the latency model is fitted.
        rates: the fields of a `DeviceProfile` that follow from the stages; empty until everything is complete.
    """

    schema_version: int
    device_kind: str
    platform: str
    jaxlib: str
    made: str
    quick: bool
    stages: Mapping[str, tuple[Sample, ...]]
    rates: Mapping[str, float]
    operators: tuple[OperatorSample, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all stages are complete."""
        return bool(self.rates)

    def profile(self, basis: DeviceProfile, model: LatencyModel | None = None) -> DeviceProfile:
        """`basis`, which says how the compiler for such devices behaves, with the measured rates and this latency model."""
        source = f"measured on this kind of device, {self.device_kind}, by tensile calibrate, {self.made}"
        name = f"calibrated {slug(self.device_kind)}"
        return replace(basis, name=name, basis="measured", source=source, latency_model=model, **self.rates)


def slug(device_kind: str) -> str:
    """The kind of a device as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") or "device"


def file_for(device_kind: str) -> Path:
    """The file for the calibration of such a device with the installed jaxlib."""
    folder = os.environ.get(_FOLDER)
    cache = Path(folder) if folder else platformdirs.user_cache_path("tensile_jax", appauthor=False)
    return cache / "calibrations" / f"{slug(device_kind)}-jaxlib-{version('jaxlib')}.json"


def read(device_kind: str) -> Calibration | None:
    """The calibration of such a device, which may be incomplete; None if there is none that can be used."""
    file = file_for(device_kind)
    if file in _only_here:
        return _only_here[file]
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Calibration)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        warnings.warn(f"{file} is ignored, since it cannot be read: {error}. Run tensile calibrate again.", stacklevel=2)
        return None
    wrong = found.schema_version != SCHEMA_VERSION or found.device_kind != device_kind or found.jaxlib != version("jaxlib")
    if wrong or not all(0 < rate < float("inf") or name == "copy_share" for name, rate in found.rates.items()):
        warnings.warn(f"{file} is ignored: it is not of this device and version. Run tensile calibrate again.", stacklevel=2)
        return None
    return found


def write(calibration: Calibration) -> Path | None:
    """Keep a calibration; the file, or None if it could be kept in this process only."""
    file = file_for(calibration.device_kind)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    except OSError:
        _only_here[file] = calibration
        return None
    _only_here.pop(file, None)
    return file


# -- the latency model ----------------------------------------------------------------------------------------------------------

_FIELDS = ("mean", "deviation", "least", "greatest", "output_mean", "output_deviation")


def write_model(device_kind: str, made: str, model: LatencyModel) -> None:
    """Keep the latency model of the calibration that was made at that time."""
    arrays: dict[str, np.ndarray] = {
        "made": np.array(made),
        "rates": np.array([model.flops_per_us, model.bytes_per_us]),
        "primitives": np.array(list(model.networks)),
    }
    for name, network in model.networks.items():
        arrays |= {f"{name}/{field}": np.asarray(getattr(network, field)) for field in _FIELDS}
        for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
            arrays |= {f"{name}/weight {i}": weight, f"{name}/bias {i}": bias}
    content = io.BytesIO()
    np.savez(content, **arrays)  # pyright: ignore[reportArgumentType] # NumPy's stub takes a keyword for one of them
    file = file_for(device_kind).with_suffix(".npz")
    _models[file] = made, model
    with suppress(OSError):
        write_whole(file, content.getvalue())


def read_model(device_kind: str, made: str) -> LatencyModel | None:
    """The latency model of the calibration that was made at that time; None if there is none that can be used."""
    file = file_for(device_kind).with_suffix(".npz")
    if file in _models and _models[file][0] == made:
        return _models[file][1]
    try:
        with np.load(io.BytesIO(file.read_bytes())) as arrays:
            if str(arrays["made"]) != made:
                return None
            model = _model_in(arrays)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except Exception as error:  # NumPy raises errors of many classes for a spoiled file
        warnings.warn(f"{file} is ignored, since it cannot be read: {error}. Run tensile calibrate again.", stacklevel=2)
        return None
    _models[file] = made, model
    return model


def _model_in(arrays: Mapping[str, np.ndarray]) -> LatencyModel:
    networks: dict[str, Network] = {}
    for name in arrays["primitives"].tolist():
        layers = sum(key.startswith(f"{name}/weight ") for key in arrays)
        networks[name] = Network(
            weights=tuple(arrays[f"{name}/weight {i}"] for i in range(layers)),
            biases=tuple(arrays[f"{name}/bias {i}"] for i in range(layers)),
            mean=arrays[f"{name}/mean"],
            deviation=arrays[f"{name}/deviation"],
            least=arrays[f"{name}/least"],
            greatest=arrays[f"{name}/greatest"],
            output_mean=float(arrays[f"{name}/output_mean"]),
            output_deviation=float(arrays[f"{name}/output_deviation"]),
        )
    flops_per_us, bytes_per_us = arrays["rates"].tolist()
    return LatencyModel(networks, flops_per_us, bytes_per_us)
