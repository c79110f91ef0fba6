"""What is refused before a cluster is asked."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.actor.entrypoint import Made
from tensile_jax.ray import ClusterJob, StartAfter, attach, submit
from tensile_jax.ray.client import _state_of

JOB = ClusterJob(tensile.Entrypoint("mlp", {"batch_size": 8}), steps=2)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("fields", "story"),
    [
        ({"steps": 0}, "steps of mlp must be a whole number of at least 1, got 0"),
        ({"name": "a@1"}, "name must have 1 to 100 letters"),
        ({"name": "-a"}, "name must have 1 to 100 letters"),
        ({"priority": 0}, "priority of mlp must be a number above zero"),
        ({"max_slowdown": 0.5}, "max_slowdown of mlp must be at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every of mlp must be a whole number"),
        ({"isolation": "none"}, 'isolation of mlp must be "thread" or "process"'),
        ({"devices": 0}, "devices of mlp must be a whole number"),
        ({"devices": 2, "isolation": "process"}, 'isolation="process" of mlp is for jobs of one device, and devices=2'),
    ],
)
def test_a_job_with_a_wrong_value_is_refused(fields: dict[str, object], story: str) -> None:
    with pytest.raises(ValueError, match=story):
        ClusterJob(tensile.Entrypoint("mlp"), **{"steps": 2, **fields})  # pyright: ignore[reportArgumentType] # wrong on purpose


def test_a_job_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="make must be an Entrypoint, or a function"):
        ClusterJob(7, steps=2)  # pyright: ignore[reportArgumentType] # wrong on purpose


def test_jobs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="name='mlp' is the name of two jobs"):
        submit([JOB, JOB], checkpoints="x", budget="1GiB", address="127.0.0.1:1")
    with pytest.raises(ValueError, match="jobs is empty"):
        submit([], checkpoints="x", budget="1GiB", address="127.0.0.1:1")
    late = ClusterJob(tensile.Entrypoint("mlp"), steps=2, name="late", start_after=StartAfter("other"))
    with pytest.raises(ValueError, match="start_after of late must be another job of this submission, got 'other'"):
        submit([late], checkpoints="x", budget="1GiB", address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("per_actor", "story"),
    [
        (0, "devices_per_actor must be a whole number of at least 1, got 0"),
        (2, "devices=4 of large: devices_per_actor=2, so that no actor holds more. Pass at least as many, or leave it out"),
    ],
)
def test_groups_that_no_job_fits_in_are_refused(per_actor: int, story: str) -> None:
    large = ClusterJob(tensile.Entrypoint("mlp"), steps=2, name="large", devices=4)
    with pytest.raises(ValueError, match=story):
        submit([JOB, large], checkpoints="x", budget="1GiB", address="127.0.0.1:1", devices_per_actor=per_actor)


def test_a_job_of_several_devices_that_cannot_be_made_here_is_refused_with_the_number_of_devices() -> None:
    def make() -> Made:
        raise RuntimeError("there are too few devices")

    with pytest.raises(ValueError, match=r"large is for devices=4 and .*too few devices\. Start .*JAX_NUM_CPU_DEVICES=4"):
        _state_of(ClusterJob(make, steps=2, name="large", devices=4))
    with pytest.raises(RuntimeError, match="there are too few devices"):
        _state_of(ClusterJob(make, steps=2, name="small"))


@pytest.mark.parametrize(
    ("where", "error", "story"),
    [
        ("gx://bucket", ValueError, "checkpoints='gx://bucket' cannot be opened: Protocol not known: gx. Name a folder"),
        (Path("gs://bucket/runs"), ValueError, "a Path drops a slash of a URL. Pass the URL as a text"),
        ("", ValueError, 'checkpoints="" names no folder. Name one that all nodes share, or a URL such as'),
        (7, TypeError, "checkpoints must be the path of a folder, or a URL, got 7"),
    ],
)
def test_a_place_that_cannot_be_opened_is_refused(where: Any, error: type[Exception], story: str) -> None:
    with pytest.raises(error, match=story):
        submit([JOB], checkpoints=where, budget="1GiB", address="127.0.0.1:1")


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":1"])
def test_an_address_that_cannot_be_read_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"address='.*' must be HOST:PORT of the head node"):
        attach(address)


def test_an_address_at_which_nothing_answers_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(tensile.ClusterError, match=f"Nothing answers at address='{address}'.*Is the head node up"):
        attach(address)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"Ray is not installed .*pip install 'tensile_jax\[ray\]'"):
        attach("127.0.0.1:1")


def test_neither_ray_nor_jax_is_imported_before_it_is_needed() -> None:
    code = "import sys, tensile_jax.ray; print([name for name in ('ray', 'jax') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"
