"""Fixtures for the tests of several packages."""

import dataclasses
import json
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import jax
import pytest

from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.knowledge_store import STORE

_CACHES = count()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Tests that send an interrupt must be heard, also where a shell has begun this in the background and ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compiled_programs_are_kept(pytestconfig: pytest.Config) -> None:
    """Tests compile many programs alike, and each is compiled once: all workers share JAX's cache, in pytest's own folder.

    What a test's own processes compile is not kept there: some of them are killed, and could leave half a file.
    """
    if hasattr(pytestconfig, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(pytestconfig.cache.mkdir("compiled-programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the caches of all tests."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def calibrations_of_this_machine_are_not_used(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests plan with the profiles that come with the package, whatever this machine's user or another test has measured."""
    monkeypatch.setenv("TENSILE_CACHE_DIR", str(caches / str(next(_CACHES))))


@pytest.fixture(autouse=True)
def plans_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what was planned before it; `exec/fitting/test_knowledge_store.py` tests what is kept."""
    STORE.forget()
    monkeypatch.setattr(find_plan, "kept_file", lambda program: None)


@pytest.fixture(scope="session")
def fast_link(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a device that computes slowly and copies in no time, so that a planner would rather swap than recompute."""
    return _cpu_but(
        tmp_path_factory,
        "fast_link",
        flops_per_us=1e3,
        bytes_per_us=1e2,
        device_to_host_bytes_per_us=1e7,
        host_to_device_bytes_per_us=1e7,
        launch_us=30.0,
    )


@pytest.fixture(scope="session")
def cheap_launches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a device whose launches cost next to nothing, so that plans of short steps have several segments."""
    return _cpu_but(tmp_path_factory, "cheap_launches", launch_us=10.0)


def _cpu_but(factory: pytest.TempPathFactory, name: str, **changes: float) -> str:
    """The file of a profile that differs from `cpu` by these values."""
    path = factory.mktemp("profiles") / f"{name}.toml"
    profile = dataclasses.replace(load_profile("cpu"), name=name, **changes)
    values = {key: value for key, value in dataclasses.asdict(profile).items() if value is not None}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def caches_of_jax_are_cleared() -> Iterator[None]:
    """What one file's tests have traced and compiled does not slow the garbage collections in the others' tests."""
    yield
    jax.clear_caches()
