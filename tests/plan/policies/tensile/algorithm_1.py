"""Finds the peak of device memory by Algorithm 1 of the paper, line by line. Tests compare `Footprint` of the package with it.

TENSILE section IV-B and Algorithm 1 are a discrete simulation of equation 2,

    MF(k) = sum of Mem(a) over accesses up to k + sum of Mem(x) over swap events up to k,     MP = max over k of MF(k)

with MF the memory footprint, MP its peak, and Mem the change of the footprint, in bytes, by an access a or a swap event x. A TGA
(tensor generating access) is the access that makes a tensor; a TUA (tensor using access) reads the tensor. The footprint changes
in five situations only:

    1  the iteration begins     + nbytes of each tensor that is on the device   line 1
    2  a TGA                    + nbytes when its operator begins               lines 5-7
    3  a swap-in                + nbytes when it finishes                       lines 17-19
    4  a swap-out               - nbytes when it ends, or its TUA if later      lines 20-22
    5  a release                - nbytes after the end of the access            lines 4, 9-10

An access releases its tensor (`event.release`, line 9) if it is the last one, which is activity analysis, or if the next one
follows a swap-in or a recomputation and no swap-out lies between. A recomputation is a further TGA of its tensor, at the time
when the operator begins that needs the tensor. The time that the recomputation takes does not delay later events, because every
event is triggered by an operator.

How ambiguous lines are read:

    1      "inputs/outputs of the model": the argument `initial` says what is on the device; IV-B names inputs and parameters.
    2      `time_axis` is sorted by the time at which the footprint changes. At equal times, events that free memory come first,
           then input accesses, swap-ins, TGAs: intervals are half-open, and an operator has read before it writes.
    4      "after its end time": at its end time or later.
    5-7    an updated parameter takes over the memory of the old one, which leaves `in_gpu_tensors`; the footprint is unchanged.
    8-10   the paper releases on input accesses only; a tensor that is recomputed before its first use is released after its TGA.
    14-16  the trigger of an event is a result of its times: `AccessSequence.last_ended`.
    23     after the last event of a time. The footprint at the beginning is the first peak, at time 0, with no access before it.

The swap-in counts at its end, as the paper says; a runtime that allocates when the copy begins needs its memory earlier.
`plan/policies/tensile/footprint.py` gives the same peak without the sweep, when events come one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import PLACEHOLDER, Access, AccessSequence
from tensile_jax.plan.policies.tensile.footprint import Peak, Recomputation
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut


@dataclass(frozen=True, slots=True)
class SwapEvent:
    """A copy of `tensor` over the link during `[begin, end)`."""

    kind: Literal["swap_out", "swap_in"]
    tensor: TensorId
    begin_us: float
    end_us: float


def events_of(away: SwappedOut) -> tuple[SwapEvent, ...]:
    """The swap events of an absence."""
    out = SwapEvent("swap_out", away.tensor, away.out_begin_us, away.out_end_us)
    into = SwapEvent("swap_in", away.tensor, away.in_begin_us, away.in_end_us)
    return (*([out] if away.copies_out else []), *([into] if away.in_begin_us < away.in_end_us else []))


class _TimedEvent(NamedTuple):
    """A point of `time_axis`; `rank` orders those of one time."""

    time: float
    rank: Literal[0, 1, 2, 3]
    type: Literal["output_access", "input_access", "swap_out", "swap_in", "recompute"]
    tensor: TensorId
    access: Access | None


def find_peak(sequence: AccessSequence, swaps: Sequence[SwapEvent] = (), recomputed: Sequence[Recomputation] = ()) -> Peak:
    """Algorithm 1, by one sweep over the time axis.

    Args:
        swaps: SE, the swap events of the iteration. An updated parameter that is swapped out last and not in again is on the host
            when the next iteration begins, and so is the old one when this iteration does.
    """
    releasing = find_releases(sequence, swaps, recomputed)
    nbytes, updates = sequence.nbytes, sequence.updates
    present = sequence.initial - starting_on_host(sequence, swaps)
    memory_used = sum(nbytes[t] for t in present)  # line 1
    log: list[tuple[TensorId, bool]] = []  # how in_gpu_tensors changes; replayed at the end, so that no copy is needed
    unused = sorted(t for t in present if (t, PLACEHOLDER) in releasing)
    to_be_released = [Access(t, PLACEHOLDER, "generating", 0.0, min(sequence.ends_us, default=0.0), nbytes[t]) for t in unused]
    released = 0  # of them, which stand in order of their ends
    last_input_access: Access | None = None
    memory_peak, log_length, last_use, peak_time = memory_used, 0, last_input_access, 0.0
    axis = _time_axis(sequence, swaps, recomputed)
    for event, then in zip(axis, [*(event.time for event in axis[1:]), float("inf")], strict=False):  # line 2
        time, size = event.time, nbytes[event.tensor]  # line 3
        while released < len(to_be_released) and to_be_released[released].end_us <= time:  # line 4
            memory_used -= to_be_released[released].nbytes
            log.append((to_be_released[released].tensor, False))
            released += 1
        if event.type == "output_access" and event.tensor not in sequence.initial:  # line 5
            if event.tensor in updates:
                log.append((updates[event.tensor], False))
            else:
                memory_used += size  # line 6
            log.append((event.tensor, True))  # line 7
        elif event.type == "input_access" and (event.tensor, _operator(event)) not in releasing:  # lines 8, 11
            last_input_access = event.access  # line 12
        elif event.type in ("swap_in", "recompute"):  # lines 13, 17
            memory_used += size  # line 18
            log.append((event.tensor, True))  # line 19
        elif event.type == "swap_out":  # line 20
            memory_used -= size  # line 21
            log.append((event.tensor, False))  # line 22
        if event.access is not None and (event.tensor, _operator(event)) in releasing:  # line 9
            to_be_released.append(event.access)  # line 10
        if memory_used > memory_peak and time < then:  # line 23
            memory_peak, log_length, last_use, peak_time = memory_used, len(log), last_input_access, time  # lines 24-27
    in_gpu_tensors = set(present)
    for tensor, there in log[:log_length]:
        in_gpu_tensors.add(tensor) if there else in_gpu_tensors.discard(tensor)
    return Peak(memory_peak, frozenset(in_gpu_tensors), last_use, peak_time)  # line 28


def find_releases(
    sequence: AccessSequence, swaps: Sequence[SwapEvent], recomputed: Sequence[Recomputation]
) -> frozenset[tuple[TensorId, int]]:
    """(tensor, operator) of the accesses after which the tensor is released: `event.release` of Algorithm 1, line 9."""
    kept = sequence.results | set(sequence.updates.values())
    found = {(t, accesses[-1].operator) for t, accesses in sequence.accesses.items() if t not in kept}
    found |= {(r.tensor, r.after) for r in recomputed}
    outs: dict[TensorId, list[float]] = {}
    for event in swaps:
        if event.kind == "swap_out":
            outs.setdefault(event.tensor, []).append(event.begin_us)
    for event in swaps:
        if event.kind == "swap_in":
            before = [a for a in sequence.accesses[event.tensor] if a.end_us <= event.begin_us]
            leaves = any(before[-1].begin_us <= begin < event.end_us for begin in outs.get(event.tensor, ()))
            if not leaves and before[-1].operator != PLACEHOLDER:
                found.add((event.tensor, before[-1].operator))
    return frozenset(found)


def starting_on_host(sequence: AccessSequence, swaps: Sequence[SwapEvent]) -> frozenset[TensorId]:
    """The old parameters that are not there at the beginning, since the updated ones stay out at the end of an iteration."""
    last: dict[TensorId, SwapEvent] = {}
    for event in swaps:
        if event.tensor in sequence.updates and (event.tensor not in last or last[event.tensor].begin_us < event.begin_us):
            last[event.tensor] = event
    return frozenset(sequence.updates[t] for t, event in last.items() if event.kind == "swap_out")


def _operator(event: _TimedEvent) -> int:
    return PLACEHOLDER if event.access is None else event.access.operator


def _time_axis(sequence: AccessSequence, swaps: Sequence[SwapEvent], recomputed: Sequence[Recomputation]) -> list[_TimedEvent]:
    axis: list[_TimedEvent] = []
    for t, accesses in sequence.accesses.items():
        for access in accesses:
            if access.kind == "using":
                axis.append(_TimedEvent(access.begin_us, 1, "input_access", t, access))
            elif access.operator != PLACEHOLDER:
                axis.append(_TimedEvent(access.begin_us, 3, "output_access", t, access))
    for event in swaps:
        if event.kind == "swap_in":
            axis.append(_TimedEvent(event.end_us, 2, "swap_in", event.tensor, None))
        else:
            last = [a.end_us for a in sequence.accesses[event.tensor] if a.begin_us <= event.begin_us]
            axis.append(_TimedEvent(max(event.end_us, *last), 0, "swap_out", event.tensor, None))
    for again in recomputed:
        axis.append(_TimedEvent(sequence.begins_us[again.before], 2, "recompute", again.tensor, None))
    return sorted(axis, key=lambda event: (event.time, event.rank, event.tensor))
