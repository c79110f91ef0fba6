"""What several jobs take on a CPU, and what a runtime and a call add."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.markdown import table
from benchmarks.results_pages.section import CPU, MODELS, Section, day, percent, read


def _jobs(names: Sequence[str]) -> str:
    """`gpt:8` twice as `2 x GPT-style decoder (batch 8)`."""
    counted = Counter(names)
    parts: list[str] = []
    for name, count in counted.items():
        model, _, batch = name.partition(":")
        parts.append((f"{count} x " if count > 1 else "") + f"{MODELS[model]} (batch {batch})")
    return " + ".join(parts)


def under_one_budget() -> Section:
    found = read("jobs-cpu.json")
    rows, throughputs = [], []
    for case in found["cases"]:
        half = next(one for one in case["budgets"] if one["budget"] == 0.5)
        throughputs.append(half["throughput"])
        rows.append(
            (
                _jobs(case["jobs"]),
                f"{half['peak_ratio']:.3f}",
                f"{half['peak_over_planned_sum']:.2f}",
                f"{half['throughput']:.2f}",
                f"{half['parks']:.0f}",
            )
        )
    return Section(
        title="Several jobs under one budget",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="jobs-cpu.json",
        headline=f"half of the memory: {min(throughputs):.2f} to {max(throughputs):.2f} of plain jit's throughput",
        reading="All jobs run at once under half of the sum of their plain-jit peaks. Plain `jax.jit` runs the same steps one "
        "after another. Throughput is the median of two rounds of 20 s. Single rounds differ by up to 19 %. Compilation is "
        "left out on both sides.",
        table=table(("jobs", "shared peak, of the sum of plain jit's", "of their planned peaks", "throughput", "parked"), rows),
        conclusions=("The budget was kept at every launch, by the live arrays and the running executable's workspace.",),
    )


def lower_budgets() -> Section:
    found = read("jobs-cpu.json")
    cases = [case for case in found["cases"] if len(case["budgets"]) > 2]
    shares = sorted({one["budget"] for case in cases for one in case["budgets"] if "throughput" in one}, reverse=True)
    rows, least = [], []
    for case in cases:
        of = {one["budget"]: one.get("throughput") for one in case["budgets"]}
        rows.append((_jobs(case["jobs"]), *(f"{of[share]:.2f}" if of.get(share) else "too small" for share in shares)))
        last = min(share for share, value in of.items() if value)
        least.append(f"{of[last]:.2f} under {percent(last)}")
    return Section(
        title="Several jobs under lower budgets",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="jobs-cpu.json",
        headline=f"throughput {', '.join(least)}",
        reading="Throughput over plain jit's, under parts of the sum of plain jit's peaks. One round each, but two at 50 %.",
        table=table(("jobs", *(percent(share) for share in shares)), rows),
    )


def soak() -> Section:
    found = read("soak.json")
    ends, events = found["ends"], found["events"]
    rows = [
        ("jobs submitted, started", f"{found['jobs']}, {events['started']}"),
        (
            "finished, cancelled, failed on purpose, refused",
            ", ".join(str(ends[k]) for k in ("finished", "cancelled", "failed", "refused")),
        ),
        ("launches", f"{found['launches']:,}"),
        ("parks, pauses, checkpoints", f"{events['parked']:,}, {events['paused']:,}, {events['checkpointed']:,}"),
        ("changes of the budget, renewed plans", f"{events['budget']}, {events['renewed']}"),
        ("most of the budget in use", f"{100 * found['most_of_budget']:.2f} %"),
        ("bytes left at the end", f"{found['bytes_left']}"),
        ("states equal to those of a run alone, to the bit", f"{found['equal_to_lonely_replay']}"),
    ]
    return Section(
        title="A soak of half an hour",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="soak.json",
        headline=f"{found['launches']:,} launches, no budget exceeded, {found['bytes_left']} bytes left",
        reading=f"Random jobs, pauses, cancels, failures and budgets for {found['minutes']:.0f} minutes.",
        table=table(("", "count"), rows),
        conclusions=(
            f"Every job that gave a state back gave the state of a run alone, bit for bit: {found['equal_to_lonely_replay']} "
            "jobs.",
        ),
    )


def cluster() -> Section:
    found = read("cluster.json")
    names = (
        ("ours", "`tensile_jax.ray.submit`"),
        ("shares", "Ray's shares, plain jit"),
        ("node killed", "ours, a node killed half-way"),
    )
    rows = [
        (label, f"{found[name]['makespan_s']:.0f} s", f"{found[name]['mean_in_flight']:.2f}", f"{found[name]['most_in_flight']}")
        for name, label in names
    ]
    killed = found["node killed"]
    return Section(
        title="A cluster",
        on="CPU, 2 cores, as six devices",
        when=day(found),
        command=found["command"],
        file="cluster.json",
        headline=f"makespan {found['ours']['makespan_s']:.0f} s, Ray's shares {found['shares']['makespan_s']:.0f} s",
        reading=f"A Ray cluster of {found['nodes']} nodes with 2 devices each on one machine, {found['jobs']} jobs of four "
        f"models, and {found['budget_bytes'] / 2**20:.1f} MiB a device. *Ray's shares*: each job takes the part of a device "
        "(`num_gpus`) that its plain-jit peak is. The machine had other work.",
        table=table(("run", "makespan", "jobs in flight, mean", "most"), rows),
        conclusions=(
            "The cluster is no faster here. More jobs are in flight, but all devices share two cores, and jobs are so short "
            "that starting processes, tracing and planning are most of the makespan.",
            f"When the node was killed, {len(set(killed['moved']))} jobs moved. {killed['equal_states']} of {found['jobs']} jobs "
            "ended with the states of the undisturbed run, bit for bit.",
            "Nothing was measured on several machines, or on GPUs.",
        ),
    )


def renewal() -> Section:
    found = read("renewal.json")
    named = {0: "none", 2: "2 processes", 4: "4 processes"}
    rows = [
        (
            named[load["burning_processes"]],
            f"{load['iterations_until_renewed']}",
            f"{load['step_ms_before_renewal'] / 1000:.2f} s",
            f"{load['over_scratch']:.2f}",
            f"{load['peak_bytes'] / load['budget_bytes']:.3f}",
        )
        for load in found["loads"]
    ]
    iterations = [load["iterations_until_renewed"] for load in found["loads"]]
    return Section(
        title="Plans that follow the machine",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="renewal.json",
        headline=f"a new plan after {min(iterations)} to {max(iterations)} iterations",
        reading="The decoder (batch 16, 256 tokens) under half of plain jit's peak with `renew_above=0.3`, while other "
        "processes take compute away. *Over from scratch*: over a second training that was planned under that load.",
        table=table(
            ("load", "iterations until the new plan", "step before", "step after, over from scratch", "peak over budget"), rows
        ),
        conclusions=(
            "Measuring costs nothing that was seen: ten iterations with it take "
            f"{found['tracking']['median_ratio_of_ten_steps']:.3f} of the time without it in the median.",
            f"After {found['iterations']} iterations under {found['plans']} plans, losses differ from plain jit's by at most "
            f"{100 * found['most_relative_difference']:.1f} %.",
            "A load that slows everything alike does not change the best plan: each new plan kept its segments.",
        ),
    )


def launches() -> Section:
    found = read("dispatch.json")
    rows = [
        (
            f"{case['jobs']}",
            f"{case['segments']}",
            f"{case['us_per_launch']:.1f} µs",
            f"{case['alone_us']:.1f} µs",
            f"{case['beyond_us']:.0f} µs",
        )
        for case in found["near_empty"]
    ]
    added = [case["us_per_launch"] - case["alone_us"] for case in found["near_empty"]]
    long = ", ".join(f"{case['ratio']:.3f} with {case['swaps']} swaps" for case in found["long"])
    return Section(
        title="What a runtime adds to launches",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="dispatch.json",
        headline=f"{min(added):.0f} to {max(added):.0f} µs a launch",
        reading="Segments that compute nearly nothing, so all time is that of the threads around them. *Beyond* is the time "
        "of a step less 40 µs for each of its launches.",
        table=table(("jobs", "segments of each", "a launch", "under `tensile.jit`", "an iteration, beyond"), rows),
        conclusions=(f"One job of steps of 20 to 27 ms takes, over the same plan under `tensile.jit`: {long}.",),
    )


def call() -> Section:
    found = read("call.json")
    rows = [
        ("reading the arguments", f"{found['signature_us'] / 1000:.2f} ms"),
        ("plain jit's whole call", f"{found['jit_us'] / 1000:.2f} ms"),
        ("our whole call", f"{found['whole_us'] / 1000:.2f} ms"),
    ]
    return Section(
        title="Time of a call",
        on=CPU,
        when=found["date"],
        command="make bench-call",
        file="call.json",
        headline=f"{found['whole_us'] / 1000:.2f} ms a call, plain jit {found['jit_us'] / 1000:.2f} ms",
        reading=f"A step that computes nearly nothing, with {found['arrays']} arrays of state.",
        table=table(("", "time"), rows),
    )


def decisions() -> Section:
    found = read("controller.json")
    cases = [case for case in found["cases"] if case["depth"] == 1]
    rows = [
        (
            f"{case['jobs']}",
            f"{case['us_per_launch']:.0f} µs",
            f"{case['us_per_launch_99']:.0f} µs",
            f"{case['longest_us'] / 1000:.2f} ms",
        )
        for case in cases
    ]
    most = cases[-1]
    return Section(
        title="Time to decide",
        on=CPU,
        when=day(found),
        command=found["command"],
        file="controller.json",
        headline=f"{cases[0]['us_per_launch']:.0f} to {most['us_per_launch']:.0f} µs a launch, for 1 to {most['jobs']} jobs",
        reading="The controller alone, in a simulation. Beside real training its caches are colder: "
        "[`jobs-cpu.json`](../benchmarks/results/jobs-cpu.json) notes it for each case.",
        table=table(("jobs", "a launch, mean", "99th percentile", "longest"), rows),
    )


SECTIONS = (under_one_budget, lower_budgets, soak, cluster, renewal, launches, call, decisions)
