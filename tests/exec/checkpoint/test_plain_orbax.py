"""What a run saves is an ordinary orbax checkpoint: orbax alone restores it, in a process that never imports tensile_jax."""

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tests.exec.checkpoint.test_checkpoints import STATES
from tests.exec.conftest import MakeRuntime

OPTIMIZER = optax.adam(1e-3)


def make_state() -> Any:
    params = {"w": jnp.ones((8, 8)), "narrow": jnp.ones(8, jnp.bfloat16)}
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": jax.random.key(3)}


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    key, drawn = jax.random.split(state["key"])
    noise = jax.random.normal(drawn, (8,))
    grads = jax.grad(lambda p: jnp.sum((batch @ p["w"] + noise) ** 2) + jnp.sum(p["narrow"] ** 2))(state["params"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer, "key": key}, None


def batches() -> Iterator[np.ndarray]:
    while True:
        yield np.ones((2, 8), np.float32)


TEN_LINES = """
    import sys, jax, optax
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = {"w": jax.numpy.zeros((8, 8)), "narrow": jax.numpy.zeros(8, "bfloat16")}
    like = {"params": params, "optimizer": optax.adam(1e-3).init(params), "key": jax.random.key(0)}
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), like)
    state = ocp.StandardCheckpointer().restore(sys.argv[1], like)
    state["key"] = jax.random.key_data(state["key"])
"""

THEN = """
    import hashlib
    import numpy as np

    assert not any(name.startswith("tensile") for name in sys.modules)
    assert isinstance(state["optimizer"][0], optax.ScaleByAdamState)
    print(*(hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(state)))
"""


def test_ten_lines_of_plain_orbax_restore_what_a_run_has_saved(runtime: MakeRuntime, tmp_path: Path) -> None:
    with runtime(checkpoints=tmp_path) as run:
        job = run.submit(step, make_state(), batches, steps=3, name="job")
    script = textwrap.dedent(TEN_LINES) + textwrap.dedent(THEN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "job" / "3" / "state")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = job.result()
    last["key"] = jax.random.key_data(last["key"])
    assert done.stdout.split() == [hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(last)]


def test_orbax_alone_finds_the_structure_and_the_numbers_of_a_state(tmp_path: Path) -> None:
    """Arrays come as NumPy arrays, typed keys and Python scalars as such, and empty arrays not at all."""
    import orbax.checkpoint as ocp

    state = {
        "containers": STATES["containers"](), "key": jax.random.key(1, impl="rbg"), "empty": np.zeros((0, 2)), "flag": True,
        "int": -3, "large": 2**80, "float": 0.1, "none": None, "weak": jnp.asarray(1.5), "uint4": jnp.arange(4, dtype=jnp.uint4),
    }  # fmt: skip
    Checkpoints(tmp_path).save(1, state)
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    kinds = jax.tree.map(lambda leaf: ocp.RestoreArgs(), state)
    kinds["key"] = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=pinned)
    kinds["empty"] = None
    kinds["containers"] = {
        "params": {"w": [ocp.RestoreArgs(), None]}, "count": {"first": ocp.RestoreArgs(), "second": [ocp.RestoreArgs()]}
    }  # fmt: skip
    args = ocp.args.PyTreeRestore(restore_args=kinds)
    found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / "1" / "state", args=args)
    assert (found["containers"]["params"]["w"][0].tolist(), found["containers"]["count"]["second"]) == ([1, 1, 1], [2.5])
    assert jax.random.key_impl(found["key"]) == "rbg"
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(state["key"])).all()
    assert [found[name] for name in ("flag", "int", "large", "float", "none", "empty")] == [True, -3, str(2**80), 0.1, None, None]
    assert [type(found[name]) for name in ("weak", "uint4")] == [np.ndarray] * 2
    assert (float(found["weak"]), found["uint4"].tolist()) == (1.5, [0, 1, 2, 3])
