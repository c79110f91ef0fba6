"""How long planning takes, and how exact predictions are, measured on a CPU."""

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_pages.section import CPU, MODELS, Section, day, percent, read


def time_to_plan() -> Section:
    found = read("scale.json")
    of = {(case["equations"], case["profile"], case["budget_share"]): case for case in found["cases"]}
    sizes = sorted({size for size, _, _ in of})
    columns = [(profile, share) for profile in ("cpu", "h200") for share in (0.75, 0.5)]
    rows = [
        (
            f"{size:,}",
            *(f"{of[size, profile, share]['plan_s']:.1f} s" for profile, share in columns),
            f"{max(of[size, profile, share]['planner_bytes'] for profile, share in columns) / 1e6:.0f} MB",
        )
        for size in sizes
    ]
    slowest = max(case["plan_s"] for case in found["cases"])
    return Section(
        title="Time to plan",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="scale.json",
        headline=f"{sizes[-1]:,} equations in at most {slowest:.0f} s",
        reading="Synthetic training steps, in one process, beside other work. *Memory* is the planner's own. "
        "[Simulated plans](predicted.md#time-to-plan-for-an-h200) have the time for real models.",
        table=table(("equations", *(f"`{profile}`, {percent(share)}" for profile, share in columns), "memory"), rows),
        conclusions=(
            "Steps of more than 2,000 large tensors are planned in bundles of tensors that are made and needed together.",
        ),
    )


def latencies() -> Section:
    found = read("predictor.json")
    methods = ("latency_model", "roofline", "shipped_roofline")
    rows = [
        (
            f"{MODELS[model['model']]}, batch {model['batch_size']}",
            f"{model['operators']}",
            *(f"{percent(model[name]['median'])}, {100 * model[name]['sum']:+.0f} %" for name in methods),
        )
        for model in found["models"]
    ]
    medians = [model["latency_model"]["median"] for model in found["models"]]
    dense = found["kinds"]["dot_general"]["latency_model"]
    return Section(
        title="Predicted latencies",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="predictor.json",
        headline=f"median error {percent(min(medians))} to {percent(max(medians))}",
        reading=f"A calibration of {found['calibration_s']:.0f} s measures {found['operators_measured']} operators of random "
        "layers and fits a small network to each primitive. Then every heavy operator of these steps is measured alone. "
        "Cells: the median of the relative errors, and the error of the sum.",
        table=table(("step", "heavy operators", "predicted", "roofline, calibrated", "roofline, profile `cpu`"), rows),
        conclusions=(
            f"Products are within {percent(dense['median'])} in the median, but their sum is {100 * dense['sum']:+.0f} %: the "
            "first dense layer of VGG-16 is unlike what was measured.",
            f"Predicting a whole step takes at most {max(model['predict_ms'] for model in found['models']):.0f} ms.",
        ),
    )


def reports() -> Section:
    found = read("memory.json")
    kinds = [list(found[kind].values()) for kind in ("workloads", "programs")]
    cases = [case for some in kinds for case in some]
    same = sum(case["jit_peak_bytes"] == case["compiled_peak_bytes"] for case in cases)
    resnet = found["resnet50"]

    def row(name: str, figure: Callable[[list[Any]], str]) -> tuple[str, ...]:
        return name, *(figure(some) for some in kinds)

    rows = [
        row(
            "peak of `compile=True` is that of `jax.jit`'s executable",
            lambda some: f"{sum(case['jit_peak_bytes'] == case['compiled_peak_bytes'] for case in some)} of {len(some)}",
        ),
        row(
            "what lives at the peak adds up to the predicted peak",
            lambda some: f"{sum(case['adds_up'] for case in some)} of {len(some)}",
        ),
        row(
            "predicted peak over XLA's: median, least, most",
            lambda some: ", ".join(f"{figure([_error(case) for case in some]):.2f}" for figure in (median, min, max)),
        ),
        row(
            "packing, of the predicted peak: median, least, most",
            lambda some: ", ".join(
                f"{100 * figure([case['packing_share'] for case in some]):.1f} %" for figure in (median, min, max)
            ),
        ),
    ]
    return Section(
        title="Reports on memory",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="memory.json",
        headline=f"`compile=True` is exact for {same} of {len(cases)}; the prediction is "
        f"{median(_error(case) for case in cases):.2f} of it in the median",
        reading="`tensile.memory` on the [training steps of many kinds](#training-steps-of-many-kinds), and on "
        "[programs](#reports-on-programs) in the forms of other libraries.",
        table=table(("", f"{len(kinds[0])} training steps", f"{len(kinds[1])} programs"), rows),
        conclusions=(
            "A report without `compile=True` is a guide to what holds memory. For the exact peak, compile.",
            f"A report on ResNet-50, {resnet['operators']:,} operators, takes {resnet['report_s'] / resnet['trace_s']:.2f} times "
            f"as long as its trace. Its page has {resnet['page_bytes'] / 1e6:.1f} MB.",
        ),
    )


def reports_on_programs() -> Section:
    found = read("memory.json")
    rows = [
        (
            name.replace("_", " "),
            f"{case['compiled_peak_bytes'] / 2**20:.1f} MiB",
            f"{case['predicted_peak_bytes'] / 2**20:.1f} MiB",
            f"{100 * case['packing_share']:.1f} %",
        )
        for name, case in found["programs"].items()
    ]
    errors = [_error(case) for case in found["programs"].values()]
    packing = [abs(case["packing_share"]) for case in found["programs"].values()]
    return Section(
        title="Reports on programs",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="memory.json",
        headline=f"predicted: {min(errors):.2f} to {max(errors):.2f} of XLA's peak",
        reading="Each program has the form of the library or repository after which it is called: "
        "[`programs.py`](../benchmarks/workloads/programs.py) names it. *Packing* is a share of the predicted peak.",
        table=table(("program", "XLA's peak", "predicted", "packing"), rows),
        conclusions=(f"What lives at the peak is known but for at most {100 * max(packing):.0f} %, which are packing.",),
    )


def _error(case: dict[str, Any]) -> float:
    """The predicted peak over XLA's."""
    return case["predicted_peak_bytes"] / case["compiled_peak_bytes"]


SECTIONS = (time_to_plan, latencies, reports, reports_on_programs)
