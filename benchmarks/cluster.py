"""`make bench-cluster`: 18 jobs of four models on a Ray cluster of 3 nodes with 2 devices each, on this machine.

Three runs, each on a fresh cluster:

    ours           `tensile_jax.ray.submit`, under a budget of `_DEVICE` times the largest peak of plain jit for each device
    shares         Ray alone: each job is a task that runs plain `jax.jit` and takes a share of a device (`num_gpus`): the part
                   of that budget that its peak is, as compiled
    node killed    ours once more; the node with the most jobs is killed when half of all steps are done

The makespan lasts from the submission to the end of the last job, and includes the start of all processes, planning, compiling
and checkpoints. Compiled programs come from a cache that a first run of ours has filled, and that has the programs of plain jit
as well. A job is in flight from its first step to its end; the mean is over the makespan. The states at the end of the first and
the third run are compared bit for bit. All devices are CPUs of one machine and share its cores. Writes
`benchmarks/results/cluster.json`.
"""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
import ray
from rich.console import Console

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS
from tensile_jax.ray import ClusterJob, submit
from tensile_jax.units import format_bytes
from tests.ray.local_cluster import LocalCluster

_RESULTS = Path(__file__).parent / "results" / "cluster.json"
_NODES, _DEVICES = 3, 2
_DEVICE = 1.25
_SMALL_RESNET = {"batch_size": 16, "image_size": 32, "classes": 10, "width": 16, "blocks": [1, 1, 1, 1]}
_MODELS: tuple[tuple[str, dict[str, Any], int, int], ...] = (  # name, sizes, steps, how many jobs
    ("cnn", {"batch_size": 64, "image_size": 16}, 200, 5),
    ("gpt", {"batch_size": 4, "sequence_length": 64, "layers": 2}, 120, 5),
    ("resnet50", _SMALL_RESNET, 60, 4),
    ("mlp", {"batch_size": 512, "width": 512, "layers": 6}, 150, 4),
)


@contextmanager
def _cluster(**resources: Any) -> Iterator[LocalCluster]:
    """A cluster whose nodes other than the head have these resources."""
    with LocalCluster({"num_cpus": 0}) as cluster:
        for _ in range(_NODES):
            cluster.add(num_cpus=8, **resources)
        try:
            yield cluster
        finally:
            ray.shutdown()


def _jobs() -> list[tuple[str, str, dict[str, Any], int]]:
    """Name, model, sizes and steps of each job. The models take turns."""
    found = [(f"{model}-{copy}", model, sizes, steps) for model, sizes, steps, count in _MODELS for copy in range(1, count + 1)]
    return sorted(found, key=lambda job: job[0].rpartition("-")[2])


def _peaks() -> dict[str, int]:
    peaks: dict[str, int] = {}
    for name, sizes, _, _ in _MODELS:
        model = MODELS[name](**sizes)
        peaks[name] = peak_of(jax.jit(model.step, donate_argnums=0).lower(model.state_shape, model.batch_shape).compile())
    return peaks


# -- ours -----------------------------------------------------------------------------------------------------------------------


