"""What was measured on an NVIDIA H200."""

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_pages.section import MODELS, Section, budget, day, percent, read

_ON = "NVIDIA H200"


def out_of_memory() -> Section:
    found = read("nvidia-h200/second-run.json")
    capped = found["capped"]["row"]
    free, plain, plan = capped["uncapped jit"], capped["jit"], capped["planned"][0]

    def losses(row: Mapping[str, Any]) -> str:
        return " ".join(f"{loss:.5f}" for loss in row["losses"])

    rows = [
        (
            "plain jit, no cap",
            f"{free['device_bytes'] / 1e9:.0f} GB",
            f"{free['allocator_peak_bytes'] / 1e9:.2f} GB",
            losses(free),
        ),
        ("plain jit", f"{plain['memory_bytes'] / 1e9:.1f} GB", f"`{plain['failed'].partition(':')[0]}`", "-"),
        (
            f"budget of {capped['budget_bytes'] / 1e9:.1f} GB",
            f"{plan['memory_bytes'] / 1e9:.1f} GB",
            f"{plan['allocator_peak_bytes'] / 1e9:.2f} GB",
            losses(plan),
        ),
    ]
    difference = max(abs(a - b) for a, b in zip(free["losses"], plan["losses"], strict=True))
    return Section(
        title="Plain jit runs out of memory, and the plan trains",
        on=_ON,
        when=found["made"],
        command="python -m benchmarks.capped gpt --batch-size 8 --budget 50%",
        file="nvidia-h200/second-run.json",
        headline="half of the memory: plain jit fails, the plan trains",
        reading=f"The decoder, `--sizes '{json.dumps(capped['sizes'])}'`. `XLA_CLIENT_MEM_FRACTION` caps the memory of the GPU. "
        "Each row is a process of its own.",
        table=table(("", "memory of the device", "in use at most, by the allocator", "losses of 4 steps"), rows),
        conclusions=(f"Losses differ from plain jit's by at most {difference:.5f}.",),
    )


def time_of_a_step() -> Section:
    found = read("nvidia-h200/second-run.json")
    rows, ratios = [], {}
    for row in sorted(found["steps"]["rows"], key=lambda row: row["50%"]["time_ratio"]):
        plan, jit = row["50%"], row["jit"]
        ratios[row["model"], row["batch_size"]] = plan["time_ratio"]
        rows.append(
            (
                f"{MODELS[row['model']]}, batch {row['batch_size']}" + (" x 1024" if row["model"] == "gpt" else ""),
                f"{plan['peak_ratio']:.3f}",
                f"{jit['pipelined_ms']:.1f} ms",
                f"{plan['pipelined_ms']:.1f} ms",
                f"**{plan['time_ratio']:.2f}**",
                f"{plan['busy_ms'] / jit['busy_ms']:.2f}",
                f"{plan['launches']}",
            )
        )
    large = (ratios["resnet50", 128], ratios["gpt", 8])
    return Section(
        title="Time of a step under half of the memory",
        on=_ON,
        when=found["made"],
        command="make gpu-times",
        file="nvidia-h200/second-run.json",
        headline=f"large steps: {min(large):.2f} to {max(large):.2f} of plain jit's time; batch 16: {ratios['resnet50', 16]:.2f}",
        reading="Steps are not waited for, as in a training. *GPU busy* is the time in which a kernel or a copy runs. "
        "Peaks are the package's own account. The decoder has the sizes above.",
        table=table(("step", "peak", "plain jit", "plan", "step", "GPU busy", "launches"), rows),
        conclusions=(
            "Large steps pay for what they compute again, and little more.",
            "With batch 16 the host is the limit: it issues a kernel in about 8 µs, and ResNet-50 has about 1,000 of them.",
        ),
    )


