"""What a run saves is an ordinary orbax checkpoint: orbax alone restores it, in a process that never imports tensile_jax."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tensile_jax as tensile
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tests.builders import batch, weights
from tests.exec.checkpoint.test_checkpoints import Training

OPTIMIZER = optax.adam(1e-3)


def loss(params: Any, batch: Any) -> Any:
    return sum(jnp.sum((batch @ w) ** 2) for w in jax.tree.leaves(params)) if False else jnp.mean(params["w"] * 0.5)


TEN_LINES = """
    import hashlib, sys
    import jax, numpy as np, optax
    import orbax.checkpoint as ocp

    params = {"w": jax.ShapeDtypeStruct((8, 8), np.float32), "narrow": jax.ShapeDtypeStruct((8,), jax.numpy.bfloat16)}
    like = {"params": params, "optimizer": jax.eval_shape(optax.adam(1e-3).init, params), "key": jax.random.key(0)}
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), like)
    state = ocp.StandardCheckpointer().restore(sys.argv[1], like)
    untyped = ocp.PyTreeCheckpointer().restore(sys.argv[1])

    assert not any(name.startswith("tensile") for name in sys.modules)
    assert isinstance(state["optimizer"][0], optax.ScaleByAdamState)
    assert jax.random.key_impl(state["key"]) == "threefry2x32"
    assert untyped["params"]["w"].tobytes() == np.asarray(state["params"]["w"]).tobytes()
    state["key"] = jax.random.key_data(state["key"])
    print([hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(state)])
"""
