"""`make bench-allocator`: the model of XLA's allocator beside what runs on an H200 saw, and plans by that model. Nothing runs.

First, the peaks of runs. `results/nvidia-h200/replayed-plans.json` has the plans of runs whose peak by the allocator is on file:
each was made again by the version of this package that had made it, from the same settings, with workspaces compiled for an H200.
It is replayed (`plan/result/allocator_replay.py`) for as many iterations as were measured, on an allocator that grows as that of
the run did. No constant is fitted. Where the peak of the replayed plan by the package's account is not the measured one, the plan
is not quite the one that ran.

Then, plans. For shares of plain jit's predicted peak, `auto` plans twice: for a device that hands out what it is asked for, and
for the allocator. The tables show what the allocator would have in use under either plan, and the times of both.
`--only runs` does the first part, which takes seconds. Writes `benchmarks/results/allocator.json`.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click
import jax
import msgspec

from tensile_jax.device_profiles import load_profile
from tensile_jax.installed_models import MODELS
from tensile_jax.ir import Carried, Graph, Tensor, TensorId
from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.result.allocator_replay import InUse, in_use
from tensile_jax.plan.result.instructions import FinishSwapOut, Free, Instruction, Launch, StartSwapIn, StartSwapOut, decode
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan.result.segment_sizes import with_sizes
from tensile_jax.trace import trace_step

RUNS = Path(__file__).parent / "results" / "nvidia-h200" / "replayed-plans.json"
_RESULTS = Path(__file__).parent / "results" / "allocator.json"
_MODELS = (("resnet50", 16), ("vgg16", 16), ("densenet121", 16), ("gpt", 64))
_LATER = (3, 20)  # iterations
_SHARES = (0.75, 0.6, 0.5, 0.4)


class Act(msgspec.Struct, frozen=True):
    """An instruction of a plan: the tensors that it brings to the device and frees there."""

    kind: Literal["launch", "in", "out", "free"]
    brings: tuple[TensorId, ...] = ()
    donated: tuple[TensorId, ...] = ()
    frees: tuple[TensorId, ...] = ()
    workspace: int = 0


class Run(msgspec.Struct, frozen=True):
    """A plan as it was replayed, and what was measured when it ran.

    `sizes` are those of its tensors, by their ids. `account_bytes` is the peak that the package measured, `allocator_bytes` that
    of the allocator after so many iterations.
    """

    file: str
    model: str
    policy: str
    budget: str
    batch_size: int
    tensile_jax: str
    grows: bool
    iterations: int
    jit_peak_bytes: int
    account_bytes: int
    allocator_bytes: int
    sizes: tuple[int, ...]
    inputs: tuple[TensorId, ...]
    constants: tuple[TensorId, ...]
    carried: tuple[tuple[TensorId, TensorId], ...]
    donated: tuple[TensorId, ...]
    code: tuple[Act, ...]


def runs() -> list[Run]:
    """The plans on file."""
    return msgspec.json.decode(RUNS.read_bytes(), type=list[Run])


def replayed(run: Run, *, iterations: int | None = None) -> int:
    """The most bytes in use by the model, from the time when all arguments were on the device."""
    found = _in_use(run, iterations or run.iterations)
    return max(found.arguments, found.at_begin, *found.segments, found.at_end)


def account_of(run: Run) -> int:
    """The peak of the replayed plan by the package's account, from the begin of an iteration."""
    code, graph, workspaces = _plan(run)
    at_begin, *resident, at_end = resident_bytes(code, graph)
    return max(at_begin, at_end, *(held + w for held, w in zip(resident, workspaces, strict=True)))


def _in_use(run: Run, iterations: int) -> InUse:
    code, graph, workspaces = _plan(run)
    return in_use(code, graph, workspaces, grows=run.grows, iterations=iterations)


def _plan(run: Run) -> tuple[list[Instruction], Graph, list[int]]:
    """The instructions of a run's plan, a graph of its tensors, and the workspaces of its segments."""
    made = {new for act in run.code if act.kind == "launch" for new in act.brings}
    tensors = tuple(
        Tensor(
            TensorId(t), f"t{t}", "constant" if t in run.constants else "activation", nbytes, (nbytes,), "uint8",
            0 if t in made else None,  # pyright: ignore[reportArgumentType] # which operator makes it plays no part
        )
        for t, nbytes in enumerate(run.sizes)
    )  # fmt: skip
    outputs = tuple(new for _, new in run.carried)
    graph = Graph(
        run.model, (), tensors, run.inputs, outputs, tuple(Carried(*p) for p in run.carried), frozenset(run.donated), ""
    )
    code: list[Instruction] = []
    for act in run.code:
        match act.kind:
            case "launch":
                index = sum(isinstance(one, Launch) for one in code)
                code.append(Launch(index, (), act.brings, act.donated, act.frees))
            case "in":
                code.append(StartSwapIn(act.brings, (), ()))
            case "out":
                code += [StartSwapOut(act.frees, ()), FinishSwapOut(act.frees)]
            case "free":
                code.append(Free(act.frees))
    return code, graph, [act.workspace for act in run.code if act.kind == "launch"]


