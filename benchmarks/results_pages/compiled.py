"""What was compiled for an H200 on a machine without one."""

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_pages.section import COMPILED, MODELS, Section, day, percent, read

Row = Mapping[str, Any]


def many_budgets() -> Section:
    found = read("h200-compiled.json")
    cases = [one for one in found["cases"] if one["policy"] != "xla" and one["launch"] == "segments"]

    def traffic(one: Row) -> float:
        return one["traffic_bytes"] / one["jit_traffic_bytes"]

    rows = [
        (
            f"{MODELS[one['model']]}, batch {one['batch_size']}" if one["policy"] == "none" else "",
            "none" if one["share"] is None else percent(one["share"]),
            f"{one['peak_bytes'] / one['jit_peak_bytes']:.3f}",
            f"{traffic(one):.3f}",
            f"{one['segments']}",
            f"{one['rounds']}",
            f"{one['seconds'] / one['jit_s']:.1f}",
        )
        for one in cases
    ]
    at = {(one["model"], one["share"]): traffic(one) for one in cases}
    return Section(
        title="ResNet-50 and a small decoder under many budgets",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="h200-compiled.json",
        headline=f"50 %: ResNet-50 moves {at['resnet50', 0.5]:.2f}, the decoder {at['gpt', 0.5]:.2f} of plain jit's traffic",
        reading="*Rounds* is how many plans were compiled until one kept the budget. The last column is the time from the "
        "traced step to the compiled plan, over that of compiling plain jit's step.",
        table=table(("step", "budget", "peak", "traffic", "segments", "rounds", "plan and compile"), rows),
        conclusions=(
            "Traffic does not show waiting. ResNet-50 waits for copies at 36 % and below, by the plan's own account: a step "
            "this short hides little of them.",
            "At neighbouring budgets, the lower one may move less. Predictions of plans that are close to one another are "
            "less exact than what tells them apart.",
        ),
    )


def rematerialization() -> Section:
    found = read("h200-compiled.json")
    models = ("resnet50", "gpt")
    of = {(one["model"], one["share"]): one for one in found["cases"] if one["policy"] == "xla"}
    shares = sorted({share for _, share in of}, reverse=True)

    def peak(one: Row) -> float:
        return one["peak_bytes"] / one["jit_peak_bytes"]

    rows = [
        (
            percent(share),
            *(
                f(of[model, share])
                for model in models
                for f in (lambda one: f"{peak(one):.3f}", lambda one: f"{one['traffic_ratio']:.3f}")
            ),
        )
        for share in shares
    ]
    least = {model: min(peak(of[model, share]) for share in shares) for model in models}
    return Section(
        title="XLA's own rematerialization",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="h200-compiled.json",
        headline=f"ResNet-50 stops at {least['resnet50']:.2f} of its peak",
        reading="The same steps as one executable. XLA computes tensors again by itself if it is told that the device has "
        "less memory.",
        table=table(("memory that XLA is told", "ResNet-50: peak", "traffic", "decoder: peak", "traffic"), rows),
        conclusions=(
            f"XLA keeps no promise: told {percent(shares[-1])}, the decoder needs {peak(of['gpt', shares[-1]]):.3f} of its peak.",
            f"ResNet-50 gets no lower than {least['resnet50']:.2f}, with {of['resnet50', shares[0]]['traffic_ratio']:.2f} of "
            "the traffic. [A plan](#resnet-50-and-a-small-decoder-under-many-budgets) for 60 % moves less. For the decoder, "
            "plans go lower, and move about as much at equal peaks.",
        ),
    )


