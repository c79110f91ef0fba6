"""Sets what a process that measures takes from its command line: a cache, XLA's flags, and JAX's allocator on a GPU.

XLA reads its flags, and JAX the environment variables of its allocator, when JAX looks for devices for the first time. That must
not have happened yet.
"""

import os
from collections.abc import Mapping

import jax

_PART = "0.3"  # of the GPU's memory, so that processes that compile beside this one have some

ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    "preallocated": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": _PART},
    "growing": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "vmm": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"},
}
"""By name: JAX's default, for a part of the memory; memory that is taken in regions, as it is needed; and the only allocator with
which XLA leaves a CUDA graph as it is where addresses change (`xla_gpu_command_buffer_update_mode`)."""


def set_up(cache: str | None, xla_flags: str, allocator: str | None, *, shared: bool) -> None:
    """Apply the settings. With `shared`, plans are those for the allocator, but this process takes memory only as it needs it."""
    if xla_flags:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if allocator is None:
        return
    if shared and allocator == "preallocated":
        os.environ |= ALLOCATORS["growing"]
        jax.devices()
    os.environ |= ALLOCATORS[allocator]
