"""The experiments, measured on this machine's device: `python -m benchmarks.paper measure`, or `make paper`.

On a GPU the models have the sizes of the paper. On a CPU they are smaller (`_CPU_SIZES`), so that all of it takes less than
40 minutes on two cores. With `--small`, everything that a GPU measures is tried out in sizes for which a CPU takes minutes. Every
workload is measured in a process of its own (`benchmarks/case.py`), in which the steps of plain jit and of the planned step
alternate; several jobs share one in `several.py`. What several experiments need is measured once.

On a CPU, the time of a step is that of one that is waited for. On a GPU it is that of steps that are issued one after another, as
in a training, and plans are not renewed.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from benchmarks.cases import Cases, Row
from benchmarks.paper.metrics import metrics
from benchmarks.paper.several import AT_THEIR_LEAST

Extent = Literal["cpu", "gpu", "small"]


class Measured(NamedTuple):
    """What runs the cases, and how much is measured: on a CPU a part, on a GPU all, or all in small sizes."""

    cases: Cases
    extent: Extent


_BATCH_SIZE = {"cpu": 16, "gpu": 16, "small": 2}
_REPETITIONS = {"cpu": 3, "gpu": 3, "small": 1}
_CPU_SIZES: Mapping[str, dict[str, Any]] = {
    "vgg16": {"image_size": 64, "width": 32},
    "inceptionv3": {"image_size": 96, "width": 16, "blocks": [1, 0, 0]},
    "inceptionv4": {"image_size": 96, "width": 16, "blocks": [1, 0, 0]},
    "resnet50": {"image_size": 96, "width": 32, "blocks": [1, 1, 1, 1]},
    "densenet121": {"image_size": 96, "blocks": [2, 2, 2, 2]},
    "bert": {"sequence_length": 128, "width": 256, "layers": 4},
}
_SMALL_SIZES: Mapping[str, dict[str, Any]] = {
    **_CPU_SIZES,
    "vgg16": {"image_size": 32, "width": 8},
    "resnet50": {"image_size": 32, "width": 8, "blocks": [1, 1, 1, 1]},
    "densenet121": {"image_size": 32, "blocks": [1, 1, 1, 1]},
    "bert": {"sequence_length": 32, "width": 32, "layers": 2},
    "gpt": {"sequence_length": 32, "width": 32, "layers": 2},
}
_BERT_BASE = {"sequence_length": 512, "vocabulary": 30522, "width": 768, "heads": 12, "layers": 12}
_GPT2_SMALL = {"sequence_length": 1024, "vocabulary": 50257, "width": 768, "heads": 12, "layers": 12}
_LARGE = {"bert": _BERT_BASE, "gpt": _GPT2_SMALL}
_SHARES = {"cpu": (75, 50), "gpu": (75, 50, 40, 30), "small": (75,)}  # per cent of plain jit's peak
_FIVE = ("vgg16", "inceptionv3", "inceptionv4", "resnet50", "densenet121")
_BATCH_SIZES = {"cpu": (4, 16, 64), "gpu": (4, 8, 16, 32, 64), "small": (2, 4)}
_SEVERAL = {"cpu": ("vgg16",), "gpu": _FIVE, "small": ("vgg16",)}
_MOST_JOBS = {"cpu": 4, "gpu": 4, "small": 2}
_BATCHES = {"cpu": ("vgg16", "resnet50"), "gpu": _FIVE, "small": ("vgg16",)}
_MIXED = {"cpu": _FIVE, "gpu": _FIVE, "small": ("vgg16", "resnet50")}
_SECONDS = {"cpu": 1.5, "gpu": 3, "small": 0.5}  # for which several jobs are measured in each repetition
_LEAST_SPEED = 0.6
_STEPS = 6  # of the policies whose plan is fixed: (steps - 1) * 2 are timed
_FOLLOWED = 8  # of those whose plan may be renewed
_RENEW_ABOVE = 0.3
_SINGLE = frozenset({"unplanned", "tensile", "vdnn", "checkpoint", "capuchin", "auto"})
_LAUNCHES = {"cpu": {}, "gpu": {"gpt": (8, "50%"), "resnet50": (16, "50%")}, "small": {"gpt": (2, "60%")}}
# batches that keep a large GPU busy
_BUSY = {"cpu": {}, "gpu": {"gpt": 8, "resnet50": 128, "inceptionv3": 64, "densenet121": 64}, "small": {"vgg16": 4}}
_BUSY_SHARES = (50, 30)
_PLAIN_BATCH = {"cpu": 4, "gpu": 16, "small": 2}  # of which larger batches are multiples
_TIMES_PLAIN = {"cpu": (2, 3, 4.5, 6.5, 10, 15), "gpu": (2, 4, 8, 12, 15), "small": (2,)}


def sizes_of(model: str, extent: Extent) -> dict[str, Any]:
    """The keyword arguments with which the model is made."""
    match extent:
        case "cpu":
            return _CPU_SIZES[model]
        case "gpu":
            return _LARGE.get(model, {})
        case "small":
            return _SMALL_SIZES[model]


def _start(on: Measured, model: str, policy: str, budget: str, batch_size: int | None = None, *, launch: str = "auto",
           without_plain: bool = False) -> Future[Row]:  # fmt: skip
    usual = _BATCH_SIZE[on.extent]
    followed = on.extent == "cpu" and policy in ("tensile", "auto") and batch_size in (None, usual) and budget != "none"
    options = ("--batch-size", str(batch_size or usual), "--sizes", json.dumps(sizes_of(model, on.extent)), "--budget", budget,
               "--policy", policy, "--steps", str(_FOLLOWED if followed else _STEPS), "--state-memory", "any")  # fmt: skip
    renewed = ("--renew-above", str(_RENEW_ABOVE)) if followed else ()
    pipelined = () if on.extent == "cpu" else ("--pipelined",)
    launched = ("--launch", launch) if launch != "auto" else ()
    alone = ("--without-plain",) if without_plain else ()
    return on.cases.start(model, *options, *renewed, *pipelined, *launched, *alone)


def _case(on: Measured, model: str, policy: str, budget: str, batch_size: int | None = None) -> Row:
    return _start(on, model, policy, budget, batch_size).result()


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
    busy = one and plain and one["busy_ms"] and plain["busy_ms"]
    on_gpu = {"busy_eor": round(one["busy_ms"] / plain["busy_ms"], 4) if busy else None,
              "waited_eor": round(median(after or before) / jit_us, 4),
              "jit_pipelined_ms": round(plain["pipelined_ms"], 3), "jit_busy_ms": round(plain["busy_ms"], 3) if busy else None,
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


def single(model: str, on: Measured) -> dict[str, Row]:
    """Experiments 1 to 3: every policy with as little memory as it can do with; Capuchin and `auto` at TENSILE's budget."""
    asked = {"unplanned": ("auto", "none"), "tensile": ("tensile", "least"), "vdnn": ("vdnn", "least"),
             "checkpoint": ("checkpoint", "least")}  # fmt: skip
    started = {name: _start(on, model, *options) for name, options in asked.items()}
    tensile = started["tensile"].result()
    same = str(tensile["peak_bytes"]) if "peak_bytes" in tensile else "least"
    for policy in ("capuchin", "auto") if same != "least" else ("capuchin",):
        started[policy] = _start(on, model, policy, same)
    found = {name: _figures(row.result()) for name, row in started.items()}
    for policy in ("capuchin", "auto"):
        if "too_small" in found.get(policy, {}):
            found[policy] = _figures(_case(on, model, policy, "least")) | {"at_its_least": True}
    return found


