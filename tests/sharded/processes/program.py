"""What each process of a test does. Run as `python program.py SCENARIOS PROCESS PROCESSES PORT FOLDER`, in all processes at once.

A scenario is a function of this file that takes the folder. The scenarios are done one after another. What they return is written
to `FOLDER/PROCESS.json`, by the name of the scenario.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import Sizes
from tensile_jax.exec.fitting.find_plan import begin

STEPS = 5
HEARTBEAT_S = 10  # jax.distributed calls a process dead of which it has not heard for so long
SHUTDOWN_S = 10  # and ends all processes if one has waited for so long for the others to end, too
LAYERS, WIDTH, BATCH = 8, 32, 512


def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def placed(value: Any, *spec: str, devices: Sequence[Any] = ()) -> jax.Array:
    """A value that every process has whole, divided among these devices; if none are given, among those of all processes."""
    among = Mesh(np.array(devices), ("data",)) if devices else mesh()
    whole, sharding = np.asarray(value), NamedSharding(among, PartitionSpec(*spec))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def state(*spec: str, layers: int = LAYERS, width: int = WIDTH) -> Any:
    """Weights and their momenta."""
    drawn = np.random.default_rng(0)
    weights = [placed(drawn.normal(size=(width, width)).astype(np.float32) / width**0.5, *spec) for _ in range(layers)]
    return weights, [placed(np.zeros((width, width), np.float32), *spec) for _ in range(layers)]


def batch(seed: int, rows: int = BATCH, width: int = WIDTH) -> jax.Array:
    return placed(np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32), "data")


def train_step(state: Any, x: jax.Array, rate: Any) -> Any:
    divided = NamedSharding(mesh(), PartitionSpec("data"))

    def loss_of(weights: Any) -> jax.Array:
        layer = lambda y, w: jax.lax.with_sharding_constraint(jnp.tanh(y @ w), divided)  # noqa: E731
        return jnp.mean((functools.reduce(layer, weights, x) - x) ** 2)

    weights, momenta = state
    loss, gradients = jax.value_and_grad(loss_of)(weights)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
    return (jax.tree.map(lambda w, m: w - rate * m, weights, momenta), momenta), {"loss": loss}


def trained(step: Any, first: Any, steps: int = STEPS, **shape: int) -> tuple[list[float], Any]:
    losses: list[float] = []
    for i in range(steps):
        first, metrics = step(first, batch(i, **shape), 0.1)  # the rate is a number, which each process has
        losses.append(float(metrics["loss"]))
    return losses, first


def shards(tree: Any) -> list[list[float]]:
    """The numbers of each shard of this process, in their order."""
    return [np.asarray(s.data).ravel().tolist() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]


def half(*spec: str, rows: int) -> int:
    """Half of plain jit's peak on each device."""
    return tensile.jit(train_step, donate_argnums=0).jit_peak_bytes(state(*spec), batch(0, rows), 0.1) // 2