def vgg16() -> Section:
    found = read("paper/compiled-h200.json")
    peaks: dict[str, list[Row]] = {model: [] for model in ("vgg16", "resnet50")}
    for model, chosen in peaks.items():
        for one in found["within"][model]:
            if "msr" in one and one not in chosen:
                chosen.append(one)
    rows = [
        (
            MODELS[model] if number == 0 else "",
            f"{1 - one['msr']:.3f}",
            f"{one['eor']:.2f}",
            f"{one['segments']}",
            f"{one['swapped_bytes'] / 1e9:.2f} GB" if one["swapped_bytes"] else "-",
        )
        for model, chosen in peaks.items()
        for number, one in enumerate(chosen)
    ]
    measured = next(one for one in read("paper/measured-nvidia-h200.json")["curve"]["vgg16"] if one["share"] == 0.5)
    half = {model: min(chosen, key=lambda one: abs(one["msr"] - 0.5)) for model, chosen in peaks.items()}
    return Section(
        title="VGG-16 and ResNet-50 in compiled memory",
        on=f"{COMPILED}, times simulated",
        when=found["made"]["within"][:10],
        command=found["command"],
        file="paper/compiled-h200.json",
        headline=f"half of the memory: VGG-16 {half['vgg16']['eor']:.2f}, ResNet-50 {half['resnet50']['eor']:.2f} of the time",
        reading="Batch 16, state in host memory between its uses where that helps. Peaks are XLA's, times are the "
        "simulator's. VGG-16 has its first convolutions [in chunks of images](how-it-works.md#large-tensors-in-chunks), and "
        "the gradients of its first dense layers [are never in memory](how-it-works.md#gradients-that-are-never-in-memory).",
        table=table(("step", "peak", "time", "segments", "swapped"), rows),
        conclusions=(
            f"[Measured](results.md#vgg-16-every-method), half of VGG-16's memory costs {measured['eor']:.2f}, and the GPU is "
            f"busy for {measured['busy_eor']:.2f} of plain jit's time. The host takes the rest.",
        ),
    )


def programs() -> Section:
    found = read("launches-h200.json")
    plain = {one["model"]: one for one in found["cases"] if one["launch"] == "plain jit"}
    cases = [one for one in found["cases"] if "asked" in one]

    def row(one: Row) -> tuple[str, ...]:
        how = "one program" if one["launches"] == 1 else f"{one['launches']} launches"
        how += ", layouts by XLA" if one["laid_out"] else ""
        ratios = (f"{one['peak_ratio']:.3f}", f"{one['traffic_ratio']:.3f}")
        return "", percent(one["share"]), how, str(one["rounds"]), *ratios, str(one["copies"]), *map(str, _launches(one))

    rows: list[tuple[str, ...]] = []
    for model, one in plain.items():
        title = f"{MODELS[model]}, batch {one['batch_size']}"
        rows.append((title, "-", "plain jit", "-", "1", "1", "-", *map(str, _launches(one))))
        rows += [row(case) for case in cases if case["model"] == model]
    at = {(one["model"], one["share"], one["asked"], one["state_layout"]): one for one in cases}
    half = {asked: at["resnet50", 0.5, asked, layout] for asked, layout in (("segments", "row_major"), ("one_program", "auto"))}
    kernels = {layout: at["resnet50", 0.75, "one_program", layout]["kernels"] for layout in ("row_major", "auto")}
    return Section(
        title="Segments joined into programs",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="launches-h200.json",
        headline=f"ResNet-50 in half of the memory: {half['one_program']['traffic_ratio']:.2f} of plain jit's traffic as one "
        f"program with layouts by XLA, {half['segments']['traffic_ratio']:.2f} as {half['segments']['launches']} launches",
        reading='State anywhere: `launch="segments"`, `launch="one_program"`, and the same with `state_layout="auto"`. Where '
        "no program keeps the budget, as with 40 % of DenseNet-121, the row shows the segments that are launched instead. "
        "*Plans* is how many were compiled until one kept the budget. *Copies* are those to and from the host in a step; "
        "traffic is what kernels move, without them. The last two columns are what the host issues for a step, by XLA's own "
        "dumps: as XLA is set by default, and with convolutions in its CUDA graphs.",
        table=table(
            ("step", "budget", "launched as", "plans", "peak", "traffic", "copies", "issued by the host", "with convolutions"),
            rows,
        ),
        conclusions=(
            "All copies inside a program run beside kernels. No such program, and no layout of XLA's choice, has run on a GPU "
            "yet, so they must be asked for.",
            "Where state is row-major, a program of ResNet-50 needs more memory and moves more than with layouts by XLA: it "
            "transposes the kernels of convolutions, and what the optimizer keeps for them, and copies state that it cannot "
            "update where it is. With [layouts of its choice](how-it-works.md#layouts-of-the-state), the program for 75 % of "
            f"ResNet-50 has {kernels['auto']} kernels instead of {kernels['row_major']}.",
            "VGG-16 moves less than plain jit: its large gradients [are never in "
            "memory](how-it-works.md#gradients-that-are-never-in-memory), and those of pooling are written into [zeros of their "
            "own](how-it-works.md#zeros-that-are-written-into).",
        ),
    )


def _launches(one: Row) -> tuple[int, int]:
    return one["host_launches"], one["with_convolutions"]


_WAYS = {"data": "data parallel", "fsdp": "FSDP", "tensor": "tensor parallel"}
_KEPT = {"dots": "products kept", "dots_no_batch": "products without batch dimensions kept", "nothing": "nothing kept"}


