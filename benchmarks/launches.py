"""`make bench-launches`: plans in segments and in one program, compiled for an NVIDIA H200. Nothing runs.

Each budget is kept three times: by launching every segment, and by one program that has the copies inside
(`launch="one_program"`, `tensile_jax/exec/compiling/program_code.py`), with row-major state and with state whose layouts XLA
chooses (`state_layout="auto"`; `laid_out` is how many tensors are then not row-major). State may be in host memory between two
steps. The step is planned in its fastest form (`exec/fitting/forms.py`). Each case begins as in a new process, and `rounds` is
how often something was compiled.

Peak and traffic (bytes that kernels read and write) are relative to plain jit's. Copies to and from the host are no kernels;
`copied_bytes` counts them. `host_launches` is what the host issues in a step: kernels, starts and ends of copies, and CUDA
graphs. XLA's dumps list the kernels, and XLA turns each run of at least five kernels of some types into one graph. With
convolutions among these types there are fewer launches (`with_convolutions`).

`python -m benchmarks.launches --model gpt` compiles one model's cases; the other rows stay. Writes
`benchmarks/results/launches-h200.json`.
"""

import json
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.h200_device import H200Compiler, h200, kernels, traced_for, traffic, write_compiled
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.async_copies import read_copies
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.segment_code import SegmentCode
from tensile_jax.exec.compiling.step import CompiledPlan, LaunchName, Options, step_of
from tensile_jax.exec.fitting.find_plan import fit
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.forms import fastest_form
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.exec.fitting.knowledge_store import STORE
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan_format import StateLayoutName
from tensile_jax.trace import TracedStep

_RESULTS = Path(__file__).parent / "results" / "launches-h200.json"
_CASES = (
    ("resnet50", 16, (0.75, 0.6, 0.5, 0.4, 0.3)),  # budgets are parts of plain jit's peak
    ("densenet121", 16, (0.75, 0.6, 0.5, 0.4, 0.3)),
    ("gpt", 64, (0.75, 0.6, 0.5, 0.4, 0.3)),
    ("vgg16", 16, (0.75, 0.6, 0.5)),
)
_ASKED: tuple[tuple[LaunchName, StateLayoutName], ...] = (
    ("segments", "row_major"),
    ("one_program", "row_major"),
    ("one_program", "auto"),
)
_THUNK = re.compile(r"( *)\d+: (k\w+)")
_TYPES = {
    "kKernel": "FUSION", "kCustomKernel": "FUSION", "kCopy": "FUSION", "kGemm": "CUBLAS", "kCublasLtMatmul": "CUBLASLT",
    "kCuDnn": "CUDNN", "kConvolution": "CONVOLUTION", "kCustomCall": "CUSTOM_CALL",
}  # fmt: skip
_IN_GRAPHS = frozenset({"FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN"})  # XLA's default
_LEAST_IN_A_GRAPH = 5  # XLA's default


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice([name for name, *_ in _CASES]), help="Only these.")
def main(models: tuple[str, ...]) -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    device = h200()
    kept = json.loads(_RESULTS.read_text())["cases"] if models else []
    rows: list[dict[str, Any]] = [row for row in kept if row["model"] not in models]
    for name, batch_size, shares in _CASES:
        if models and name not in models:
            continue
        traced = traced_for(MODELS[name](batch_size=batch_size), device)
        with tempfile.TemporaryDirectory() as folder:
            plain = traced.traced.lower(lowering_platforms=("cuda",)).compile(_dumped_to(folder))
            launches = _host_launches([Path(folder)])
        peak, moved = peak_of(plain), traffic(plain)
        known = {"model": name, "batch_size": batch_size}
        rows.append({**known, "launch": "plain jit", "kernels": len(list(kernels(plain))), **launches})
        print(json.dumps(rows[-1]), flush=True)
        for share in shares:
            for launch, layout in _ASKED:
                found = _case(traced, device, peak, moved, share, launch, layout)
                rows.append({**known, "share": share, "asked": launch, "state_layout": layout, **found})
                print(json.dumps(rows[-1]), flush=True)
    order = [name for name, *_ in _CASES]
    write_compiled(_RESULTS, "make bench-launches", cases=sorted(rows, key=lambda row: order.index(row["model"])))


