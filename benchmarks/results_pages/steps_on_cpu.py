"""What steps under a budget take on a CPU."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_pages.section import CPU, MODELS, Section, budget, day, percent, read

Row = Mapping[str, Any]


def under_a_budget() -> Section:
    found = read("cpu.json")
    cases = [case for case in found["cases"] if case["policy"] in ("none", "auto") and case.get("time_ratio")]
    rows = [
        (
            f"{MODELS[case['model']]}, batch {case['batch_size']}" if case["budget"] == "none" else "",
            budget(case["budget"]) + (", state anywhere" if case["state_memory"] == "any" else ""),
            f"{case['peak_ratio']:.3f}",
            f"{case['time_ratio']:.2f}",
            # A warm compilation cache says nothing of compiling.
            f"{case['compile_ratio']:.2f}" if case["compile_ratio"] > 0.1 else "-",
            f"{case['trace_to_plan_s']:.1f} s",
            f"{case['segments']}",
        )
        for case in cases
    ]
    half = [case["time_ratio"] for case in cases if case["budget"] == "50%"]
    exact = all(case["predicted_over_measured"] == 1 for case in cases if case["budget"] != "none")
    slower = [case["predicted_over_measured_time"] for case in cases]
    return Section(
        title="One step under a budget",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="cpu.json",
        headline=f"under 50 %, a step takes {min(half):.2f} to {max(half):.2f} of plain jit's time",
        reading="Images of 224x224, texts of 256 tokens, Adam. Steps of both alternate. *None* is a plan without a budget. "
        '*State anywhere* is `state_memory="any"`. *Trace to plan* includes the search for the plan, in one thread.',
        table=table(("step", "budget", "peak", "time", "compile", "trace to plan", "segments"), rows),
        conclusions=(
            f"Every budget was kept{', and each predicted peak was the measured one to the byte' if exact else ''}.",
            "ResNet-50 and the decoders are often faster than under plain jit here. Do not count on it: this CPU touches "
            "fresh pages slowly.",
            f"The profile `cpu` predicts {min(slower):.1f} to {max(slower):.1f} times the measured time. "
            "`tensile calibrate` measures a machine.",
        ),
    )


def policies() -> Section:
    found = read("cpu.json")
    of = {
        (case["model"], case["budget"], case["policy"]): case
        for case in found["cases"]
        if "time_ratio" in case or "too_small" in case
    }
    names = ("auto", "tensile", "capuchin", "vdnn", "checkpoint")

    def cell(model: str, limit: str, policy: str) -> str:
        case = of.get((model, limit, policy))
        if case is None:
            return ""
        return "too small" if "too_small" in case else f"{case['time_ratio']:.2f} ({case['peak_ratio']:.2f})"

    steps = (("resnet50", "75%"), ("resnet50", "60%"), ("gpt", "60%"))
    rows = [(f"{MODELS[model]}, {budget(limit)}", *(cell(model, limit, name) for name in names)) for model, limit in steps]
    return Section(
        title="Policies on a CPU",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="cpu.json",
        headline=f"ResNet-50 in 75 %: `auto` {of['resnet50', '75%', 'auto']['time_ratio']:.2f}, "
        f"`tensile` {of['resnet50', '75%', 'tensile']['time_ratio']:.2f}",
        reading="Time of a step, and its peak in parentheses. An empty cell was not measured.",
        table=table(("step, budget", *(f"`{name}`" for name in names)), rows),
        conclusions=("No copy hides behind computation on a CPU, so policies are closer together than on a GPU.",),
    )


def many_kinds() -> Section:
    found = read("workloads-cpu.json")
    cases = found["cases"]
    kept = [case for case in cases if not case["refused"] and case["budget"] == "60%" and case["peak_ratio"] <= 0.6 + 1e-6]
    others = [case["workload"] for case in cases if case not in kept]
    rows = [
        (
            case["workload"].replace("_", " "),
            budget(case["budget"]) if case in kept else f"{percent(case['budget_ratio'])}, the least",
            f"{case['peak_ratio']:.3f}",
            f"{case['time_ratio']:.2f}",
            f"{1000 * case['jit_step_s']:.0f} ms",
            f"{case['first_call_s']:.1f} s",
            f"{case['jit_first_call_s']:.1f} s",
            f"{case['plan_s']:.1f} s",
            f"{case['segments']}",
        )
        for case in cases
    ]
    times = [case["time_ratio"] for case in kept]
    first = [_first_call(case) for case in cases]
    equal = sum(case["loss_difference"] == 0 for case in cases)
    head = ("step", "budget", "peak", "time", "plain jit", "first call", "plain jit's", "planning", "segments")
    return Section(
        title="Training steps of many kinds",
        on=CPU,
        when=day(found),
        command="python -m benchmarks.workloads --budget 60%",
        file="workloads-cpu.json",
        headline=f"{len(kept)} of {len(cases)} keep 60 %; a step takes {median(times):.2f} of plain jit's time in the median",
        reading="Small training steps as people write them: loss, gradient and optimizer. One case at a time. If a step "
        "cannot keep 60 %, the budget is the least one, which the error names.",
        table=table(head, rows),
        conclusions=(
            f"With 60 %, a step takes {min(times):.2f} to {max(times):.2f} of plain jit's time. A first call takes "
            f"{median(first):.1f} times plain jit's in the median and {max(first):.1f} times at most: each segment is compiled "
            "on its own.",
            f"Losses of the first four steps are equal to plain jit's to the bit for {equal} of the {len(cases)}. Others "
            f"differ by at most {max(case['loss_difference'] for case in cases):.0e}.",
            f"These cannot keep 60 %: {', '.join(name.replace('_', ' ') for name in others)}. Most of their memory is state, "
            "or is in one operator that stays whole.",
        ),
    )


def begun_sooner() -> Section:
    found, whole_search = read("workloads-cpu-improved.json"), read("workloads-cpu.json")
    at_once = {case["workload"]: case for case in whole_search["cases"]}
    pairs = [(case, at_once[case["workload"]]) for case in found["cases"] if not case["refused"] and case["tries"]]
    before = [_first_call(one) for _, one in pairs]
    after = [_first_call(case) for case, _ in pairs]
    improved = [case["improved_s"] for case, _ in pairs]
    times = [case["time_ratio"] for case, _ in pairs]
    rows = [
        (
            case["workload"].replace("_", " "),
            f"{_first_call(one):.1f}",
            f"{_first_call(case):.1f}",
            f"{case['improved_s']:.1f} s",
            f"{one['time_ratio']:.2f}",
            f"{case['time_ratio']:.2f}",
        )
        for case, one in pairs
    ]
    head = ("step", "first call", 'with `improve="background"`', "better plan after", "a step", "under the better plan")
    return Section(
        title="A first step that comes sooner",
        on=CPU,
        when=day(found),
        command="python -m benchmarks.workloads --budget 60% --improve background",
        file="workloads-cpu-improved.json",
        headline=f"a first call takes {median(after):.1f} times plain jit's in the median, {median(before):.1f} without",
        reading='The same steps under 60 % with `improve="background"`. First calls and steps are over plain jit\'s of the same '
        "process. *Better plan after* is counted from the end of the first call.",
        table=table(head, rows),
        conclusions=(
            f"A first call takes {median(after):.1f} times plain jit's in the median, and {max(after):.1f} at most; with the "
            f"whole search in the first call, {median(before):.1f} and {max(before):.1f}.",
            f"The better plan is in use {median(improved):.0f} s after the first call in the median. With it, a step takes "
            f"{median(times):.2f} of plain jit's time in the median, {median(one['time_ratio'] for _, one in pairs):.2f} without "
            "`improve`.",
        ),
    )


def _first_call(case: Row) -> float:
    return case["first_call_s"] / case["jit_first_call_s"]


_NETWORKS = {"decoder": "decoder", "mixer": "MLP-mixer", "resnet": "ResNet", "recurrent": "LSTM"}


def beside_checkpoint() -> Section:
    found = read("checkpointing-cpu.json")
    rows: list[tuple[str, ...]] = []
    pairs: list[tuple[Row, Row]] = []
    least: list[str] = []
    for network, cases in found["networks"].items():
        plain = next(one for one in cases if one["how"] == "plain jit")
        by_hand = [one for one in cases if one["how"] not in ("plain jit", "budget") and "peak_ratio" in one]
        floor = next(one["floor_bytes"] for one in cases if one["how"] == "the least budget") / plain["peak_bytes"]
        least.append(f"{_NETWORKS[network]} {floor:.2f} ({min(one['peak_ratio'] for one in by_hand):.2f})")
        name = _NETWORKS[network]
        for one in sorted((one for one in by_hand if "time_ratio" in one), key=lambda one: -one["peak_ratio"]):
            kept = [case for case in cases if "time_ratio" in case and case.get("budget_bytes", math.inf) <= one["peak_bytes"]]
            ours = max(kept, key=lambda case: case["budget_bytes"], default=None)
            pairs += [(one, ours)] if ours else []
            cells = (f"{ours['time_ratio']:.2f}", f"{ours['first_call_s']:.1f} s") if ours else ("too small", "")
            times = f"{one['time_ratio']:.2f}", cells[0], f"{one['first_call_s']:.1f} s", cells[1]
            rows.append((name, one["how"], f"{one['peak_ratio']:.2f}", *times))
            name = ""
        others = [one["peak_ratio"] for one in by_hand if "time_ratio" not in one]
        if others:
            rows.append((name, "other ways", f"{min(others):.2f} to {max(others):.2f}", "-", "-", "", ""))
    quicker = sum(ours["time_ratio"] < theirs["time_ratio"] for theirs, ours in pairs)
    over = [ours["time_ratio"] / theirs["time_ratio"] for theirs, ours in pairs]
    calls = [ours["first_call_s"] / theirs["first_call_s"] for theirs, ours in pairs]
    every = [one for cases in found["networks"].values() for one in cases if "peak_ratio" in one]
    in_turn = [one for one in every if one["how"].startswith("nothing_saveable")]
    head = ("step", "by hand", "peak", "time by hand", "under that budget", "first call by hand", "under that budget")
    return Section(
        title="`jax.checkpoint` placed by hand",
        on=CPU,
        when=day(found),
        command="make bench-checkpointing",
        file="checkpointing-cpu.json",
        headline=f"with the same bytes, a budget is faster in {quicker} of {len(pairs)} cases: "
        f"{min(over):.2f} to {max(over):.2f} of the time by hand",
        reading="Networks of 4 to 6 blocks, and an LSTM of 16 unrolled time steps, a block each. By hand, `jax.checkpoint` with "
        "this policy is around each block. *Scan*: the blocks are the body of a `lax.scan`. The budget has the bytes of that "
        "peak. It is given to the plain step, without `jax.checkpoint` and without a scan. Times are relative to plain jit's "
        f"step. Ways that save less than 1 % are not timed.{_noted(found)}",
        table=table(head, rows),
        conclusions=(
            f"Around blocks one after another, `nothing_saveable` leaves {min(one['peak_ratio'] for one in in_turn):.2f} of the "
            f"peak or more. XLA does compute blocks again (up to {max(one['flops_ratio'] for one in in_turn):.2f} times plain "
            "jit's operations), but right beside the first time: XLA for CPUs drops the barriers of `prevent_cse` before it "
            "orders operations. In a scan, memory is saved. Compiled for GPUs, blocks one after another [save memory, "
            "too](predicted.md#a-step-on-eight-devices).",
            f"The least budgets that can be kept, and in parentheses the least peaks by hand: {', '.join(least)}.",
            f"Losses differ from plain jit's by at most {max(one['loss_difference'] for one in every):.0e}, gradients by at "
            f"most {max(one['gradient_difference'] for one in every):.0e}. In the median, a first call under a budget takes "
            f"{median(calls):.1f} times as long as one by hand, and {max(calls):.1f} times at most.",
        ),
    )


def _noted(found: Row) -> str:
    """What ran beside the benchmark."""
    return f" Note: {found['note']}." if found["note"] else ""


def second_process() -> Section:
    found = read("first-call.json")
    limits = ("90%", "60%", "40%")
    ratios = {(case["model"], case["budget"]): case["warm_ratio"] for case in found["cases"] if "warm_ratio" in case}
    rows = [
        (MODELS[model], *(f"{ratios[model, limit]:.2f}" if (model, limit) in ratios else "too small" for limit in limits))
        for model in dict.fromkeys(model for model, _ in ratios)
    ]
    return Section(
        title="The first call of a second process",
        on=CPU,
        when=day(found),
        command="make bench-first-call",
        file="first-call.json",
        headline=f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f} of plain jit's first call without a cache",
        reading="The first process has filled JAX's compilation cache and the file of known plans. The first call of a second "
        "process, over plain jit's first call with an empty cache. [Training steps of many "
        "kinds](#training-steps-of-many-kinds) has the first process.",
        table=table(("step", *map(budget, limits)), rows),
        conclusions=(
            "Switch [the caches](budgets-and-plans.md#how-long-the-first-call-takes) on: the plan is then read from a file, "
            "and tracing is most of what is left.",
        ),
    )


def a_training() -> Section:
    found = read("training.json")
    rows = [
        (
            one["form"],
            f"{one['steps']}",
            f"{one['last_loss'][0]:.4f}",
            f"{one['last_loss'][1]:.4f}",
            f"{100 * one['largest_difference']:.2f} %",
            f"{one['peak_ratio']:.3f}",
            f"{one['time_ratio']:.2f}",
        )
        for one in found["trainings"]
    ]
    first = found["trainings"][0]
    return Section(
        title="A training under 40 %",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="training.json",
        headline=f"{first['steps']} steps: losses within {100 * first['largest_difference']:.1f} % of plain jit's",
        reading="A decoder whose layers are one loop learns English text, batch 16 x 128. Both begin with the same state "
        f"(loss {first['first_loss'][0]:.3f}) and read the same batches. *In one call* is a `lax.scan` over all batches, a "
        "[driven loop](how-it-works.md#loops).",
        table=table(("form", "steps", "last loss", "plain jit's", "largest difference", "peak", "time"), rows),
        conclusions=(
            "Differences are those of rounding, which grow over a training.",
            "XLA:CPU runs a scan slower than its iterations one by one, so times are below plain jit's. That is not a "
            "property of plans.",
        ),
    )


SECTIONS = (under_a_budget, policies, many_kinds, begun_sooner, second_process, a_training, beside_checkpoint)