def caught(call: Callable[[], Any]) -> list[Any]:
    """The type and the text of the error that `call` raises, and the processes that the error names."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), list(getattr(error, "processes", ()))]
    return ["no error", "", []]


def _trainings(*spec: str, rows: int = BATCH) -> Any:
    losses, last = trained(jax.jit(train_step, donate_argnums=0), state(*spec), rows=rows)
    step = tensile.jit(train_step, donate_argnums=0, budget=(most := half(*spec, rows=rows)))
    ours, mine = trained(step, state(*spec), rows=rows)
    plan, report = step.plan(mine, batch(0, rows), 0.1), step.report()
    pairs = list(zip(*map(jax.tree.leaves, (mine, last)), strict=True))
    return {
        "losses": losses, "ours": ours, "budget": most, "plan": msgspec.json.encode(plan).decode(), "whole": plan.whole,
        "devices": plan.devices, "planned_bytes": plan.peak_bytes, "peak_bytes": report.peak_bytes,
        "alike": all(a.sharding == b.sharding for a, b in pairs), "shards": shards(mine), "shards_of_jit": shards(last),
        "passive": report.passive_swap_ins,
    }  # fmt: skip


def fsdp(folder: Path) -> Any:
    return _trainings("data")


def data_parallel(folder: Path) -> Any:
    return _trainings(rows=16 * BATCH)  # each device has the whole state, of which nothing can be dropped


def host_memory(folder: Path) -> Any:
    """Training under a budget which state must leave: it is in pinned host memory between two steps."""
    step = tensile.jit(train_step, donate_argnums=0, budget="65%", state_memory="any")
    ours, mine = trained(step, state(layers=4, width=128), rows=64, width=128)
    losses, last = trained(jax.jit(train_step, donate_argnums=0), state(layers=4, width=128), rows=64, width=128)
    plan = step.plan(mine, batch(0, rows=64, width=128), 0.1)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(mine)]
    return {
        "losses": losses, "ours": ours, "on_host": kinds.count("pinned_host"), "plan": msgspec.json.encode(plan).decode(),
        "swapped": plan.swapped_out_bytes, "shards": shards(tensile.to_device(mine)), "shards_of_jit": shards(last),
    }  # fmt: skip


def whole(folder: Path) -> Any:
    """A step that runs as plain jit runs it, since the budget is plain jit's own peak."""
    plain, _ = trained(jax.jit(train_step, donate_argnums=0), state("data"))
    step = tensile.jit(train_step, donate_argnums=0, budget="100%")
    losses, mine = trained(step, state("data"), 2)
    plan = step.plan(mine, batch(0), 0.1)
    return {"plain": plain, "losses": losses, "whole": plan.whole, "plan": msgspec.json.encode(plan).decode()}


def saved_plan(folder: Path) -> Any:
    """A plan that was made, saved, loaded in each process and run. One process keeps the plans that are used."""
    step = tensile.jit(train_step, donate_argnums=0, budget="60%", keep_plans=folder / "plans")
    if jax.process_index():
        step.plan(state("data"), batch(0), 0.1)  # a plan may be looked at in one process alone
    losses, mine = trained(step, state("data"), 2)
    file = folder / f"saved-{jax.process_index()}.json"
    step.plan(mine, batch(0), 0.1).save(file)
    again = tensile.jit(train_step, donate_argnums=0, plan=tensile.Plan.load(file), keep_plans=folder / "plans")
    ours, _ = trained(again, state("data"), 2)
    return {"losses": losses, "ours": ours, "saved": file.read_text()}


def kept_plans(folder: Path) -> Any:
    return sorted(file.name for file in (folder / "plans").iterdir())


def other_budget(folder: Path) -> Any:
    """The processes have different budgets, and then both the larger one."""
    own = 40_000 + 50_000 * jax.process_index()
    first = state("data", layers=1)
    error = caught(lambda: tensile.jit(train_step, donate_argnums=0, budget=own)(first, batch(0), 0.1))
    _, metrics = tensile.jit(train_step, donate_argnums=0, budget=90_000)(first, batch(0), 0.1)
    return [*error, float(metrics["loss"])]


def other_step(folder: Path) -> Any:
    function = jnp.tanh if jax.process_index() else jnp.sin
    return caught(lambda: tensile.jit(lambda x: function(x) @ x.T, budget="1GiB")(batch(0)))


def one_fails(folder: Path) -> Any:
    """The step cannot be traced in process 1."""

    def step(x: jax.Array) -> jax.Array:
        if jax.process_index():
            raise KeyError("the file of process 1")
        return x + 1

    return caught(lambda: tensile.jit(step, budget="1GiB")(batch(0)))


def too_small(folder: Path) -> Any:
    """A budget that no plan keeps, and then the budget that the error names."""
    first = state("data", layers=1)
    try:
        tensile.jit(train_step, donate_argnums=0, budget="10KB")(first, batch(0), 0.1)
    except tensile.BudgetTooSmall as error:
        deleted = any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        step = tensile.jit(train_step, donate_argnums=0, budget=error.floor_bytes)
        step(first, batch(0), 0.1)
        return [str(error), error.floor_bytes, deleted, step.report().peak_bytes]
    return ["no error", 0, False, 0]


