"""`make gpu-times`: the time of a step as plain jit, in segments and in programs, with and without CUDA graphs over convolutions.

Each row is a case (`../case.py`): a step under a part of plain jit's peak, launched in one way. Plain jit's times are in the same
row, since it runs in the same process with the same settings. `graphs` are XLA's settings for CUDA graphs:

    default         XLA's own: graphs of fusions and matrix products
    convolutions    graphs of convolutions as well; then nearly all of a program is one graph
    kept            the same, and a graph stays as it is where the addresses of arrays change, by VMM, the only allocator that can

In the JSON, `pipelined` and `jit_pipelined` have what `../device_time.py` measures.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from benchmarks.cases import Row
from benchmarks.gpu.rows import Run, Wanted

_GPT2_SMALL = {"sequence_length": 1024, "vocabulary": 50257, "width": 768, "heads": 12, "layers": 12}
_STEPS: tuple[tuple[str, int | None, dict[str, Any], str], ...] = (
    ("resnet50", 16, {}, "50%"),
    ("gpt", 8, _GPT2_SMALL, "50%"),
    ("vgg16", 16, {}, "50%"),
    ("densenet121", 16, {}, "50%"),
    ("resnet50", 128, {}, "50%"),
    ("lstm", None, {}, "60%"),
    ("decoder", None, {}, "60%"),
    ("mixture_of_experts", None, {}, "60%"),
)
_SMALL: tuple[tuple[str, int | None, dict[str, Any], str], ...] = (
    ("gpt", 4, {"sequence_length": 32, "width": 32, "heads": 2, "layers": 2}, "50%"),
    ("lstm", None, {}, "60%"),
)
_WAYS = (
    ("segments", "row_major", "device"),
    ("one_program", "row_major", "any"),
    ("one_program", "auto", "any"),
    ("program", "row_major", "device"),
)
_GRAPHS = ("default", "convolutions", "kept")
_CONVOLUTIONS = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION"
_KEPT = tuple(f"--xla_gpu_command_buffer_update_mode={mode}" for mode in ("SKIP_TEMP", "NEVER_UPDATE"))  # newer XLA, older XLA


def run_of(*, small: bool) -> Run:
    """The cases, the most important first: each step in every way, then with graphs."""
    return Run(list(_wanted(small)), shown)


def _wanted(small: bool) -> Iterator[Wanted]:
    for graphs in _GRAPHS:
        flags, allocator = _settings(graphs)
        for model, batch_size, sizes, budget in _SMALL if small else _STEPS:
            for launch, layout, memory in _WAYS:
                asked = {"model": model, "batch_size": batch_size or "", "budget": budget, "launch": launch,
                         "state_layout": layout, "graphs": graphs}  # fmt: skip
                batch = () if batch_size is None else ("--batch-size", str(batch_size))
                options = (*batch, "--sizes", json.dumps(sizes), "--budget", budget, "--launch", launch,
                           "--state-layout", layout, "--state-memory", memory, "--steps", "3", "--pipelined",
                           "--allocator", allocator, *flags)  # fmt: skip
                yield Wanted(asked, lambda cases, m=model, given=options: cases.start(m, *given))


def _settings(graphs: str) -> tuple[tuple[str, ...], str]:
    """The options for XLA's flags, and the allocator."""
    match graphs:
        case "convolutions":
            return ("--xla-flags", _CONVOLUTIONS), "growing"
        case "kept":
            return ("--xla-flags", f"{_CONVOLUTIONS} {_kept_flag()}"), "vmm"
        case _:
            return (), "growing"


@cache
def _kept_flag() -> str:
    """The flag of the installed XLA: a process ends at once if its XLA does not know a flag. The last one is not tried."""
    for flag in _KEPT[:-1]:
        environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
        code = "import jax; jax.devices()"
        if not subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False).returncode:
            return flag
    return _KEPT[-1]


def shown(row: Row) -> str:
    """One line for a person."""
    ours, plain = row["pipelined"], row["jit_pipelined"]
    ratio = ours["pipelined_ms"] / plain["pipelined_ms"]
    return (
        f"{ours['pipelined_ms']:.2f} ms (plain jit: {plain['pipelined_ms']:.2f}, ratio {ratio:.3f}), "
        f"{row['launches']} launches, the GPU is busy for {_ms(ours['busy_ms'])} (plain jit: {_ms(plain['busy_ms'])}), "
        f"peak {row['peak_ratio']:.3f}"
    )


def _ms(busy: float | None) -> str:
    return "an unknown time" if busy is None else f"{busy:.2f} ms"
