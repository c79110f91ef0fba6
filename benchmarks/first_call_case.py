"""Measures the first call of one step in a process of its own, under plain jit or under a budget.

    python -m benchmarks.first_call_case resnet50 --budget 60% --cache FOLDER

Prints one JSON object: seconds of the first call and its parts, the processor's seconds in all threads (`cpu_s`, which other
processes on the machine hardly change), how many plans were compiled until one kept the budget (rounds), how many executables
that took, and for each segment of the first of these plans how far the prediction was from what XLA needs. Without `--budget`,
the step is plain jit's. `--cache` is the folder of jax's persistent compilation cache.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import jax
import numpy as np
import optax
from flax import nnx

import tensile_jax as tensile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import Sizes, peak_of
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.installed_models import MODELS
from tensile_jax.plan_format import Plan
from tensile_jax.trace import shape_struct

SIZES: Mapping[str, Mapping[str, int]] = {
    "mlp": {"batch_size": 256, "image_size": 16},
    "cnn": {"batch_size": 64},
    "gpt": {"batch_size": 8},
    "resnet50": {"batch_size": 16, "image_size": 64},
    "vgg16": {"batch_size": 8, "image_size": 64, "classes": 100},
}
MIXER = "nnx_mixer"

Errors = list[tuple[float, float]]
"""For each segment: (predicted - compiled) / compiled, of its workspace and of all that it has on the device."""


class MixerBlock(nnx.Module):
    """Two dense networks of one hidden layer: over the patches, then over the channels (Tolstikhin et al., 2021, figure 1)."""

    def __init__(self, patches: int, channels: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(channels, rngs=rngs) for _ in range(2)])
        self.over_patches = _dense(patches, 2 * patches, rngs)
        self.over_channels = _dense(channels, 4 * channels, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.over_patches(self.norms[0](x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.over_channels(self.norms[1](x))


def _dense(width: int, hidden: int, rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(width, hidden, rngs=rngs), nnx.gelu, nnx.Linear(hidden, width, rngs=rngs))


class Mixer(nnx.Module):
    """An MLP-mixer on patches of 8x8 pixels."""

    def __init__(self, rngs: nnx.Rngs, *, image_size: int = 32, channels: int = 64, blocks: int = 4, classes: int = 10) -> None:
        self.patch = nnx.Conv(3, channels, kernel_size=(8, 8), strides=(8, 8), rngs=rngs)
        self.blocks = nnx.List([MixerBlock((image_size // 8) ** 2, channels, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(channels, rngs=rngs)
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patch(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def mixer_step(model: Mixer, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Loss, gradients and update."""

    def loss_of(model: Mixer) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def step_of(model: str, budget: str | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step, jitted, and the arguments of its first call."""
    if model == MIXER:
        mixer = Mixer(nnx.Rngs(0))
        draw = np.random.default_rng(0)
        batch = draw.random((256, 32, 32, 3), np.float32), draw.integers(0, 10, 256)
        arguments = (mixer, nnx.Optimizer(mixer, optax.adam(1e-3), wrt=nnx.Param), *batch)
        donated = ("model", "optimizer")
        if budget is None:
            return nnx.jit(mixer_step, donate_argnames=donated), arguments
        return tensile.nnx.jit(mixer_step, budget=budget, donate_argnames=donated), arguments
    built = MODELS[model](**SIZES[model])
    batch = jax.tree.map(jax.numpy.asarray, next(built.batches()))
    step = jax.jit(built.step, donate_argnums=0) if budget is None else tensile.jit(built.step, budget=budget, donate_argnums=0)
    return step, (built.init(), batch)


class Round(NamedTuple):
    """A plan that was compiled: the errors of its segments' predictions, and how many executables there are since."""

    errors: Errors
    executables: int


@contextmanager
def watched_rounds() -> Iterator[list[Round]]:
    """A list to which each plan is added that is compiled in the block, since nothing reports what was predicted before."""
    rounds: list[Round] = []
    workspaces = Fitting.workspaces

    def watched(self: Fitting, plan: Plan, sizes: Sequence[Sizes]) -> list[int]:
        found = workspaces(self, plan, sizes)
        errors: Errors = []
        for segment, needed in zip(plan.segments, found, strict=True):
            error = segment.workspace_bytes - needed
            errors.append((error / max(needed, 1), error / (segment.resident_bytes + needed)))
        rounds.append(Round(errors, len(self.step.compiler)))
        return found

    with patch.object(Fitting, "workspaces", watched):
        yield rounds


@click.command()
@click.argument("model", type=click.Choice([*SIZES, MIXER]))
@click.option("--budget", help='Such as "60%"; plain jit without it.')
@click.option("--cache", required=True, help="A folder for jax's persistent compilation cache.")
def main(model: str, budget: str | None, cache: str) -> None:
    jax.config.update("jax_compilation_cache_dir", cache)
    step, arguments = step_of(model, budget)
    shapes = None if model == MIXER else jax.tree.map(shape_struct, arguments)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))  # JAX's own first call of anything
    began, cpu_began = time.perf_counter(), time.process_time()
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    with watched_rounds() as rounds:
        try:
            jax.block_until_ready(step(*arguments))
        except BudgetTooSmall as error:
            result["too_small"] = error.floor_bytes
    result |= {"first_call_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began, "rounds": len(rounds)}
    if "too_small" in result:
        print(json.dumps(result))
        return
    if budget is None and shapes is not None:
        result["jit_peak_bytes"] = peak_of(step.lower(*shapes).compile())  # pyright: ignore[reportFunctionMemberAccess]  # jit's
    if budget is not None:
        plan = step.plan(*(shapes or arguments))  # pyright: ignore[reportFunctionMemberAccess]  # as the next line
        report = step.report()  # pyright: ignore[reportFunctionMemberAccess]  # a planned function, not jit's
        result |= {
            "budget_bytes": plan.budget_bytes,
            "predicted_step_us": plan.step_us,
            "trace_s": report.trace_s,
            "plan_s": report.plan_s,
            "compile_s": report.compile_s,
            "segments": report.segments,
            "executables": rounds[-1].executables if rounds else 1,
            "workspace_errors": [workspace for workspace, _ in (rounds[0].errors if rounds else [])],
            "device_bytes_errors": [on_device for _, on_device in (rounds[0].errors if rounds else [])],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
