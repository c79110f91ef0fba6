"""A fixture that makes runtimes and asserts that each leaves no thread, no job, and no byte of device or pinned host memory."""

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

import tensile_jax as tensile
from tests.exec.small_jobs import until

MakeRuntime = Callable[..., tensile.Runtime]


def bytes_in(kind: str) -> int:
    """Of every live array in memory of that kind."""
    return sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted() and a.sharding.memory_kind == kind)


def threads() -> set[threading.Thread]:
    """Those of runtimes, but for feeds that hang in user code on purpose."""
    return {t for t in threading.enumerate() if t.name.startswith("tensile-") and "hangs" not in t.name}


@pytest.fixture
def only_own_garbage() -> Iterator[None]:
    """Until the test ends, garbage collection looks at the test's own objects, and not at the millions that JAX has cached."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def runtime(only_own_garbage: None) -> Iterator[MakeRuntime]:
    """Makes runtimes. Tests must leave no array of their own behind but those in the results of jobs."""
    before = {kind: bytes_in(kind) for kind in ("device", "pinned_host")}
    assert not threads()
    made: list[tensile.Runtime] = []

    def make(budget: int | str = "64MiB", **options: Any) -> tensile.Runtime:
        made.append(tensile.Runtime(budget, **options))
        return made[-1]

    yield make
    for one in made:
        assert one._store.closed, "the test left its runtime open"
        assert not one._dispatcher.state.records and not one._dispatcher.state.pending
        assert one._dispatcher.state.held_bytes == 0
        assert all(level.planned_bytes <= level.budget_bytes for level in one.record().levels)
        assert all((level.measured_bytes or 0) <= level.budget_bytes for level in one.record().levels)
        for job in one.jobs:
            stored = job._stored
            stored.life = replace(stored.life, error=None)  # a traceback holds the test's locals
    until(lambda: not threads())
    # A feed that hung until the test's last line may still hold its job for a moment.
    until(lambda: gc.collect() >= 0 and bytes_in("device") <= before["device"])  # device memory is given back
    made.clear()
    one = job = stored = None
    until(lambda: gc.collect() >= 0 and bytes_in("pinned_host") <= before["pinned_host"])  # and so is pinned host memory
