"""The experiments, measured on this machine's device: `python -m benchmarks.paper measure`, or `make paper`.

On a GPU the models have the sizes of the paper. On a CPU they are smaller (`_CPU_SIZES`), so that all of it takes less than
40 minutes on two cores. Every workload is measured in a process of its own (`benchmarks/case.py`), in which the steps of plain
jit and of the planned step alternate; several jobs share one in `several.py`. What several experiments need is measured once.

On a CPU, the time of a step is that of one that is waited for. On a GPU it is that of steps that are issued one after another, as
in a training, and plans are not renewed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from statistics import mean, median
from typing import Any

import jax

from benchmarks.paper.cases import Cases, Row
from benchmarks.paper.metrics import metrics
from benchmarks.paper.several import AT_THEIR_LEAST

BATCH_SIZE = 16
REPETITIONS = 3
_CPU_SIZES: Mapping[str, dict[str, Any]] = {
    "vgg16": {"image_size": 64, "width": 32},
    "inceptionv3": {"image_size": 96, "width": 16, "blocks": [1, 0, 0]},
    "inceptionv4": {"image_size": 96, "width": 16, "blocks": [1, 0, 0]},
    "resnet50": {"image_size": 96, "width": 32, "blocks": [1, 1, 1, 1]},
    "densenet121": {"image_size": 96, "blocks": [2, 2, 2, 2]},
    "bert": {"sequence_length": 128, "width": 256, "layers": 4},
}
_BERT_BASE = {"sequence_length": 512, "vocabulary": 30522, "width": 768, "heads": 12, "layers": 12}
_GPT2_SMALL = {"sequence_length": 1024, "vocabulary": 50257, "width": 768, "heads": 12, "layers": 12}
_LARGE = {"bert": _BERT_BASE, "gpt": _GPT2_SMALL}
_SHARES = {"cpu": (75, 50), "gpu": (75, 50, 40, 30)}  # per cent of plain jit's peak
_BATCH_SIZES = {"cpu": (4, 16, 64), "gpu": (4, 8, 16, 32, 64)}
_SEVERAL = {"cpu": ("vgg16",), "gpu": ("vgg16", "inceptionv3", "inceptionv4", "resnet50", "densenet121")}
_BATCHES = {"cpu": ("vgg16", "resnet50"), "gpu": _SEVERAL["gpu"]}
_MIXED = _SEVERAL["gpu"]
_SECONDS = {"cpu": 1.5, "gpu": 3}  # for which several jobs are measured in each repetition
_LEAST_SPEED = 0.6
_STEPS = 6  # of the policies whose plan is fixed: (steps - 1) * 2 are timed
_FOLLOWED = 8  # of those whose plan may be renewed
_RENEW_ABOVE = 0.3
_LAUNCHES = {"gpt": (8, "50%"), "resnet50": (16, "50%")}
_BUSY = {"gpt": 8, "resnet50": 128, "inceptionv3": 64, "densenet121": 64}  # batches that keep a large GPU busy
_BUSY_SHARES = (50, 30)
_TIMES_PLAIN = {"cpu": (2, 3, 4.5, 6.5, 10, 15), "gpu": (2, 4, 8, 12, 15)}


def kind() -> str:
    """`cpu` or `gpu`."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "gpu"


def sizes_of(model: str) -> dict[str, Any]:
    """The keyword arguments with which the model is made on this kind of device."""
    if kind() == "cpu":
        return _CPU_SIZES[model]
    return _LARGE.get(model, {})


def _start(cases: Cases, model: str, policy: str, budget: str, batch_size: int = BATCH_SIZE, *, launch: str = "auto",
           without_plain: bool = False) -> Future[Row]:  # fmt: skip
    followed = kind() == "cpu" and policy in ("tensile", "auto") and batch_size == BATCH_SIZE and budget != "none"
    options = ("--batch-size", str(batch_size), "--sizes", json.dumps(sizes_of(model)), "--budget", budget, "--policy", policy,
               "--steps", str(_FOLLOWED if followed else _STEPS), "--state-memory", "any")  # fmt: skip
    renewed = ("--renew-above", str(_RENEW_ABOVE)) if followed else ()
    launched = ("--launch", launch) if launch != "auto" else ()
    return cases.start(model, *options, *renewed, *launched, *(("--without-plain",) if without_plain else ()))


def _case(cases: Cases, model: str, policy: str, budget: str, batch_size: int = BATCH_SIZE) -> Row:
    return _start(cases, model, policy, budget, batch_size).result()


