"""Prints what `tensile --version` shows: the versions of tensile_jax, jax and jaxlib, and the default device.

Versions are read from the installed packages. JAX is imported only to name the device.
"""

from importlib.metadata import PackageNotFoundError, version

import click

from tensile_jax.cli.formatting import one_line

VERSION_HELP = "Show the versions of tensile_jax, jax and jaxlib, and the default device, and exit."


def print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the versions and the device, and end the command. The callback of `--version`."""
    del parameter
    if not asked or context.resilient_parsing:
        return
    for package in ("tensile_jax", "jax", "jaxlib"):
        click.echo(f"{package} {_version(package)}")
    click.echo(f"device {_device()}")
    context.exit()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _device() -> str:
    """The kind and platform of JAX's default device, or in words why there is none."""
    try:
        import jax  # only here: it takes seconds to import

        device = jax.devices()[0]
    except Exception as error:  # plugins raise errors of any class
        return f"cannot be reached: {one_line(str(error)) or type(error).__name__}"
    return f"{device.device_kind} ({device.platform})"
