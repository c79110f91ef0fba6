"""Defines four networks as chains of blocks, and the ways in which people place `jax.checkpoint` around the blocks by hand.

Every network trains in one step: loss, gradient, Adam. `Chain.workload` writes this step in a `Way`: with or without
`jax.checkpoint`, its blocks one after another or as a loop. All ways begin with the same numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from tensile_models.attention import Attention
from tensile_models.layers import stem
from tensile_models.resnet import Bottleneck

from benchmarks.workloads import Workload
from benchmarks.workloads.workload import cross_entropy, integers, normal

# -- placing `jax.checkpoint` -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write the step by hand.

    Attributes:
        policy: what `jax.checkpoint` keeps, from the names of values in a block; None: no `jax.checkpoint`.
        scan: whether the blocks are one `lax.scan`, over stacked parameters if each block has its own.
        group: how many blocks are inside of one `jax.checkpoint`, of so many blocks. In a scan, each of them is in one of its own
            as well.
        needs_names: whether the policy says nothing about blocks in which no value has a name.
    """

    name: str
    policy: Callable[[Sequence[str]], Any] | None
    scan: bool = False
    group: Callable[[int], int] = lambda blocks: 1
    needs_names: bool = False


_POLICIES = jax.checkpoint_policies
_KEPT: Mapping[str, Callable[[Sequence[str]], Any]] = {
    "nothing_saveable": lambda _: _POLICIES.nothing_saveable,
    "dots_saveable": lambda _: _POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": lambda _: _POLICIES.dots_with_no_batch_dims_saveable,
    "save_only_these_names": lambda names: _POLICIES.save_only_these_names(*names),
    "save_anything_except_these_names": lambda names: _POLICIES.save_anything_except_these_names(*names),
    "offload_dot_with_no_batch_dims": lambda _: _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
_IN_TURN = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "save_anything_except_these_names")
_IN_A_LOOP = (
    "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "save_only_these_names",
    "offload_dot_with_no_batch_dims",
)  # fmt: skip
PLAIN = Way("plain jit", None)
WAYS = (
    *(Way(name, _KEPT[name], needs_names="names" in name) for name in _IN_TURN),
    Way("nothing_saveable, sqrt(n) groups", _KEPT["nothing_saveable"], group=math.isqrt),
    Way("scan", None, scan=True),
    *(Way(f"scan, {name}", _KEPT[name], scan=True, needs_names="names" in name) for name in _IN_A_LOOP),
    Way("scan, nothing_saveable, two levels", _KEPT["nothing_saveable"], scan=True, group=math.isqrt),
)


