"""`tensile show`: what a saved plan swaps, recomputes and releases, when and why. Needs no JAX."""

from pathlib import Path

import click
from rich.console import Console

from tensile_jax.cli.curve import memory_curve
from tensile_jax.cli.life import life_lines, matching, segment_lines, segment_tables
from tensile_jax.cli.options import POSITIVE_COUNT
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.tables import (
    events_of,
    largest_table,
    readable_console,
    recomputed_table,
    releases_line,
    segments_table,
    swaps_table,
)
from tensile_jax.plan_format import Plan

_READABLE_WIDTH = 110  # for a pipe or a file, of which rich knows nothing and says 80


@click.command(short_help="Show what a saved plan does, when and why.")
@click.argument("plan_file", metavar="PLAN.JSON", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--segment", metavar="N", type=int, help="Only segment N, in detail.")
@click.option("--tensor", metavar="TEXT", help="Only the life of tensors whose name contains TEXT.")
@click.option("--top", metavar="N", type=POSITIVE_COUNT, default=12, show_default=True, help="Rows in a table.")
def show(plan_file: Path, segment: int | None, tensor: str | None, top: int) -> None:
    """Show what the saved plan PLAN.JSON does, when and why, and its memory curve."""
    if segment is not None and tensor is not None:
        raise Refusal("--segment and --tensor exclude each other. Leave one of them out.")
    plan = Plan.load(plan_file)
    console = readable_console(_READABLE_WIDTH, highlight=False, markup=False)
    if segment is not None:
        _show_segment(plan, segment, top, console)
    elif tensor is not None:
        _show_tensors(plan, tensor, top, console)
    else:
        _show_all(plan, top, console)


def _show_all(plan: Plan, top: int, console: Console) -> None:
    _say(console, str(plan).splitlines())
    console.print()
    _say(console, memory_curve(plan, console))
    console.print()
    console.print(segments_table(plan))
    if any(events_of(plan, "swap_out", "swap_in")):
        console.print(swaps_table(plan, top))
    if any(events_of(plan, "recompute")):
        console.print(recomputed_table(plan, top))
    console.print(largest_table(plan, top))
    _say(console, [releases_line(plan), "More: --segment N, --tensor TEXT."])


def _show_segment(plan: Plan, index: int, top: int, console: Console) -> None:
    if not 0 <= index < len(plan.segments):
        raise Refusal(f"--segment={index}: the plan has segments 0 to {len(plan.segments) - 1}. Name one of these.")
    _say(console, segment_lines(plan, index))
    for table in segment_tables(plan, index, top):
        console.print(table)


def _show_tensors(plan: Plan, text: str, top: int, console: Console) -> None:
    found = matching(plan, text)
    if not found:
        raise Refusal(f"--tensor={text}: no tensor's name contains it. The largest is {_largest_name(plan)}.")
    for tensor in found[:top]:
        _say(console, life_lines(plan, tensor))
    if len(found) > top:
        _say(console, [f"... {len(found) - top} more tensors match (--top N)"])


def _largest_name(plan: Plan) -> str:
    return max(plan.tensors, key=lambda t: t.nbytes).name if plan.tensors else "none: the step runs whole"


def _say(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
