"""`tensile plan JOBS.toml`: what fits, and the smallest budget where it does not."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from tensile_jax.cli.main import main
from tests.builders import slow_but

_JOBS = """
[device]
budget = {budget}
device_profile = "cpu"
[defaults]
model = "mlp"
steps = 3
[[jobs]]
args = {{batch_size = 256, image_size = 16, layers = 1}}
count = 2
[[jobs]]
name = "small"
args = {{batch_size = 32, layers = 1}}
"""


def planned(folder: Path, budget: str, *options: str) -> Result:
    file = folder / "jobs.toml"
    file.write_text(_JOBS.format(budget=budget))
    return CliRunner().invoke(main, ["plan", str(file), *options], catch_exceptions=False)


def test_jobs_that_fit_get_a_table_and_valid_json(tmp_path: Path) -> None:
    done = planned(tmp_path, '"64MiB"', "-o", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.stderr
    assert [name for name in ("mlp-1", "mlp-2", "small", "predicted", "64 MiB") if name not in done.stdout] == []
    joint = json.loads((tmp_path / "plan.json").read_text())
    jsonschema.validate(joint, json.loads(CliRunner().invoke(main, ["schema", "plan-jobs"]).stdout))
    jobs = joint["jobs"]
    assert [job["name"] for job in jobs] == ["mlp-1", "mlp-2", "small"]
    assert joint["peak_sum_bytes"] == sum(job["peak_bytes"] for job in jobs)
    rest = sum(job["idle_bytes"] for job in jobs)
    assert joint["serial_peak_bytes"] == max(rest - job["idle_bytes"] + job["peak_bytes"] for job in jobs) <= 64 * 2**20
    assert joint["round_us"] == pytest.approx(sum(job["step_us"] for job in jobs))
    assert (joint["take_turns"], [job["beside_others"] for job in jobs]) == (False, [True] * 3)


def test_a_share_is_of_the_sum_of_plain_jits_peaks(tmp_path: Path) -> None:
    done = planned(tmp_path, '"200%"', "-o", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.stderr
    joint = json.loads((tmp_path / "plan.json").read_text())
    peaks = [job["jit_peak_bytes"] for job in joint["jobs"]]
    assert joint["budget_bytes"] == 2 * sum(peaks) and peaks[0] == peaks[1] > peaks[2]
    assert "plain jit" in done.stdout


@pytest.mark.slow
def test_too_small_a_budget_is_exit_code_3_and_names_one_that_then_works(tmp_path: Path) -> None:
    refused = planned(tmp_path, '"100KiB"')
    assert (refused.exit_code, refused.stdout) == (3, "")
    found = re.search(r"the smallest that works is about .* \((\d+) bytes\)\. mlp-1 alone needs", refused.stderr)
    assert found is not None, refused.stderr
    smallest = int(found[1])
    assert planned(tmp_path, str(smallest)).exit_code == 0
    assert planned(tmp_path, str(int(smallest * 0.99))).exit_code == 3


@pytest.mark.slow
def test_states_that_do_not_fit_at_once_take_turns(tmp_path: Path) -> None:
    found = re.search(r"\((\d+) bytes\)\. mlp-1", planned(tmp_path, '"100KiB"').stderr)
    assert found is not None
    done = planned(tmp_path, found[1], "-o", str(tmp_path / "plan.json"))
    assert "they take turns" in done.stdout
    joint = json.loads((tmp_path / "plan.json").read_text())
    assert joint["take_turns"] and joint["serial_peak_bytes"] > joint["budget_bytes"]


def joint_of(folder: Path, jobs: str) -> tuple[dict[str, Any], str]:
    (folder / "jobs.toml").write_text(jobs)
    done = CliRunner().invoke(main, ["plan", str(folder / "jobs.toml"), "-o", str(folder / "plan.json")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads((folder / "plan.json").read_text()), done.stdout


def test_state_is_kept_out_where_that_makes_room_for_another_job(tmp_path: Path) -> None:
    joint, told = joint_of(
        tmp_path,
        """
[device]
budget = "10700KiB"  # the large one's peak fits, but not beside all of the small one's state
device_profile = "h200"
[defaults]
model = "cnn"
policy = "none"
steps = 3
[[jobs]]
name = "large"
args = {batch_size = 64, image_size = 16}
[[jobs]]
name = "small"
args = {batch_size = 32, image_size = 16}
""",
    )
    large, small = joint["jobs"]
    assert not joint["take_turns"] and joint["serial_peak_bytes"] <= joint["budget_bytes"]
    assert (large["beside_others"], large["kept_out_tensors"], large["swapped_bytes"]) == (False, 0, 0)
    assert small["kept_out_tensors"] > 0 and small["swapped_bytes"] > 0
    assert f"{small['kept_out_tensors']} tensors of small's state are in host memory" in told


@pytest.mark.parametrize("rate", slow_but([1.0, 0.5], 0.5))
def test_a_job_swaps_no_more_than_its_rate(tmp_path: Path, rate: float) -> None:
    joint, _ = joint_of(
        tmp_path,
        f"""
[device]
budget = "7900KiB"  # under which it swaps if it may
device_profile = "cpu"
[[jobs]]
model = "cnn"
args = {{batch_size = 64, image_size = 16}}
steps = 3
max_swap_rate = {rate}
""",
    )
    assert (joint["jobs"][0]["swapped_bytes"] > 0) == (rate == 1)  # half of what no other job swaps is nothing


def test_a_host_that_is_too_small_is_said_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(
        _JOBS.format(budget='"64MiB"').replace("device_profile", 'host_budget = "1KiB"\ndevice_profile')
    )
    refused = CliRunner().invoke(main, ["plan", str(tmp_path / "jobs.toml")], catch_exceptions=False)
    assert (refused.exit_code, "device.host_budget of 1 KiB is too small" in refused.stderr) == (3, True)
    assert re.search(r"at least twice that \(\d+ bytes\)", refused.stderr)


def test_an_option_for_a_model_is_refused_beside_a_jobs_file(tmp_path: Path) -> None:
    refused = planned(tmp_path, '"64MiB"', "--policy", "vdnn")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("Error: --policy is for a model; ")
