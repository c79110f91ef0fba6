"""Real faults while orbax writes: the kernel refuses to write, or kills the process, whatever code is at work in it."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import tensile_jax as tensile
from tests.exec.checkpoint.test_faults import expect_nothing_lost, users_files

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
LIMIT_S = 120.0

ON_SMALL_DISKS = """
    import os, resource, sys, threading, time
    from pathlib import Path
    import jax, numpy as np
    from tensile_jax.errors import CheckpointError
    from tensile_jax.exec.checkpoint.checkpoints import Checkpoints

    state = {"large": [np.arange(n) for n in range(10_000, 10_008)], "key": jax.random.key(0), "n": 2**80, "x": 0.5}
    folder = Path(sys.argv[1])
    Checkpoints(folder).save(1, state)
    sizes = {path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for limit in sorted({0, 1, *(size - 1 for size in sizes), *(size // 2 for size in sizes)}):
        checkpoints = Checkpoints(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, state)
        except CheckpointError as error:
            assert "could not be saved" in str(error) and "File too large" in str(error), str(error)
        else:
            assert limit > min(sizes), limit  # tensorstore's files are not of the same sizes each time
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert not any(name.startswith(".tensile") for name in os.listdir(folder)), (limit, os.listdir(folder))
        assert checkpoints.steps() in ((1,), (2, 1)) and checkpoints.latest() == checkpoints.steps()[0], limit
        checkpoints.save(1, state)
        assert checkpoints.steps() == (1,) and checkpoints.latest() == 1, limit
        found = checkpoints.restore(1, state)
        assert all(np.array_equal(a, b) for a, b in zip(found["large"], state["large"], strict=True))
        assert (found["n"], found["x"], found["key"] == state["key"]) == (2**80, 0.5, True)
    end = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == 1, threading.enumerate()
    print("done")
"""


def test_a_disk_too_small_for_any_of_the_files_is_told_and_nothing_else_is_said(tmp_path: Path) -> None:
    """A limit on the size of files, beyond which the kernel refuses to write, as to tensorstore's own threads."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(ON_SMALL_DISKS), str(tmp_path / "job")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


SAVE_FOREVER = """
    import itertools, sys
    from pathlib import Path
    from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
    from tests.exec.checkpoint.test_faults import state_of

    checkpoints = Checkpoints(Path(sys.argv[1]))
    for step in itertools.count(1):
        checkpoints.save(step, state_of(step))
        print(step, flush=True)
"""

STAGES = (  # what lies in a checkpoint that is being written, one after another
    "tensile.json",
    "state.orbax-checkpoint-tmp",
    "state.orbax-checkpoint-tmp/ocdbt.process_0/manifest.ocdbt",
    "state.orbax-checkpoint-tmp/_METADATA",
    "state.orbax-checkpoint-tmp/d/*",
    "state/commit_success.txt",
    "manifest.json",
)


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[] if stage in STAGES[2:4] else pytest.mark.slow) for stage in STAGES]
)
def test_a_process_that_is_killed_while_orbax_writes_loses_nothing(tmp_path: Path, stage: str) -> None:
    folder = tmp_path / "job"
    users = users_files(folder)
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(folder)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        end = time.monotonic() + LIMIT_S
        while not any(folder.glob(f".tensile-writing-*-{process.pid}/{stage}")):
            assert time.monotonic() < end, "it was never seen"
        process.kill()
        last = 2
        for line in process.stdout:
            last = int(line)
    assert process.returncode == -signal.SIGKILL
    expect_nothing_lost(folder, users, last)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_time_loses_nothing(tmp_path: Path) -> None:
    for i in range(30):
        folder = tmp_path / f"job-{i}"
        users = users_files(folder)
        command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(folder)]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            time.sleep(i * 0.011)
            process.kill()
            last = 1
            for line in itertools.islice(process.stdout, 1000):
                last = int(line)
        expect_nothing_lost(folder, users, last)