def every_method() -> Section:
    found = read("paper/measured-nvidia-h200.json")
    single, curve = found["single"]["vgg16"], [row for row in found["curve"]["vgg16"] if "msr" in row]
    methods = ("unplanned", "checkpoint", "vdnn", "capuchin", "tensile", "auto")
    named = [(f"`{name}`" if name != "auto" else "`auto` at TENSILE's peak", single[name]) for name in methods]
    named += [(f"`auto`, {percent(row['share'])}", row) for row in curve]
    rows = [
        (
            name,
            f"{row['account_peak_bytes'] / row['jit_peak_bytes']:.3f}",
            f"{row['peak_bytes'] / row['jit_peak_bytes']:.3f}",
            f"{row['eor']:.2f}",
            f"{row['busy_eor']:.2f}",
            f"{row['predicted_ms'] / row['jit_pipelined_ms']:.2f}",
            f"{row['segments']}",
            f"{row['swapped_bytes'] / 1e9:.2f} GB" if row["swapped_bytes"] else "-",
        )
        for name, row in named
    ]
    auto, tensile = single["auto"], single["tensile"]
    excess = [(row["peak_bytes"] - row["account_peak_bytes"]) / 1e9 for _, row in named]
    refused = [row for row in found["curve"]["vgg16"] if "too_small" in row]
    least = refused[0]["too_small"] / tensile["jit_peak_bytes"]
    return Section(
        title="VGG-16, every method",
        on=_ON,
        when=found["made"]["single"][:10],
        command="python -m benchmarks.paper measure --model vgg16",
        file="paper/measured-nvidia-h200.json",
        headline=f"at TENSILE's peak, `auto` takes {auto['eor']:.2f}, TENSILE {tensile['eor']:.2f}",
        reading=f"Batch 16. Plain jit takes {tensile['jit_pipelined_ms']:.1f} ms a step and "
        f"{tensile['jit_peak_bytes'] / 1e9:.2f} GB. Peaks are by the package's account and by XLA's allocator. Times are of "
        "steps that are not waited for, and of the busy GPU. *Predicted* is the time that the plan states.",
        table=table(("method", "account", "allocator", "step", "GPU busy", "predicted", "segments", "swapped"), rows),
        conclusions=(
            f"The allocator has {min(excess):.2f} to {max(excess):.2f} GB more in use than the account says. It hands out a "
            "free piece whole if the piece is at most 128 MiB too large. That matters for steps of a few gigabytes.",
            f"Half of the memory costs {curve[1]['eor']:.2f}, 40 % costs {curve[2]['eor']:.2f}. "
            f"{percent(refused[0]['share'])} is refused: {least:.3f} is the least.",
        ),
    )


def batch_16() -> Section:
    found = read("nvidia-h200/third-run.json")
    timed = [row for row in found["rows"] if "pipelined" in row and row["model"] != "vgg16"]
    rows = [
        (
            MODELS[row["model"]],
            f"`{row['policy']}`",
            budget(row["budget"]),
            f"{row['peak_bytes'] / row['jit_peak_bytes']:.3f}",
            f"{row['allocator_peak_bytes'] / row['jit_peak_bytes']:.3f}",
            f"{row['time_ratio']:.2f}",
            f"{row['busy_ratio']:.2f}",
            f"{row['launches']}",
        )
        for row in timed
    ]
    dense = next(row for row in timed if row["model"] == "densenet121")
    return Section(
        title="DenseNet-121 and ResNet-50 with batch 16",
        on=_ON,
        when=found["made"],
        command="python -m benchmarks.paper measure --at-once 20",
        file="nvidia-h200/third-run.json",
        headline=f"DenseNet-121 in 40 %: step {dense['time_ratio']:.2f}, GPU busy {dense['busy_ratio']:.2f}",
        reading="*Least* is the least budget that the policy can keep. Columns are as in the table above.",
        table=table(("model", "method", "budget", "account", "allocator", "step", "GPU busy", "launches"), rows),
        conclusions=(
            "Short steps of many kernels wait for the host, not for the GPU: the step takes much longer than the GPU is busy.",
            "Of that run's other plans, only VGG-16's were timed, and they are measured again above.",
        ),
    )


def many_kinds() -> Section:
    found = read("nvidia-h200/fourth-run.json")
    cases = sorted(found["workloads"], key=lambda case: (case["workload"], case["budget"]))
    rows = [
        (
            case["workload"].replace("_", " "),
            budget(case["budget"]),
            f"{case['peak_ratio']:.3f}",
            f"{1000 * case['jit_step_s']:.1f} ms",
            f"{case['time_ratio']:.2f}",
            f"{case['segments']}",
            f"{case['loss_difference']:.0e}" if case["loss_difference"] else "0",
        )
        for case in cases
    ]
    times = [case["time_ratio"] for case in cases]
    steps = [1000 * case["jit_step_s"] for case in cases]
    long = next(case for case in cases if case["budget"] == "15%")
    return Section(
        title="Short steps of six kinds",
        on=_ON,
        when=found["made"],
        command="python -m benchmarks.workloads.case NAME --budget B",
        file="nvidia-h200/fourth-run.json",
        headline=f"steps of {min(steps):.0f} to {max(steps):.0f} ms: {min(times):.2f} to {max(times):.2f} of plain jit's time",
        reading="Small training steps, beside compilations on the same host. "
        "The last column is the largest relative difference of a loss.",
        table=table(("step", "budget", "peak", "plain jit", "time", "segments", "losses differ by"), rows),
        conclusions=(
            f"Budgets are kept and losses agree. Time is {median(times):.1f} of plain jit's in the median, since this host needs "
            f"{found['calibration']['launch_on_host_us'] / 1000:.2f} ms for a launch. Do not plan steps of a few milliseconds.",
            f"The differential equation, one long loop, takes {long['time_ratio']:.2f} in {long['peak_ratio']:.2f} of plain "
            "jit's memory.",
        ),
    )


