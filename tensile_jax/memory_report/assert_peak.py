"""Fails a test if a function's peak under plain `jax.jit` is above a limit or a baseline: `tensile_jax.assert_peak`.

The function is compiled but not run, and the peak is the one that XLA reports. A baseline is a JSON file with an entry for each
function:

    Baseline ::= {name: Recorded}
    Recorded ::= peak_bytes, device, jax, and the tensors at the peak, by name

The entries are sorted, so that a change of the file reads well in a review. Sizes are in bytes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import jax
import msgspec

from tensile_jax.arguments import read_number, shown
from tensile_jax.atomic_file import write_whole
from tensile_jax.budget import parse_budget
from tensile_jax.exec.call.options import JitOptions
from tensile_jax.memory_report.alike import tensors_of
from tensile_jax.memory_report.calls import refuse_unknown
from tensile_jax.memory_report.memory import memory
from tensile_jax.memory_report.records import Tensor
from tensile_jax.memory_report.report import MemoryReport
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes

__all__ = ["assert_peak"]

UPDATE = "TENSILE_UPDATE_PEAKS"
"""The environment variable with which baselines are written."""

_LARGEST = 8  # tensors that a message names


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a baseline has of a function. `tensors` are those at the peak, by name: the bytes of all of this name together."""

    peak_bytes: int
    device: str
    jax: str
    tensors: dict[str, int]


@hides_frames
def assert_peak(
    function: Callable[..., Any],
    /,
    *args: Any,
    at_most: int | float | str | None = None,
    baseline: str | PathLike[str] | None = None,
    name: str | None = None,
    tolerance: float = 0.01,
    kwargs: Mapping[str, Any] | None = None,
    device_profile: str | None = None,
    **jit_options: Unpack[JitOptions],
) -> MemoryReport:
    """Fail unless the peak of `function` under plain `jax.jit` is at most a limit, or at most that of a baseline.

    The function is compiled and not run. The message of a failure names the tensors at the peak: the largest, or those that are
    new or larger than in the baseline.

    Args:
        function, *args, kwargs, device_profile, **jit_options: as in `tensile_jax.memory`.
        at_most: bytes, or a size such as `"1.2GiB"`.
        baseline: a JSON file with the peaks of earlier versions. With the environment variable `TENSILE_UPDATE_PEAKS=1`, the peak
            is written there instead of being compared; keep the file in your repository.
        name: the name of the function in the baseline; without it, its `__name__`.
        tolerance: by which part of the baseline the peak may be higher.

    Returns:
        The `MemoryReport`.

    Raises:
        AssertionError: the peak is too high, or the baseline has no entry for the function.
        TypeError: as from `tensile_jax.memory`.
        ValueError: neither `at_most` nor `baseline` is given, or the baseline cannot be read.

    >>> import jax.numpy as jnp
    >>> report = assert_peak(lambda w, x: jnp.tanh(x @ w), jnp.ones((256, 256)), jnp.ones((256, 256)), at_most="1MiB")
    >>> report.compiled_peak_bytes
    786432
    """
    limit = _read_limit(at_most)
    if limit is None and baseline is None:
        raise ValueError('assert_peak has nothing to compare with. Pass at_most="1.2GiB" or baseline="peaks.json".')
    refuse_unknown(jit_options)  # also what only memory takes
    part = read_number(tolerance)
    if part is None or not 0 <= part < float("inf"):
        raise ValueError(
            f"tolerance must be a part of the baseline's peak, 0 or more: got {shown(tolerance)}. Pass 0.01 for 1 %."
        )
    updates = baseline is not None and os.environ.get(UPDATE, "") not in ("", "0")
    known = {} if baseline is None else _read(baseline, missing_is_empty=updates)
    report = memory(function, *args, kwargs=kwargs, compile=True, device_profile=device_profile, **jit_options)
    called = name or report.program
    if limit is not None and report.peak_bytes > limit:
        raise AssertionError(
            f"The peak of {called!r} is {format_bytes(report.peak_bytes)}, above at_most={format_bytes(limit)}. "
            "The largest there:\n" + _listed(tensors_of(report.held))
        )
    if baseline is None:
        return report
    if updates:
        _write(baseline, {**known, called: _recorded(report)})
    elif called not in known:
        raise AssertionError(
            f"{os.fspath(baseline)} has no entry for {called!r}, whose peak is {format_bytes(report.peak_bytes)}. "
            f"Run the test once with {UPDATE}=1, and keep the file."
        )
    else:
        _compare(report, known[called], called, os.fspath(baseline), float(part))
    return report


