"""A runtime on the second of two devices, in a process of its own, where XLA makes two of one CPU."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tensile_jax as tensile

SCRIPT = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import tensile_jax as tensile
    from tests.exec.isolated_jobs import batches, bits, make_state, step
    from tests.exec.small_jobs import counting, equal, wide

    first, second = jax.devices()
    work, count, folder = wide(0), counting(), sys.argv[1]
    on_second, on_first = jax.device_put(count.state(), second), jax.device_put(count.state(), first)
    mesh = jax.make_mesh((2,), ("x",))
    sharded = jax.device_put(count.state(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))

    def refused(run, state):
        try:
            run.submit(count.step, state, count.batches, steps=2)
        except ValueError as error:
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            return str(error)

    for policy in sys.argv[2:]:
        with tensile.Runtime("64MiB", device=second, look="always", checkpoints=f"{folder}/{policy}") as run:
            a = run.submit(work.step, work.state(), work.batches, steps=4, name="a", policy=policy)
            b = run.submit(count.step, count.state(), [jnp.ones(8)] * 4, steps=4, name="b", policy=policy)
            c = run.submit(count.step, on_second, [jax.device_put(np.ones(8, np.float32), second)] * 4, steps=4, name="c")
            d = run.submit(lambda s, b: (None, jnp.float32(1)), None, [None] * 4, steps=4, name="d", policy=policy)
            e = run.submit(step, make_state(), batches, steps=4, name="e", policy=policy)
            print(refused(run, on_first))
            print(refused(run, sharded))
            on_second = jax.device_put(count.state(), second)
        for job in run.jobs:
            assert job.status.state == "finished", job.status.note
            assert {leaf.device for leaf in jax.tree.leaves(job.result())} <= {second}
        with tensile.Runtime("64MiB", checkpoints=f"{folder}/{policy}/lonely") as run:
            alone = run.submit(work.step, work.state(), work.batches, steps=4, policy=policy, name="a")
            other = run.submit(step, make_state(), batches, steps=6, name="e", policy=policy)
        assert equal(a.result(), alone.result())
        with tensile.Runtime("64MiB", device=second, checkpoints=f"{folder}/{policy}") as run:
            again = run.submit(step, make_state(), batches, steps=6, name="e", policy=policy, resume=True)
        assert again.status.state == "finished", again.status.note
        assert bits(again.result()) == bits(other.result())
    with tensile.Runtime("64MiB") as run:
        wrong = run.submit(count.step, count.state(), [jax.device_put(np.ones(8, np.float32), second)] * 4, steps=2)
    print(wrong.status.note)
"""


@pytest.mark.parametrize("policy", ["auto", pytest.param("none", marks=pytest.mark.slow)])  # whole, and in segments
def test_a_runtime_on_the_second_device_gives_what_one_on_the_first_gives(tmp_path: Path, policy: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tensile.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), policy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    elsewhere, sharded, *_, wrong = done.stdout.splitlines()
    assert "state['total'] of 'count' is on " in elsewhere and "Bring it there, with jax.device_put" in elsewhere
    assert (
        "state['total'] of 'count' is spread over 2 devices, and the runtime has cpu:1. Make the runtime with Runtime(" in sharded
    )
    assert "ValueError: the batch has an array on " in wrong
