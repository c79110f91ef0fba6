"""`tensile calibrate`: measures this machine's device, so that plans for the device predict realistic times."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import readable_console, table_of
from tensile_jax.cli.options import writable_file
from tensile_jax.cli.progress import Phases
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console

if TYPE_CHECKING:  # at run time this would import NumPy
    from tensile_jax.plan import DeviceProfile

_WIDTH = 100
_SHOWN = {
    "flops_per_us": ("products", 1e-6, "TFLOP/s"),
    "bytes_per_us": ("device memory", 1e-3, "GB/s"),
    "device_to_host_bytes_per_us": ("link, to the host", 1e-3, "GB/s"),
    "host_to_device_bytes_per_us": ("link, to the device", 1e-3, "GB/s"),
    "launch_us": ("launch", 1.0, "us"),
    "host_launch_us": ("launch, on the host", 1.0, "us"),
    "host_kernel_us": ("a kernel, on the host", 1.0, "us"),
    "copy_share": ("slowed by a copy", 1.0, "of its time"),
}


@click.command(short_help="Measure this machine's device, so that plans predict its times.")
@click.option("--quick", is_flag=True, help="Take about 10 s instead of 60.")
@click.option("--device", metavar="N", type=click.IntRange(0), default=0, help="Number in jax.devices().  [default: 0]")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
def calibrate(quick: bool, device: int, output: Path | None) -> None:
    """Measure launches, memory, products and the link to the host, and keep the result for plans.

    The result is kept for this kind of device and this version of jaxlib, in the user's cache folder or in the folder named by
    the environment variable TENSILE_CACHE_DIR. An interrupted calibration continues where it stopped.
    """
    import jax

    from tensile_jax.device_profiles import profile_for, shipped_profile
    from tensile_jax.device_profiles.calibrations import file_for
    from tensile_jax.exec.calibration.calibrate import calibrate as measure

    devices = jax.devices()
    if device >= len(devices):
        raise Refusal(f"--device={device}: jax.devices() has {len(devices)}. Name one of 0 to {len(devices) - 1}.")
    with Phases(stderr_console()) as phases:
        made = measure(devices[device], quick=quick, progress=phases.update)
    kind = devices[device].device_kind
    readable_console(_WIDTH).print(_table(kind, profile_for(kind), shipped_profile(kind)))
    if output is not None:
        save_json(made, output)
        click.echo(f"Written to {output}")
    file = file_for(kind)
    click.echo(f"Kept in {file}" if file.is_file() else f"{file} cannot be written: this calibration is lost with this command.")


def _table(kind: str, measured: "DeviceProfile", shipped: "DeviceProfile") -> object:
    table = table_of(f"{kind}, measured, beside the profile {shipped.name} ({shipped.source})", "", ">measured", ">profile", "")
    for name, (what, factor, unit) in _SHOWN.items():
        if not getattr(measured, name):
            continue
        table.add_row(what, f"{getattr(measured, name) * factor:.4g}", f"{getattr(shipped, name) * factor:.4g}", unit)
    return table