def profile_h200() -> Section:
    found, fit = read("nvidia-h200/fitted.json"), read("nvidia-h200/profile.json")
    rows = [
        (
            f"{MODELS[step['model']]}, batch {step['batch_size']}" + (" x 1024" if step["model"] == "gpt" else ""),
            f"{step['busy_ms']:.1f} ms" if step["busy_ms"] else "-",
            f"{step['pipelined_ms']:.1f} ms",
            f"{fitted['predicted_over_busy']:.2f}",
            f"{fitted['predicted_over_step']:.2f}",
        )
        for step, fitted in zip(found["steps"], fit["steps"], strict=True)
    ]
    busy = [fitted["predicted_over_busy"] for fitted in fit["steps"]]
    rates = fit["rates"]
    return Section(
        title="The profile `h200`",
        on=_ON,
        when=fit["made"],
        command="python -m benchmarks.fit_profile benchmarks/results/nvidia-h200/fitted.json",
        file="nvidia-h200/profile.json",
        headline=f"predicted time is {min(busy):.2f} to {max(busy):.2f} of the measured one",
        reading="Steps of plain jit, and what the shipped profile predicts, over what was measured: of the busy GPU, and of "
        f"the step with a host that issues a kernel in {rates['host_kernel_us']} µs. The measured steps are in "
        "[`fitted.json`](../benchmarks/results/nvidia-h200/fitted.json).",
        table=table(("step of plain jit", "GPU busy", "step", "predicted, GPU busy", "predicted, step"), rows),
        conclusions=(
            f"The fit gives {rates['flops_per_us'] / 1e6:.0f} TFLOP/s, {rates['bytes_per_us'] / 1e6:.2f} TB/s, and "
            f"{rates['kernel_us']} µs for each kernel.",
            "Products of 16-bit numbers count as twice as fast, by the data sheet. That was not measured.",
            "What a host needs is not in the profile. `tensile calibrate` measures it.",
        ),
    )


def what_the_allocator_hands_out() -> Section:
    found = read("allocator.json")
    rows, off = [], []
    for run in found["runs"]:
        jit = run["jit_peak_bytes"]
        budget = "" if run["policy"] != "auto" else f", {100 * int(run['budget']) / jit:.0f} %"
        off.append(abs(run["off"]))
        rows.append(
            (
                f"`{run['policy']}`{budget}" + ("" if run["replayed_account_bytes"] == run["account_bytes"] else " \\*"),
                *(f"{run[of] / jit:.3f}" for of in ("account_bytes", "measured_bytes", "model_bytes")),
                *(f"{nbytes / jit:.3f}" for nbytes in run["later_bytes"].values()),
            )
        )
    later = [f"model, {iterations} iterations" for iterations in found["runs"][0]["later_bytes"]]
    return Section(
        title="What the allocator hands out",
        on=_ON,
        when=day(found),
        command=found["command"],
        file="allocator.json",
        headline=f"the model is within {100 * max(off):.1f} % of plain jit's peak of what was in use",
        reading="VGG-16, batch 16: the plans of [every method](#vgg-16-every-method), made again and replayed on "
        "[the model of XLA's allocator](how-it-works.md#what-the-allocator-hands-out), with workspaces compiled for an H200. "
        "Shares of plain jit's peak: by the package's account, in use after the first step as measured and by the model, and "
        "later by the model. A \\* marks plans that are nearly those that ran.",
        table=table(("plan", "account", "allocator, measured", "allocator, model", *later), rows),
        conclusions=(
            "Plans for GPUs count this, and keep their budget by it, since 2026-11-29. These runs did not.",
            "0.064 of each peak is because that allocator grew (`XLA_PYTHON_CLIENT_PREALLOCATE=false`). JAX's default has one "
            "region from the beginning, and wastes less.",
            "Plans of ResNet-50 and DenseNet-121 cannot be replayed without a GPU: the workspaces of cuDNN are missing.",
        ),
    )


SECTIONS = (out_of_memory, time_of_a_step, every_method, what_the_allocator_hands_out, batch_16, many_kinds, profile_h200)