def eight_devices() -> Section:
    found = read("mesh-h200.json")
    ours = {(one["way"], one["budget"]): one for one in found["cases"] if one["how"] == "chosen"}
    theirs = {(one["way"], one["policy"]): one for one in found["cases"] if one["how"] == "checkpoint"}

    def cell(one: Row | None) -> str:
        return "" if one is None else f"{one['peak_ratio']:.3f}, {one['traffic_ratio']:.3f}, {one['kernels_us'] / 1000:.2f}"

    rows: list[tuple[str, ...]] = [
        (f"ours, {percent(int(b[:-1]) / 100)}", *(cell(ours.get((w, b))) for w in _WAYS)) for b in ("50%", "40%")
    ]
    for policy, label in _KEPT.items():
        rows.append((f"`jax.checkpoint`, {label}", *(cell(theirs.get((way, policy))) for way in _WAYS)))
        if any((way, policy) in ours for way in _WAYS):
            rows.append(("ours, the same peak", *(cell(ours.get((way, policy))) for way in _WAYS)))
    at = [ours[way, "50%"]["traffic_ratio"] for way in _WAYS]
    return Section(
        title="A step on eight devices",
        on="compiled for 8 H200",
        when=day(found),
        command=found["command"],
        file="mesh-h200.json",
        headline=f"50 %: {min(at):.2f} to {max(at):.2f} of plain jit's traffic",
        reading="A decoder of 8 layers, width 512, batch 64 x 512, fp32, Adam, no swaps, beside `jax.checkpoint` of each "
        "layer by hand. Cells: peak and traffic of a device, and milliseconds of its kernels at the rates of the profile "
        "`h200`. An empty cell is as at 50 %.",
        table=table(("", *_WAYS.values()), rows),
        conclusions=(
            "At every peak of `jax.checkpoint`, ours needs less memory, moves less, and its kernels take less time. With "
            "products kept under data parallel the difference is 0.1 %.",
            "Two or three plans were compiled for each of our rows.",
        ),
    )


def large_decoder() -> Section:
    found = read("mesh-largest-h200.json")
    names = {
        "plain": "plain jit",
        "dots": "`jax.checkpoint`, products kept",
        "dots_no_batch": "without batch dimensions kept",
        "dots_offloaded": "the same products on the host",
        "nothing": "nothing kept",
        "ours": "**ours**",
    }
    cases = [one for one in found["cases"] if "kernels_ns_per_token" in one and one["how"] in names]
    # This row was compiled with rates that were fitted later: its kernel time cannot be compared with the others'.
    cases = [one for one in cases if not (one["how"] == "ours" and one["sequences"] == 385)]
    cases.sort(key=lambda one: (list(names).index(one["how"]), one["sequences"]))
    rows = [
        (
            names[one["how"]],
            f"{one['sequences']}",
            f"{one['peak_bytes'] / 1e9:.1f}" + ("" if one["fits"] else ", does not fit"),
            f"{one['traffic_per_token'] / 1e6:.1f}",
            f"{one['gflops_per_token']:.2f}",
            f"{one['kernels_ns_per_token'] / 1000:.1f}",
        )
        for one in cases
    ]
    most = {how: max(one["sequences"] for one in cases if one["how"] == how and one["fits"]) for how in ("ours", "nothing")}
    return Section(
        title="A large decoder on eight devices",
        on="compiled for 8 H200",
        when=day(found),
        command=found["command"],
        file="mesh-largest-h200.json",
        headline=f"{most['ours']} texts a device fit, {most['nothing']} with `jax.checkpoint`",
        reading=f"A decoder of {found['parameters'] / 1e9:.1f} billion parameters, texts of {found['length']:,} tokens, bf16, "
        f"AdamW, FSDP, and a budget of {found['limit_bytes'] / 1e9:.0f} GB. Traffic, operations and time are for each token of "
        "a device. Time is that of the kernels at 4.3 TB/s and 400 TFLOP/s.",
        table=table(("", "texts a device", "GB", "MB a token", "GFLOP", "µs"), rows),
        conclusions=(
            "At equal batches of up to 280 texts, ours takes the least kernel time.",
            "From 280 texts on, `jax.checkpoint` that keeps nothing moves less, as far as it fits.",
            "The planner has changed since. These rows were not compiled again.",
        ),
    )


