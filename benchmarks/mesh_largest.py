"""`make bench-mesh-largest`: the largest batch of a decoder of 1.3 billion parameters on eight NVIDIA H200, compiled without one.

The decoder of `sharded_decoder.py` with 24 layers of width 2048 and 50,304 words, in bfloat16 with AdamW, is divided as FSDP
does. Sequences have 1,024 words. A batch fits if XLA's memory analysis of the compiled step stays within 141 GB on each device.
For plain jit and for `jax.checkpoint` around every layer with four policies, batches that are larger than a straight line through
two small ones predicts are tried, too, since XLA rematerializes by itself where a device would be too small: to a twelfth of the
largest one that fits. Our largest batch is the largest one of which a compiled plan keeps 141 GB as one program, without
copies to the host.

`--how nothing --batch 280` compiles one batch in one way. Besides, ours is compiled with the largest batch of every other way.
For each word of a device's part of the batch stand the bytes that its kernels read and write (traffic), the operations of its
products, and the time of the kernels, if each takes as long as it reads and writes, or multiplies, at the rates of the device
profile h200, whatever is longer. Writes `benchmarks/results/mesh-largest-h200.json`.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp

from benchmarks.h200_device import H200Compiler, cost_of, h200s, write_compiled
from benchmarks.mesh import fitting_under, timed, traced_by_jit
from benchmarks.sharded_decoder import POLICIES, ShardedDecoder
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.find_plan import fit
from tensile_jax.plan import CompiledSizes

_RESULTS = Path(__file__).parent / "results" / "mesh-largest-h200.json"
_LIMIT = 141 * 10**9  # bytes on each device
_DEVICES = 8
_TRIED = 7  # batches beyond the first two


class _Try(NamedTuple):
    """A batch that was compiled. `sequences` and `peak_bytes` are those of one device; there is no peak if compiling failed."""

    sequences: int
    peak_bytes: int | None
    figures: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None and self.peak_bytes <= _LIMIT


@click.command()
@click.option(
    "--how", "hows", multiple=True, type=click.Choice(["plain", *POLICIES, "ours"]), help="Only these; other rows stay."
)
@click.option("--batch", "batches", multiple=True, type=int, help="Only batches of so many sequences a device.")
def main(hows: tuple[str, ...], batches: tuple[int, ...]) -> None:
    """Find the largest batch in each way, and write the figures."""
    warnings.simplefilter("ignore")
    devices = h200s()
    decoder = ShardedDecoder(
        "fsdp", devices, batch=_DEVICES, length=1024, layers=24, width=2048, heads=16, words=50304, dtype=jnp.bfloat16
    )
    compiler = H200Compiler(devices[0])
    kept = json.loads(_RESULTS.read_text())["cases"] if _RESULTS.exists() and hows else []
    again = [row for row in kept if row["how"] in hows and (not batches or row["sequences"] in batches)]
    cases: list[dict[str, Any]] = [row for row in kept if row not in again]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(decoder.state_shape[0]))

    def add(how: str, tries: Iterable[_Try], *, at_batch_of: str | None = None) -> None:
        """Write each try as soon as it was compiled, since some take a quarter of an hour."""
        for one in tries:
            beside = {} if at_batch_of is None else {"at_batch_of": at_batch_of}
            cases.append(
                {"how": how, **beside, "sequences": one.sequences, "fits": one.fits, "peak_bytes": one.peak_bytes, **one.figures}
            )
            print(json.dumps(cases[-1]), flush=True)
            write_compiled(
                _RESULTS,
                "make bench-mesh-largest",
                devices=_DEVICES,
                parameters=parameters,
                limit_bytes=_LIMIT,
                length=1024,
                cases=cases,
            )

    for policy in (None, *POLICIES):
        how = policy or "plain"
        if not hows or how in hows:

            def compiled(n: int, policy: str | None = policy) -> _Try:
                return _by_hand(replace(decoder, batch=n * _DEVICES, policy=policy), compiler)

            add(how, map(compiled, batches) if batches else _largest(compiled))
    if "ours" in hows and batches:
        add("ours", (_planned(replace(decoder, batch=n * _DEVICES), compiler) for n in batches))
    elif not hows or "ours" in hows:
        by_hand = [row for row in cases if row["fits"] and row["how"] != "ours"]
        add("ours", _largest_planned(decoder, compiler))
        for how in dict.fromkeys(row["how"] for row in by_hand):
            sequences = max(row["sequences"] for row in by_hand if row["how"] == how)
            add("ours", [_planned(replace(decoder, batch=sequences * _DEVICES), compiler)], at_batch_of=how)


def _largest(compiled: Callable[[int], _Try]) -> Iterator[_Try]:
    """What is compiled on the way to the largest batch that fits."""
    first, second = compiled(2), compiled(4)
    yield from (first, second)
    if first.peak_bytes is None or second.peak_bytes is None:
        return
    low, high = 4 if second.fits else 2, None
    sequences = int(4 + (_LIMIT - second.peak_bytes) / max(1.0, (second.peak_bytes - first.peak_bytes) / 2))
    for _ in range(_TRIED):
        sequences = max(sequences, low + 1) if high is None else min(max(sequences, low + 1), high - 1)
        one = compiled(sequences)
        yield one
        if one.fits:
            low = sequences
        else:
            high = sequences
        if high is not None and high - low <= max(1, low // 12):
            break
        sequences = low + max(1, low // 2) if high is None else (low + high) // 2


def _by_hand(decoder: ShardedDecoder, compiler: H200Compiler) -> _Try:
    sequences = decoder.batch // _DEVICES
    try:
        seconds, whole = timed(lambda: compiler.compile_whole(traced_by_jit(decoder)))
    except jax.errors.JaxRuntimeError as error:  # what XLA says of it is the figure
        return _Try(sequences, None, {"failed": str(error).splitlines()[0][:200]})
    return _Try(sequences, peak_of(whole), {**_per_token([whole], decoder), "seconds": seconds})


def _largest_planned(decoder: ShardedDecoder, compiler: H200Compiler) -> Iterator[_Try]:
    """From the batch whose predicted floor is the limit downwards, since compiling may show that the floor is higher."""

    def floor(sequences: int) -> int:
        step = replace(decoder, batch=sequences * _DEVICES).traced()
        return fitting_under(step, compiler, _LIMIT, None).planner.floor_bytes(CompiledSizes())

    small, large = floor(4), floor(16)
    sequences = int(4 + (_LIMIT - small) / ((large - small) / 12))
    for _ in range(_TRIED):
        one = _planned(replace(decoder, batch=sequences * _DEVICES), compiler)
        yield one
        if one.fits:
            break
        floor_bytes = max(one.figures.get("floor_bytes", 0), one.peak_bytes or 0, _LIMIT + 1)
        sequences = min(sequences - 1, int(sequences * _LIMIT / floor_bytes))


def _planned(decoder: ShardedDecoder, compiler: H200Compiler) -> _Try:
    sequences = decoder.batch // _DEVICES
    fitting = fitting_under(decoder.traced(), compiler, _LIMIT, None)
    try:
        seconds, found = timed(partial(fit, fitting))
    except BudgetTooSmall as error:
        return _Try(sequences, None, {"floor_bytes": error.floor_bytes})
    executables = _compiled(found)
    known = {"segments": len(found.plan.segments), "launches": len(executables), "barriers": found.plan.barriers}
    return _Try(sequences, found.plan.peak_bytes, {**known, **_per_token(executables, decoder), "seconds": seconds})


def _compiled(found: CompiledPlan) -> list[Any]:
    """XLA's executables of a plan, in the order of the launches."""
    assert found.executables is not None
    return [found.step.plain_jit.compiled().executable] if found.plan.whole else [one.call for one in found.executables]


def _per_token(executables: Sequence[Any], decoder: ShardedDecoder) -> dict[str, float]:
    """What a step costs a device for each word of its part of the batch."""
    words = decoder.batch * decoder.length // _DEVICES
    cost = cost_of(executables, load_profile("h200"))
    return {
        "traffic_per_token": cost.traffic // words,
        "gflops_per_token": round(cost.multiplied / words / 1e9, 3),
        "kernels_ns_per_token": round(1000 * cost.us / words, 1),
    }


if __name__ == "__main__":
    main()
