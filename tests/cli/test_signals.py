"""Ctrl-C, SIGTERM and SIGHUP: what each of them does, in this process, where nothing is ended but a list told of it."""

import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensile_jax.cli.signals import Listener, StopRequest, StopSignals
from tensile_jax.exec.call.interrupts import InterruptsHeld

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Heard:
    """The signals of this process, and the exit codes with which it would have ended."""

    def __init__(self) -> None:
        self.ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.signals = StopSignals(self.ends.put)
        self.listener = Listener(self.signals)

    def next_end(self) -> int:
        return self.ends.get(timeout=10)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """None of the signals is ignored before, as SIGHUP is under `nohup`."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _CODES}
    made = Heard()
    try:
        made.listener.begin()
        yield made
        made.listener.end()
        assert {signal.getsignal(number) for number in _CODES} == {signal.SIG_DFL}
        assert made.ends.empty()
    finally:
        made.listener.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_a_stop(stop: StopRequest) -> None:
    told = threading.Event()
    stop.call(told.set)
    assert told.wait(10)


@pytest.mark.parametrize("number", _CODES)
def test_a_signal_ends_the_process_at_once(heard: Heard, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    os.kill(os.getpid(), number)
    assert heard.next_end() == _CODES[signal.Signals(number)]
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("number", _CODES)
def test_in_a_run_the_first_signal_asks_and_the_second_ends_the_process(heard: Heard, number: int) -> None:
    with heard.signals.stopping() as stopping:
        assert not stopping.asked
        os.kill(os.getpid(), number)
        wait_for_a_stop(stopping)
        assert heard.ends.empty()
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.next_end() == 130
    assert heard.signals.exit_code == _CODES[signal.Signals(number)]


def test_a_run_that_begins_after_the_signal_is_asked_at_once(heard: Heard) -> None:
    with heard.signals.stopping() as first:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for_a_stop(first)
        with heard.signals.stopping() as second:
            assert second.asked


_STUCK = """
import ctypes
from tensile_jax.cli.signals import listen_to_the_end
listen_to_the_end()
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
print("locked", flush=True)
lock(mutex)
"""


def test_a_signal_is_heard_while_the_main_thread_does_not_return_to_python() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", _STUCK], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_a_signal_during_an_iteration_of_a_planned_step_is_heard_once(heard: Heard) -> None:
    with InterruptsHeld():
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.next_end() == 130
    with InterruptsHeld():  # what is held back would be sent once more here
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard.next_end() == 143


def test_a_signal_that_was_ignored_stays_ignored_but_not_an_interrupt() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    made = Heard()
    try:
        made.listener.begin()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        assert made.next_end() == 130
        assert made.ends.empty()
    finally:
        made.listener.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_forked_child_has_the_signals_of_before(heard: Heard) -> None:
    with warnings.catch_warnings(action="ignore"):  # Python and JAX warn of forks of a process that has threads
        child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.next_end() == 143


def test_in_another_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    listener = Heard().listener

    def try_it() -> None:
        listener.begin()
        listener.end()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


_COMPILING_AT_THE_END = """
import sys, threading, time
from tensile_jax.cli.signals import listen_to_the_end
end = listen_to_the_end()
import jax, jax.numpy as jnp
begun = threading.Event()
def compile_for_ever():
    for k in range(10**6):
        begun.set()
        jax.jit(lambda x: jnp.sin(x @ x + k) @ x).lower(jnp.ones((8, 8))).compile()
threading.Thread(target=compile_for_ever, daemon=True).start()
begun.wait()
time.sleep(0.5)
print("done")
end.code = 143
sys.exit(end.code)
"""


def test_a_command_that_ends_while_a_thread_compiles_has_its_own_exit_code() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _COMPILING_AT_THE_END], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (143, "done\n", "")


_SPAWNING = """
from tensile_jax.cli.program import start
import multiprocessing, signal
def tell(queue):
    queue.put(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
if __name__ == "__main__":
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=tell, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""


def test_a_process_that_a_step_spawns_has_its_own_signals(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SPAWNING)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