def layers_in_a_loop() -> Section:
    found = read("loops.json")
    whole = found["plain"]["unrolled"]
    names = {
        "unrolled": "plain jit, unrolled",
        "scan": "plain jit, `nn.scan`",
        "scan, remat": "plain jit, `nn.scan` of `nn.remat`",
    }
    rows = [
        (label, f"{one['peak_bytes'] / 1e9:.2f}", f"{one['traffic_bytes'] / whole['traffic_bytes']:.2f}", "", "1", "")
        for name, label in names.items()
        for one in [found["plain"][name]]
    ]
    rows += [
        (
            "ours, the least" if one["share"] is None else f"ours, {percent(one['share'])}",
            f"{one['peak_bytes'] / 1e9:.2f}",
            f"{one['traffic_ratio']:.2f}",
            f"{one['predicted_ratio']:.2f}",
            f"{one['executables']}",
            f"{one['planning_s']:.1f} s",
        )
        for one in found["planned"]
    ]
    half = next(one for one in found["planned"] if one["share"] == 0.5)
    return Section(
        title="Layers in a loop",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="loops.json",
        headline=f"GPT-2 small in 50 %: {half['traffic_ratio']:.2f} of the unrolled step's traffic",
        reading="GPT-2 small, 8 x 1024 tokens, bf16, AdamW. Layers are written with `nn.scan`, which ours opens. Traffic, "
        "budgets and predicted time are relative to the unrolled step.",
        table=table(("step", "peak, GB", "traffic", "predicted time", "executables", "plan"), rows),
        conclusions=("The least plan keeps nearly everything on the host, and waits for it.",),
    )


def deep_loops() -> Section:
    found = read("loops.json")
    rows = [
        (
            f"{one['layers']}",
            f"{one['executables']}",
            f"{one['planning_s']:.1f} s",
            f"{one['compile_s']:.1f} s",
            f"{one['plain']['compile_s']:.1f} s",
            f"{one['unrolled']['compile_s']:.1f} s",
            f"{one['traffic_bytes'] / one['unrolled']['traffic_bytes']:.2f}",
        )
        for one in found["depths"]
    ]
    slower = [one["compile_s"] / one["plain"]["compile_s"] for one in found["depths"]]
    last = found["depths"][-1]
    head = ("layers", "executables", "plan", "compile", "plain jit, `nn.scan`", "plain jit, unrolled", "traffic, of unrolled")
    return Section(
        title="Loops of many layers",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="loops.json",
        headline=f"{last['layers']} layers compile in {last['compile_s']:.0f} s, unrolled in "
        f"{last['unrolled']['compile_s']:.0f} s",
        reading="The same decoder with more layers, under 60 % of the peak of plain `nn.scan`.",
        table=table(head, rows),
        conclusions=(
            f"Compiling does not grow with depth. It takes {min(slower):.1f} to {max(slower):.1f} times as long as plain "
            "`nn.scan`, since each executable is compiled on its own.",
        ),
    )


def long_loops() -> Section:
    found = read("loops.json")
    plain = {one["step"]: one for one in found["long"] if "share" not in one}
    planned = [one for one in found["long"] if "share" in one]
    names = {"recurrent network": "LSTM", "differential equation": "differential equation"}
    rows = [
        (
            names[one["step"]],
            f"{100 * one['share']:g} %",
            f"{one['peak_bytes'] / plain[one['step']]['peak_bytes']:.3f}",
            f"{one['traffic_ratio']:.2f}",
            f"{one['predicted_ratio']:.2f}",
            f"{one['executables']}",
            f"{one['planning_s']:.1f} s",
        )
        for one in planned
    ]
    quarter = [one["predicted_ratio"] for one in planned if one["share"] == 0.25]
    sizes = " and ".join(f"{one['peak_bytes'] / 1e9:.1f}" for one in plain.values())
    return Section(
        title="Long loops",
        on=COMPILED,
        when=day(found),
        command=found["command"],
        file="loops.json",
        headline=f"a quarter of the memory: {min(quarter):.2f} to {max(quarter):.2f} of the time, predicted",
        reading="Loops that are [split](how-it-works.md#loops): an LSTM of two layers of 1,024 cells over 512 time steps of "
        f"128 texts, and 100 Runge-Kutta steps of 64 unknowns from 8,192 beginnings, fp32. Plain jit needs {sizes} GB.",
        table=table(("step", "budget", "peak", "traffic", "predicted time", "executables", "plan"), rows),
    )


SECTIONS = (
    many_budgets,
    vgg16,
    rematerialization,
    programs,
    eight_devices,
    large_decoder,
    layers_in_a_loop,
    deep_loops,
    long_loops,
)
