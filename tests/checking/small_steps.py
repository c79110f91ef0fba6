"""A step with a state of several kinds, and plans whose executables compute something else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensile_jax.exec.compiling.compiler import Compiler

ROWS, WIDTH = 64, 8
NAMES = {
    "result[0]['count']", "result[0]['key']", "result[0]['mean']", "result[0]['w']", "result[1]['best']", "result[1]['loss']",
}  # fmt: skip


def train_step(state: dict[str, Any], images: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(images @ w) @ w) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    noise = jax.random.normal(state["key"], state["w"].shape)
    new = {
        "w": state["w"] - 0.1 * gradient + 1e-3 * noise,
        "mean": 0.9 * state["mean"] + 0.1 * images[:5].mean(axis=1),
        "count": state["count"] + 1,
        "key": jax.random.split(state["key"])[0],
    }
    return new, {"loss": loss, "best": jnp.argmax(images @ state["w"], axis=1)}


def state() -> dict[str, Any]:
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    return {"w": w, "mean": jnp.zeros(5), "count": jnp.int32(0), "key": jax.random.key(7)}


def images() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def spoil(
    monkeypatch: pytest.MonkeyPatch, is_meant: Callable[[Any], bool], change: Callable[[Any], Any], *, after: int = 0
) -> None:
    """From now on, executables of plans change each result that is meant, once they have returned `after` such results."""
    compile_segments = Compiler.compile
    seen: list[Any] = []

    def changed(value: Any) -> Any:
        if not is_meant(value):
            return value
        seen.append(value)
        return change(value) if len(seen) > after else value

    def spoiled(self: Compiler, *args: Any, **named: Any) -> list[Any]:
        made = compile_segments(self, *args, **named)
        return [dataclasses.replace(e, call=lambda *xs, e=e: [changed(value) for value in e.call(*xs)]) for e in made]

    monkeypatch.setattr(Compiler, "compile", spoiled)


def has_form(shape: tuple[int, ...], dtype: str) -> Callable[[Any], bool]:
    return lambda value: getattr(value, "shape", None) == shape and str(value.dtype) == dtype


def numbers_of(tree: Any) -> list[np.ndarray]:
    return [np.array(jax.random.key_data(x) if "key" in str(x.dtype) else x) for x in jax.tree.leaves(tree)]
