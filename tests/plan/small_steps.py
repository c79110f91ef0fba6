"""Makes small random train steps for the oracle: a chain with skip connections, its backward pass, updates of donated state.

Sizes are multiples of 64 KiB, the smallest tensor that is swapped. The device's rates are random too. The link is anything from
so slow that no copy can overlap enough computation to so fast that copies cost nothing. A launch costs anything from nothing to
as much as an operator.
"""

import random
from dataclasses import replace
from typing import NamedTuple

from tensile_jax.ir import Graph
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.analysis.operator_order import order
from tests.builders import PROFILE, graph_of

_UNIT = 2**16


class SmallStep(NamedTuple):
    """A step and the device that it is planned for."""

    graph: Graph
    profile: DeviceProfile


def small_step(seed: int, *, most: int = 13) -> SmallStep:
    """A step of at most `most` operators."""
    rng = random.Random(seed)
    while True:
        graph = _graph(rng)
        if len(graph.operators) <= most:
            return SmallStep(order(graph), _profile(rng))


def _graph(rng: random.Random) -> Graph:
    layers = rng.choice((1, 2, 2, 3, 3))
    lines: list[str] = []
    sizes = {"x": _UNIT * rng.randint(1, 4), "loss": 4}
    state: dict[str, str] = {}
    saved: list[str] = []  # what the backward pass reads of each layer, beside its input
    before = ["x"]
    for k in range(layers):
        width = _UNIT * rng.randint(1, 8)
        skip = [rng.choice(before[:-1])] if len(before) > 1 and rng.random() < 0.35 else []
        lines.append(f"a{k} = heavy({', '.join([before[-1], f'w{k}', *skip])})")
        sizes |= {f"a{k}": width, f"w{k}": _UNIT * rng.choice((1, 1, 2, 6))}
        state[f"w{k}"] = f"v{k}"
        made = f"a{k}"
        if rng.random() < 0.5:
            made = f"y{k}"
            lines.append(f"y{k} = {rng.choice(('light', 'light', 'reduction'))}(a{k})")
            sizes[made] = width if rng.random() < 0.8 else _UNIT
        saved.append(rng.choice((made, f"a{k}")))
        before.append(made)
    if rng.random() < 0.5:
        lines.append(f"loss = reduction({before[-1]})")
    gradient = before[-1]
    for k in reversed(range(layers)):
        here = gradient
        if rng.random() < 0.5:
            here = f"e{k}"
            lines.append(f"e{k} = light({', '.join(dict.fromkeys([gradient, saved[k]]))})")
            sizes[here] = sizes[f"a{k}"]
        lines.append(f"g{k} = heavy({', '.join(dict.fromkeys([before[k], here]))})")
        sizes[f"g{k}"] = sizes[f"w{k}"]
        if k:
            lines.append(f"d{k} = heavy({', '.join(dict.fromkeys([here, saved[k], f'w{k}']))})")
            sizes[f"d{k}"] = sizes[before[k]]
            gradient = f"d{k}"
    for k in range(layers):
        moment = rng.random() < 0.3
        if moment:
            lines.append(f"n{k} = light(m{k}, g{k})")
            sizes |= {f"m{k}": sizes[f"w{k}"], f"n{k}": sizes[f"w{k}"]}
            state[f"m{k}"] = f"n{k}"
        lines.append(f"v{k} = light(w{k}, {f'n{k}' if moment else f'g{k}'})")
        sizes[f"v{k}"] = sizes[f"w{k}"]
    graph = graph_of(
        lines,
        sizes=sizes,
        inputs=" ".join([*state, "x"]),
        outputs=" ".join([*state.values(), *(["loss"] if any(line.startswith("loss") for line in lines) else [])]),
        carried=state,
        donated=" ".join(state) if rng.random() < 0.85 else "",
    )
    flops = [int(10 ** rng.uniform(4.5, 6.5)) if op.kind == "heavy" else 0 for op in graph.operators]
    return replace(graph, operators=tuple(replace(op, flops=f) for op, f in zip(graph.operators, flops, strict=True)))


def _profile(rng: random.Random) -> DeviceProfile:
    return replace(
        PROFILE,
        bytes_per_us=10 ** rng.uniform(1.5, 3.0),
        device_to_host_bytes_per_us=10 ** rng.uniform(0.5, 3.0),
        host_to_device_bytes_per_us=10 ** rng.uniform(0.5, 3.0),
        launch_us=10 ** rng.uniform(-1.0, 3.0),
    )