def _figures(row: Row) -> Row:
    """The paper's metrics of a case, and where they come from; `error` or `too_small` if there are none."""
    if "time_ratio" not in row:
        return {key: row[key] for key in ("error", "too_small", "budget_bytes") if key in row}
    peak = row["allocator_peak_bytes"] or row["peak_bytes"]
    jit_us = row["jit_step_us"]
    last = row["plans_before_steps"][-1]
    after = [us for us, plans in zip(row["steps_us"], row["plans_before_steps"], strict=True) if plans == last]
    before = [us for us, plans in zip(row["steps_us"], row["plans_before_steps"], strict=True) if plans == 1]
    # the first two calls may compile, and the first step of a plan touches its memory for the first time
    before, after = before[2:] or before, after[1:] if last > 1 else after[2:]
    one, plain = row.get("pipelined"), row.get("jit_pipelined")
    eor = one["pipelined_ms"] / plain["pipelined_ms"] if one and plain else median(after or before) / jit_us
    on_gpu = {"busy_eor": round(one["busy_ms"] / plain["busy_ms"], 4), "waited_eor": round(median(after or before) / jit_us, 4),
              "jit_pipelined_ms": round(plain["pipelined_ms"], 3), "jit_busy_ms": round(plain["busy_ms"], 3),
              "account_peak_bytes": row["peak_bytes"], "launches": row["launches"],
              "predicted_ms": round(row["predicted_step_us"] / 1e3, 3)} if one and plain else {}  # fmt: skip
    whole, cold = mean([*before, *after] if last > 1 else after or before) / jit_us, median(before) / jit_us
    return {
        **metrics(1 - peak / row["jit_peak_bytes"], eor),
        **on_gpu,
        "whole_eor": round(eor if on_gpu else whole, 4),
        "cold_eor": round(eor if on_gpu else cold, 4),
        "renewals": last - 1,
        "first_eor": round(row["first_step_us"] / jit_us, 4),
        "plan_s": round(row["trace_to_plan_s"], 3),
        "peak_bytes": peak,
        "jit_peak_bytes": row["jit_peak_bytes"],
        "jit_step_us": round(jit_us, 1),
        "budget_bytes": row["budget_bytes"],
        "swapped_bytes": row["swapped_bytes"],
        "stall": round(row["stall_us"] / jit_us, 4),
        "recomputed": round(row["recomputed_us"] / jit_us, 4),
        "segments": row["segments"],
        "loss_difference": row["first_loss_difference"],
    }


def single(model: str, cases: Cases) -> dict[str, Row]:
    """Experiments 1 to 3: every policy with as little memory as it can do with; Capuchin and `auto` at TENSILE's budget."""
    asked = {"unplanned": ("auto", "none"), "tensile": ("tensile", "least"), "vdnn": ("vdnn", "least"),
             "checkpoint": ("checkpoint", "least")}  # fmt: skip
    started = {name: _start(cases, model, *options) for name, options in asked.items()}
    tensile = started["tensile"].result()
    same = str(tensile["peak_bytes"]) if "peak_bytes" in tensile else "least"
    for policy in ("capuchin", "auto") if same != "least" else ("capuchin",):
        started[policy] = _start(cases, model, policy, same)
    found = {name: _figures(row.result()) for name, row in started.items()}
    for policy in ("capuchin", "auto"):
        if "too_small" in found.get(policy, {}):
            found[policy] = _figures(_case(cases, model, policy, "least")) | {"at_its_least": True}
    return found


def curve(model: str, cases: Cases) -> list[Row]:
    """Experiment 8: `auto` under budgets that are shares of plain jit's peak."""
    started = [(share, _start(cases, model, "auto", f"{share}%")) for share in _SHARES[kind()]]
    return [{"share": share / 100, **_figures(row.result())} for share, row in started]


def batch(model: str, cases: Cases) -> list[Row]:
    """Experiment 6: TENSILE with as little memory as it can do with, and `auto` with that peak, for several batch sizes."""
    rows: list[Row] = []
    for size in _BATCH_SIZES[kind()] if model in _BATCHES[kind()] else ():
        tensile = _figures(_case(cases, model, "tensile", "least", size))
        rows.append({"batch_size": size, "tensile": tensile})
        if "peak_bytes" in tensile:
            rows[-1]["auto"] = _figures(_case(cases, model, "auto", str(tensile["peak_bytes"]), size))
    return rows


def busy(cases: Cases) -> dict[str, Row]:
    """`auto` with batches that keep a large GPU busy. On a CPU, that is every batch, and nothing is measured."""
    wanted = [(m, size, share) for m, size in _BUSY.items() for share in _BUSY_SHARES] if kind() == "gpu" else []
    started = [(f"{m} {size} {share}%", _start(cases, m, "auto", f"{share}%", size)) for m, size, share in wanted]
    return {name: _figures(row.result()) for name, row in started}


