"""Predicts when the segments and copies of a plan happen, by simulating one iteration of the plan.

A *segment* is a stretch of operators that is compiled as one executable. The simulation goes through the plan's instructions
(`instructions.py`) in the order in which the executor carries them out, with a clock. One lane computes. Each memory where
tensors wait, such as the host's, has a lane for copies to it and one for copies from it. Each lane serves one request at a time,
in order.

    StartSwapOut, StartSwapIn     Each copy begins as soon as it is issued and its lane is free, and takes nbytes / rate. A copy
                                  slows the computation down: the next launch takes longer by `copy_share` times the time of the
                                  copy. (`copy_share` belongs to the device profile. It is 0 if copies cost the computation
                                  nothing, and 1 if the cores that compute also do the copying.)
    FinishSwapOut, FinishSwapIn   The clock moves on to the end of these copies.
    Launch                        It takes launch_us, what starting an executable costs, and latency_us, the time of the
                                  segment's computation. The clock moves on to its end.

The iteration ends when its last segment and all its copies have ended. The *stall* is the total time in which no segment runs:
before the first launch, between launches, and after the last one.

TENSILE simulates its tensor access sequence in the same way (section IV-B, "a discrete simulation process").

Times in microseconds since the iteration began, sizes in bytes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.result.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Instruction,
    Launch,
    StartSwapIn,
    StartSwapOut,
)
from tensile_jax.plan_format import Memory, Plan

Span = tuple[float, float]
"""When a segment or a copy begins and ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The spans of segments in their order, and those of copies by their places in `plan.events`.

    `step_us` is the time of the iteration, and `stall_us` the part of it in which no segment runs.
    """

    segments: tuple[Span, ...]
    copies: Mapping[int, Span]
    step_us: float
    stall_us: float


def simulate(plan: Plan, code: Sequence[Instruction], profile: DeviceProfile) -> Simulation:
    """Simulates one iteration of `plan`; `code` are the plan's instructions."""
    size = {t.id: t.nbytes for t in plan.tensors}
    segments: list[Span] = []
    copies: dict[int, Span] = {}
    copied: dict[TensorId, float] = {}  # when the latest copy of each tensor ends
    now = launched = stalled = 0.0  # `launched` is when the latest launch has ended
    out, into = defaultdict[Memory, float](float), defaultdict[Memory, float](float)  # when the lanes of copies are free
    delay_us = 0.0  # that copies take from the next launch
    for instruction in code:
        match instruction:
            case StartSwapOut(tensors, events, memory):
                for t, event in zip(tensors, events, strict=True):
                    begin = max(out[memory], now)
                    end = out[memory] = copied[t] = begin + copy_out_us(size[t], profile, memory)
                    delay_us += profile.copy_share * (end - begin)
                    copies[event] = begin, end
            case StartSwapIn(tensors, events, memory=memory):
                for t, event in zip(tensors, events, strict=True):
                    begin = max(into[memory], now)
                    end = into[memory] = copied[t] = begin + copy_in_us(size[t], profile, memory)
                    delay_us += profile.copy_share * (end - begin)
                    copies[event] = begin, end
            case FinishSwapOut(tensors) | FinishSwapIn(tensors):
                now = max(now, *(copied[t] for t in tensors))
            case Launch(index):
                begin, stalled = now, stalled + (now - launched)
                now = launched = begin + plan.launch_us + plan.segments[index].latency_us + delay_us
                delay_us = 0.0
                segments.append((begin, now))
            case Free():
                pass
    end = max([now, *out.values(), *into.values()])
    return Simulation(tuple(segments), copies, step_us=end, stall_us=stalled + end - launched)
