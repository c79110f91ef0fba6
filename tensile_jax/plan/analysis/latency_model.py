"""Predicts the latency of heavy operators by small neural networks (TENSILE section IV-A).

XLA runs *heavy* operators, such as matrix products, as kernels of their own. For each heavy primitive there is an MLP of four
layers, fitted to operators that were measured on the device (`exec/calibration/fit.py`). Its inputs describe an operator
(`trace/cost/features.py`) and the load of the device (the part of its time that other work takes). Its output is

    log(latency / roofline)        roofline = max(flops / flops_per_us, bytes / bytes_per_us, floor)

The roofline is the time of an ideal kernel: the longer of computing and of moving the bytes, but no less than the time that any
kernel takes. A network whose output is 0 predicts the roofline itself. Several networks are trained from different initial
weights, and the model averages their outputs. The model makes no prediction for an operator that is unlike all measured ones.
This module needs only NumPy. Latencies are in microseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from tensile_jax.ir import Operator

_FLOOR_US = 5.0  # no executable that does anything takes less; not tuned
# How far a network extrapolates, not tuned: far above what was measured, latency grows as the roofline does.
_BEYOND = 3.0  # by how much an input (a logarithm to base 2) may lie outside of what was measured
_SAME = 0.01  # the same for an input that did not vary in what was measured, such as the size of a number
_MOST = 4.0  # the most standard deviations of what was measured that a network may predict


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """The networks of one primitive, and what their inputs and outputs were shifted and scaled by.

    `weights[i]` has the shape (networks, inputs, outputs) of layer i, and `biases[i]` (networks, outputs). `least` and `greatest`
    are the range of each input among what was measured.
    """

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    mean: np.ndarray
    deviation: np.ndarray
    least: np.ndarray
    greatest: np.ndarray
    output_mean: float
    output_deviation: float

    def log_ratios(self, inputs: np.ndarray) -> np.ndarray:
        """The logarithm of latency / roofline for each row of inputs; NaN for rows unlike what was measured."""
        beyond = np.where(self.greatest > self.least, _BEYOND, _SAME)
        known = ((inputs >= self.least - beyond) & (inputs <= self.greatest + beyond)).all(axis=1)
        values = ((np.clip(inputs, self.least, self.greatest) - self.mean) / self.deviation)[None]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight + bias[:, None]
            if i < len(self.weights) - 1:
                values = _gelu(values)
        found = np.clip(values[..., 0].mean(axis=0), -_MOST, _MOST) * self.output_deviation + self.output_mean
        return np.where(known, found, np.nan)


def _gelu(x: np.ndarray) -> np.ndarray:
    """The activation function that `jax.nn.gelu` computes."""
    return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def roofline_us(flops: np.ndarray, nbytes: np.ndarray, flops_per_us: float, bytes_per_us: float) -> np.ndarray:
    """The roofline above."""
    return np.maximum(np.maximum(flops / flops_per_us, nbytes / bytes_per_us), _FLOOR_US)


@dataclass(frozen=True, slots=True, eq=False)
class LatencyModel:
    """The networks by primitive, and the rates of the roofline to which they are fitted."""

    networks: Mapping[str, Network] = field(repr=False)
    flops_per_us: float
    bytes_per_us: float

    def predict(self, operators: Sequence[Operator], load: float = 0.0) -> np.ndarray:
        """Microseconds of each operator by itself; NaN for those that are not predicted.

        Args:
            load: the part of the device's time that other work takes, from 0 to 1.
        """
        found = np.full(len(operators), np.nan)
        places: dict[tuple[str, int], list[int]] = {}
        for place, op in enumerate(operators):
            if op.features and op.primitive in self.networks:
                places.setdefault((op.primitive, len(op.features)), []).append(place)
        for (primitive, count), several in places.items():
            network = self.networks[primitive]
            if count + 1 != len(network.mean):
                continue  # another version of this package has measured
            inputs = np.array([(*operators[place].features, load) for place in several])
            flops = np.array([operators[place].flops for place in several], float)
            nbytes = np.array([operators[place].nbytes for place in several], float)
            found[several] = roofline_us(flops, nbytes, self.flops_per_us, self.bytes_per_us) * np.exp(network.log_ratios(inputs))
        return found
