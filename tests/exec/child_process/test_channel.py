"""Messages, exceptions and payloads between two processes, both ends in this one."""

import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tensile_jax.errors import BudgetTooSmall, ProcessDied
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.child_process import job_process
from tensile_jax.exec.child_process.carried_exception import CarriedException, carry
from tensile_jax.exec.child_process.channel import Answer, Channel, Heartbeat, InvalidMessage
from tensile_jax.exec.child_process.job_process import JobProcess
from tensile_jax.exec.child_process.payload import pack_job, pack_tree
from tests.exec import isolated_jobs as jobs

Ends = tuple[Channel, Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two channels, and the socket of the second."""
    a, b = socket.socketpair()
    with a, b:
        yield Channel(a), Channel(b), b


# -- messages ---------------------------------------------------------------------------------------------------------------


def test_arrays_come_bit_for_bit_however_large(ends: Ends) -> None:
    ours, theirs, _ = ends
    sent = [np.arange(3_000_000, dtype=np.float64), np.zeros((0, 3)), np.asfortranarray(np.arange(6).reshape(2, 3)), "text"]
    thread = threading.Thread(target=theirs.send, args=(Answer(7, sent),))
    thread.start()
    got = ours.receive()
    thread.join()
    assert (got.number, got.value[3]) == (7, "text")
    assert [(x.dtype, x.shape, x.tobytes()) for x in got.value[:3]] == [(x.dtype, x.shape, x.tobytes()) for x in sent[:3]]


def test_messages_of_several_threads_do_not_mix(ends: Ends) -> None:
    ours, theirs, _ = ends
    threads = [threading.Thread(target=theirs.send, args=(Answer(i, np.full(10_000, i)),)) for i in range(8)]
    for thread in threads:
        thread.start()
    got = {message.number: set(message.value.tolist()) for message in (ours.receive() for _ in threads)}
    for thread in threads:
        thread.join()
    assert got == {i: {i} for i in range(8)}


def test_the_end_of_the_other_side_is_seen_after_what_it_sent(ends: Ends) -> None:
    ours, theirs, _ = ends
    theirs.send(Heartbeat())
    theirs.end()
    assert ours.receive() == Heartbeat()
    with pytest.raises(EOFError):
        ours.receive()


def test_whatever_comes_is_counted(ends: Ends) -> None:
    ours, theirs, _ = ends
    assert ours.received == 0
    theirs.send(Heartbeat())
    ours.receive()
    once = ours.received
    thread = threading.Thread(target=theirs.send, args=(Answer(1, np.zeros(10_000_000)),))
    thread.start()
    ours.receive()
    thread.join()
    assert 0 < once < ours.received - once


def chunk(raw: bytes) -> bytes:
    """As a connection of `multiprocessing` sends it."""
    return len(raw).to_bytes(4, "big") + raw


@pytest.mark.parametrize(
    ("raw", "story"),
    [
        (b"garbage!" * 4, "more than .* bytes at once"),
        (b"\xff\xff\xff\xff" + (1 << 60).to_bytes(8, "big"), "more than .* bytes at once"),
        (chunk(b"garbage"), "JSONDecodeError"),
        (chunk(b"3"), "TypeError"),
        (chunk(b"[]"), "ValueError"),
        (chunk(b"[3]") + chunk(b"abc"), "UnpicklingError"),
        (chunk(b"[2]") + chunk(b"N."), None),
    ],
)
def test_what_is_no_message_is_refused(raw: bytes, story: str | None, ends: Ends) -> None:
    ours, _, socket_of_theirs = ends
    socket_of_theirs.sendall(raw)
    if story is None:
        assert ours.receive() is None  # a pickle, if not of a message
        return
    with pytest.raises(InvalidMessage, match=story):
        ours.receive()


def test_a_message_that_is_announced_as_large_is_not_allocated_before_it_comes(ends: Ends) -> None:
    ours, theirs, socket_of_theirs = ends
    socket_of_theirs.sendall(chunk(b"[%d]" % (1 << 60)) + chunk(b"abc"))
    theirs.end()
    with pytest.raises(EOFError):
        ours.receive()


# -- a process without a job ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "story"),
    [
        ("import time; time.sleep(1000)", r"was killed by SIGKILL because it gave no sign of life for 0.2 s\."),
        ("import os, time, sys; os.close(int(sys.argv[1])); time.sleep(1000)", "SIGKILL because it closed its socket"),
        ("import os, sys; os.write(int(sys.argv[1]), b'no message')", "because it sent something that is no message"),
        ("import sys; sys.exit(3)", r"ended with exit code 3\."),
    ],
)
def test_a_process_that_does_not_answer_is_ended_and_that_is_told(does: str, story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_COMMAND": does, "_START_S": 0.2, "_LOOK_S": 0.02, "_END_S": 0.5}.items():
        monkeypatch.setattr(job_process, name, value)
    if "no sign" not in story:
        monkeypatch.setattr(job_process, "_START_S", 60.0)
    died: list[BaseException] = []
    process = JobProcess(_pack(), lock=None, receive=died.append, died=died.append)
    with pytest.raises(ProcessDied, match=story) as caught:
        process.ask("trace")()
    process.close()
    process.join()
    assert died == [caught.value]
    with pytest.raises(ProcessDied):
        process.ask("trace")()


# -- exceptions -------------------------------------------------------------------------------------------------------------


class Particular(Exception):
    """Keeps other arguments than it is made with."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"particularly {what}")
        self.code = code


class Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("mine")
        self.lock = threading.Lock()


def _carried(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return pickle.loads(pickle.dumps(carry(caught))).exception()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine", 3),
        OSError(2, "none", "file"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        SystemExit(3),
        KeyError("k"),
    ],
)
def test_exceptions_come_as_they_are_with_their_traceback(error: BaseException) -> None:
    got = _carried(error)
    assert (type(got), got.args, str(got)) == (type(error), error.args, str(error))
    assert "In the job's own process" in got.__notes__[0]
    assert "in _carried" in got.__notes__[0]


def test_exceptions_with_arguments_of_their_own_come_as_they_are() -> None:
    got = _carried(Particular("bad", code=4))
    assert isinstance(got, Particular)
    assert (str(got), got.code) == ("particularly bad", 4)
    small = _carried(BudgetTooSmall("too small", budget_bytes=1, floor_bytes=2))
    assert isinstance(small, BudgetTooSmall)
    assert (small.message, small.floor_bytes) == ("too small", 2)


def test_an_exception_of_which_a_part_cannot_be_sent_comes_without_it() -> None:
    got = _carried(Unsendable())
    assert isinstance(got, Unsendable)
    assert (str(got), hasattr(got, "lock")) == ("mine", False)


def test_an_exception_that_does_not_exist_here_comes_as_its_text() -> None:
    class Local(Exception):
        pass

    assert (type(_carried(Local("mine"))), str(_carried(Local("mine")))) == (RuntimeError, "Local: mine")
    assert str(CarriedException(b"\x80garbage", "Odd: one", "").exception()) == "Odd: one"


# -- payloads ---------------------------------------------------------------------------------------------------------------


def _pack(step: Any = jobs.step, state: Any = None, batches: Any = jobs.batches) -> Any:
    return pack_job(step, state, batches, name="job", device=jax.devices()[0], first=0, checkpoints=None)


def test_a_state_comes_bit_for_bit() -> None:
    state = {**jobs.make_state(), "scalars": (1, 2.5, True, None), "odd": np.array([np.nan, -0.0]), "none": np.zeros((0, 2))}
    got = pickle.loads(pickle.dumps(pack_tree(state))).unpack(jax.tree.structure(state))
    assert jobs.bits(got) == jobs.bits(state)
    assert jax.typeof(got["weak"]).weak_type
    assert [type(x) for x in got["scalars"]] == [int, float, bool, type(None)]


@jax.jit
def jitted(state: Any, batch: Any) -> Any:
    return state, batch


def test_functions_go_by_name_even_decorated_ones() -> None:
    for function in (jobs.step, jitted):
        step, state, batches = pickle.loads(pickle.dumps(_pack(function, (1, {"a": 2})))).open()
        assert step is function
        assert batches is jobs.batches
        assert state == (1, {"a": 2})


def test_a_closure_goes_by_value_if_cloudpickle_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 3

    def closure(state: Any, batch: Any) -> Any:
        return state, number

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(
            TypeError, match=r"^step cannot be sent.*closure.*level of a module, or give an Entrypoint.*isolation="
        ):
            _pack(closure)
    pytest.importorskip("cloudpickle")
    assert pickle.loads(pickle.dumps(_pack(closure))).open()[0](1, 2) == (1, 3)


@pytest.mark.parametrize(
    ("given", "story"),
    [
        (
            lambda: {"batches": jobs.batches()},
            "^batches cannot be sent.*generator.*Give a function at the level of a module that",
        ),
        (lambda: {"batches": [threading.Lock()]}, "^batches cannot be sent.*lock"),
        (lambda: {"step": Entrypoint("a:b", {"x": threading.Lock()})}, "^step cannot be sent.*lock"),
        (lambda: {"state": {"a": "text"}}, r"state\['a'\] is a str"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_argument(given: Callable[[], dict[str, Any]], story: str) -> None:
    with pytest.raises(TypeError, match=story):
        _pack(**given())


def test_the_main_module_goes_along_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a worker of pytest-xdist has none
    assert _pack().environment.main is None
    assert _pack(Entrypoint("__main__:make_job")).environment.main is not None
    there = pickle.loads(pickle.dumps(_pack())).environment
    assert there.configuration["jax_enable_x64"] == jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    assert there.apply() == jax.devices()[0]
