"""The actor of a device: its lease, and how it shows that it shares a folder."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tensile_jax.ray import device_actor
from tensile_jax.ray.device_actor import ANSWER, DeviceActor, NotShared, _refuse_unshared
from tensile_jax.ray.records import DeviceId, DeviceSettings, JobNews
from tensile_jax.ray.shared.folder import SharedFolder


def actor(monkeypatch: pytest.MonkeyPatch, *, devices: int = 1) -> DeviceActor:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    settings = DeviceSettings("1GiB", None, None, "/nowhere")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    return DeviceActor(DeviceId("node/device-0"), settings, devices=devices, neighbours=1, accelerator=False)


def test_an_actor_that_is_not_polled_any_more_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr(device_actor, "LEASE_S", 0.3)
    monkeypatch.setattr(device_actor, "_WATCH_S", 0.01)
    monkeypatch.setattr(device_actor, "_POLL_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    one = actor(monkeypatch)
    threading.Thread(target=one._watch, daemon=True).start()

    async def poll() -> None:
        for _ in range(20):
            await one.poll()
            assert not ended.wait(0.03)

    asyncio.run(poll())
    assert ended.wait(10)
    assert codes == [3]


def test_an_actor_without_gpus_lets_the_cpu_stand_in_for_its_devices_whatever_xla_flags_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    actor(monkeypatch, devices=4)
    program = "import jax; print(len(jax.devices()), jax.devices()[0].platform)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "cpu"]


def test_news_are_polled_in_their_order_and_the_end_of_a_job_ends_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_actor, "_POLL_S", 0.01)
    one = actor(monkeypatch)
    news = [JobNews(DeviceId("node/device-0"), "x", 1, kind, 2) for kind in ("step", "finished")]

    async def poll() -> list[JobNews]:
        ended = one._ends["x", 1] = asyncio.Event()
        for each in news:
            one._hear(each)
        await asyncio.wait_for(ended.wait(), 10)
        return await one.poll() + await one.poll()

    assert asyncio.run(poll()) == news


def test_a_folder_with_another_content_or_without_the_file_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_actor, "_TOKEN_S", 0.0)
    with pytest.raises(NotShared, match="it cannot read .*token, which the head node has written"):
        _refuse_unshared(SharedFolder(tmp_path), "token", "abc")
    (tmp_path / "token").write_text("xyz")
    with pytest.raises(NotShared, match="token has another content than the head node has written"):
        _refuse_unshared(SharedFolder(tmp_path), "token", "abc")
    _refuse_unshared(SharedFolder(tmp_path), "token", "xyz")
    assert (tmp_path / ("token" + ANSWER)).read_text() == "xyz"
