"""Makes the page of a `Comparison`: a chart of a step's time against the memory saved by every policy, and a table of plans.

A policy is a method of planning. The measures are those of the TENSILE paper (`plan/comparison.py`): MSR is the share of the
peak that is saved, EOR is the time of a step divided by its time without any schedule, and CBR = MSR / EOR.
"""

from collections.abc import Iterator
from os import PathLike

from tensile_jax.pages.page import Cell, Column, Page, Plot, Table, refuse_without_plotly, write_page
from tensile_jax.pages.policy_looks import BOUND, LOOKS, PLAIN_JIT
from tensile_jax.pages.traces import GRAY, Trace, line
from tensile_jax.plan.comparison import Comparison, Entry
from tensile_jax.units import format_bytes

_COLUMNS = (
    Column("policy"), Column("budget", number=True), Column("peak", number=True), Column("MSR", number=True),
    Column("EOR", number=True), Column("CBR", number=True), Column("copied in a step", number=True),
    Column("computes again [ms]", number=True), Column("waits [ms]", number=True), Column("segments", number=True),
)  # fmt: skip


def save_comparison(made: Comparison, path: str | PathLike[str]) -> None:
    """Write the page of a comparison to a file.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    refuse_without_plotly()
    write_page(page_of(made), path)


def page_of(made: Comparison) -> Page:
    """The page of a comparison."""
    entries = tuple(_entries(made))
    traces = tuple(_traces(made, entries))
    most = max((entry.msr for _, entry in entries), default=1.0)
    lowest = made.curve[-1]
    return Page(
        title=f"Policies on {made.program}",
        subtitle=(
            f"Predicted for {made.device_profile}. MSR is the share of memory that is saved and EOR the time of a step, both "
            "against policy none; CBR is their ratio. To the right is less memory, upwards is more time."
        ),
        figures=(
            ("without a schedule", format_bytes(made.vanilla.peak_bytes)),
            ("plain jit", f"{format_bytes(made.whole.peak_bytes)}, {made.whole.eor:.3f} of the time"),
            ("least memory, auto", f"{format_bytes(lowest.peak_bytes)}, {lowest.eor:.2f} times the time"),
        ),
        description=(
            f"The time of a step over the memory that is saved, for {len({name for name, _ in entries})} policies. Policy auto "
            f"saves {lowest.msr:.0%} at {lowest.eor:.2f} times the time. The table has every plan."
        ),
        plots=(Plot("EOR: time of a step, policy none = 1", 460, logarithmic=True),),
        traces=traces,
        x_title="MSR: memory saved, part of the peak of policy none",
        x_range=(min(-0.02, made.whole.msr - 0.02), most + 0.04),
        table=Table("Plans", _COLUMNS, tuple(_row(name, entry) for name, entry in entries)),
    )


def _entries(made: Comparison) -> Iterator[tuple[str, Entry]]:
    """The name and the figures of each plan, each plan once."""
    seen: set[tuple[str, Entry]] = set()
    several = [(PLAIN_JIT, made.whole), ("none", made.vanilla)]
    several += [(entry.policy, entry) for entry, _ in made.least]
    several += [("auto", entry) for entry in made.curve]
    several += [(entry.policy, entry) for at in made.budgets for entry in at.entries]
    for one in several:
        if one not in seen:
            seen.add(one)
            yield one


def _traces(made: Comparison, entries: tuple[tuple[str, Entry], ...]) -> Iterator[Trace]:
    curve = sorted({(entry.msr, entry.eor) for entry in made.curve})
    hover = "MSR %{x:.3f}, EOR %{y:.3f}"
    x, y = [m for m, _ in curve], [e for _, e in curve]
    yield line("auto", x, y, LOOKS["auto"].colour, step=False, hover=hover, mode="lines+markers")
    bounds = sorted((1 - b.budget_bytes / made.vanilla.peak_bytes, b.bound_eor) for b in made.budgets if b.bound_eor is not None)
    yield line(BOUND, [m for m, _ in bounds], [e for _, e in bounds], GRAY, step=False, dash="dot", hover=hover)
    for name in dict.fromkeys(name for name, _ in entries if name != "auto"):
        some = [entry for other, entry in entries if other == name]
        look = LOOKS[name]
        texts = [f"{name}<br>{format_bytes(e.peak_bytes)}, MSR {e.msr:.3f}, EOR {e.eor:.3f}" for e in some]
        x, y = [e.msr for e in some], [e.eor for e in some]
        yield line(name, x, y, look.colour, step=False, mode="markers", texts=texts, symbol=look.symbol)


def _row(name: str, entry: Entry) -> tuple[Cell, ...]:
    budget = entry.budget_bytes
    return (
        name,
        (-1, "") if budget is None else (budget, format_bytes(budget) if budget else "the least"),
        (entry.peak_bytes, format_bytes(entry.peak_bytes)),
        *((value, f"{value:.3f}") for value in (entry.msr, entry.eor, entry.cbr)),
        (entry.swapped_bytes, format_bytes(entry.swapped_bytes)),
        *((us, f"{us / 1e3:.4g}") for us in (entry.recomputed_us, entry.stall_us)),
        (entry.segments, str(entry.segments)),
    )
