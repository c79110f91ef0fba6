"""Runs JAX's own tests of `jit` with `tensile_jax.jit` in the place of `jax.jit`.

    python -m tests.conformance.jax_own_tests PATH/TO/jax/tests/api_test.py [pytest's options]

The file is JAX's and is never part of this repository: take it from JAX's repository at the tag of the installed version
(`git show jax-v0.10.2:tests/api_test.py`). Every `jit` and `jax.jit` in that file becomes `tensile_jax.jit(policy="none")`, so
that segments run, and not plain `jax.jit`. The classes `JitTest` and `BufferDonationTest` are run unless `-k` selects others.

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

CLASSES = "JitTest or BufferDonationTest"

_PRIVATE_CACHE = "calls the private method _cache_size"
_REPR = "expects the name PjitFunction"
_COUNTS = "counts compilations and cache misses of jit's own"

EXCEPTIONS: dict[str, str] = {
    "test_cache_key_defaults": _PRIVATE_CACHE,
    "test_static_args_equality": _PRIVATE_CACHE,
    "test_fun_name": "reads the private state of jit's C++ object",
    "test_jit_repr": _REPR,
    "test_jit_repr_errors": _REPR,
    "test_jit_compile_with_compiler_options_multiple": _COUNTS,
    "test_jit_lower_no_pruning": _COUNTS,
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
