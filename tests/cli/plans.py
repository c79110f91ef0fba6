"""A small plan for tests: two segments; the tensor `BIG` is on the host between them, and `AGAIN` is computed twice."""

from tensile_jax.ir import TensorId
from tensile_jax.plan_format import Event, EventKind, Plan, PlannedTensor, Segment

KIB = 1024
PARAMETER, BIG, AGAIN = TensorId(0), TensorId(1), TensorId(2)


def tensor(number: TensorId, name: str, nbytes: int, *, parameter: bool = False) -> PlannedTensor:
    role = "parameter" if parameter else "activation"
    return PlannedTensor(number, name, role, nbytes, (nbytes // 4,), "float32")


def segment(
    name: str,
    *,
    resident: int,
    workspace: int,
    begin_us: float,
    inputs: tuple[TensorId, ...],
    outputs: tuple[TensorId, ...],
    frees: tuple[TensorId, ...],
) -> Segment:
    return Segment(
        name=name,
        operators=((0, 2),),
        recomputes=(),
        inputs=inputs,
        outputs=outputs,
        donated=(),
        frees=frees,
        resident_bytes=resident,
        workspace_bytes=workspace,
        device_bytes=resident + workspace,
        begin_us=begin_us,
        latency_us=100.0,
        recomputed_us=0.0,
        stall_us=0.0,
    )


def event(kind: EventKind, one: TensorId, name: str, nbytes: int, *, trigger: int, until: int, at: float) -> Event:
    return Event(kind, one, name, nbytes, trigger, until, 0.0, at, at + 10.0, f"why {kind}")


PLAN = Plan(
    schema_version=1,
    tensile_version="0",
    program="step",
    fingerprint="f",
    policy="auto",
    device_profile="cpu",
    state_memory="device",
    whole=False,
    workspaces="predicted",
    budget_bytes=12 * KIB,
    peak_bytes=10 * KIB,
    peak_segment=1,
    jit_peak_bytes=20 * KIB,
    unplanned_peak_bytes=20 * KIB,
    floor_bytes=4 * KIB,
    floor_tensors=("state.w",),
    step_us=250.0,
    stall_us=0.0,
    recomputed_us=0.0,
    swapped_out_bytes=4 * KIB,
    swapped_in_bytes=4 * KIB,
    tensors=(
        tensor(PARAMETER, "state.w", 2 * KIB, parameter=True),
        tensor(BIG, "Net/Block_0:dot", 4 * KIB),
        tensor(AGAIN, "Net/Block_0/Norm:mul", KIB),
    ),
    segments=(
        segment("s0", resident=6 * KIB, workspace=0, begin_us=0.0, inputs=(PARAMETER,), outputs=(BIG,), frees=(BIG,)),
        segment("s1", resident=6 * KIB, workspace=4 * KIB, begin_us=150.0, inputs=(PARAMETER, BIG), outputs=(), frees=(BIG,)),
    ),
    events=(
        event("swap_out", BIG, "Net/Block_0:dot", 4 * KIB, trigger=0, until=1, at=100.0),
        event("swap_in", BIG, "Net/Block_0:dot", 4 * KIB, trigger=0, until=1, at=120.0),
        event("recompute", AGAIN, "Net/Block_0/Norm:mul", KIB, trigger=0, until=1, at=150.0),
        event("release", BIG, "Net/Block_0:dot", 4 * KIB, trigger=1, until=1, at=250.0),
    ),
)