@dataclass(frozen=True, slots=True)
class Chain:
    """A network: `enter`, then `blocks` one after another, then `leave`.

    Attributes:
        enter: (input) -> what the first block takes, and a further input for each block.
        blocks: (x, its further input) -> (x, its output). Blocks of the same name share their parameters.
        leave: (x, the outputs of the blocks) -> logits.
        batch: makes the batch of this number: (input, labels).
        names: the values in a block that `checkpoint_name` names.
        alike: whether all blocks are the same module, so that they can be one loop. Their number is a square then.
    """

    enter: nn.Module
    blocks: tuple[tuple[str, nn.Module], ...]
    leave: nn.Module
    batch: Callable[[int], Any]
    names: tuple[str, ...] = ()
    alike: bool = True

    def fits(self, way: Way) -> bool:
        """Whether the network can be written in this way, and the policy says something about it."""
        return (self.alike or not way.scan) and (bool(self.names) or not way.needs_names)

    def workload(self, way: Way) -> Workload:
        """The training step, written in this way."""
        optimizer = optax.adam(1e-3)

        def init() -> Any:
            params, statistics = jax.jit(self._first)(jax.random.key(0), self.batch(0)[0])
            params = self.stacked(params) if way.scan else params
            return params, statistics, optimizer.init(params)

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, statistics, moments = state

            def loss_of(params: Any) -> tuple[jax.Array, Any]:
                return self._loss(params, statistics, batch, way)

            (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), statistics, moments), loss

        return Workload(step, init, self.batch)

    def _first(self, key: jax.Array, given: Any) -> tuple[Any, Any]:
        """The first parameters and the first running statistics, by the names of the modules."""
        variables: dict[str, Any] = {}

        def called(name: str, module: nn.Module, *arguments: Any) -> Any:
            if name not in variables:
                variables[name] = module.init(jax.random.fold_in(key, len(variables)), *arguments)
            return module.apply(variables[name], *arguments, mutable=["batch_stats"])[0]

        x, inputs = called("enter", self.enter, given)
        outputs: list[Any] = []
        for (name, block), further in zip(self.blocks, inputs, strict=True):
            x, output = called(name, block, x, further)
            outputs.append(output)
        called("leave", self.leave, x, outputs)
        params = {name: one["params"] for name, one in variables.items()}
        return params, {name: one.get("batch_stats", {}) for name, one in variables.items()}

    def stacked(self, params: Any) -> Any:
        """Parameters for `Way.scan`: those of all blocks as one tree, whose first axis counts the blocks if each has its own."""
        names = list(dict.fromkeys(name for name, _ in self.blocks))
        several = [params[name] for name in names]
        blocks = several[0] if len(names) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
        return {"enter": params["enter"], "blocks": blocks, "leave": params["leave"]}

    def _loss(self, params: Any, statistics: Any, batch: Any, way: Way) -> tuple[jax.Array, Any]:
        """The loss, and the running statistics after this step."""
        after: dict[str, Any] = {}

        def called(name: str, module: nn.Module, *arguments: Any) -> Any:
            variables = {"params": params[name], "batch_stats": statistics[name]}
            result, changed = module.apply(variables, *arguments, mutable=["batch_stats"])
            after[name] = changed.get("batch_stats", {})
            return result

        given, labels = batch
        x, inputs = called("enter", self.enter, given)
        if way.scan:
            x, outputs = self._scanned(params["blocks"], x, inputs, way)
            after |= {name: {} for name, _ in self.blocks}  # blocks of a loop have no running statistics here
        else:
            outputs = []
            size = way.group(len(self.blocks))
            for begin in range(0, len(self.blocks), size):
                group = self.blocks[begin : begin + size]
                run = _in_turn([block for _, block in group])
                if way.policy is not None:
                    run = jax.checkpoint(run, policy=way.policy(self.names))
                variables = [{"params": params[name], "batch_stats": statistics[name]} for name, _ in group]
                x, made, changed = run(variables, x, inputs[begin : begin + size])
                outputs += made
                after |= {name: one for (name, _), one in zip(group, changed, strict=True)}
        return cross_entropy(called("leave", self.leave, x, outputs), labels), after

    def _scanned(self, params: Any, x: Any, inputs: Any, way: Way) -> tuple[Any, Any]:
        """All blocks as a loop; the outputs are stacked again, one for each block. `prevent_cse` is for code outside of loops."""
        block, count = self.blocks[0][1], len(self.blocks)
        shared = len({name for name, _ in self.blocks}) == 1

        def body(x: Any, own: Any) -> Any:
            variables, further = own
            return block.apply({"params": params if shared else variables}, x, further)

        def kept(run: Callable[..., Any]) -> Callable[..., Any]:
            return run if way.policy is None else jax.checkpoint(run, policy=way.policy(self.names), prevent_cse=False)

        several = (None if shared else params, None if inputs[0] is None else jnp.stack(inputs))
        size = way.group(count)
        if size == 1:
            x, outputs = jax.lax.scan(kept(body), x, several)
        else:
            several = jax.tree.map(lambda leaf: leaf.reshape(count // size, size, *leaf.shape[1:]), several)
            x, outputs = jax.lax.scan(kept(lambda x, group: jax.lax.scan(kept(body), x, group)), x, several)
            outputs = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), outputs)
        return x, [jax.tree.map(lambda leaf, index=index: leaf[index], outputs) for index in range(count)]


def _in_turn(blocks: Sequence[nn.Module]) -> Callable[[Any, Any, Any], Any]:
    """(variables, x, further inputs) -> (x, outputs, running statistics) of these blocks, one after another."""

    def run(variables: Any, x: Any, inputs: Any) -> Any:
        outputs: list[Any] = []
        after: list[Any] = []
        for block, own, further in zip(blocks, variables, inputs, strict=True):
            (x, output), changed = block.apply(own, x, further, mutable=["batch_stats"])
            outputs.append(output)
            after.append(changed.get("batch_stats", {}))
        return x, outputs, after

    return run


# -- the networks -----------------------------------------------------------------------------------------------------------


class _Words(nn.Module):
    """Embedded words with learned positions."""

    words: int
    width: int
    blocks: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        return nn.Embed(self.words, self.width)(tokens) + positions, [None] * self.blocks