def _read_limit(at_most: Any) -> int | None:
    if at_most is None:
        return None
    budget = parse_budget(at_most)
    if budget.nbytes is None:
        raise ValueError(f"at_most={at_most!r} is a share of the peak itself. Give bytes, or a size such as '1.2GiB'.")
    return budget.nbytes


def _read(file: str | PathLike[str], *, missing_is_empty: bool) -> dict[str, Recorded]:
    path = Path(file)
    if missing_is_empty and not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Recorded])
    except FileNotFoundError:
        return {}  # so that the message says how to make it
    except msgspec.DecodeError as error:
        raise ValueError(f"baseline {path} is not a file of peaks: {error}. Remove it, and write it with {UPDATE}=1.") from error


def _write(file: str | PathLike[str], several: Mapping[str, Recorded]) -> None:
    ordered = dict(sorted(several.items()))
    write_whole(file, msgspec.json.format(msgspec.json.encode(ordered, order="deterministic"), indent=1) + b"\n")


def _recorded(report: MemoryReport) -> Recorded:
    return Recorded(report.peak_bytes, report.device, jax.__version__, _by_name(tensors_of(report.held)))


def _by_name(tensors: Sequence[Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.name] = found.get(tensor.name, 0) + tensor.nbytes
    return found


def _compare(report: MemoryReport, known: Recorded, called: str, file: str, tolerance: float) -> None:
    """Raises: AssertionError: the peak is above the recorded one by more than the tolerance."""
    if report.peak_bytes <= known.peak_bytes * (1 + tolerance):
        return
    there = tensors_of(report.held)
    before, now = known.tensors, _by_name(there)
    grown = [t for t in there if now[t.name] > before.get(t.name, 0)]
    grown.sort(key=lambda t: before.get(t.name, 0) - now[t.name])
    above = report.peak_bytes / max(known.peak_bytes, 1) - 1
    message = (
        f"The peak of {called!r} is {format_bytes(report.peak_bytes)}, {above:.1%} above {format_bytes(known.peak_bytes)} in "
        f"{file}"
    )
    where = report.device, jax.__version__
    if where != (known.device, known.jax):
        message += f" (that is of {known.device} with jax {known.jax}; this is {where[0]} with jax {where[1]})"
    if grown:
        message += ". New or larger at the peak:\n" + _listed(grown, before)
    else:
        message += ". No tensor there is new or larger: XLA packs them otherwise, or needs more inside operators."
    raise AssertionError(f"{message}\nIf that is meant, run the test with {UPDATE}=1.")


def _listed(tensors: Sequence[Tensor], before: Mapping[str, int] | None = None) -> str:
    lines: list[str] = []
    for tensor in tensors[:_LARGEST]:
        was = "" if before is None else f", was {format_bytes(before[tensor.name])}" if tensor.name in before else ", new"
        where = f", made at {tensor.made_at}" if tensor.made_at else ""
        lines.append(f"  {format_bytes(tensor.nbytes):>10}  {tensor.name} {tensor.form}{was}{where}")
    if len(tensors) > _LARGEST:
        lines.append(f"{'':14}and {len(tensors) - _LARGEST} more")
    return "\n".join(lines)