def out_of_memory(folder: Path) -> Any:
    """The device of process 1 is out of memory in the second step; from the next agreement on, all have a plan for less."""
    step = tensile.jit(train_step, donate_argnums=0, budget="60%")
    state_, losses = state("data"), []
    for i in range(STEPS):
        if jax.process_index() and i == 1:
            (planned,) = step._calls._planned.values()
            planned.runner.executor.needs_lower_budget = True
        state_, metrics = step(state_, batch(i), 0.1)
        losses.append(float(metrics["loss"]))
    plans = step.plans(state_, batch(0), 0.1)
    return {"losses": losses, "peaks": [plan.peak_bytes for plan in plans]}


def refused(folder: Path) -> Any:
    """What is for devices of one process."""
    return [
        caught(lambda: tensile.Runtime("1GiB", devices=jax.devices())),
        caught(_submit_divided),
        caught(lambda: tensile.jit(train_step, renew_above=0.3)(state("data"), batch(0), 0.1)),
        caught(lambda: tensile.jit(train_step, improve="background")(state("data"), batch(0), 0.1)),
    ]


def _until_process_1_is_away(folder: Path, leave: Callable[[], None]) -> Any:
    """Training that process 1 leaves after three steps. Process 0 then waits for it in a step."""
    step, first = tensile.jit(train_step, donate_argnums=0, budget="90%"), state("data", layers=2)
    for i in range(STEPS):
        first, _ = step(first, batch(i), 0.1)
        if i == 2 and jax.process_index():
            leave()
        (folder / f"step-{i}-{jax.process_index()}").touch()
    return "no error"


def fails_in_a_step(folder: Path) -> Any:
    """A step fails in the middle in process 1, which goes on and tries another one. Process 0 waits for it."""
    step, first, errors = tensile.jit(train_step, donate_argnums=0, budget="90%"), state("data", layers=2), []
    step(first, batch(0), 0.1)
    (planned,) = step._calls._planned.values()
    if jax.process_index() and not planned.plan.whole:
        planned.runner.executor.end = _fail
    for _ in range(2):
        errors.append(caught(lambda: step(state("data", layers=2), batch(0), 0.1)))
    return errors


def _fail(iteration: Any) -> Any:
    raise OSError("no disk in process 1")


def one_program(folder: Path) -> Any:
    """All segments in one launch, as on GPUs: as planned, and as a saved plan."""
    keep_barriers = {"xla_disable_hlo_passes": "cse,cse_barrier_expander"}  # which XLA for CPUs would drop
    losses, _ = trained(jax.jit(train_step, donate_argnums=0), state(layers=4), 2, rows=16 * BATCH)
    step = tensile.jit(train_step, donate_argnums=0, budget="80%", launch="program", compiler_options=keep_barriers)
    ours, mine = trained(step, state(layers=4), 2, rows=16 * BATCH)
    plan = step.plan(mine, batch(0, rows=16 * BATCH), 0.1)
    again = tensile.jit(train_step, donate_argnums=0, plan=plan, compiler_options=keep_barriers)
    saved, _ = trained(again, state(layers=4), 2, rows=16 * BATCH)
    return {
        "losses": losses, "ours": ours, "saved": saved, "plan": msgspec.json.encode(plan).decode(), "launch": plan.launch,
        "launches": [step.report().launches, again.report().launches], "segments": len(plan.segments),
        "peaks": [step.report().peak_bytes, plan.peak_bytes, plan.budget_bytes],
    }  # fmt: skip


def local_arguments(folder: Path) -> Any:
    """Arguments that are not on the mesh yet, and are equal in both: a random key, and arrays of JAX and of NumPy."""

    def step(weights: Any, x: jax.Array, key: jax.Array, shift: Any, scales: Any) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            kept = jax.random.bernoulli(key, 0.9, x.shape)
            y = functools.reduce(lambda y, w: jnp.tanh(y @ w), weights, x * kept + shift)
            return jnp.mean((y * scales - x) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), jax.random.split(key)[0], loss

    found: list[Any] = []
    others = jnp.float32(0.1), np.ones(WIDTH, np.float32)
    planned = tensile.jit(step, donate_argnums=0, budget="80%")
    for function in (jax.jit(step, donate_argnums=0), planned):
        (weights, _), key, loss = state("data", layers=3), jax.random.key(0), 0.0
        for i in range(3):
            weights, key, loss = function(weights, batch(i), key, *others)
        found.append([float(loss), jax.random.key_data(key).tolist(), shards(weights)])
    whole = planned.plan(state("data", layers=3)[0], batch(0), jax.random.key(0), *others).whole
    return {"found": found, "whole": whole}