class _DecoderBlock(nn.Module):
    """Causal attention and a dense network of one hidden layer, as in GPT-2."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        x = x + Attention(self.heads, jnp.float32, causal=True)(nn.LayerNorm()(x))
        x = checkpoint_name(x, "middle")
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))), None


class _Patches(nn.Module):
    """Patches of 8x8 pixels."""

    width: int
    blocks: int

    @nn.compact
    def __call__(self, images: jax.Array) -> Any:
        x = nn.Conv(self.width, (8, 8), strides=8)(images)
        return x.reshape(len(x), -1, self.width), [None] * self.blocks


class _MixerBlock(nn.Module):
    """Two dense networks of one hidden layer: over the patches, then over the channels (Tolstikhin et al., 2021)."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        x = x + nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(2 * y.shape[-1])(y))).swapaxes(1, 2)
        x = checkpoint_name(x, "middle")
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))), None


class _Stem(nn.Module):
    """A 7x7 convolution and a 3x3 maximum: the image is halved twice."""

    width: int
    blocks: int

    @nn.compact
    def __call__(self, images: jax.Array) -> Any:
        return stem(images, self.width, train=True, dtype=jnp.float32), [None] * self.blocks


class _Residual(nn.Module):
    """A bottleneck block of ResNet-50."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        return Bottleneck(self.width, self.stride, jnp.float32)(x, train=True), None


class _Letters(nn.Module):
    """Embedded letters, one time after another, and a first state of zeros."""

    letters: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:
        x = nn.Embed(self.letters, self.width)(tokens)
        zeros = jnp.zeros((len(tokens), self.width))
        return (zeros, zeros), [x[:, time] for time in range(x.shape[1])]


class _Cell(nn.Module):
    """One time step of an LSTM (Hochreiter and Schmidhuber, 1997)."""

    width: int

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> Any:
        return nn.OptimizedLSTMCell(self.width)(carry, x)


class _Head(nn.Module):
    """A dense layer at each place of a text, at each time, or on the mean of an image."""

    classes: int
    of: str

    @nn.compact
    def __call__(self, x: Any, outputs: Any) -> jax.Array:
        if self.of == "times":
            return nn.Dense(self.classes)(jnp.stack(outputs, 1))
        if self.of == "image":
            x = x.reshape(len(x), -1, x.shape[-1]).mean(1)
        return nn.Dense(self.classes)(nn.LayerNorm()(x))


def _texts(number: int, texts: int, length: int, words: int) -> Any:
    tokens = integers(number, words, texts, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


def decoder(*, layers: int = 4, width: int = 128, texts: int = 4, length: int = 128, words: int = 256) -> Chain:
    """A decoder as GPT-2."""
    blocks = tuple((f"Block_{index}", _DecoderBlock(heads=4)) for index in range(layers))
    enter, leave = _Words(words, width, layers), _Head(words, "text")
    return Chain(enter, blocks, leave, lambda number: _texts(number, texts, length, words), names=("middle",))


def mixer(*, layers: int = 4, width: int = 128, images: int = 16, size: int = 64) -> Chain:
    """An MLP-mixer."""
    blocks = tuple((f"Block_{index}", _MixerBlock()) for index in range(layers))
    return Chain(
        _Patches(width, layers), blocks, _Head(10, "image"), lambda number: _images(number, images, size), names=("middle",)
    )


def resnet(*, stages: Sequence[int] = (1, 2, 2, 1), width: int = 32, images: int = 16, size: int = 64) -> Chain:
    """The bottleneck blocks of ResNet-50, fewer and narrower."""
    places = [(stage, place) for stage, blocks in enumerate(stages) for place in range(blocks)]
    blocks = tuple(
        (f"Block_{index}", _Residual(width * 2**stage, 2 if stage and not place else 1))
        for index, (stage, place) in enumerate(places)
    )
    enter, leave = _Stem(width, len(blocks)), _Head(10, "image")
    return Chain(enter, blocks, leave, lambda number: _images(number, images, size), alike=False)


def recurrent(*, length: int = 16, width: int = 128, texts: int = 64, letters: int = 64) -> Chain:
    """An LSTM whose time steps are unrolled: each of them is a block."""
    blocks = (("Cell", _Cell(width)),) * length
    return Chain(_Letters(letters, width), blocks, _Head(letters, "times"), lambda number: _texts(number, texts, length, letters))


def _images(number: int, images: int, size: int) -> Any:
    return normal(number, images, size, size, 3), integers(number, 10, images)


CHAINS: Mapping[str, Callable[..., Chain]] = {
    "decoder": decoder,
    "mixer": mixer,
    "resnet": resnet,
    "recurrent": recurrent,
}
