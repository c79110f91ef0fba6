"""Ctrl-C, SIGTERM and SIGHUP during a run of several jobs."""

import os
import signal

import pytest

from tensile_jax.cli import stop_signals
from tensile_jax.cli.stop_signals import stopping_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_aborts(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    told: list[str] = []
    monkeypatch.setattr(stop_signals.os, "_exit", leave)
    before = signal.getsignal(number)
    with stopping_on_signals(lambda: told.append("stop")):
        os.kill(os.getpid(), number)
        assert told == ["stop"]
        with pytest.raises(SystemExit, match="130"):
            os.kill(os.getpid(), signal.SIGINT)
    assert told == ["stop"]
    assert signal.getsignal(number) is before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told: list[str] = []
    try:
        with stopping_on_signals(lambda: told.append("stop")):
            os.kill(os.getpid(), signal.SIGHUP)
        assert told == []
    finally:
        signal.signal(signal.SIGHUP, before)