def largest_workspaces(folder: Path) -> Any:
    """XLA reports a larger workspace in process 1."""
    of_xla = Sizes.workspace
    if jax.process_index():
        Sizes.workspace = lambda self, **sizes: of_xla(self, **sizes) + 4096
    try:
        step = tensile.jit(train_step, donate_argnums=0, budget="90%")
        step(state("data", layers=2), batch(0), 0.1)
    finally:
        Sizes.workspace = of_xla
    (planned,) = step._calls._planned.values()
    compiled = planned.runner.compiled
    own = begin(compiled.step, None).workspaces(compiled.plan, [e.sizes for e in compiled.executables or ()])
    return [s.workspace_bytes - mine for s, mine in zip(compiled.plan.segments, own, strict=True)]


def other_call(folder: Path) -> Any:
    """The processes call different functions, and then the same one."""

    def double(x: jax.Array) -> jax.Array:
        return x + x

    def square(x: jax.Array) -> jax.Array:
        return x * x

    error = caught(lambda: tensile.jit(square if jax.process_index() else double, budget="1GiB")(batch(0)))
    return [*error, shards(tensile.jit(double, budget="1GiB")(batch(0)))]


def interrupted_while_planning(folder: Path) -> Any:
    """Ctrl-C in process 1 while process 0 plans, which takes long. Then both train."""

    def progress(what: str, done: int, of: int) -> None:
        if what != "tracing" and not jax.process_index() and not (folder / "interrupted").exists():
            (folder / "plans").touch()
            while not (folder / "interrupted").exists():
                time.sleep(0.05)
            time.sleep(0.5)

    def interrupt() -> None:
        while not (folder / "plans").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        (folder / "interrupted").touch()
        os.kill(os.getpid(), signal.SIGINT)

    step = tensile.jit(train_step, donate_argnums=0, budget="90%", progress=progress)
    if jax.process_index():
        threading.Thread(target=interrupt).start()
    try:
        error = caught(lambda: step(state("data", layers=2), batch(0), 0.1))
    except KeyboardInterrupt:
        error = ["KeyboardInterrupt", "", []]
    losses, _ = trained(step, state("data", layers=2))
    return {"error": error, "losses": losses}


def some_processes(folder: Path) -> Any:
    """Steps of all three processes, and of the last two, in turn."""

    def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(functools.reduce(lambda y, _: jnp.tanh(y @ weights), range(LAYERS), x))

    found: list[Any] = []
    for first in (0, 1, 0, 1):
        devices = [device for device in jax.devices() if device.process_index >= first]
        if jax.process_index() >= first:
            weights = placed(np.ones((WIDTH, WIDTH), np.float32) / WIDTH, devices=devices)
            x = placed(np.ones((12 * BATCH, WIDTH), np.float32), "data", devices=devices)
            step = tensile.jit(jax.grad(loss_of), budget="70%")
            gradient, plain = shards(step(weights, x)), shards(jax.jit(jax.grad(loss_of))(weights, x))
            plan = step.plan(weights, x)
            found.append([np.allclose(gradient, plain, atol=1e-5), plan.whole, msgspec.json.encode(plan).decode()])
    return found


def killed(folder: Path) -> Any:
    return _until_process_1_is_away(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def interrupted(folder: Path) -> Any:
    return _until_process_1_is_away(folder, lambda: signal.raise_signal(signal.SIGINT))


def _submit_divided() -> None:
    with tensile.Runtime("1GiB") as runtime:
        runtime.submit(train_step, state("data"), [(batch(0), 0.1)], steps=1)


def main(scenarios: str, process: int, processes: int, port: str, folder: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", processes, process,
        heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=SHUTDOWN_S,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name in scenarios.split(","):
        found[name] = globals()[name](folder)
        (folder / f"{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