def _ours(
    budget: int, folder: Path, *, kill: bool = False, steps_each: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a run, and the states at its end."""
    work = [(name, model, sizes, steps_each or steps) for name, model, sizes, steps in _jobs()]
    total = sum(steps for *_, steps in work)
    done: dict[str, int] = {}
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    places: dict[str, str] = {}
    lost: list[str] = []
    with _cluster(resources={"tensile_device": _DEVICES}) as cluster:
        jobs = [
            ClusterJob(tensile.Entrypoint(model, sizes), steps, name=name, checkpoint_every=20)
            for name, model, sizes, steps in work
        ]
        began = time.monotonic()
        run = submit(jobs, checkpoints=folder, budget=budget, address=cluster.address)
        for event in run.events():
            at = time.monotonic() - began
            match event.kind:
                case "placed":
                    places[event.job] = event.device
                case "step":
                    started.setdefault(event.job, at)
                    done[event.job] = max(done.get(event.job, 0), event.step)
                case "lost":
                    lost.append(event.job)
                case "finished" | "failed" | "cancelled":
                    ended[event.job] = at
                    places.pop(event.job, None)
                case _:
                    pass
            if kill and not lost and sum(done.values()) > total / 2:
                kill = False
                cluster.kill(max(cluster.nodes, key=lambda node: sum(node[:6] in place for place in places.values())))
        makespan = time.monotonic() - began
        status = run.status()
        bad = [f"{job.name}: {job.state}: {job.note}" for job in status.jobs if job.state != "finished"]
        if bad:
            raise click.ClickException("; ".join(bad))
        states = {name: run.result(name) for name in run.names}
    spans = [(started.get(name, ended[name]), ended[name]) for name in ended]
    return {**_figures(spans, makespan), "moved": sorted(lost)}, states


# -- Ray alone ------------------------------------------------------------------------------------------------------------------


def _train(model: str, sizes: dict[str, Any], steps: int) -> tuple[float, float]:
    """Train with plain jit, in a process of Ray. Returns when the first step had ended, and when the last one had."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    built = MODELS[model](**sizes)
    step = jax.jit(built.step, donate_argnums=0)
    state, batches = built.init(), built.batches()
    first = 0.0
    for _ in range(steps):
        state, _ = step(state, next(batches))
        jax.block_until_ready(state)
        first = first or time.time()
    return first, time.time()


def _shares(budget: int, peaks: dict[str, int]) -> dict[str, Any]:
    """The figures of a run by Ray's own shares of devices."""
    with _cluster(num_gpus=_DEVICES) as cluster:
        ray.init(cluster.address, log_to_driver=False)
        task = ray.remote(max_calls=1)(_train)
        began = time.time()
        references = [
            task.options(num_cpus=0, num_gpus=ceil(1e4 * peaks[model] / budget) / 1e4, name=name).remote(model, sizes, steps)
            for name, model, sizes, steps in _jobs()
        ]
        spans = ray.get(references)
        makespan = time.time() - began
    return _figures([(first - began, last - began) for first, last in spans], makespan)


def _figures(spans: Sequence[tuple[float, float]], makespan: float) -> dict[str, Any]:
    """The makespan, and how many jobs were in flight: the mean and the most."""
    times = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in times:
        now += change
        most = max(most, now)
    mean = sum(end - begin for begin, end in spans) / makespan
    return {"makespan_s": round(makespan, 1), "mean_in_flight": round(mean, 2), "most_in_flight": most}


# -- all of it ------------------------------------------------------------------------------------------------------------------


def _equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS, help="Where to write the JSON.")
def main(output: Path) -> None:
    console = Console(stderr=True, width=140)
    folder = Path(tempfile.mkdtemp(prefix="tensile-cluster-"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        peaks = _peaks()
        budget = int(_DEVICE * max(peaks.values()))
        console.print(f"{format_bytes(budget)} a device; peaks of plain jit:", {k: format_bytes(v) for k, v in peaks.items()})
        console.print("filling the cache of compiled programs")
        _ours(budget, folder / "warm", steps_each=2)
        figures: dict[str, Any] = {}
        figures["ours"], states = _ours(budget, folder / "first")
        console.print("ours", figures["ours"])
        figures["shares"] = _shares(budget, peaks)
        console.print("shares", figures["shares"])
        figures["node killed"], others = _ours(budget, folder / "killed", kill=True)
        figures["node killed"]["equal_states"] = sum(_equal(states[name], others[name]) for name in states)
        console.print("node killed", figures["node killed"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "command": "make bench-cluster",
        "versions": {"jax": jax.__version__, "ray": ray.__version__},
        "jobs": len(_jobs()),
        "nodes": _NODES,
        "devices": _NODES * _DEVICES,
        "budget_bytes": budget,
        "jit_peak_bytes": peaks,
        **figures,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    console.print("written", output)


if __name__ == "__main__":
    main()
