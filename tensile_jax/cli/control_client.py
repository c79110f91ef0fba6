"""The second terminal's side: ask a run that is alive, and say so where none is."""

from pathlib import Path

import msgspec

from tensile_jax.cli.control_wire import Reply, Request, connect
from tensile_jax.cli.refusal import Refusal
from tensile_jax.runtime_records import Status

_PATIENCE_S = 10.0


def ask(folder: Path, request: Request, *, timeout_s: float = _PATIENCE_S) -> Reply:
    """The run's reply, which has no error.

    Raises:
        Refusal: no run is alive in the folder, it does not answer in time, or it refuses.
    """
    try:
        with connect(folder, timeout_s=timeout_s) as connection, connection.makefile("rb") as replies:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = replies.readline()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise Refusal(
            f"no run is alive in {folder}: it has ended, was killed, or this is no run folder. Name the folder of one that runs."
        ) from error
    except (TimeoutError, BlockingIOError) as error:
        raise Refusal(
            f"the run in {folder} did not answer within {timeout_s:g} s. Try again, or look whether its process is stopped."
        ) from error
    except OSError as error:
        raise Refusal(
            f"the run in {folder} cannot be reached: {error.strerror or error}. Ask as the user who began it."
        ) from error
    if not line:
        raise Refusal(f"the run in {folder} ended before it answered. Look for the outcome in its folder.")
    try:
        reply = msgspec.json.decode(line, type=Reply)
    except msgspec.DecodeError as error:
        raise Refusal(
            f"the reply of the run in {folder} cannot be read: {error}. Use the same version of tensile_jax as the run."
        ) from error
    if reply.error:
        raise Refusal(reply.error)
    return reply


def ask_status(folder: Path) -> Status:
    """How the run stands. Raises as `ask` does."""
    status = ask(folder, Request("status")).status
    if status is None:
        raise Refusal(f"the run in {folder} answered without its status. Use the same version of tensile_jax as the run.")
    return status
