"""An iteration on paper: three lanes, first come first served. PROFILE: a launch takes 1 us, a copy of 100 bytes 10 us."""

import dataclasses

from tensile_jax.ir import TensorId
from tensile_jax.plan.result.instructions import decode
from tensile_jax.plan.result.simulate import Simulation, simulate
from tensile_jax.plan_format import Event, EventKind, Plan, PlannedTensor, Segment
from tests.builders import PROFILE, graph_of, header_for

X, Y, Z = map(TensorId, range(3))


def segment(
    index: int,
    latency_us: float,
    *,
    inputs: tuple[TensorId, ...] = (),
    outputs: tuple[TensorId, ...] = (),
    frees: tuple[TensorId, ...] = (),
) -> Segment:
    return Segment(
        name=f"segment_{index:03d}", operators=((index, index + 1),), recomputes=(), inputs=inputs, outputs=outputs, donated=(),
        frees=frees, resident_bytes=0, workspace_bytes=0, device_bytes=0, begin_us=0.0,
        latency_us=latency_us, recomputed_us=0.0, stall_us=0.0,
    )  # fmt: skip


def copy(kind: EventKind, tensor: TensorId, trigger: int, until: int) -> Event:
    return Event(kind, tensor, f"t{tensor}", 100, trigger, until, 0.0, 0.0, 0.0, "")


GRAPH = graph_of(["y = heavy(x)", "z = heavy(x, y)"], inputs="x", outputs="z")


def plan_of(segments: list[Segment], events: tuple[Event, ...] = ()) -> Plan:
    empty = header_for(GRAPH)
    tensors = tuple(PlannedTensor(t, f"t{t}", "activation", 100, (100,), "uint8") for t in (X, Y, Z))
    return dataclasses.replace(empty, segments=tuple(segments), events=events, tensors=tensors, launch_us=PROFILE.launch_us)


def swapping() -> Plan:
    """y, made by segment 0, is on the host while segments 1 and 2 run; 3 reads it. x is always there."""
    return plan_of(
        [
            segment(0, 9.0, inputs=(X,), outputs=(Y,)),
            segment(1, 19.0, inputs=(X,)),
            segment(2, 4.0, inputs=(X,)),
            segment(3, 9.0, inputs=(X, Y), outputs=(Z,), frees=(Y, Z)),
        ],
        (copy("swap_out", Y, 0, 2), copy("swap_in", Y, 1, 3)),
    )


def simulated(plan: Plan) -> Simulation:
    return simulate(plan, decode(plan, GRAPH), PROFILE)


def test_copies_run_beside_segments_and_a_segment_waits_for_the_copy_that_it_needs() -> None:
    seen = simulated(swapping())
    assert seen.copies == {0: (10.0, 20.0), 1: (30.0, 40.0)}
    assert seen.segments == ((0.0, 10.0), (10.0, 30.0), (30.0, 35.0), (40.0, 50.0))
    assert seen.stall_us == 5.0
    assert seen.step_us == 50.0


def test_an_iteration_ends_when_its_last_copy_has_ended() -> None:
    seen = simulated(plan_of([segment(0, 4.0, inputs=(X,), outputs=(Y,))], (copy("swap_out", Y, 0, 1),)))
    assert (seen.step_us, seen.stall_us) == (15.0, 10.0)
    seen = simulated(plan_of([segment(0, 4.0, inputs=(X,), outputs=(Y,))], (copy("swap_in", X, 0, 1),)))
    assert (seen.step_us, seen.stall_us) == (15.0, 10.0)  # no instruction waits for that copy


def test_each_direction_carries_one_copy_at_a_time() -> None:
    seen = simulated(
        plan_of(
            [segment(0, 4.0, inputs=(X,), outputs=(Y, Z)), segment(1, 1.0)],
            (copy("swap_out", Y, 0, 2), copy("swap_out", Z, 0, 2), copy("swap_in", X, -1, 1)),
        )
    )
    assert seen.copies == {0: (5.0, 15.0), 1: (15.0, 25.0), 2: (0.0, 10.0)}
    assert seen.segments == ((0.0, 5.0), (10.0, 12.0))
    assert (seen.step_us, seen.stall_us) == (25.0, 5.0 + 13.0)


def test_a_copy_takes_a_share_of_its_time_from_the_next_launch() -> None:
    plan = swapping()
    seen = simulate(plan, decode(plan, GRAPH), dataclasses.replace(PROFILE, copy_share=0.5))
    assert seen.segments == ((0.0, 10.0), (10.0, 35.0), (35.0, 45.0), (45.0, 55.0))
    assert seen.copies == {0: (10.0, 20.0), 1: (35.0, 45.0)}