def curve(model: str, on: Measured) -> list[Row]:
    """Experiment 8: `auto` under budgets that are shares of plain jit's peak."""
    started = [(share, _start(on, model, "auto", f"{share}%")) for share in _SHARES[on.extent]]
    return [{"share": share / 100, **_figures(row.result())} for share, row in started]


def batch(model: str, on: Measured) -> list[Row]:
    """Experiment 6: TENSILE with as little memory as it can do with, and `auto` with that peak, for several batch sizes."""
    rows: list[Row] = []
    for size in _BATCH_SIZES[on.extent] if model in _BATCHES[on.extent] else ():
        tensile = _figures(_case(on, model, "tensile", "least", size))
        rows.append({"batch_size": size, "tensile": tensile})
        if "peak_bytes" in tensile:
            rows[-1]["auto"] = _figures(_case(on, model, "auto", str(tensile["peak_bytes"]), size))
    return rows


def busy(on: Measured) -> dict[str, Row]:
    """`auto` with batches that keep a large GPU busy. On a CPU, that is every batch, and nothing is measured."""
    wanted = [(m, size, share) for m, size in _BUSY[on.extent].items() for share in _BUSY_SHARES]
    started = [(f"{m} {size} {share}%", _start(on, m, "auto", f"{share}%", size)) for m, size, share in wanted]
    return {name: _figures(row.result()) for name, row in started}


def launches(on: Measured) -> dict[str, Row]:
    """Segments beside programs of them. On a CPU there are no programs."""
    wanted = [(m, *one, how) for m, one in _LAUNCHES[on.extent].items() for how in ("segments", "program")]
    started = [(f"{m} {how}", _start(on, m, "auto", budget, size, launch=how)) for m, size, budget, how in wanted]
    return {name: _figures(row.result()) for name, row in started}


