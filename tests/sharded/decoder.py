"""A decoder whose arguments are divided among devices, in the ways that users divide them.

    data     the batch is divided, every device has all parameters (data parallel)
    fsdp     the batch is divided, and so are parameters and moments (FSDP, ZeRO-3)
    tensor   the batch is divided along one axis of a grid, and heads and wide dimensions along the other (tensor parallel)

With `typed`, the axes of the mesh are explicit (`jax.sharding.AxisType`), so that shardings are part of the types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Way = Literal["data", "fsdp", "tensor"]
_WIDTH, _HEADS, _WORDS, _BATCH, _LENGTH = 64, 8, 128, 16, 32
_OPTIMIZER = optax.adam(1e-3)
_TENSOR_SPECS = {
    "embedding": PartitionSpec("model"),
    "query": PartitionSpec(None, "model"),
    "key": PartitionSpec(None, "model"),
    "value": PartitionSpec(None, "model"),
    "out": PartitionSpec("model"),
    "up": PartitionSpec(None, "model"),
    "down": PartitionSpec("model"),
}


@dataclass(frozen=True)
class ShardedDecoder:
    """A step, its first state and its batches on a mesh of eight devices."""

    way: Way
    typed: bool = False
    layers: int = 2

    @cached_property
    def mesh(self) -> Mesh:
        kind = AxisType.Explicit if self.typed else AxisType.Auto
        if self.way == "tensor":
            return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
        return jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def state(self) -> Any:
        """The first state; new arrays each time."""
        rng = np.random.default_rng(0)  # NumPy's: JAX would compile a program for each shape

        def normal(*shape: int) -> np.ndarray:
            return (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

        size = _WIDTH // _HEADS
        layers = [
            {
                "query": normal(_WIDTH, _HEADS, size), "key": normal(_WIDTH, _HEADS, size), "value": normal(_WIDTH, _HEADS, size),
                "out": normal(_HEADS, size, _WIDTH), "up": normal(_WIDTH, 4 * _WIDTH), "down": normal(4 * _WIDTH, _WIDTH),
            }
            for _ in range(self.layers)
        ]  # fmt: skip
        parameters = {"embedding": normal(_WORDS, _WIDTH) * 4, "layers": layers}
        return jax.tree_util.tree_map_with_path(self._placed, (parameters, _OPTIMIZER.init(parameters)))

    def batch(self, seed: int) -> Any:
        words = np.random.default_rng(seed).integers(0, _WORDS, (2, _BATCH, _LENGTH))
        return jax.device_put((words[0], words[1]), NamedSharding(self.mesh, PartitionSpec("data")))

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """(state, batch) -> (state, metrics)."""

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            parameters, moments = state
            loss, gradients = jax.value_and_grad(self._loss)(parameters, *batch)
            updates, moments = _OPTIMIZER.update(gradients, moments, parameters)
            return (optax.apply_updates(parameters, updates), moments), {"loss": loss}

        return train_step

    def _placed(self, path: Any, array: Any) -> jax.Array:
        name = getattr(path[-1], "key", "")
        spec = PartitionSpec()
        if array.ndim and self.way == "fsdp":
            spec = PartitionSpec("data")
        if array.ndim and self.way == "tensor":
            spec = _TENSOR_SPECS[name]
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def _loss(self, parameters: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        model = "model" if self.way == "tensor" else None
        embedding = parameters["embedding"]
        if self.typed:
            x = embedding.at[words].get(out_sharding=PartitionSpec("data"))
        else:
            x = self._held(embedding[words], "data")
        causal = jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool))
        for layer in parameters["layers"]:
            if self.typed and self.way == "fsdp":
                layer = jax.tree.map(self._held, layer)
            q, k, v = (
                self._product("btw,whd->bthd", _normal(x), layer[name], "data", None, model) for name in ("query", "key", "value")
            )
            scores = jnp.where(causal, jnp.einsum("bqhd,bkhd->bhqk", q, k) * (_WIDTH // _HEADS) ** -0.5, -1e9)
            attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            x = x + self._product("bqhd,hdw->bqw", attended, layer["out"], "data")
            wide = jax.nn.gelu(self._product("btw,wf->btf", _normal(x), layer["up"], "data", None, model))
            x = x + self._product("btf,fw->btw", wide, layer["down"], "data")
        logits = jnp.einsum("btw,vw->btv", _normal(x), self._held(embedding) if self.typed else embedding)
        right = jnp.sum(jnp.where(targets[..., None] == jnp.arange(_WORDS), logits, 0.0), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    def _product(self, labels: str, a: jax.Array, b: jax.Array, *spec: str | None) -> jax.Array:
        if not self.typed:
            return self._held(jnp.einsum(labels, a, b), *spec)
        rest = [None] * (len(labels.split("->")[1]) - len(spec))
        return jnp.einsum(labels, a, b, out_sharding=PartitionSpec(*spec, *rest))

    def _held(self, x: jax.Array, *spec: str | None) -> jax.Array:
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.sharding.reshard(x, sharding) if self.typed else jax.lax.with_sharding_constraint(x, sharding)


def _normal(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
