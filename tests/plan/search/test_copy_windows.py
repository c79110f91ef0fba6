"""Windows in which nothing waits for a copy. PROFILE: 100 bytes over the link take 10 us."""

from tensile_jax.ir import TensorId
from tensile_jax.plan.search.copy_windows import Need, Window, windows_without_waiting
from tests.builders import PROFILE

A, B = TensorId(0), TensorId(1)


def test_a_tensor_is_gone_when_its_copy_has_ended_and_its_return_begins_in_time() -> None:
    need = Need(A, 100, issued=1, used=4, copies_out=True)
    assert windows_without_waiting([need], (10.0,) * 5, PROFILE) == {0: Window(2, 3)}
    # The copy out takes from 10 to 20. Where segments are short, that is after boundary 2, and no segment is left without it.
    assert windows_without_waiting([need], (10.0, 6.0, 6.0, 20.0), PROFILE) == {}
    assert windows_without_waiting([need], (10.0, 12.0, 12.0, 10.0), PROFILE) == {0: Window(2, 3)}
    assert windows_without_waiting([need], (10.0, 6.0, 6.0, 6.0), PROFILE) == {}


def test_what_the_host_has_needs_no_time_to_leave() -> None:
    assert windows_without_waiting([Need(A, 100, 1, 3, copies_out=False)], (10.0,) * 3, PROFILE) == {0: Window(1, 2)}
    assert windows_without_waiting([Need(A, 100, 1, 2, copies_out=False)], (10.0, 9.0), PROFILE) == {}


def test_copies_take_turns_and_the_last_to_leave_returns_first() -> None:
    needs = [Need(A, 100, 1, 6, copies_out=True), Need(B, 100, 1, 6, copies_out=True)]
    assert windows_without_waiting(needs, (10.0,) * 6, PROFILE) == {0: Window(2, 5), 1: Window(3, 4)}
