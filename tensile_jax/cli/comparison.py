"""The tables of `tensile compare`."""

from typing import get_args

from rich.table import Table

from tensile_jax.cli.tables import table_of
from tensile_jax.cli.units import format_us
from tensile_jax.plan.result.comparison import Comparison, Entry
from tensile_jax.plan_format import PolicyName, format_bytes


def least_table(made: Comparison, *, title: str) -> Table:
    """Every policy with as little memory as it can do with, and `auto` at the same peak."""
    columns = (">peak", ">MSR", ">EOR", ">CBR", ">swapped", ">again", ">waits", ">auto's EOR there")
    heading = f"{title}, {made.device_profile} (predicted): as little memory as each policy can do with"
    table = table_of(heading, "policy", *columns)
    table.add_row(*_cells(made.vanilla), "")
    for entry, beside in made.least:
        fits = beside.peak_bytes <= entry.peak_bytes
        table.add_row(*_cells(entry), f"{beside.eor:.3f}" + ("" if fits else f" at {format_bytes(beside.peak_bytes)}"))
    table.add_row(*_cells(made.curve[-1]), "", style="bold")
    table.caption = (
        f"MSR, EOR, CBR against none; plain jit is predicted to take {made.whole.eor:.3f} of its time at "
        f"{made.whole.peak_bytes / made.vanilla.peak_bytes:.3f} of its peak"
    )
    table.caption_justify = "left"
    return table


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        entry.policy,
        format_bytes(entry.peak_bytes),
        f"{entry.msr:.3f}",
        f"{entry.eor:.3f}",
        f"{entry.cbr:.3f}",
        format_bytes(entry.swapped_bytes),
        format_us(entry.recomputed_us),
        format_us(entry.stall_us),
    )


def budgets_table(made: Comparison) -> Table:
    """EOR of every policy under every budget, and the peak it then has."""
    shares = (f">{b.share:.0%}" for b in made.budgets)
    table = table_of("EOR (and peak) under a budget, both as parts of none's", "policy", *shares)
    for policy in get_args(PolicyName):
        if policy == "none":
            continue
        entries = [b.of(policy) for b in made.budgets]
        cells = ("" if e is None else f"{e.eor:.3f} ({1 - e.msr:.2f})" for e in entries)
        table.add_row(policy, *cells, style="bold" if policy == "auto" else "")
    table.add_row("capuchin's first iteration", *(f"{b.passive_eor:.3f}" for b in made.budgets), style="dim")
    table.add_row("bound", *("" if b.bound_eor is None else f"{b.bound_eor:.3f}" for b in made.budgets), style="dim")
    table.caption = (
        "empty: the policy cannot keep the budget; bound: no plan is faster; "
        "capuchin measures in its first iteration, the others need none"
    )
    table.caption_justify = "left"
    return table
