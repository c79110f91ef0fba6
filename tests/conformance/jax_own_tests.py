"""Runs JAX's own tests of `jit` with `tensile_jax.jit` in the place of `jax.jit`.

    python -m tests.conformance.jax_own_tests PATH/TO/jax/tests/api_test.py [pytest's options]
    python -m tests.conformance.jax_own_tests PATH/TO/jax/tests/memories_test.py [pytest's options]

The files are JAX's and are never part of this repository: take them from JAX's repository at the tag of the installed version
(`git show jax-v0.10.2:tests/api_test.py`). Every `jit` and `jax.jit` in such a file becomes `tensile_jax.jit(policy="none")`, so
that segments run, and not plain `jax.jit`. The classes of `CLASSES` are run unless `-k` selects others. JAX skips those of
`memories_test.py` on a CPU. They are run there all the same, since most of them pass under `jax.jit`.

The tests in `EXCEPTIONS` are expected to fail, each for the reason given there; docs/jit.md lists them for users. If one of them
passes, it is reported as an error, because the list is then out of date.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import tensile_jax

_OF_MEMORIES = ("DevicePutTest", "ComputeOffload", "ActivationOffloadingTest")
CLASSES = " or ".join(("JitTest", "BufferDonationTest", *_OF_MEMORIES))

_PRIVATE_CACHE = "calls the private method _cache_size"
_REPR = "expects the name PjitFunction"
_COUNTS = "counts compilations and cache misses of jit's own"
_ON_A_CPU = "fails on a CPU under jax.jit as well"

EXCEPTIONS: dict[str, str] = {
    "test_cache_key_defaults": _PRIVATE_CACHE,
    "test_static_args_equality": _PRIVATE_CACHE,
    "test_fun_name": "reads the private state of jit's C++ object",
    "test_jit_repr": _REPR,
    "test_jit_repr_errors": _REPR,
    "test_jit_compile_with_compiler_options_multiple": _COUNTS,
    "test_jit_lower_no_pruning": _COUNTS,
    "test_jit_cpp_cache_hit": _COUNTS,
    "test_jit_cpp_cache_output_hit": _COUNTS,
    "test_jit_cache_hit_with_default_and_specified_mem_kind": _COUNTS,
    "test_diff_mem_space_error": "copies an argument in host memory to the device where jit refuses it",
    "test_compute_offload_mesh_with_linear_layout": "asks for a memory layout on a mesh, which is refused",
    "test_device_put_transpose_auto_mode": _ON_A_CPU,
    "test_remat_checkpoint_dots_with_no_batch_dims": _ON_A_CPU,
    "test_remat_jaxpr_offloadable": _ON_A_CPU,
    "test_remat_scan_jaxpr_offloadable": _ON_A_CPU,
    "test_remat_scan_layout_change_offloadable": _ON_A_CPU,
}
"""Name of a test of JAX's, and why `tensile_jax.jit` does not pass it."""


def segmented_jit(*args: Any, **kwargs: Any) -> Any:
    """`tensile_jax.jit` that runs segments, called as `jax.jit` is."""
    return tensile_jax.jit(*args, policy="none", **kwargs)


class JaxWithSegmentedJit(ModuleType):
    """The module `jax`, in which `jit` is ours. JAX's own code goes on using its own."""

    def __init__(self) -> None:
        super().__init__("jax")

    jit = staticmethod(segmented_jit)

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(jax, name, value)


def load(path: Path) -> ModuleType:
    """JAX's test file as a module whose `jit` is ours."""
    spec = importlib.util.spec_from_file_location("api_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_test"] = module
    spec.loader.exec_module(module)
    module.__dict__["jit"] = segmented_jit
    for name in _OF_MEMORIES:
        if (tests := getattr(module, name, None)) is not None:
            tests.setUp = tests.__mro__[1].setUp  # its own skips all tests on a CPU
    module.__dict__["jax"] = JaxWithSegmentedJit()
    return module


class _Substitute:
    """A pytest plugin that collects JAX's file from the module with our `jit`, and marks the exceptions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        if module_path != self._path:
            return None
        loaded = load(module_path)

        class Loaded(pytest.Module):
            def _getobj(self) -> ModuleType:
                return loaded

        return Loaded.from_parent(parent, path=module_path)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            reason = EXCEPTIONS.get(item.name)
            if reason is not None:
                subtests = item.name == "test_fun_name"  # its subtests fail, and the test itself passes
                item.add_marker(pytest.mark.xfail(reason=reason, strict=not subtests))


def main(arguments: list[str], run: Callable[..., Any] = pytest.main) -> int:
    """Run the tests; the exit code is pytest's."""
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", f"--rootdir={path.parent}"]
    chosen = [] if "-k" in arguments else ["-k", CLASSES]
    return int(run([*options, *chosen, *arguments[1:], str(path)], plugins=[_Substitute(path)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