def launches(cases: Cases) -> dict[str, Row]:
    """Segments beside programs of them. On a CPU there are no programs."""
    wanted = [(m, *one, how) for m, one in _LAUNCHES.items() for how in ("segments", "program")] if kind() == "gpu" else []
    started = [(f"{m} {how}", _start(cases, m, "auto", budget, size, launch=how)) for m, size, budget, how in wanted]
    return {name: _figures(row.result()) for name, row in started}


def scalability(model: str, cases: Cases) -> dict[str, Row]:
    """Experiments 4 and 7: one to four equal jobs, by their number."""
    numbers = range(1, 5) if model in _SEVERAL[kind()] else ()
    return {str(jobs): _several([model] * jobs, cases) for jobs in numbers}


def mixed(cases: Cases) -> Row:
    """Experiment 5: the five models as jobs that begin one after another, each time in another order."""
    least: dict[str, list[int]] = {}
    for policy in AT_THEIR_LEAST:
        rows = [_case(cases, model, policy, "least") for model in _MIXED]
        if all("peak_bytes" in row for row in rows):
            least[policy] = [row["peak_bytes"] for row in rows]
    return _several(list(_MIXED), cases, "--apart", "1.5", "--budget-share", "0.55", "--least", json.dumps(least))


def _several(models: list[str], cases: Cases, *options: str) -> Row:
    jobs = [json.dumps({"model": model, "batch_size": BATCH_SIZE, "sizes": sizes_of(model)}) for model in models]
    command = [
        sys.executable,
        "-m",
        "benchmarks.paper.several",
        *jobs,
        "--repetitions",
        str(REPETITIONS),
        "--seconds",
        str(_SECONDS[kind()]),
        "--cache",
        str(cases.folder),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def largest(cases: Cases) -> Row:
    """Experiment 8: the largest batch of the encoder in the memory in which plain jit trains `plain` samples at once.

    Batches grow as `_TIMES_PLAIN` says, as long as the step fits under the budget and trains at least `_LEAST_SPEED` of plain
    jit's samples a second, both measured.
    """
    plain = 4 if kind() == "cpu" else 16
    unplanned = _case(cases, "bert", "auto", "none", plain)
    if "jit_peak_bytes" not in unplanned:
        return {"error": unplanned.get("error")}
    memory = unplanned["jit_peak_bytes"]
    policies = ("checkpoint", "tensile", "auto")
    sizes = [int(plain * times) for times in _TIMES_PLAIN[kind()]]
    if cases.at_once > 1:
        started = [_start(cases, "bert", p, str(memory), size, without_plain=True) for size in sizes for p in policies]
        for one in started:
            one.result()
    if "time_ratio" not in unplanned:
        return {"error": unplanned.get("error")}
    speed = plain / _step_us(unplanned, "jit") * 1e6
    found: Row = {"memory_bytes": memory, "least_speed": _LEAST_SPEED, "model": "bert", **sizes_of("bert")}
    found["methods"] = {"jit": {"batch_size": plain, "samples_per_s": round(speed, 1), "times_jit": 1.0, "speed": 1.0}}
    for policy in policies:
        best = found["methods"]["jit"]
        for size in sizes:
            row = _start(cases, "bert", policy, str(memory), size, without_plain=True).result()
            if "step_us" not in row:
                break
            faster = size / _step_us(row) * 1e6
            if faster < _LEAST_SPEED * speed:
                break
            best = {"batch_size": size, "samples_per_s": round(faster, 1), "times_jit": round(size / plain, 3),
                    "speed": round(faster / speed, 3), "peak_bytes": row["peak_bytes"]}  # fmt: skip
        found["methods"][policy] = best
    return found


def _step_us(row: Row, whose: str = "") -> float:
    """The time of a step: of those that are not waited for, where these were measured."""
    key = f"{whose}_pipelined" if whose else "pipelined"
    if row.get(key):
        return row[key]["pipelined_ms"] * 1e3
    return row[f"{whose}_step_us" if whose else "step_us"]


OF_A_MODEL: Mapping[str, Callable[[str, Cases], Any]] = {
    "single": single,
    "curve": curve,
    "batch": batch,
    "scalability": scalability,
}
OF_A_DEVICE: Mapping[str, Callable[[Cases], Any]] = {"mixed": mixed, "largest": largest, "busy": busy, "launches": launches}
