"""A decoder on a mesh of eight devices, of which only shapes exist, for figures that are compiled and never run.

    data     the batch is divided, every device has all parameters (data parallel, DP)
    fsdp     the batch is divided, and so are parameters and moments (FSDP, ZeRO-3)
    tensor   on a grid of 2 x 4 devices, the batch is divided along one axis, heads and wide dimensions along the other (TP)

Activations are constrained at the end of every product, as users of a mesh do. With `policy`, every layer is in `jax.checkpoint`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tensile_jax.trace import TracedStep, shape_struct, trace_step
from tensile_jax.trace.devices.per_device import per_device

Way = Literal["data", "fsdp", "tensor"]
WAYS: tuple[Way, ...] = get_args(Way)
POLICIES: Mapping[str, Callable[[], Any]] = {
    "nothing": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_offloaded": lambda: jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""What `jax.checkpoint` keeps of a layer, by the names in the results."""

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
    """The shapes of a decoder's state and batch on a mesh, and its step."""

    way: Way
    devices: tuple[Any, ...]
    batch: int = 64
    length: int = 512
    layers: int = 8
    width: int = 512
    heads: int = 8
    words: int = 256
    dtype: Any = jnp.float32
    policy: str | None = None

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh: one axis over all devices, or a grid for `tensor`. One device is a mesh of its own."""
        if self.way == "tensor":
            return Mesh(np.array(self.devices).reshape(2, -1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        return Mesh(np.array(self.devices), ("data",), axis_types=(AxisType.Auto,))

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam in float32; AdamW in other types."""
        return optax.adam(1e-3) if self.dtype == jnp.float32 else optax.adamw(1e-3)

    @cached_property
    def state_shape(self) -> Any:
        """The parameters and the moments, as shapes with shardings."""
        size = self.width // self.heads
        shapes = {
            "query": (self.width, self.heads, size), "key": (self.width, self.heads, size),
            "value": (self.width, self.heads, size), "out": (self.heads, size, self.width),
            "up": (self.width, 4 * self.width), "down": (4 * self.width, self.width),
        }  # fmt: skip
        layer = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        parameters = {
            "embedding": jax.ShapeDtypeStruct((self.words, self.width), self.dtype),
            "layers": [layer for _ in range(self.layers)],
        }
        state = (parameters, jax.eval_shape(self.optimizer.init, parameters))
        return jax.tree_util.tree_map_with_path(self._placed, state)

    @cached_property
    def batch_shape(self) -> Any:
        """Words and the words after them."""
        words = jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)
        return (shape_struct(words, NamedSharding(self.mesh, PartitionSpec("data"))),) * 2

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """(state, batch) -> (state, metrics)."""

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            parameters, moments = state
            loss, gradients = jax.value_and_grad(self._loss)(parameters, *batch)
            updates, moments = self.optimizer.update(gradients, moments, parameters)
            return (optax.apply_updates(parameters, updates), moments), {"loss": loss}

        return train_step

    @property
    def out_shardings(self) -> Any:
        """The state comes back as it was given."""
        return jax.tree.map(lambda shape: shape.sharding, self.state_shape), None

    @property
    def jitted(self) -> Any:
        """Plain jit's step, which takes over the memory of the state."""
        return jax.jit(self.step, donate_argnums=0, out_shardings=self.out_shardings)

    def traced_whole(self) -> TracedStep:
        """The step with the sizes of all devices together."""
        return trace_step(self.jitted, self.step, (self.state_shape, self.batch_shape), {})

    def traced(self) -> TracedStep:
        """The step, traced as `tensile.jit` traces it, with the sizes of one device."""
        arguments, step = (self.state_shape, self.batch_shape), self.traced_whole()
        wanted = [*jax.tree.leaves(self.out_shardings[0]), None]
        return per_device(step, [leaf.sharding for leaf in jax.tree.leaves(arguments)], wanted, [self.mesh])

    def _placed(self, path: Sequence[Any], shape: Any) -> Any:
        spec = PartitionSpec()
        if shape.ndim and self.way == "fsdp":
            sizes = list(shape.shape)
            spec = PartitionSpec(*(None,) * sizes.index(max(sizes)), "data")
        if shape.ndim and self.way == "tensor":
            spec = _TENSOR_SPECS[path[-1].key]
        return shape_struct(shape, NamedSharding(self.mesh, spec))

    def _loss(self, parameters: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        embedding = parameters["embedding"]
        x = self._held(embedding[words], "data")
        layer = self._layer if self.policy is None else jax.checkpoint(self._layer, policy=POLICIES[self.policy]())
        for of in parameters["layers"]:
            x = layer(x, of)
        logits = jnp.einsum("btw,vw->btv", _normal(x), embedding).astype(jnp.float32)
        right = jnp.sum(jnp.where(targets[..., None] == jnp.arange(self.words), logits, 0.0), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    def _layer(self, x: jax.Array, layer: Any) -> jax.Array:
        model = "model" if self.way == "tensor" else None
        normal = _normal(x)
        q, k, v = (
            self._held(jnp.einsum("btw,whd->bthd", normal, layer[name]), "data", None, model)
            for name in ("query", "key", "value")
        )
        causal = jnp.tril(jnp.ones((self.length, self.length), bool))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (self.width // self.heads) ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(self.dtype)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + self._held(jnp.einsum("bqhd,hdw->bqw", attended, layer["out"]), "data")
        wide = jax.nn.gelu(self._held(jnp.einsum("btw,wf->btf", _normal(x), layer["up"]), "data", None, model))
        return x + self._held(jnp.einsum("btf,fw->btw", wide, layer["down"]), "data")

    def _held(self, x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


def _normal(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return ((wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)
