"""Corrects predicted times by measured ones: a factor for each operator of a step, and for each direction of copies.

    corrected time = predicted time * factor

A factor is a measured time divided by the predicted one. Only a whole executable can be measured, so all operators of an
executable get its factor. `plan/drift.py` computes the factors.
"""

from dataclasses import dataclass, replace

from tensile_jax.plan.analysis.device_profile import DeviceProfile


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Factors of predicted times.

    Attributes:
        first: of each operator where it runs first, by its place among the step's operators.
        again: of each operator where a segment runs it again, by its place.
        out, into: of copies to the host, and of copies to the device.
    """

    first: tuple[float, ...]
    again: tuple[float, ...]
    out: float = 1.0
    into: float = 1.0

    @property
    def change_nothing(self) -> bool:
        """Whether all factors are 1, as long as nothing was measured."""
        return {*self.first, *self.again, self.out, self.into} <= {1.0}

    def of_link(self, profile: DeviceProfile) -> DeviceProfile:
        """The profile with the rates of the link corrected."""
        return replace(
            profile,
            device_to_host_bytes_per_us=profile.device_to_host_bytes_per_us / self.out,
            host_to_device_bytes_per_us=profile.host_to_device_bytes_per_us / self.into,
        )


def no_corrections(operators: int) -> Corrections:
    """The corrections before anything was measured: all factors are 1."""
    return Corrections((1.0,) * operators, (1.0,) * operators)
