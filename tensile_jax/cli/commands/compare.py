"""`tensile compare`: plans a step with every policy under many budgets, and writes tables, a JSON file and a picture.

A policy is a method of planning. `auto` is this project's own; the others are known methods to compare it with.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import format_us, readable_console, table_of
from tensile_jax.cli.options import Limits, ModelChoice, OwnStep, device_profile_option, html_option, takes_step, writable_file
from tensile_jax.cli.progress import Phases
from tensile_jax.plan_format import save_json
from tensile_jax.progress.stderr import stderr_console
from tensile_jax.units import format_bytes

if TYPE_CHECKING:  # at run time this would import NumPy
    from tensile_jax.plan.comparison import AtBudget, Comparison, Entry


@click.command(short_help="Plan a step with every policy.")
@takes_step
@device_profile_option
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), callback=writable_file, help="Write JSON.")
@click.option(
    "--picture",
    metavar="NAME",
    type=click.Path(path_type=Path),
    callback=writable_file,
    help="Draw the curve: NAME.png and NAME.svg.",
)
@html_option
def compare(
    source: ModelChoice | OwnStep,
    device_profile: str | None,
    output: Path | None,
    picture: Path | None,
    html: Path | None,
) -> None:
    """Plan a step with every policy, under many budgets, without running it.

    MODEL is one of the models of tensile run. MODULE:FUNCTION is a function of yours that returns (step, args), with arrays or
    jax.ShapeDtypeStructs as args, or what an entrypoint of a job returns.

    MSR, EOR and CBR are the paper's: memory saved, time, and their ratio, against policy "none". Every policy may keep state in
    host memory between two iterations (--state-memory any), as the paper's own policy does. All figures are predicted from the
    device profile.
    """
    if picture is not None and find_spec("matplotlib") is None:
        raise Refusal("--picture needs matplotlib: pip install 'tensile_jax[plot]'")
    from tensile_jax.cli.run.step_source import calls_of_step, find_step  # imports JAX
    from tensile_jax.exec.fitting.forms import compare_forms

    limits = Limits(None, "auto", device_profile, "any")
    with Phases(stderr_console()) as phases:
        phases.begin("tracing")
        found = find_step(source)
        made = compare_forms(calls_of_step(found, limits, phases).step(found.args, {}))
    if output is not None:
        save_json(made, output)
    if html is not None:
        made.save_html(html)
    drawn: tuple[Path, ...] = ()
    if picture is not None:
        from tensile_jax.cli.pictures.tradeoff import draw  # imports matplotlib

        drawn = draw(made, picture, title=source.title)
    console = readable_console(110)
    console.print(_least_table(made, title=source.title))
    console.print(_budgets_table(made))
    if output is not None:
        click.echo(f"Written to {output}")
    if html is not None:
        click.echo(f"Written to {html}")
    for file in drawn:
        click.echo(f"Drawn: {file}")


def _least_table(made: "Comparison", *, title: str) -> Table:
    """The plan with the lowest peak of every policy, beside the plan of `auto` at the same peak."""
    columns = (">peak", ">MSR", ">EOR", ">CBR", ">swapped", ">again", ">waits", ">auto's EOR there")
    predicted = f"{made.device_profile}, state memory {made.state_memory}, predicted"
    heading = f"{title} ({predicted}): the least memory that each policy can work with"
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
    return table


def _cells(entry: "Entry") -> tuple[str, ...]:
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


def _budgets_table(made: "Comparison") -> Table:
    """EOR and peak of every policy under every budget."""
    shares = (f">{b.share:.0%}" for b in made.budgets)
    table = table_of("EOR (and peak) under a budget, both as parts of none's", "policy", *shares)
    for policy in (made.whole.policy, *sorted(entry.policy for entry, _ in made.least)):
        entries = [b.of(policy) for b in made.budgets]
        cells = ("" if e is None else f"{e.eor:.3f} ({1 - e.msr:.2f})" for e in entries)
        table.add_row(policy, *cells, style="bold" if policy == "auto" else "")
    table.add_row("capuchin's first iteration", *(f"{b.passive_eor:.3f}" for b in made.budgets), style="dim")
    table.add_row("bound", *("" if b.bound_eor is None else f"{b.bound_eor:.3f}" for b in made.budgets), style="dim")
    table.add_row("auto above the bound", *map(_above_bound, made.budgets), style="dim")
    table.caption = (
        "empty: the policy cannot keep the budget; bound: no plan without chunks is faster; "
        "capuchin measures in its first iteration, the others need none"
    )
    return table


def _above_bound(budget: "AtBudget") -> str:
    auto = budget.of("auto")
    return "" if auto is None or budget.bound_eor is None else f"{auto.eor / budget.bound_eor - 1:.1%}"
