"""Defines what a planner knows of a device: the rates at which the device computes and copies, and how XLA behaves on it.

Rates are in bytes per microsecond, or in floating-point operations per microsecond. `tensile_jax/device_profiles` reads the
values from files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from tensile_jax.plan.analysis.latency_model import LatencyModel
from tensile_jax.plan_format import Memory

Allocator = Literal["exact", "best_fit", "growing"]
"""How memory of the device is handed out: what is asked for; by XLA's allocator for GPUs (`result/best_fit_allocator.py`), which
has reserved its memory; or by the same allocator, which takes more memory when it needs some."""

Basis = Literal["measured", "published", "unknown"]
"""Where the rates of a profile come from: measurements on such a device, figures that its vendor has published, or nowhere."""

_CHOICES = {"basis": get_args(Basis), "allocator": get_args(Allocator)}
_MAY_BE_ZERO = ("kernel_us", "host_kernel_us", "host_launch_us")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The rates of a device. A link has one rate for each direction, and copies in the two directions do not slow each other.

    Attributes:
        flops_per_us: the floating-point operations of products and convolutions.
        half_speedup: how many times faster these are if all operands are 16-bit floating-point numbers.
        bytes_per_us: the bytes of device memory that are read and written.
        launch_us: the time to launch one executable.
        kernel_us: what a kernel takes on the device beside its operations and bytes: its begin, its end, and the gap before it.
        host_kernel_us: what the host takes to issue a kernel. A shorter kernel takes this long too, since the device waits for
            the host.
        host_launch_us: what the host takes to launch one more executable, without its kernels. Only the part for which the device
            waits counts (`search/step_model.py`).
        canonical_layouts: convolutions copy operands that are not in the backend's own layout.
        fused_reductions: what a reduction reads is computed on the fly, and is not written to memory first.
        late_weight, early_weight: the weights that predict a segment's workspace from two extreme orders of its operators
            (`search/cost/workspace.py`).
        copy_share: the part of a copy's time by which the computation takes longer: 0 if copies cost the computation nothing, 1
            if the cores that compute also do the copying.
        interconnect_bytes_per_us: what a device sends to the other devices of its host, in one direction.
        kinds: regular expressions; the profile is that of a device whose whole `device_kind` one of them matches.
        basis: where the rates come from.
        source: the same for people, in a sentence.
        latency_model: predicts the latency of heavy operators, if operators were measured on such a device.
        allocator: how memory of the device is handed out.
    """

    name: str
    platform: str
    flops_per_us: float
    bytes_per_us: float
    device_to_host_bytes_per_us: float
    host_to_device_bytes_per_us: float
    launch_us: float
    memory_bytes: int
    canonical_layouts: bool
    fused_reductions: bool
    late_weight: float
    early_weight: float
    copy_share: float
    half_speedup: float = 1.0
    kernel_us: float = 0.0
    host_kernel_us: float = 0.0
    host_launch_us: float = 0.0
    interconnect_bytes_per_us: float = 5.0e4  # PCIe 5.0 x16, where nothing else is known
    kinds: tuple[str, ...] = ()
    basis: Basis = "measured"
    source: str = ""
    latency_model: LatencyModel | None = None
    allocator: Allocator = "exact"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "latency_model":
                right, wanted = value is None or isinstance(value, LatencyModel), "a LatencyModel"
            elif field.name == "kinds":
                right, wanted = (
                    isinstance(value, tuple) and all(type(kind) is str for kind in cast(tuple[Any, ...], value)),
                    "texts",
                )
            elif field.name in _CHOICES:
                right, wanted = value in _CHOICES[field.name], f"one of {', '.join(_CHOICES[field.name])}"
            elif field.type in (str, bool):
                right, wanted = isinstance(value, field.type), "a string" if field.type is str else "true or false"
            else:
                share = field.name == "copy_share"
                may_be_zero = field.name.endswith("_weight") or field.name in _MAY_BE_ZERO
                number = isinstance(value, int | float) and not isinstance(value, bool)
                right = number and (
                    0 <= value <= 1 if share else 0 <= value < float("inf") if may_be_zero else 0 < value < float("inf")
                )
                wanted = (
                    "a number from zero to one" if share else f"a number {'of zero or more' if may_be_zero else 'above zero'}"
                )
            if not right:
                raise ValueError(f"Device profile {self.name!r}: {field.name} must be {wanted}, got {value!r}.")

    @property
    def to_memory_bytes_per_us(self) -> Mapping[Memory, float]:
        """The rate of copies from the device to each memory where tensors wait."""
        return {"host": self.device_to_host_bytes_per_us}

    @property
    def from_memory_bytes_per_us(self) -> Mapping[Memory, float]:
        """The rate of copies to the device from each memory where tensors wait."""
        return {"host": self.host_to_device_bytes_per_us}