@click.command()
@click.option("--only", type=click.Choice(["runs", "plans"]), help="Only this part; the other one stays as it is on file.")
@click.option("--model", "models", multiple=True, type=click.Choice([name for name, _ in _MODELS]), help="Only plans of these.")
def main(only: str | None, models: tuple[str, ...]) -> None:
    """Replay the runs, plan the models, print both tables and write the figures."""
    before = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    about = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "jax": jax.__version__, "command": "make bench-allocator"}
    found: dict[str, Any] = {**about}
    found["runs"] = before.get("runs", []) if only == "plans" else _compared()
    found["plans"] = before.get("plans", [])
    if only != "runs":
        wanted = [(name, size) for name, size in _MODELS if not models or name in models]
        stays = [row for row in found["plans"] if row["model"] not in dict(wanted)]
        found["plans"] = [*stays, *(row for name, size in wanted for row in _planned(name, size))]
    _RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _compared() -> list[dict[str, Any]]:
    print("| model, policy, budget | account | measured | model | off | after 3 | after 20 |\n|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for run in runs():
        jit, model = run.jit_peak_bytes, replayed(run)
        later = {n: replayed(run, iterations=n) for n in _LATER}
        off = (model - run.allocator_bytes) / jit
        rows.append(
            {
                "run": run.file, "model": run.model, "batch_size": run.batch_size, "policy": run.policy, "budget": run.budget,
                "jit_peak_bytes": jit, "account_bytes": run.account_bytes, "measured_bytes": run.allocator_bytes,
                "replayed_account_bytes": account_of(run), "model_bytes": model, "off": round(off, 5),
                "later_bytes": {str(n): nbytes for n, nbytes in later.items()},
            }
        )  # fmt: skip
        what = f"{run.model} {run.batch_size}, {run.policy}, {run.budget}"
        shares = [f"{n / jit:.4f}" for n in (run.account_bytes, run.allocator_bytes, model)]
        print(f"| {' | '.join([what, *shares, f'{off:+.4f}', *(f'{n / jit:.4f}' for n in later.values())])} |")
    return rows


def _planned(name: str, batch_size: int) -> list[dict[str, Any]]:
    model = MODELS[name](batch_size=batch_size)
    traced = trace_step(jax.jit(model.step, donate_argnums=0), model.step, (model.state_shape, model.batch_shape), {})
    h200 = load_profile("h200")
    planners = [Planner(traced.graph, replace(h200, allocator=kind)) for kind in ("exact", "best_fit")]
    return [row for share in _SHARES for row in _under(name, batch_size, share, planners)]


def _under(name: str, batch_size: int, share: float, planners: Sequence[Planner]) -> list[dict[str, Any]]:
    """The row of a share: the plan for what is asked for, replayed, and the plan for the allocator."""
    exact, best_fit = planners
    measured = CompiledSizes()
    jit = best_fit.whole_peak_bytes(measured)
    row: dict[str, Any] = {"model": name, "batch_size": batch_size, "share": share}
    for what, planner in (("asked", exact), ("handed_out", best_fit)):
        began = time.perf_counter()
        found = planner.plan(Goal(share * jit), measured)
        if found is None:
            return []
        seconds, plan = time.perf_counter() - began, found.plan
        if planner is exact:
            workspaces = [s.workspace_bytes for s in plan.segments]
            plan = with_sizes(plan, decode(plan, exact.graph), exact.graph, workspaces, best_fit.profile)
        row[what] = {
            "peak": round(plan.peak_bytes / jit, 4), "allocator": round((plan.allocator_bytes or 0) / jit, 4),
            "time": round(plan.step_us / planner.whole_us, 4), "segments": len(plan.segments), "plan_s": round(seconds, 1),
        }  # fmt: skip
    print(name, batch_size, share, row["asked"], row["handed_out"], flush=True)
    return [row]


if __name__ == "__main__":
    main()
