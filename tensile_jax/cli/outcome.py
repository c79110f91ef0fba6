"""What `tensile run` ends with, as one table or one JSON object. Bytes, microseconds and seconds, as the names say."""

from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from tensile_jax.cli.units import format_share, format_us
from tensile_jax.plan_format import format_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished or interrupted training.

    `peak_bytes`, `step_us`, `stall_us`, `recomputed_us` are measured; `predicted_...` are the plan's. `step_us` is the median
    without the first step. What was not measured, or is no number, is null.
    """

    model: str
    parameters: int
    batch_size: int
    image_size: int | None
    sequence_length: int | None
    device: str
    policy: str
    state_memory: str
    steps_asked: int
    steps_done: int
    interrupted: bool
    budget_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int
    jit_peak_bytes: int | None
    step_us: float | None
    predicted_step_us: float
    stall_us: float
    swapped_bytes: int
    passive_swap_ins: int
    recomputed_us: float
    out_of_memory: int
    segments: int
    distinct_segments: int
    trace_s: float
    plan_s: float
    compile_s: float
    loss_first: float | None
    loss_last: float | None
    test_accuracy: float | None


def outcome_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of what `tensile run --json` prints."""
    schema = msgspec.json.schema(Outcome)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensile run", **schema}


def outcome_table(outcome: Outcome) -> Table:
    """Two columns: what, and how much."""
    o = outcome
    done = f"{o.steps_done} of {o.steps_asked} (interrupted)" if o.interrupted else str(o.steps_done)
    jit = "" if o.jit_peak_bytes is None else f", {format_share(o.peak_bytes, o.jit_peak_bytes)} of plain jit's"
    rows = {
        "steps": done,
        "peak measured": f"{format_bytes(o.peak_bytes)}{jit}",
        "peak predicted": format_bytes(o.predicted_peak_bytes),
        "budget": "none" if o.budget_bytes is None else format_bytes(o.budget_bytes),
        "step time": "one step is too few to tell" if o.step_us is None else format_us(o.step_us),
        "waiting for copies": f"{format_us(o.stall_us)} a step",
        "swapped": f"{format_bytes(o.swapped_bytes)} a step, both ways",
        "recomputed": f"{format_us(o.recomputed_us)} a step",
        "segments": str(o.segments) if o.segments > 1 else "1: the step runs whole, as plain jit",
        "compiling": f"{o.compile_s:.1f} s",
        "loss": f"{_number(o.loss_first)} -> {_number(o.loss_last)}",
    }
    if o.out_of_memory:
        rows["out of memory"] = f"{o.out_of_memory} times, recovered"
    if o.test_accuracy is not None:
        rows["test accuracy"] = f"{o.test_accuracy:.2%}"
    table = Table("", f"{o.model} on {o.device}, batch {o.batch_size}", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