def scalability(model: str, on: Measured) -> dict[str, Row]:
    """Experiments 4 and 7: one to four equal jobs, by their number."""
    numbers = range(1, _MOST_JOBS[on.extent] + 1) if model in _SEVERAL[on.extent] else ()
    return {str(jobs): _several([model] * jobs, on) for jobs in numbers}


def mixed(on: Measured) -> Row:
    """Experiment 5: the five models as jobs that begin one after another, each time in another order."""
    least: dict[str, list[int]] = {}
    for policy in AT_THEIR_LEAST:
        rows = [_case(on, model, policy, "least") for model in _MIXED[on.extent]]
        if all("peak_bytes" in row for row in rows):
            least[policy] = [row["peak_bytes"] for row in rows]
    return _several(list(_MIXED[on.extent]), on, "--apart", "1.5", "--budget-share", "0.55", "--least", json.dumps(least))


def _several(models: list[str], on: Measured, *options: str) -> Row:
    jobs = [json.dumps({"model": m, "batch_size": _BATCH_SIZE[on.extent], "sizes": sizes_of(m, on.extent)}) for m in models]
    how = ("--repetitions", str(_REPETITIONS[on.extent]), "--seconds", str(_SECONDS[on.extent]))
    row = on.cases.start_program("benchmarks.paper.several", *jobs, *how, *options).result()
    return {key: value for key, value in row.items() if key != "case"}


def largest(on: Measured) -> Row:
    """Experiment 8: the largest batch of the encoder in the memory in which plain jit trains `plain` samples at once.

    Batches grow as `_TIMES_PLAIN` says, as long as the step fits under the budget and trains at least `_LEAST_SPEED` of plain
    jit's samples a second, both measured.
    """
    plain = _PLAIN_BATCH[on.extent]
    unplanned = _case(on, "bert", "auto", "none", plain)
    if "jit_peak_bytes" not in unplanned:
        return {"error": unplanned.get("error")}
    memory = unplanned["jit_peak_bytes"]
    policies = ("checkpoint", "tensile", "auto")
    sizes = [int(plain * times) for times in _TIMES_PLAIN[on.extent]]
    if on.cases.at_once > 1:
        started = [_start(on, "bert", p, str(memory), size, without_plain=True) for size in sizes for p in policies]
        for one in started:
            one.result()
    if "time_ratio" not in unplanned:
        return {"error": unplanned.get("error")}
    speed = plain / _step_us(unplanned, "jit") * 1e6
    found: Row = {"memory_bytes": memory, "least_speed": _LEAST_SPEED, "model": "bert", **sizes_of("bert", on.extent)}
    found["methods"] = {"jit": {"batch_size": plain, "samples_per_s": round(speed, 1), "times_jit": 1.0, "speed": 1.0}}
    for policy in policies:
        best = found["methods"]["jit"]
        for size in sizes:
            row = _start(on, "bert", policy, str(memory), size, without_plain=True).result()
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


OF_A_MODEL: Mapping[str, Callable[[str, Measured], Any]] = {
    "single": single,
    "curve": curve,
    "scalability": scalability,
    "batch": batch,
}
OF_A_DEVICE: Mapping[str, Callable[[Measured], Any]] = {"largest": largest, "mixed": mixed, "busy": busy, "launches": launches}

IN_ORDER = ("single", "curve", "largest", "scalability", "mixed", "batch", "launches", "busy")
"""All experiments, those first of which figures matter most where there is not the time for all of them."""

MODELS: Mapping[Extent, tuple[str, ...]] = {
    "cpu": _FIVE,
    "gpu": ("resnet50", "inceptionv3", "inceptionv4", "densenet121", "vgg16"),  # VGG-16 last: it has been measured
    "small": ("vgg16",),
}


def is_complete(experiment: str, model: str | None, found: Any, extent: Extent) -> bool:
    """Whether an experiment's figures (of this model, if it is one of a model) are all there, and none of them is an error."""
    if found is None or _has_error(found):
        return False
    match experiment:
        case "single":
            return _SINGLE <= set(found)
        case "curve":
            return {share / 100 for share in _SHARES[extent]} <= {row["share"] for row in found}
        case "batch":
            return model not in _BATCHES[extent] or set(_BATCH_SIZES[extent]) <= {row["batch_size"] for row in found}
        case "scalability":
            return model not in _SEVERAL[extent] or len(found) >= _MOST_JOBS[extent]
        case _:
            return True


def _has_error(found: Any) -> bool:
    if isinstance(found, list):
        return any(map(_has_error, found))
    return isinstance(found, dict) and ("error" in found or any(map(_has_error, found.values())))
