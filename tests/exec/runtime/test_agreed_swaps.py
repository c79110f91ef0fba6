"""Jobs of policy `tensile` choose their swaps together, whenever one more of them comes."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.runtime.submission import Isolation
from tensile_jax.installed_models import MODELS
from tests.exec.runtime.test_kept_out import FOREVER, replay, same_bits


@pytest.fixture
def slow_link(tmp_path: Path) -> str:
    """The device profile of a CPU whose link is so slow that the copies of two jobs do not both fit."""
    text = (files("tensile_jax.device_profiles") / "cpu.toml").read_text()
    profile = tmp_path / "slow_link.toml"
    profile.write_text(re.sub(r"(?m)^(device_to_host|host_to_device)_bytes_per_us = \S+", r"\1_bytes_per_us = 1400.0", text))
    return str(profile)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_job_that_comes_changes_the_swaps_of_one_that_runs_and_no_bit_of_its_results(
    isolation: Isolation, slow_link: str
) -> None:
    """The large job has the larger tensors, so its copies take the times on the link that the small one's have had until then."""
    small, large = MODELS["cnn"](batch_size=32, image_size=16, seed=1), MODELS["cnn"](batch_size=64, image_size=16, seed=0)
    options: dict[str, Any] = {"policy": "tensile", "isolation": isolation}
    b, renewed = None, list[int]()
    with tensile.Runtime(budget="18000KiB", device_profile=slow_link) as runtime:
        a = runtime.submit(small.step, small.init(), small.batches, steps=FOREVER, name="a", budget="6270KiB", **options)
        for event in runtime.events():
            if b is None and event.kind == "started":
                b = runtime.submit(large.step, large.init(), large.batches, steps=3, name="b", budget="11540KiB", **options)
            elif event.job == "a" and event.kind == "renewed":
                renewed.append(event.step)
            elif event.job == "a" and event.kind == "step" and renewed and event.step == renewed[0] + 3:
                a.cancel()
        assert b is not None
    before, after = a.plans[0][1], a.plans[1][1]
    assert before.swapped_out_bytes > after.swapped_out_bytes > 0
    assert same_bits(a.result(), replay(small, a, a.status.step, slow_link))
    assert same_bits(b.result(), replay(large, b, 3, slow_link))
