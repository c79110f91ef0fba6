"""Jobs on a Ray cluster of several nodes, all of them on this machine."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import tensile_jax as tensile
from tensile_jax.cli.main import main
from tensile_jax.ray import ClusterEvent, ClusterJob, ClusterRun, StartAfter, attach, submit
from tests.ray.local_cluster import LocalCluster

ray: Any = pytest.importorskip("ray")

BUDGET = "512KiB"
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


class Nodes(LocalCluster):
    """A cluster whose nodes other than the head have one device each."""

    def have(self, count: int) -> None:
        """Add or remove nodes until there are `count` beside the head."""
        while len(self.nodes) < count:
            self.add(resources={"tensile_device": 1})
        while len(self.nodes) > count:
            self.kill(self.nodes[-1])

    def node_of(self, device: str) -> str:
        """The node that holds a device of that name."""
        return next(node for node in self.nodes if node[:6] in device)


@pytest.fixture(scope="module")
def caches_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("caches-of-nodes")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "TENSILE_CACHE_DIR": str(folder / "calibrations")}


@pytest.fixture(scope="module")
def nodes(caches_of_nodes: dict[str, str]) -> Iterator[Nodes]:
    with Nodes(env=caches_of_nodes) as cluster:
        yield cluster
        ray.shutdown()


def job(name: str, *, steps: int, seed: int = 0, pause_s: float = 0.05, **fields: Any) -> ClusterJob:
    function = "sharded_job" if fields.get("devices", 1) > 1 else "job"
    make = tensile.Entrypoint(f"tests.ray.cluster_jobs:{function}", {"seed": seed, "pause_s": pause_s})
    return ClusterJob(make, steps=steps, name=name, checkpoint_every=10, **fields)


def until(run: ClusterRun, kind: str, job: str, *, step: int = 0) -> ClusterEvent:
    """The first event of that kind after so many steps."""
    seen: list[str] = []
    for event in run.events():
        seen.append(f"{event.kind} {event.job} {event.step} {event.note}")
        if (event.kind, event.job) == (kind, job) and event.step >= step:
            return event
    raise AssertionError(f"no {kind} of {job}: {seen}")


def alone(seed: int, steps: int, limit_bytes: int) -> Any:
    """The state of an undisturbed run."""
    with tensile.Runtime(BUDGET) as runtime:
        make = tensile.Entrypoint("tests.ray.cluster_jobs:job", {"seed": seed, "pause_s": 0.0})
        return runtime.submit(make, steps=steps, plan_for=limit_bytes).result()


def sharded_alone(seed: int, steps: int, limit_bytes: int, devices: int, file: Path) -> Any:
    """The weights of an undisturbed run of the sharded job in a process with so many devices."""
    command = [sys.executable, "tests/ray/cluster_jobs.py", str(seed), str(steps), BUDGET, str(limit_bytes), str(file)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": path}
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    with np.load(file) as found:
        return [found[name] for name in found.files]


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_a_cluster_without_devices_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    with pytest.raises(ValueError, match="no jobs were submitted to this cluster"):
        attach(nodes.address)
    with pytest.raises(ValueError, match="this cluster has no devices.*ray start --resources"):
        submit([job("x", steps=2)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)


def test_a_folder_that_is_not_shared_is_refused_with_the_name_of_the_node(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    (tmp_path / "elsewhere").mkdir()
    nodes.add(cwd=str(tmp_path / "elsewhere"), resources={"tensile_device": 1})
    shared = f"/proc/self/cwd/{os.path.relpath(tmp_path / 'shared', Path.cwd())}"  # a different one in each process
    try:
        with pytest.raises(ValueError, match=r"checkpoints='/proc/.*' is not shared by all nodes: .*/device-0: it cannot"):
            submit([job("x", steps=2)], checkpoints=shared, budget=BUDGET, address=nodes.address)
    finally:
        nodes.have(0)


def test_jobs_end_with_the_states_of_an_undisturbed_run_when_a_node_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(2)
    jobs = [job("x", steps=60, seed=1), job("y", steps=60, seed=2), job("late", steps=10, start_after=StartAfter("x", 5))]
    run = submit(jobs, checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    with pytest.raises(ValueError, match=r"name='x' is taken: a job of this name is"):
        submit([job("x", steps=2)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    with pytest.raises(ValueError, match="budget='1GiB': jobs run on this cluster now, with budget='512KiB'"):
        submit([job("z", steps=2)], checkpoints=tmp_path, budget="1GiB", address=nodes.address)
    until(run, "checkpointed", "x", step=20)
    run.pause("y")
    until(run, "paused", "y")
    status = run.status()
    assert {one.name: one.state for one in status.jobs}["y"] == "paused"
    run.resume("y")
    device = until(run, "placed", "x").device
    assert device in {one.name for one in status.devices}
    nodes.kill(nodes.node_of(device))
    events = list(run.events())
    assert [event.device for event in events if event.kind == "lost" and event.job == "x"] == [device]
    assert {event.device for event in events if event.kind == "placed" and event.job == "x"} == {
        one.name for one in status.devices
    }
    limits = {event.job: int(event.values["limit_bytes"]) for event in events if event.kind == "placed"}
    status = run.status()
    assert [(one.name, one.state, one.step) for one in status.jobs] == [
        ("x", "finished", 60), ("y", "finished", 60), ("late", "finished", 10),
    ]  # fmt: skip
    assert equal(run.result("x"), alone(1, 60, limits["x"]))
    assert equal(run.result("y"), alone(2, 60, limits["y"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "tensile-cluster.json", "x", "y"]


def test_with_checkpoints_at_a_url_jobs_go_on_when_a_node_is_killed_and_with_the_next_submission(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.have(2)
    url = f"file://{tmp_path}/bucket"
    jobs = [job("x", steps=60, seed=1), job("y", steps=60, seed=2, isolation="process")]
    run = submit(jobs, checkpoints=url, budget=BUDGET, address=nodes.address)
    until(run, "checkpointed", "x", step=20)
    nodes.kill(nodes.node_of(until(run, "placed", "x").device))
    events = list(run.events())
    assert "lost" in {event.kind for event in events if event.job == "x"}
    assert {one.name: (one.state, one.step) for one in run.status().jobs} == dict.fromkeys("xy", ("finished", 60))
    limits = {event.job: int(event.values["limit_bytes"]) for event in events if event.kind == "placed"}
    for name, seed in (("x", 1), ("y", 2)):
        assert equal(run.result(name), alone(seed, 60, limits[name]))
    assert sorted(path.name for path in (tmp_path / "bucket").iterdir()) == ["tensile-cluster.json", "x@2", "y@1"]

    more = [job("x", steps=70, seed=1)]
    with pytest.raises(ValueError, match=r"checkpoints='file://.*' has checkpoints of a job 'x'. Pass resume=True"):
        submit(more, checkpoints=url, budget=BUDGET, address=nodes.address)
    run = submit(more, checkpoints=url, budget=BUDGET, address=nodes.address, resume=True)
    assert until(run, "planned", "x").step == 60
    assert [(one.state, one.step) for one in run.wait().jobs if one.name == "x"] == [("finished", 70)]
    assert equal(run.result("x"), alone(1, 70, limits["x"]))


def test_the_command_line_submits_and_steers(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    nodes.add(resources={"tensile_device": 2})
    (tmp_path / "jobs.toml").write_text(
        f'[device]\nbudget = "{BUDGET}"\n[defaults]\ncheckpoint_every = 5\n'
        '[[jobs]]\nname = "long"\nentrypoint = "tests.ray.cluster_jobs:sharded_job"\nsteps = 100000\ndevices = 2\n'
        '[[jobs]]\nname = "short"\nentrypoint = "tests.ray.cluster_jobs:job"\nargs = {pause_s = 0.0}\nsteps = 10\n'
    )
    at = ["--ray", nodes.address]

    def tensile_(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, [*words, *at], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done.output

    folder = str(tmp_path / "shared")
    tensile_("submit", str(tmp_path / "jobs.toml"), "--checkpoints", folder, "--detach")
    run = attach(nodes.address)
    until(run, "step", "long", step=5)
    assert "/devices-0-1" in tensile_("status", "long")
    assert "JOB=longer" in tensile_("status", "longer", code=2)
    assert "name='long' is taken" in tensile_("submit", str(tmp_path / "jobs.toml"), "--checkpoints", folder, code=2)
    assert "long will pause." in tensile_("pause", "long")
    until(run, "finished", "short")
    assert "long is cancelled." in tensile_("cancel")
    run.wait()
    jobs = json.loads(tensile_("status", "--json"))["jobs"]
    assert {one["name"]: one["state"] for one in jobs} == {"long": "cancelled", "short": "finished"}
    assert "long is cancelled; it cannot be paused" in tensile_("pause", "long", code=2)
    assert "Pass --resume to go on" in tensile_("submit", str(tmp_path / "jobs.toml"), "--checkpoints", folder, code=2)


@pytest.mark.slow
def test_jobs_whose_coordinator_has_died_are_resumed_by_another_submission(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(1)
    run = submit([job("z", steps=60, seed=3)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    limit_bytes = int(until(run, "placed", "z").values["limit_bytes"])
    until(run, "checkpointed", "z", step=10)
    ray.kill(ray.get_actor("tensile:coordinator", namespace="tensile"))
    with pytest.raises(tensile.ClusterError, match=f"has died.*checkpoints are in {tmp_path}.*resume=True"):
        run.wait()
    jobs = [job("z", steps=60, seed=3), job("other", steps=2)]  # which must not change the plan of the first
    with pytest.raises(ValueError, match="has checkpoints of a job 'z'. Pass resume=True"):
        submit(jobs, checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    run = submit(jobs, checkpoints=tmp_path, budget=BUDGET, address=nodes.address, resume=True)
    assert until(run, "planned", "z").step >= 10
    assert {one.name: one.state for one in run.wait().jobs} == {"z": "finished", "other": "finished"}
    assert equal(run.result("z"), alone(3, 60, limit_bytes))


@pytest.mark.slow
def test_a_sharded_job_runs_in_a_group_of_devices_beside_a_small_job(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    nodes.add(resources={"tensile_device": 4})
    greedy = ClusterJob(tensile.Entrypoint("tests.ray.cluster_jobs:sharded_job"), steps=2, name="greedy")
    modest = ClusterJob(tensile.Entrypoint("tests.ray.cluster_jobs:job"), steps=2, name="modest", devices=4)
    jobs = [job("large", steps=30, seed=1, devices=4), job("small", steps=30, seed=2), greedy, modest]
    with pytest.raises(ValueError, match="devices=5 of larger: no node of this cluster has more than 4. Ask for at most 4."):
        submit([*jobs, job("larger", steps=2, devices=5)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    run = submit(jobs, checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    with pytest.raises(ValueError, match="devices=5 of late: jobs run on this cluster now, and its actors hold 4 each"):
        submit([job("late", steps=2, devices=5)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    until(run, "checkpointed", "large", step=10)
    (group,) = run.status().devices
    assert (group.name.partition("/")[2], group.devices, set(group.jobs)) == ("devices-0-3", 4, {"large", "small"})
    assert ray.get_actor(f"tensile:{group.name}", namespace="tensile")  # as Ray's dashboard shows it
    run.pause("large")
    until(run, "paused", "large")
    run.resume("large")
    limits = {event.job: int(event.values["limit_bytes"]) for event in run.events() if event.kind == "placed"}
    status = {one.name: one for one in run.status().jobs}
    assert [one.state for one in status.values()] == ["finished", "finished", "failed", "failed"]
    assert "devices=1 of greedy, and its state is on 4 of jax.devices(). Give the job devices=4, or" in status["greedy"].note
    assert "devices=4 of modest, and its state is on 1 of jax.devices(). Give the job devices=1, or" in status["modest"].note
    assert equal(run.result("large"), sharded_alone(1, 30, limits["large"], 4, tmp_path / "alone.npz"))
    assert equal(run.result("small"), alone(2, 30, limits["small"]))


@pytest.mark.slow
def test_a_sharded_job_whose_group_is_killed_goes_on_in_another_one_bit_for_bit(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    for devices in (2, 3):  # the second has a group, and a device of the rest
        nodes.add(resources={"tensile_device": devices})
    small = [job("small-0", steps=60, seed=2), job("small-1", steps=60, seed=2, isolation="process")]
    jobs = [job("large", steps=60, seed=1, devices=2), *small]
    run = submit(jobs, checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    until(run, "checkpointed", "large", step=20)
    devices = run.status().devices
    assert sorted(one.name.partition("/")[2] for one in devices) == ["device-2", "devices-0-1", "devices-0-1"]
    group = until(run, "placed", "large").device
    ray.kill(ray.get_actor(f"tensile:{group}", namespace="tensile"))
    events = list(run.events())
    assert [event.device for event in events if event.kind == "lost" and event.job == "large"] == [group]
    placed = [event for event in events if event.kind == "placed" and event.job == "large"]
    assert placed[-1].device != group and "/devices-0-1" in placed[-1].device
    assert {event.values["limit_bytes"] for event in placed} == {placed[0].values["limit_bytes"]}
    assert [(one.state, one.step) for one in run.status().jobs] == [("finished", 60)] * 3
    limit_bytes = int(placed[0].values["limit_bytes"])
    assert equal(run.result("large"), sharded_alone(1, 60, limit_bytes, 2, tmp_path / "alone.npz"))
    (limit,) = {event.values["limit_bytes"] for event in events if event.kind == "placed" and event.job != "large"}
    for name in ("small-0", "small-1"):
        assert equal(run.result(name), alone(2, 60, int(limit)))


@pytest.mark.slow
def test_a_sharded_job_is_resumed_with_another_number_of_devices(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(0)
    nodes.add(resources={"tensile_device": 4})
    run = submit([job("large", steps=20, seed=1, devices=2)], checkpoints=tmp_path, budget=BUDGET, address=nodes.address)
    run.wait()
    more = job("large", steps=40, seed=1, devices=4)
    run = submit([more], checkpoints=tmp_path, budget=BUDGET, address=nodes.address, resume=True)
    placed = until(run, "placed", "large")
    assert "/devices-0-3" in placed.device
    assert until(run, "planned", "large").step == 20
    assert [(one.state, one.step) for one in run.wait().jobs] == [("finished", 40)]
    undisturbed = sharded_alone(1, 40, int(placed.values["limit_bytes"]), 4, tmp_path / "alone.npz")
    for one, other in zip(run.result("large"), undisturbed, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)  # two devices add a product up in another order than four


@pytest.mark.slow
def test_when_the_head_node_goes_away_the_submitter_ends_with_a_message(caches_of_nodes: dict[str, str], tmp_path: Path) -> None:
    with Nodes({"resources": {"tensile_device": 1}}, env=caches_of_nodes) as cluster:
        (tmp_path / "jobs.toml").write_text(
            f'[device]\nbudget = "{BUDGET}"\n[[jobs]]\nname = "x"\nentrypoint = "tests.ray.cluster_jobs:job"\nsteps = 100000\n'
        )
        command = [
            sys.executable,
            "-c",
            "from tensile_jax.cli.program import start; start()",
            "submit",
            str(tmp_path / "jobs.toml"),
            "--ray",
            cluster.address,
        ]
        submitter = subprocess.Popen(
            [*command, "--checkpoints", str(tmp_path / "shared")], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        until_s = time.monotonic() + PATIENCE_S
        while not list((tmp_path / "shared").glob("x@1/100")):
            assert time.monotonic() < until_s, submitter.poll()
            time.sleep(0.2)
        cluster.kill("head")
        _, errors = submitter.communicate(timeout=PATIENCE_S)
        assert submitter.returncode == 1
        assert re.search("^Error: The head node .* submit the jobs with --resume.$", errors, re.MULTILINE), errors
