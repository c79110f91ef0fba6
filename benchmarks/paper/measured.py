"""The experiments, measured on this machine's device: `python -m benchmarks.paper measure`, or `make paper`.

On a GPU the models have the sizes of the paper. On a CPU they are smaller (`_CPU_SIZES`), so that all of it takes less than
40 minutes on two cores. Every workload is measured in a process of its own (`benchmarks/case.py`), in which the steps of plain
jit and of the planned step alternate; several jobs share one in `several.py`. What several experiments need is measured once.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from statistics import mean, median
from typing import Any

import jax

from benchmarks.paper.metrics import metrics
from benchmarks.paper.several import AT_THEIR_LEAST
from benchmarks.run import run_case

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
_SHARES = {"cpu": (75, 50), "gpu": (90, 75, 60, 50, 40, 30, 25)}  # per cent of plain jit's peak
_BATCH_SIZES = {"cpu": (4, 16, 64), "gpu": (4, 8, 16, 32, 64)}
_SEVERAL = {"cpu": ("vgg16",), "gpu": ("vgg16", "inceptionv3", "inceptionv4", "resnet50", "densenet121")}
_BATCHES = {"cpu": ("vgg16", "resnet50"), "gpu": _SEVERAL["gpu"]}
_MIXED = _SEVERAL["gpu"]
_SECONDS = {"cpu": 2, "gpu": 3}  # for which several jobs are measured in each repetition
_LEAST_SPEED = 0.6
_STEPS = 6  # of the policies whose plan is fixed: (steps - 1) * 2 are timed
_FOLLOWED = 8  # of those whose plan may be renewed
_RENEW_ABOVE = 0.3

Row = dict[str, Any]


def kind() -> str:
    """`cpu` or `gpu`."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "gpu"


def sizes_of(model: str) -> dict[str, Any]:
    """The keyword arguments with which the model is made on this kind of device."""
    if kind() == "cpu":
        return _CPU_SIZES[model]
    return _BERT_BASE if model == "bert" else {}


@cache
def _case(model: str, policy: str, budget: str, cache_folder: str, batch_size: int = BATCH_SIZE) -> Row:
    followed = policy in ("tensile", "auto") and batch_size == BATCH_SIZE and budget != "none"
    arguments = (model, "--batch-size", str(batch_size), "--sizes", json.dumps(sizes_of(model)), "--budget", budget, "--policy",
                 policy, "--steps", str(_FOLLOWED if followed else _STEPS), "--state-memory", "any")  # fmt: skip
    renewed = ("--renew-above", str(_RENEW_ABOVE)) if followed else ()
    return run_case((*arguments, *renewed), "--cache", cache_folder)


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
    updated = median(after or before) / jit_us
    msr, eor = 1 - peak / row["jit_peak_bytes"], updated
    return {
        **metrics(msr, eor),
        "whole_eor": round(mean([*before, *after] if last > 1 else after or before) / jit_us, 4),
        "cold_eor": round(median(before) / jit_us, 4),
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


def single(model: str, cache_folder: str) -> dict[str, Row]:
    """Experiments 1 to 3: every policy with as little memory as it can do with; Capuchin and `auto` at TENSILE's budget."""
    tensile = _figures(_case(model, "tensile", "least", cache_folder))
    found = {"tensile": tensile}
    asked = {"unplanned": ("auto", "none"), "vdnn": ("vdnn", "least"), "checkpoint": ("checkpoint", "least"),
             "capuchin": ("capuchin", "least")}  # fmt: skip
    if "peak_bytes" in tensile:
        asked |= {"auto": ("auto", str(tensile["peak_bytes"])), "capuchin": ("capuchin", str(tensile["peak_bytes"]))}
    for name, (policy, budget) in asked.items():
        found[name] = _figures(_case(model, policy, budget, cache_folder))
    for policy in ("capuchin", "auto"):
        if "too_small" in found.get(policy, {}):
            found[policy] = _figures(_case(model, policy, "least", cache_folder)) | {"at_its_least": True}
    return found


def curve(model: str, cache_folder: str) -> list[Row]:
    """Experiment 8: `auto` under budgets that are shares of plain jit's peak."""
    return [{"share": share / 100, **_figures(_case(model, "auto", f"{share}%", cache_folder))} for share in _SHARES[kind()]]


def batch(model: str, cache_folder: str) -> list[Row]:
    """Experiment 6: TENSILE with as little memory as it can do with, and `auto` with that peak, for several batch sizes."""
    rows: list[Row] = []
    for size in _BATCH_SIZES[kind()] if model in _BATCHES[kind()] else ():
        tensile = _figures(_case(model, "tensile", "least", cache_folder, size))
        rows.append({"batch_size": size, "tensile": tensile})
        if "peak_bytes" in tensile:
            rows[-1]["auto"] = _figures(_case(model, "auto", str(tensile["peak_bytes"]), cache_folder, size))
    return rows


def scalability(model: str, cache_folder: str) -> dict[str, Row]:
    """Experiments 4 and 7: one to four equal jobs, by their number."""
    numbers = range(1, 5) if model in _SEVERAL[kind()] else ()
    return {str(jobs): _several([model] * jobs, cache_folder) for jobs in numbers}


def mixed(cache_folder: str) -> Row:
    """Experiment 5: the five models as jobs that begin one after another, each time in another order."""
    least: dict[str, list[int]] = {}
    for policy in AT_THEIR_LEAST:
        rows = [_case(model, policy, "least", cache_folder) for model in _MIXED]
        if all("peak_bytes" in row for row in rows):
            least[policy] = [row["peak_bytes"] for row in rows]
    return _several(list(_MIXED), cache_folder, "--apart", "1.5", "--budget-share", "0.55", "--least", json.dumps(least))


def _several(models: list[str], cache_folder: str, *options: str) -> Row:
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
        cache_folder,
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def largest(cache_folder: str) -> Row:
    """Experiment 8: the largest batch of the encoder in the memory in which plain jit trains `jit` samples at once.

    Batches grow by half as long as the step fits under the budget and trains at least `_LEAST_SPEED` of plain jit's samples a
    second, both measured.
    """
    plain = 4 if kind() == "cpu" else 16
    unplanned = _case("bert", "auto", "none", cache_folder, plain)
    if "time_ratio" not in unplanned:
        return {"error": unplanned.get("error")}
    memory, speed = unplanned["jit_peak_bytes"], plain / unplanned["jit_step_us"] * 1e6
    found: Row = {"memory_bytes": memory, "least_speed": _LEAST_SPEED, "model": "bert", **sizes_of("bert")}
    found["methods"] = {"jit": {"batch_size": plain, "samples_per_s": round(speed, 1), "times_jit": 1.0, "speed": 1.0}}
    for policy in ("checkpoint", "tensile", "auto"):
        size, best = plain, found["methods"]["jit"]
        while True:
            size = size * 3 // 2
            row = _case("bert", policy, str(memory), cache_folder, size)
            if "time_ratio" not in row:
                break
            faster = size / row["step_us"] * 1e6
            if faster < _LEAST_SPEED * speed:
                break
            best = {"batch_size": size, "samples_per_s": round(faster, 1), "times_jit": round(size / plain, 3),
                    "speed": round(faster / speed, 3), "peak_bytes": row["peak_bytes"]}  # fmt: skip
        found["methods"][policy] = best
    return found


OF_A_MODEL: Mapping[str, Callable[[str, str], Any]] = {
    "single": single,
    "curve": curve,
    "batch": batch,
    "scalability": scalability,
}
OF_A_DEVICE: Mapping[str, Callable[[str], Any]] = {"mixed": mixed, "largest": largest}
