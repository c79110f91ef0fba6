"""What the planner predicts for an H200, and how far its plans are from the best ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_pages.section import MODELS, SIMULATED, Section, day, percent, read

_SHARES = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
_FILE = "planning.json"


def _rows() -> Sequence[Mapping[str, Any]]:
    """All rows but VGG-16's, which are of plans without chunks of images, and with all gradients in memory."""
    return [row for row in read(_FILE)["rows"] if row["model"] != "vgg16"]


def plans() -> Section:
    found = read(_FILE)
    of = {(row["model"], row["state_memory"], row["share"]): row for row in _rows()}
    rows = []
    for model in dict.fromkeys(row["model"] for row in _rows()):
        batch = next(row["batch_size"] for row in _rows() if row["model"] == model)
        for state, key, label in (("device", "eor", "device"), ("any", "eor", "any"), ("any", "bound_eor", "*bound*")):
            cells = [of.get((model, state, share), {}).get(key) for share in _SHARES]
            name = f"{MODELS[model]}, batch {batch}" if label == "device" else ""
            rows.append((name, label, *(f"{one:.2f}" if one else "-" for one in cells)))
    half = sorted(row["eor"] for row in _rows() if row["share"] == 0.5 and row["state_memory"] == "any" and row.get("eor"))
    return Section(
        title="Plans for an H200",
        on=SIMULATED,
        when=max(found["made"].values())[:10],
        command=found["command"],
        file=_FILE,
        headline=f"50 %: {half[0]:.2f} to {half[-1]:.2f} of the time",
        reading="Time of a step over that of the step as one executable, under parts of its predicted peak. *State* is "
        "`state_memory`. No plan can be faster than the *bound*. VGG-16 is [above](#vgg-16-and-resnet-50-in-compiled-memory).",
        table=table(("step", "state", *map(percent, _SHARES)), rows),
        conclusions=("At 30 % and below, state in host memory (`any`) makes ResNet-50 and the Inceptions faster.",),
    )


def time_to_plan() -> Section:
    found = read(_FILE)
    of = {(row["model"], row["state_memory"], row["share"]): row for row in _rows() if row.get("eor")}
    rows = []
    for model in dict.fromkeys(row["model"] for row in _rows()):
        for state in ("device", "any"):
            cells = [of.get((model, state, share), {}).get("planning_s") for share in _SHARES]
            rows.append((MODELS[model] if state == "device" else "", state, *(f"{one:.0f} s" if one else "-" for one in cells)))
    slowest = max(of.values(), key=lambda row: row["planning_s"])
    upper = max(row["planning_s"] for (_, _, share), row in of.items() if share >= 0.4)
    resnet = of["resnet50", "device", 0.3]
    return Section(
        title="Time to plan for an H200",
        on="CPU, 2 cores",
        when=max(found["made"].values())[:10],
        command=found["command"],
        file=_FILE,
        headline=f"at most {upper:.0f} s for 40 % or more, at most {slowest['planning_s']:.0f} s for 25 %",
        reading="CPU seconds to plan the steps above, once they are traced, beside other work.",
        table=table(("step", "state", *map(percent, _SHARES)), rows),
        conclusions=(
            "Budgets are kept by what XLA's allocator hands out, which is more than a plan asks for "
            "([its model](how-it-works.md#what-the-allocator-hands-out)). Without that, ResNet-50 in 30 % takes 1.16 instead of "
            f"{resnet['eor']:.2f} of the time, and is planned in 4 instead of {resnet['planning_s']:.0f} s.",
        ),
    )


def distance() -> Section:
    found = read("gap.json")

    def row(name: str, key: str) -> tuple[str, ...]:
        gaps = found[key]
        return name, *(f"{100 * gaps[part]:.1f} %" for part in ("median", "mean", "95th_percentile", "worst"))

    return Section(
        title="Distance from the best plan",
        on="the planner's own model",
        when=day(found),
        command=found["command"],
        file="gap.json",
        headline=f"the fastest plan in the median, {100 * found['gap']['95th_percentile']:.0f} % slower at the 95th percentile",
        reading=f"{found['graphs']} small random training steps of at most {found['most_operators']} operators under five "
        f"budgets each, against an exact search of all plans. `auto` has a plan for {found['plans']} of "
        f"{found['plans'] + found['no_plan']} limits that some plan keeps.",
        table=table(
            ("above the best", "median", "mean", "95th percentile", "worst"),
            (row("time of the step", "gap"), row("least peak", "floor_gap")),
        ),
        conclusions=("The worst cases are steps of a few operators on slow links.",),
    )


def what_an_allocator_costs() -> Section:
    found = read("allocator.json")
    rows = [
        (
            f"{MODELS[plan['model']]}, batch {plan['batch_size']}",
            percent(plan["share"]),
            *(f"{plan['asked'][of]:.3f}" for of in ("peak", "time")),
            *(f"{plan['handed_out'][of]:.3f}" for of in ("peak", "allocator", "time")),
        )
        for plan in found["plans"]
    ]
    slower = [plan["handed_out"]["time"] / plan["asked"]["time"] - 1 for plan in found["plans"]]
    return Section(
        title="What a budget by the allocator's account costs",
        on=SIMULATED,
        when=day(found),
        command=found["command"],
        file="allocator.json",
        headline=f"{100 * min(slower):.0f} to {100 * max(slower):.0f} % of a step",
        reading="Peaks are by [the model of XLA's allocator](how-it-works.md#what-the-allocator-hands-out), over plain jit's "
        "predicted peak. Times are over plain jit's. First for plans that count what they ask for, then for plans that count "
        "what the allocator hands out, as they all do for a GPU; *unasked for* is a part of the peak.",
        table=table(("step", "budget", "peak", "time", "peak", "unasked for", "time"), rows),
        conclusions=("Planning takes about twice as long.",),
    )


SECTIONS = (plans, what_an_allocator_costs, time_to_plan, distance)