def _case(
    traced: TracedStep, device: Any, peak: int, moved: int, share: float, launch: LaunchName, layout: StateLayoutName
) -> dict[str, Any]:
    STORE.forget()
    options = Options("auto", load_profile("h200"), "any", launch=launch, state_layout=layout)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiler = _DumpingCompiler(device, Path(folder))
        budget, known = Budget(int(share * peak), None), Knowledge(CompiledSizes(whole=peak))
        try:
            found = fit(fastest_form(Fitting(step_of(traced, options, compiler), budget, known)))
        except BudgetTooSmall as error:
            return {"floor_ratio": round(error.floor_bytes / peak, 4), "rounds": compiler.rounds}
        launches = _host_launches(compiler.folders_of(found))
    executables, plan = found.executables, found.plan
    assert executables is not None and not plan.whole  # every budget here is below plain jit's peak
    calls: list[Any] = [e.call for e in executables]  # compiled functions, which have a text
    copies = [read_copies(call.as_text()) for call in calls] if plan.barriers == "chain" else []
    return {
        "launch": plan.launch,
        "barriers": plan.barriers,
        "launches": len(executables),
        "segments": len(plan.segments),
        "laid_out": len(plan.layouts or ()),
        "rounds": compiler.rounds,
        "peak_ratio": round(plan.peak_bytes / peak, 4),
        "traffic_ratio": round(sum(traffic(e.call) for e in executables) / moved, 4),
        "kernels": sum(len(list(kernels(e.call))) for e in executables),
        "copies": sum(len(one.copies) for one in copies) or sum(e.kind in ("swap_in", "swap_out") for e in plan.events),
        "exposed_copies": sum(not copy.beside for one in copies for copy in one.copies),
        **launches,
        "copied_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        "predicted_step_us": found.launched.step_us,
        "notes": list(plan.notes),
        "seconds": round(time.perf_counter() - began, 1),
    }


class _DumpingCompiler(H200Compiler):
    """Has XLA dump what it makes of each code, into a folder of its own."""

    def __init__(self, device: Any, folder: Path) -> None:
        super().__init__(device)
        self._folder = folder
        self._folders: dict[object, Path] = {}

    def _options_for(self, code: SegmentCode) -> dict[str, Any] | None:
        folder = self._folders.setdefault(code.content, self._folder / str(len(self._folders)))
        return {**(super()._options_for(code) or {}), **_dumped_to(str(folder))}

    def folders_of(self, found: CompiledPlan) -> list[Path]:
        """The folders of a plan's executables, in their order."""
        of = {id(self._done[content]): folder for content, folder in self._folders.items() if content in self._done}
        return [of[id(executable)] for executable in found.executables or ()]


def _dumped_to(folder: str) -> dict[str, Any]:
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def _host_launches(folders: Sequence[Path]) -> dict[str, int]:
    """What the host issues in a step, from the dumps of its executables; also with convolutions in CUDA graphs."""
    every = [list(_thunks(folder)) for folder in folders]
    return {
        "thunks": sum(map(len, every)),
        "host_launches": sum(_issued(thunks, _IN_GRAPHS) for thunks in every),
        "with_convolutions": sum(_issued(thunks, _IN_GRAPHS | {"CONVOLUTION"}) for thunks in every),
    }


def _thunks(folder: Path) -> Iterator[str]:
    """The kinds of the thunks that the host issues one after another."""
    (dump,) = folder.glob("*thunk_sequence.txt")
    for line in dump.read_text().splitlines():
        match = _THUNK.match(line)
        if match is not None and not match[1]:
            yield match[2]


def _issued(thunks: Sequence[str], in_graphs: frozenset[str]) -> int:
    """How many graphs and single thunks the host issues."""
    issued = in_a_row = 0
    for kind in (*thunks, None):
        if kind is not None and _TYPES.get(kind) in in_graphs:
            in_a_row += 1
            continue
        issued += 1 if in_a_row >= _LEAST_IN_A_GRAPH else in_a_row
        issued += kind is not None
        in_a_row = 0
    return issued


if __name__ == "__main__":
    main()
