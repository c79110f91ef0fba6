"""Runs one workload under one budget beside plain jit, from the same state, in a process of its own.

    python -m benchmarks.workloads.case diffusion --budget 60%
    python -m benchmarks.workloads.case diffusion --budget 60% --improve background

Prints one JSON object: how long both first calls took, and of ours what planning and compiling took; the peaks; by how much the
losses of the first steps differ; and how long later steps take, which alternate. If the budget is refused, it is
the smallest one that the error names.

With `--improve background`, the first call runs under the plan of a short search. `plan_s`, `compile_s` and `tries` are of that
plan. Then steps run until a better plan is in use (`improved_s` seconds after the first call), whose time and peak are given.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import click
import jax
import jax.numpy as jnp

import tensile_jax as tensile
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.workload import Workload
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of


def copied(state: Any) -> Any:
    """The same values in arrays of their own."""
    return jax.tree.map(jnp.copy, state)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result, and how many seconds it took."""
    began = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - began


Improve = Literal["background"] | None


def under(budget: str | int, workload: Workload, improve: Improve = None) -> tuple[Any, Any, float, bool]:
    """The planned function, what its first call returns, the seconds of that, and whether the budget was refused before."""
    planned = tensile.jit(workload.step, budget=budget, donate_argnums=0, improve=improve)
    try:
        result, seconds = timed(planned, workload.init(), workload.batch(0))
    except BudgetTooSmall as error:
        planned, result, seconds, _ = under(int(error.floor_bytes), workload, improve)
        return planned, result, seconds, True
    return planned, result, seconds, False


def improved(planned: Any, state: Any, batch: Any, since_s: float) -> dict[str, Any]:
    """Runs steps until no better plan is sought any more; after how many seconds and steps that is."""
    while planned.report().improving:
        state, _ = jax.block_until_ready(planned(state, batch))
    return {"improved_s": time.perf_counter() - since_s, "improved_steps": planned.report().iterations}


def measured(workload: Workload, budget: str, compared: int, timed_steps: int, improve: Improve) -> dict[str, Any]:
    """What is printed, less the names."""
    state, batch = workload.init(), workload.batch(0)
    plain, compile_s = timed(lambda: jax.jit(workload.step, donate_argnums=0).lower(state, batch).compile())
    (theirs, loss), run_s = timed(plain, copied(state), batch)
    planned, (mine, own_loss), first_s, refused = under(budget, workload, improve)
    first, since_s = planned.report(), time.perf_counter()
    losses = [(float(own_loss), float(loss))]
    for number in range(1, compared):
        mine, own_loss = planned(mine, workload.batch(number))
        theirs, loss = plain(theirs, workload.batch(number))
        losses.append((float(own_loss), float(loss)))
    later: dict[str, Any] = {}
    if improve is not None:
        later = improved(planned, mine, batch, since_s)
        mine = copied(theirs)  # the time of a line search depends on the state
    own_s, plain_s = [], []
    for _ in range(timed_steps):
        (mine, _), seconds = timed(planned, mine, batch)
        own_s.append(seconds)
        (theirs, _), seconds = timed(plain, theirs, batch)
        plain_s.append(seconds)
    plan, report = planned.plan(mine, batch), planned.report()
    return {
        "refused": refused,
        "jit_peak_bytes": peak_of(plain),
        "peak_ratio": plan.peak_bytes / peak_of(plain),
        "budget_ratio": (plan.budget_bytes or 0) / peak_of(plain),
        "time_ratio": statistics.median(own_s) / statistics.median(plain_s),
        "jit_step_s": statistics.median(plain_s),
        "first_call_s": first_s,
        "jit_first_call_s": compile_s + run_s,
        "plan_s": first.plan_s,
        "compile_s": first.compile_s,
        "segments": report.segments,
        "tries": first.tries,
        **later,
        "loss_difference": max(abs(a - b) / max(abs(b), 1e-6) for a, b in losses),
        "losses": losses,
    }


@click.command()
@click.argument("name", type=click.Choice(list(WORKLOADS)))
@click.option("--budget", default="60%", show_default=True)
@click.option("--improve", type=click.Choice(["background"]))
@click.option("--compared", default=4, show_default=True, help="Steps whose losses are compared.")
@click.option("--timed", "timed_steps", default=7, show_default=True, help="Later steps of each, alternating.")
def main(name: str, budget: str, improve: Improve, compared: int, timed_steps: int) -> None:
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))  # JAX's own first call of anything
    figures = measured(WORKLOADS[name](), budget, compared, timed_steps, improve)
    print(json.dumps({"workload": name, "budget": budget, **figures}))


if __name__ == "__main__":
    main()
