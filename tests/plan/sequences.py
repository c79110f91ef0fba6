"""Builds access sequences from lines such as `"y z = x w @ 10"`: an operator of 10 us that uses x and w and generates y and z."""

import random
from collections.abc import Mapping, Sequence

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence, Execution, find_accesses
from tensile_jax.plan.policies.tensile.footprint import Recomputation
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut


def sequence_of(
    lines: Sequence[str],
    sizes: Mapping[str, int],
    *,
    initial: str = "",
    results: str = "",
    fixed: str = "",
    updates: Mapping[str, str] | None = None,
    job: int = 0,
) -> AccessSequence:
    """The sequence of the lines; a tensor's id is its place in `sizes`."""
    number = {name: TensorId(place) for place, name in enumerate(sizes)}

    def ids(names: str) -> tuple[TensorId, ...]:
        return tuple(number[name] for name in names.split())

    executions: list[Execution] = []
    for line in lines:
        outputs, rest = line.split("=")
        inputs, latency = rest.split("@")
        executions.append(Execution(ids(inputs), ids(outputs), float(latency)))
    return find_accesses(
        executions,
        {number[name]: nbytes for name, nbytes in sizes.items()},
        initial=ids(initial),
        results=ids(results),
        fixed=ids(fixed),
        updates={number[new]: number[old] for new, old in (updates or {}).items()},
        job=job,
    )


def random_sequence(seed: int) -> AccessSequence:
    """Some tens of operators on some tens of tensors, with state that is updated in place."""
    rng = random.Random(seed)
    names, lines = ["x", "p", "q"], list[str]()
    sizes = {name: rng.randrange(0, 30) for name in names}
    for k in range(rng.randrange(1, 20)):
        reads = rng.sample(names, min(len(names), rng.randrange(1, 4)))
        made = [f"t{k}{letter}" for letter in "ab"[: rng.randrange(1, 3)]]
        sizes |= {name: rng.randrange(0, 30) for name in made}
        lines.append(f"{' '.join(made)} = {' '.join(reads)} @ {rng.randrange(1, 30)}")
        names += made
    for old in "pq":
        sizes[f"{old}'"] = sizes[old]
        lines.append(f"{old}' = {old} {rng.choice([n for n in names if n not in 'pq'])} @ {rng.randrange(1, 30)}")
    if rng.random() < 0.5:
        sizes["last"] = rng.randrange(0, 30)
        lines.append(f"last = {rng.choice(names[3:])} @ {rng.randrange(1, 30)}")
    results = rng.sample(names[3:], min(2, len(names) - 3))
    return sequence_of(lines, sizes, initial="x p q", results=" ".join(results), updates={"p'": "p", "q'": "q"})


def usage(
    sequence: AccessSequence, time_us: float, swaps: Sequence[SwappedOut] = (), recomputed: Sequence[Recomputation] = ()
) -> dict[TensorId, int]:
    """The bytes of each tensor in device memory at that time, computed from the definition."""
    there = {t: sequence.nbytes[t] for t, (begin, end) in sequence.lifetimes().items() if begin <= time_us < end}
    for away in swaps:
        if away.out_end_us <= time_us < away.in_end_us:
            there.pop(away.tensor, None)
    for again in recomputed:
        if sequence.ends_us[again.after] <= time_us < sequence.begins_us[again.before]:
            there.pop(again.tensor, None)
    return there
