"""Jobs that another process can import, for tests of isolated jobs. States, batches and steps take a few microseconds."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Job = tuple[Callable[..., Any], Any, Callable[[], Iterator[Any]]]


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Uses every kind of leaf that a state can have."""
    key, drawn = jax.random.split(state["key"])
    noise = jax.random.normal(drawn, state["w"].shape) * 1e-2
    w = jnp.tanh(state["w"] @ state["w"].T) @ state["w"] * 0.1 + batch["x"] + noise
    half = (state["half"].astype(jnp.float32) * 0.9 + w[0]).astype(jnp.bfloat16)
    after = {"w": w, "half": half, "key": key, "weak": state["weak"] * 0.5, "count": state["count"] + 1}
    return after, {"loss": jnp.mean(w**2), "process": batch["process"]}


def make_state(*, seed: int = 0, size: int = 64) -> Any:
    w = jax.random.normal(jax.random.key(seed), (size, size))
    weak = jnp.full((), 0.5)
    return {"w": w, "half": w[0].astype(jnp.bfloat16), "key": jax.random.key(7), "weak": weak, "count": np.int32(0)}


def batches() -> Iterator[Any]:
    for i in range(10_000):
        yield {"x": np.full(64, i % 7, np.float32), "process": np.int32(os.getpid())}


def make_job(*, seed: int = 0) -> Job:
    return step, make_state(seed=seed), batches


def bits(state: Any) -> Any:
    """Every bit of a state, and what it means, in its structure."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf)).tobytes()
        return np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes()

    return jax.tree.map(of, state)


def refuses(*, story: str) -> Job:
    raise LookupError(story)


def fails_at_three() -> Iterator[Any]:
    for i, batch in enumerate(batches()):
        if i == 3:
            raise ValueError("the fourth batch is bad")
        yield batch


def ends_the_process() -> Iterator[Any]:
    for i, batch in enumerate(batches()):
        if i == 3:
            os._exit(3)
        yield batch


def hangs() -> Iterator[Any]:
    for i, batch in enumerate(batches()):
        if i == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        yield batch


def talks_garbage() -> Iterator[Any]:
    for i, batch in enumerate(batches()):
        if i == 3:
            _write_to_sockets(b"no message " * 1000)
        yield batch


def sends_a_bomb() -> Iterator[Any]:
    for i, batch in enumerate(batches()):
        if i == 3:
            _write_to_sockets(b"\xff\xff\xff\xff" + (1 << 62).to_bytes(8, "big"))
        yield batch


def waits(path: str) -> Iterator[Any]:
    """Says that it runs, and draws no more."""
    yield from (batch for _, batch in zip(range(3), batches(), strict=False))
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(0.1)


def make_waiting_job(*, path: str) -> tuple[Any, Any, Any]:
    return step, make_state(), lambda: waits(path)


def wrong_step(state: Any, batch: Any) -> Any:
    raise ZeroDivisionError("in the step")


def _write_to_sockets(text: bytes) -> None:
    for descriptor in range(3, 100):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family == socket.AF_UNIX:
                    end.sendall(text)
        except OSError:
            continue


def draws_nothing(state: Any, batch: Any) -> tuple[Any, Any]:
    """Takes a batch of None."""
    return {"a": state["a"] + 1}, {"sum": state["a"].sum()}


def does_nothing(state: Any, batch: Any) -> tuple[Any, Any]:
    """Has no operator at all."""
    return state, None


ODD_STEPS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {"no batch": draws_nothing, "nothing": does_nothing}


def step_that_hangs(state: Any, batch: Any) -> tuple[Any, Any]:
    """Never ends while it is traced."""
    time.sleep(3600)
    return step(state, batch)


def make_that_hangs() -> Job:
    """Never ends while the job is made."""
    time.sleep(3600)
    return make_job()
