"""Trains under a plan, and compares its steps with plain jit's. Prints one JSON object, and then the same one with a profile.

    python -m benchmarks.gpu.trained resnet50 --batch-size 16 --budget 30% --launch one_program --state-memory any

The planned step trains for `--steps` steps. Its state stays where the plan puts it, in device memory or in host memory, and is
donated in each step. Every `--every` steps, plain jit takes one step from a copy of that state, and both new states are compared.
Rounding differs between two programs, so the states are not equal: `off` is the norm of their difference over the norm of the
update. A stale or overwritten tensor is off by 1 or more; `off_most` is the most among the tensors. The other steps are issued
without waiting for them, as in a training. A loss that is not finite ends the training at once (`not_finite_at`).

Plain jit also trains alone for as many steps, and both have a loss for every step; rounding drives the two apart. The planned
step trains a second time without comparisons. `repeated_until` is the number of losses before the first one that differs between
its two trainings. A difference is a race, unless plain jit's own two trainings differ as well (`jit_repeated_until`).

On a GPU, `profile` says how long copies run, and how long a kernel runs beside them (`device_time.py`).
"""

import fcntl
import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

import tensile_jax as tensile
from benchmarks.device_time import PROFILED, profiled
from benchmarks.process_settings import ALLOCATORS, set_up
from benchmarks.training_steps import TrainingStep, training_step
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.transfer import places_on_host

Step = Callable[[Any, Any], tuple[Any, Any]]


@click.command()
@click.argument("name")
@click.option("--batch-size", type=int, help="Of a model; a workload has none.")
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
@click.option("--budget", required=True, help='A share of plain jit\'s peak, such as "50%".')
@click.option("--launch", default="auto", help="As for tensile.jit.")
@click.option("--state-layout", default="row_major", help="As for tensile.jit.")
@click.option("--state-memory", default="any", help="As for tensile.jit.")
@click.option("--policy", default="auto", help="As for tensile.jit.")
@click.option("--steps", type=click.IntRange(1), default=200)
@click.option("--every", type=click.IntRange(1), default=10, help="One of so many steps is compared.")
@click.option("--lock", help="A file that is locked: together with others, and alone while a profile is taken.")
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--allocator", type=click.Choice(list(ALLOCATORS)), help="JAX's allocator on a GPU.")
@click.option("--xla-flags", default="", help="More flags of XLA's, for both steps.")
def main(
    name: str, batch_size: int | None, sizes: str, budget: str, launch: Any, state_layout: Any, state_memory: Any, policy: Any,
    steps: int, every: int, lock: str | None, cache: str | None, allocator: str | None, xla_flags: str,
) -> None:  # fmt: skip
    """Train, and compare."""
    set_up(cache, xla_flags, allocator, shared=False)
    locked = open(lock, "a") if lock else None  # noqa: SIM115 # until the process ends
    if locked:
        fcntl.flock(locked, fcntl.LOCK_SH)
    built = training_step(name, batch_size, json.loads(sizes))
    about = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
    plain = jax.jit(built.step, donate_argnums=0).lower(built.state_shape, next(built.batches())).compile()
    planned = tensile.jit(
        built.step,
        budget=budget,
        launch=launch,
        state_layout=state_layout,
        state_memory=state_memory,
        policy=policy,
        donate_argnums=0,
    )
    try:
        found = compared(built, planned, plain, steps, every)
    except tensile.BudgetTooSmall as error:
        print(json.dumps({**about, "too_small": error.floor_bytes, "floor_ratio": error.floor_bytes / peak_of(plain)}))
        return
    state, batch = found.pop("state"), next(built.batches())
    plan, report = planned.plan(state, batch), planned.report()
    found |= {
        "jit_losses": losses_of(plain, built, steps, every),
        "repeated_until": _equal(found["losses"], losses_of(planned, built, steps, every)),
        "launch": plan.launch,
        "barriers": plan.barriers,
        "launches": report.launches,
        "segments": report.segments,
        "laid_out": len(plan.layouts or ()),
        "on_host": len(places_on_host(state)),
        "copied_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        "out_of_memory": report.out_of_memory,
        "notes": list(plan.notes),
    }
    found["jit_repeated_until"] = _equal(found["jit_losses"], losses_of(plain, built, steps, every))
    print(json.dumps({**about, **found}), flush=True)  # so that it is there if the time is up while this process waits
    if locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
    found["profile"] = profiled(lambda: jax.block_until_ready(_run(planned, state, [batch] * PROFILED)[0]))._asdict()
    print(json.dumps({**about, **found}))


def compared(built: TrainingStep, planned: Step, plain: Step, steps: int, every: int) -> dict[str, Any]:
    """The losses of the planned step, how far it was off plain jit's where that was compared, and the last state."""
    state, batches = built.init(), built.batches()
    losses: list[float] = []
    rows: list[dict[str, float]] = []
    while len(losses) < steps and _all_finite(losses):
        batch = next(batches)
        before = numbers(state)
        expected, theirs = plain(_copied(state), batch)
        state, metrics = planned(state, batch)
        rows.append({"step": len(losses), "jit_loss": float(theirs["loss"]), **off(before, numbers(state), numbers(expected))})
        losses.append(float(metrics["loss"]))
        state, more = _run(planned, state, list(islice(batches, min(every - 1, steps - len(losses)))))
        losses += more
    return {"state": state, "losses": losses, "compared": rows, "not_finite_at": _first_not_finite(losses)}


def losses_of(step: Step, built: TrainingStep, steps: int, every: int) -> list[float]:
    """The losses of a training that waits for one of `every` steps, and ends if one is not finite."""
    state, batches = built.init(), built.batches()
    losses: list[float] = []
    while len(losses) < steps and _all_finite(losses):
        state, more = _run(step, state, list(islice(batches, min(every, steps - len(losses)))))
        losses += more
    return losses


def off(before: Sequence[np.ndarray], ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> dict[str, float]:
    """The norm of `ours - theirs` over that of `theirs - before`: for the whole state, and the most for a tensor.

    A tensor that plain jit leaves as it is must stay so; otherwise it is off by infinity.
    """
    wrong = [_norm(a, b) for a, b in zip(ours, theirs, strict=True)]
    moved = [_norm(a, b) for a, b in zip(before, theirs, strict=True)]
    each = [w / m if m else (float("inf") if w else 0.0) for w, m in zip(wrong, moved, strict=True)]
    whole = float(np.linalg.norm(moved))
    return {"off": float(np.linalg.norm(wrong)) / whole if whole else 0.0, "off_most": max(each, default=0.0)}


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves as NumPy arrays that have norms; keys as their words."""
    return [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]


def _norm(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other))


def _copied(state: Any) -> Any:
    """The same values in arrays of their own, in device memory."""
    on_device = tensile.to_device(state)
    return jax.tree.map(lambda leaf: jax.random.clone(leaf) if _is_key(leaf) else jnp.copy(leaf), on_device)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _run(step: Step, state: Any, batches: Sequence[Any]) -> tuple[Any, list[float]]:
    """Steps that are issued without waiting for them."""
    found: list[Any] = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    return state, [float(loss) for loss in found]


def _all_finite(losses: Sequence[float]) -> bool:
    return _first_not_finite(losses) is None


def _first_not_finite(losses: Sequence[float]) -> int | None:
    return next((i for i, loss in enumerate(losses) if not np.isfinite(loss)), None)


def _equal(one: Sequence[float], other: Sequence[float]) -> int:
    """How many losses at the begin are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
