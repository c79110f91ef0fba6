"""Steps on devices of several processes: they have one plan, plain jit's results, and raise errors together."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sharded.processes.program import HEARTBEAT_S, SHUTDOWN_S
from tests.sharded.processes.two_processes import Ended, run

QUICK = "fsdp,too_small,other_budget,other_step,other_call,one_fails,interrupted_while_planning,refused"
LONG = "data_parallel,host_memory,whole,saved_plan,kept_plans,out_of_memory,largest_workspaces,local_arguments,one_program"


def _all(scenarios: str, folder: Path, *, processes: int = 2) -> list[Ended]:
    ended = run(scenarios, folder, timeout_s=300, processes=processes)
    for one in ended:
        assert one.code == 0, one.text[-4000:]
    return ended


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Both processes, after all quick scenarios, since starting two processes takes most of the time."""
    return _all(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return _all(LONG, tmp_path_factory.mktemp("long"))


def _of(ended: Sequence[Ended], scenario: str) -> list[Any]:
    return [one.found[scenario] for one in ended]


def _expect_that_of_jit(found: Sequence[Any]) -> None:
    first, second = found
    assert first["plan"] == second["plan"]
    for one in found:
        np.testing.assert_allclose(one["ours"], one["losses"], rtol=1e-5)  # cut and recomputed, sums are rounded in another order
        assert one["ours"][-1] < one["ours"][0]
        for mine, its in zip(one["shards"], one["shards_of_jit"], strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-5)
    assert first["losses"] == second["losses"] and first["ours"] == second["ours"]


def _expect_a_training_under_half_of_the_memory(found: Sequence[Any]) -> None:
    _expect_that_of_jit(found)
    for one in found:
        assert not one["whole"] and one["devices"] == 8 and one["alike"] and one["passive"] == 0
        assert one["peak_bytes"] == one["planned_bytes"] <= one["budget"]  # on each device, to the byte


@pytest.mark.smoke
def test_an_fsdp_training_in_two_processes_has_one_plan_and_the_results_of_jit(quick: list[Ended]) -> None:
    _expect_a_training_under_half_of_the_memory(_of(quick, "fsdp"))


@pytest.mark.slow
def test_a_data_parallel_training_in_two_processes_has_one_plan_and_the_results_of_jit(long: list[Ended]) -> None:
    _expect_a_training_under_half_of_the_memory(_of(long, "data_parallel"))


@pytest.mark.slow
def test_state_rests_in_the_host_memory_of_each_process(long: list[Ended]) -> None:
    found = _of(long, "host_memory")
    _expect_that_of_jit(found)
    assert all(one["on_host"] and one["swapped"] for one in found)


def test_a_budget_that_is_too_small_is_refused_in_both_before_anything_has_run(quick: list[Ended]) -> None:
    (text, floor, deleted, peak), (other_text, other_floor, other_deleted, other_peak) = _of(quick, "too_small")
    message, _, address = text.rpartition("\n")
    assert "on each of the 8 devices" in message and other_text == f"{message} (Process 0 has found this.)\n{address}"
    assert floor == other_floor and not deleted and not other_deleted
    assert peak <= floor and other_peak <= floor


def test_a_process_with_another_budget_is_named_in_both_and_nothing_has_run(quick: list[Ended]) -> None:
    first, second = _of(quick, "other_budget")
    assert first == second
    kind, text, processes, loss = first
    assert kind == "DistributedError" and processes == [1] and loss > 0
    assert "budget is 90000 bytes in process 1 and 40000 bytes in process 0" in text


def test_a_process_with_another_step_is_named_in_both(quick: list[Ended]) -> None:
    first, second = _of(quick, "other_step")
    assert first == second and first[0] == "DistributedError" and first[2] == [1]
    assert "do not have the same step: the fingerprint of the step is" in first[1]


def test_an_error_in_one_process_ends_the_call_in_all_with_its_name(quick: list[Ended]) -> None:
    first, second = _of(quick, "one_fails")
    assert second == ["KeyError", "'the file of process 1'", []]
    assert first[0] == "DistributedError" and first[2] == [1]
    assert "Process 1 has failed while the processes agreed on the plan of 'step': KeyError: 'the file of process 1'" in first[1]


def test_processes_that_call_different_functions_are_named_and_can_go_on(quick: list[Ended]) -> None:
    first, second = _of(quick, "other_call")
    assert first[:3] == second[:3]
    kind, text, processes, doubled = first
    assert kind == "DistributedError" and processes == [1] and doubled
    assert "do not have the same step: the fingerprint of the step is" in text


def test_ctrl_c_in_one_process_while_another_one_plans_ends_the_call_in_all_and_they_can_go_on(quick: list[Ended]) -> None:
    first, second = _of(quick, "interrupted_while_planning")
    assert second["error"][0] == "KeyboardInterrupt"
    kind, text, processes = first["error"]
    assert kind == "DistributedError" and processes == [1]
    assert "Process 1 has failed while the processes agreed on the plan of 'train_step': KeyboardInterrupt" in text
    assert first["losses"] == second["losses"] and first["losses"][-1] < first["losses"][0]


@pytest.mark.slow
def test_steps_of_all_processes_and_of_some_of_them_run_in_turn(tmp_path: Path) -> None:
    first, second, third = _of(_all("some_processes", tmp_path, processes=3), "some_processes")
    assert second == third and first == second[::2]
    assert all(like_jit and not whole for like_jit, whole, _ in second)


def test_a_runtime_and_renewal_on_devices_of_several_processes_are_refused(quick: list[Ended]) -> None:
    for process, (runtime, submitted, renewing, improving) in enumerate(_of(quick, "refused")):
        assert runtime[0] == submitted[0] == renewing[0] == improving[0] == "ValueError"
        assert f"is of process {1 - process}, and this is process {process}" in runtime[1]
        assert "is spread over 8 devices, and the runtime has" in submitted[1]
        assert "Leave renew_above out" in renewing[1] and "Leave improve out" in improving[1]


def _expect_that_jax_ends_it(stays: Ended, leaves: Ended) -> None:
    """JAX has ended a process that waits in a step, since the other has waited for it as it ended."""
    assert not stays.found and stays.code < 0
    assert "Terminating process because the JAX distributed service detected fatal errors" in stays.text
    assert abs(stays.after_s - leaves.after_s) < SHUTDOWN_S


@pytest.mark.slow
def test_jax_ends_a_process_that_waits_for_one_that_was_interrupted(tmp_path: Path) -> None:
    stays, leaves = run("interrupted", tmp_path, timeout_s=120)
    assert not leaves.found and "KeyboardInterrupt" in leaves.text
    _expect_that_jax_ends_it(stays, leaves)


@pytest.mark.slow
def test_after_a_step_that_failed_in_the_middle_in_a_process_it_begins_no_further_one(tmp_path: Path) -> None:
    waits, fails = run("fails_in_a_step", tmp_path, timeout_s=120)
    failure, refusal = fails.found["fails_in_a_step"]
    assert failure[:2] == ["OSError", "no disk in process 1"]
    assert "An earlier step has failed in the middle in process 1 (OSError: no disk in process 1)" in refusal[1]
    _expect_that_jax_ends_it(waits, fails)


@pytest.mark.slow
def test_the_largest_workspaces_of_all_processes_count(long: list[Ended]) -> None:
    first, second = _of(long, "largest_workspaces")
    assert set(first) == set(second) == {4096}  # more than XLA reports


@pytest.mark.slow
def test_jax_ends_a_process_that_waits_for_one_that_was_killed(tmp_path: Path) -> None:
    stays, killed = run("killed", tmp_path, timeout_s=120)
    assert killed.code == -signal.SIGKILL
    assert not stays.found and stays.code != 0  # Gloo may fail before
    assert stays.after_s - killed.after_s < 2 * HEARTBEAT_S + SHUTDOWN_S


@pytest.mark.slow
def test_a_step_in_one_launch_is_that_of_jit_in_both(long: list[Ended]) -> None:
    first, second = _of(long, "one_program")
    assert first == second
    np.testing.assert_allclose(first["ours"], first["losses"], rtol=1e-5)  # recomputed, sums are rounded in another order
    assert first["saved"] == first["ours"]
    assert first["launch"] == "program" and first["launches"] == [1, 1] and first["segments"] > 1
    measured, planned, budget = first["peaks"]
    assert measured == planned <= budget


@pytest.mark.slow
def test_keys_and_arrays_that_each_process_has_are_taken_as_by_jit(long: list[Ended]) -> None:
    for one in _of(long, "local_arguments"):
        (loss, key, shards), (our_loss, our_key, ours) = one["found"]
        assert key == our_key and not one["whole"]
        np.testing.assert_allclose(our_loss, loss, rtol=1e-5)  # cut and recomputed, sums are rounded in another order
        np.testing.assert_allclose(ours, shards, atol=1e-5)


@pytest.mark.slow
def test_a_step_that_fits_runs_whole_in_both(long: list[Ended]) -> None:
    first, second = _of(long, "whole")
    assert first == second and first["whole"]
    assert first["losses"] == first["plain"][:2]


@pytest.mark.slow
def test_a_saved_plan_runs_in_both_and_one_process_keeps_the_plans(long: list[Ended]) -> None:
    first, second = _of(long, "saved_plan")
    assert first == second and first["losses"] == first["ours"]
    assert _of(long, "kept_plans") == [["plan-000.json", "plan-001.json"]] * 2


@pytest.mark.slow
def test_all_processes_have_a_plan_for_less_after_the_device_of_one_was_out_of_memory(long: list[Ended]) -> None:
    first, second = _of(long, "out_of_memory")
    assert first == second
    before, after = first["peaks"]
    assert after < 0.9 * before
    np.testing.assert_allclose(first["losses"], _of(long, "whole")[0]["plain"], rtol=1e-5)  # rounded in another order
