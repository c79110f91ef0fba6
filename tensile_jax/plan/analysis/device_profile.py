"""The record of what a planner knows of a device: the rates at which it computes and copies, and how its compiler behaves.

Rates are in bytes (or operations) per microsecond. `tensile_jax/device_profiles` reads the values from files.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The rates of a device. The link has one rate for each direction, and copies in the two directions do not slow each other.

    Attributes:
        bytes_per_us: of device memory, read and written.
        launch_us: the time to launch one executable.
        canonical_layouts: convolutions copy operands that are not in the backend's own layout.
        fused_reductions: what a reduction reads is computed on the fly, and is not written to memory first.
        late_weight, early_weight: predict a segment's workspace from the two extremes of XLA's order (`search/workspace.py`).
        copy_share: the part of a copy's time that computation loses: 0 where copies have engines and memory to themselves, 1
            where the cores that compute also do the copying.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (str, bool):
                right, wanted = isinstance(value, field.type), "a string" if field.type is str else "true or false"
            else:
                share = field.name == "copy_share"
                weight = field.name.endswith("_weight")
                number = isinstance(value, int | float) and not isinstance(value, bool)
                right = number and (
                    0 <= value <= 1 if share else 0 <= value < float("inf") if weight else 0 < value < float("inf")
                )
                wanted = "a number from zero to one" if share else f"a number {'of zero or more' if weight else 'above zero'}"
            if not right:
                raise ValueError(f"Device profile {self.name!r}: {field.name} must be {wanted}, got {value!r}.")
