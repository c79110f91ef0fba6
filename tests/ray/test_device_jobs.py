"""The jobs of a device: what is said of them if their place for checkpoints fails in a way that it should not."""

import functools
import pickle
import threading
from pathlib import Path

from tensile_jax.ray.device_jobs import DeviceJobs
from tensile_jax.ray.records import DeviceId, DeviceSettings, JobNews, Work
from tensile_jax.ray.shared.folder import SharedFolder
from tests.ray.cluster_jobs import job


class Broken(SharedFolder):
    """A place that raises where it should answer."""

    def publish(self, job: str, attempt: int) -> str:
        raise RuntimeError("the moon is full")

    give_back = publish


def news_of(make: bytes, place: SharedFolder, *, checkpoint_every: int | None = None) -> list[JobNews]:
    """All news of a job of three steps."""
    news, ended = list[JobNews](), threading.Event()

    def tell(one: JobNews) -> None:
        news.append(one)
        if one.kind in ("finished", "failed", "cancelled"):
            ended.set()

    settings = DeviceSettings("64MiB", None, "cpu", place.name)
    jobs = DeviceJobs(DeviceId("node/device-0"), settings, place, tell, devices=1, neighbours=1)
    with jobs._runtime:
        jobs.start(Work("x", make, 3, 1.0, None, checkpoint_every, "thread"), 1, 2**26)
        assert ended.wait(60)
    return news


def test_an_ended_job_is_news_even_if_its_checkpoints_cannot_be_passed_on(tmp_path: Path) -> None:
    news = news_of(pickle.dumps(functools.partial(job, pause_s=0.0)), Broken(tmp_path), checkpoint_every=1)
    assert [one.kind for one in news if one.kind == "step"] == ["step"] * 3, "training goes on"
    assert all("RuntimeError: the moon is full" in one.note for one in news if one.kind == "checkpoint_failed")
    assert any(one.kind == "checkpoint_failed" for one in news) and not any(one.kind == "checkpointed" for one in news)
    assert news[-1].kind == "failed" and "finished, but its checkpoints could not be passed on" in news[-1].note


def test_a_job_that_cannot_be_made_is_news_even_if_its_folder_cannot_be_given_back(tmp_path: Path) -> None:
    news = news_of(pickle.dumps(functools.partial(job, width=-1)), Broken(tmp_path))
    assert [one.kind for one in news] == ["failed"]
    assert "Error: " in news[0].note and "the moon is full" in news[0].note
