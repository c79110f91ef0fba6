"""Counts how many bytes of tensors are on the device while each segment of a plan runs, and how many in host memory at each
boundary: the `resident_bytes` and the `host_peak_bytes` that a plan states.

The bytes are counted from the finished segments and events, so the count is right whatever the policy expected. Before segment i,
the device holds

    held(0)     = inputs and constants of the step, except those whose first copy is a swap-in
    held(i + 1) = resident(i) - bytes that segment i frees
    resident(i) = held(i) - bytes of swap-outs that must end before i + bytes of swap-ins issued before i
                  + outputs of i - what is donated to i

and the same without outputs is what the device holds when the iteration ends, after the last segment. When it begins, the device
holds held(0).

The memory of donated inputs becomes the memory of outputs, so the two are counted once.

A tensor is in host memory from the boundary at which its first copy to the host is issued to the one at which its last copy back
has ended, both included. State that an iteration leaves there stays to the end, and is there from the beginning of the next one:

    host(j) = sum of the sizes of the tensors that are in host memory at boundary j,  host_peak = max over j of host(j)

`check.py` replays the plan with sets of tensors, shares no code with this file, and must agree with it.

Sizes in bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan_format import Event, Segment


def resident_bytes(graph: Graph, segments: Sequence[Segment], events: Sequence[Event]) -> list[int]:
    """For each segment, the bytes on the device while it runs, without its workspace.

    Before these come the bytes when the iteration begins, and after them those when it ends. Sizes that segments state are not
    read.
    """
    size = [t.nbytes for t in graph.tensors]
    change = [0] * (len(segments) + 1)  # by the segment before which it happens
    copied: set[int] = set()
    held = sum(t.nbytes for t in graph.tensors if t.producer is None)
    for event in events:
        if event.kind == "swap_out":
            change[event.until] -= size[event.tensor]
        elif event.kind == "swap_in":
            change[event.trigger + 1] += size[event.tensor]
            if event.tensor not in copied:
                held -= size[event.tensor]
        if event.kind in ("swap_out", "swap_in"):
            copied.add(event.tensor)
    found = [held]
    for segment, changed in zip(segments, change, strict=False):
        held += changed + sum(size[t] for t in segment.outputs) - sum(size[t] for t in segment.donated)
        found.append(held)
        held -= sum(size[t] for t in segment.frees)
    return [*found, held + change[-1]]


def host_bytes(graph: Graph, segments: Sequence[Segment], events: Sequence[Event]) -> list[int]:
    """For each boundary, from the one before the first segment to the end of the iteration, the bytes in host memory."""
    last = len(segments)
    copies = sorted((e for e in events if e.kind in ("swap_out", "swap_in")), key=lambda e: (e.trigger, e.kind == "swap_in"))
    begin: dict[TensorId, int] = {}
    returned: dict[TensorId, Event] = {}  # the last copy back
    for event in copies:
        begin.setdefault(event.tensor, event.trigger + 1 if event.kind == "swap_out" else 0)
        if event.kind == "swap_in":
            returned[event.tensor] = event
    freed = {t: index for index, segment in enumerate(segments) for t in segment.frees}
    results = set(graph.outputs)
    change = [0] * (last + 2)
    for t, first in begin.items():
        back = returned.get(t)
        rests = back is None or (t in results and freed.get(t, -1) > back.trigger)
        change[first] += graph.tensors[t].nbytes
        change[last + 1 if rests or back is None else back.until + 1] -= graph.tensors[t].nbytes
    return list(accumulate(change[:-1]))


def with_ends(segments: Iterable[Segment], at_begin: int, at_end: int) -> list[Segment]:
    """The segments; the first states at least the bytes when the iteration begins, the last at least those when it ends."""
    found = list(segments)
    found[0] = replace(found[0], device_bytes=max(found[0].device_bytes, at_begin))
    found[-1] = replace(found[-1], device_bytes=max(found[-1].device_bytes, at_end))
    return found
