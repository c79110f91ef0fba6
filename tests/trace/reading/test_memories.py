"""What a step keeps in host memory, and its own copies between the memories, in its graph."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.trace import TracedStep, trace_step

HOST, DEVICE = (SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("pinned_host", "device"))
NBYTES = 4 * 16 * 16


def step(weights: Any, x: Any) -> Any:
    """Layers whose weights come from host memory all at once, and go back there all at once."""
    there = jax.device_put(weights, DEVICE)
    for w in there:
        x = jnp.tanh(x @ w)
    return jax.device_put([w * 0.9 for w in there], HOST), x


def traced() -> TracedStep:
    weights = jax.device_put([jnp.ones((16, 16))] * 3, HOST)
    return trace_step(jax.jit(step), step, (weights, jnp.ones((8, 16))), {})


def test_what_is_in_host_memory_takes_no_device_memory() -> None:
    graph = traced().graph
    sizes = {graph.tensors[t].name: (graph.tensors[t].nbytes, graph.tensors[t].host_bytes) for t in graph.inputs}
    assert sizes == {"weights[0]": (0, NBYTES), "weights[1]": (0, NBYTES), "weights[2]": (0, NBYTES), "x": (512, None)}
    assert traced().on_host == {0, 1, 2}


def test_a_copy_of_several_arrays_is_an_operator_for_each() -> None:
    copies = [op for op in traced().graph.operators if op.primitive == "device_put"]
    assert [(len(op.inputs), op.bytes_in, op.bytes_out) for op in copies] == [(1, NBYTES, 0)] * 3 + [(1, 0, NBYTES)] * 3
    assert all(op.kind == "heavy" for op in copies)


def test_what_comes_from_the_host_comes_right_before_its_first_consumer() -> None:
    names = [op.primitive for op in order(traced().graph).operators]
    assert names[:9] == ["device_put", "dot_general", "tanh"] * 3
