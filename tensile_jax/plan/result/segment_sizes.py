"""Computes the sizes that a plan states, from its instructions and the workspaces of its segments.

The *workspace* of a segment is the memory that it needs beside its inputs and results. For each segment,

    device_bytes    = bytes of the tensors on the device (`memory_curve.py`) + workspace + allocator_bytes
    allocator_bytes = what the device's allocator has in use beyond the other two (`allocator_replay.py`); zero if the allocator
                      hands out exactly what it is asked for

The `device_bytes` of the first segment are at least what is in use when the iteration begins, because state may leave before the
segment runs. Those of the last segment are at least what is in use when the iteration ends, because copies may have brought
results back. For the plan, with s over its segments,

    plan.peak_bytes      = max of s.device_bytes
    plan.allocator_bytes = plan.peak_bytes - max of (s.device_bytes - s.allocator_bytes)

Sizes in bytes.
"""

from collections.abc import Sequence
from dataclasses import replace

from tensile_jax.ir import Graph
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.result.allocator_replay import InUse, in_use, whole_in_use
from tensile_jax.plan.result.instructions import Instruction
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan_format import Plan, Segment, unasked_bytes


def with_sizes(plan: Plan, code: Sequence[Instruction], graph: Graph, workspaces: Sequence[int], profile: DeviceProfile) -> Plan:
    """The plan, of which `code` are the instructions, with the sizes of its segments, which have these workspaces."""
    at_begin, *resident, at_end = resident_bytes(code, graph)
    exact = InUse(tuple(map(sum, zip(resident, workspaces, strict=True))), at_begin, at_end, 0, frozenset())
    found = exact if profile.allocator == "exact" else in_use(code, graph, workspaces, grows=profile.allocator == "growing")
    segments = [
        replace(
            segment,
            resident_bytes=held,
            workspace_bytes=workspace,
            allocator_bytes=used - held - workspace,
            device_bytes=used,
        )
        for segment, held, workspace, used in zip(plan.segments, resident, workspaces, found.segments, strict=True)
    ]
    segments[0] = _at_least(segments[0], found.at_begin)
    segments[-1] = _at_least(segments[-1], found.at_end)
    return with_peak(plan, segments, profile)


def with_peak(plan: Plan, segments: Sequence[Segment], profile: DeviceProfile) -> Plan:
    """The plan with these segments, whose sizes are known, and with the peak that follows from them."""
    peak = max(range(len(segments)), key=lambda i: (segments[i].device_bytes, -i))
    return replace(
        plan,
        segments=tuple(segments),
        peak_bytes=segments[peak].device_bytes,
        peak_segment=peak,
        allocator_bytes=None if profile.allocator == "exact" else unasked_bytes(segments),
    )


def whole_peak_bytes(nbytes: int, graph: Graph, profile: DeviceProfile) -> int:
    """The peak of the step as one executable, of which XLA says that it needs `nbytes`."""
    return nbytes if profile.allocator == "exact" else whole_in_use(graph, nbytes, grows=profile.allocator == "growing")


def _at_least(segment: Segment, nbytes: int) -> Segment:
    return replace(segment, device_bytes=max(segment.device_bytes, nbytes))
