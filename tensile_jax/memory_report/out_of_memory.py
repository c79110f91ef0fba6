"""Says what held the memory of a device when it had no room for an allocation: `tensile_jax.explain_out_of_memory`.

The error stays the one that JAX has raised. It gets a note, which Python prints below the error:

    Note ::= what was being allocated, the limit of the device and what is in use
             live arrays on the device, in groups of one shape and type, the largest group first
             for a step that `tensile_jax.jit` runs as plain jit: what it needs for parameters, activations, the batch and so
             on, and the largest tensors at its peak

Live arrays are those to which Python still refers. What a running program has allocated is not among them. Arrays that share one
buffer count once. If several devices have live arrays, the note is about the one that holds the most. Sizes are in bytes.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from tensile_jax.errors import OutOfMemory
from tensile_jax.exec.compiling.step import Step
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.transfer import Device, nbytes_on_a_device, on_host
from tensile_jax.memory_report.alike import largest_lines
from tensile_jax.memory_report.memory import report_of
from tensile_jax.memory_report.records import WORDS
from tensile_jax.memory_report.report import by_role
from tensile_jax.units import format_bytes

__all__ = ["explain_out_of_memory"]

_TITLE = "What held the memory of the device:"
_ALLOCATED = re.compile(r"allocat(?:e|ing) (?P<nbytes>\d+) bytes|Attempting to (?:allocate|reserve) (?P<size>[\d.]+[KMGT]i?B?)")
_GROUPS = 8  # of live arrays that are listed
_ROWS = 8  # of tensors at the step's peak that are alike
_COMMAND = "tensile errors RESOURCE_EXHAUSTED"
_Form = tuple[str, tuple[int, ...], int]
"""The type, the shape and the bytes of an array on one device."""


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """`with explain_out_of_memory():` adds to an error of JAX that the device is out of memory what held that memory.

    The error keeps its type and its text. It gets a note, which a traceback shows below the error: what was being allocated, the
    memory of the device, and the live arrays by shape and type. Other errors pass unchanged. It is a decorator, too. JAX runs
    ahead of Python, so wait for results inside the block (`jax.block_until_ready`).

    A function of `tensile_jax.jit` does this by itself, and adds what its step needs.

    >>> import jax.numpy as jnp
    >>> try:
    ...     with explain_out_of_memory():
    ...         x = jnp.zeros(1 << 50)
    ... except jax.errors.JaxRuntimeError as error:
    ...     print(error.__notes__[-1].splitlines()[0])
    What held the memory of the device:
    """
    try:
        yield
    except Exception as error:
        explain(error)
        raise


def explain(error: Exception, step: Step | None = None) -> None:
    """Add to the error what held the memory of the device, if the error says that the device is out of memory.

    Args:
        step: the step that plain jit ran, if the error comes from one of `tensile_jax.jit`.
    """
    if not (isinstance(error, OutOfMemory) or is_out_of_memory(error, effectful=False)):
        return
    if any(note.startswith(_TITLE) for note in getattr(error, "__notes__", ())):
        return
    try:
        lines = [*_device_lines(error), *([] if step is None else _step_lines(step))]
    except Exception as failure:  # which must not take the place of the error
        lines = [f"  is not known, since asking for it failed: {type(failure).__name__}: {failure}"]
    error.add_note("\n".join([_TITLE, *lines, f"How to read this, and what helps: {_COMMAND}"]))


def _device_lines(error: Exception) -> Iterator[str]:
    """What was being allocated, and what is on the device that holds the most."""
    asked = _asked_bytes(error)
    groups = _live_arrays()
    held = {device: sum(form[2] * count for form, count in forms.items()) for device, forms in groups.items()}
    device = max(held, key=lambda one: (held[one], -one.id), default=jax.local_devices()[0])
    if asked:
        yield f"  {asked} were being allocated."
    yield f"  {_memory_of(device)}"
    forms = groups.get(device, {})
    if not forms:
        yield f"  There is no live array on {device}: programs that ran, or other processes, held the memory."
        return
    count = sum(forms.values())
    where = f"{device}, which holds the most of {len(held)} devices" if len(held) > 1 else str(device)
    yield f"  {_arrays(count)} with {format_bytes(held[device])} {'is' if count == 1 else 'are'} live on {where}:"
    ordered = sorted(forms.items(), key=lambda item: (-item[0][2] * item[1], item[0]))
    for (dtype, shape, nbytes), several in ordered[:_GROUPS]:
        form = f"{dtype}[{','.join(map(str, shape))}]"
        each = f", {format_bytes(nbytes)} each" if several > 1 else ""
        yield f"  {format_bytes(nbytes * several):>12}  {_arrays(several)} {form}{each}"
    rest = ordered[_GROUPS:]
    if rest:
        nbytes = sum(form[2] * several for form, several in rest)
        yield f"  {format_bytes(nbytes):>12}  {_arrays(sum(several for _, several in rest))} of {len(rest)} more forms"


def _step_lines(step: Step) -> Iterator[str]:
    """What plain jit needs for a step, and what holds its peak."""
    report = report_of(step)
    roles = ", ".join(f"{WORDS[role]} {format_bytes(nbytes)}" for role, nbytes in by_role(report.held).items() if nbytes > 0)
    needed = format_bytes(report.predicted_peak_bytes)
    yield f"  {report.program!r} ran as plain jit, which is predicted to need {needed}: {roles}."
    if report.peak is not None:
        at = f" ({report.peak.source})" if report.peak.source else ""
        yield f"  The largest tensors at its peak, in {report.peak.name}{at}, with the lines that make them:"
        more = "tensile_jax.memory has them"
        yield from (f"  {line}" for line in largest_lines(report.held, rows=_ROWS, more=more))
    yield "  A plan needs less: pass a budget to tensile_jax.jit, such as budget='60%'."


def _asked_bytes(error: Exception) -> str:
    """How much was being allocated, as the error or its cause says; empty if neither does."""
    for one in (error, error.__cause__):
        found = _ALLOCATED.search(str(one)) if one is not None else None
        if found is not None:
            return format_bytes(int(found["nbytes"])) if found["nbytes"] else found["size"]
    return ""


def _memory_of(device: Device) -> str:
    """What the allocator of the device says of its memory, in a sentence."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return f"{device} ({device.device_kind}) tells no limit of its memory."
    used = stats.get("bytes_in_use", 0)
    left = f", and {format_bytes(stats['bytes_limit'] - used)} are free, not always in one piece"
    return f"{device} ({device.device_kind}) has {format_bytes(stats['bytes_limit'])}: {format_bytes(used)} are in use{left}."


def _live_arrays() -> dict[Device, dict[_Form, int]]:
    """How many live arrays of each form there are in the memory of each device of this process."""
    found: dict[Device, dict[_Form, int]] = defaultdict(lambda: defaultdict(int))
    seen: set[object] = set()
    for array in jax.live_arrays():
        if array.is_deleted() or on_host(array):
            continue
        for shard in array.addressable_shards:
            buffer = shard.device, _buffer_of(shard.data)
            if buffer not in seen:
                seen.add(buffer)
                found[shard.device][str(array.dtype), tuple(shard.data.shape), nbytes_on_a_device(shard.data)] += 1
    return found


def _buffer_of(array: Any) -> object:
    """What is equal for arrays that share a buffer; keys tell no buffer, and count as arrays of their own."""
    try:
        return array.unsafe_buffer_pointer()
    except (AttributeError, NotImplementedError, RuntimeError):
        return id(array)


def _arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count} arrays"
