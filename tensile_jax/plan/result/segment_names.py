"""Gives the segments of a plan names that a person recognises: `forward`, `backward ResNet/Block_12..15`, `optimizer`.

A *segment* is a stretch of operators that is compiled as one executable. An operator belongs to one of three parts of a train
step:

    backward    differentiation added it: its name begins with `backward`, which `trace/graph.py` writes
    optimizer   differentiation has not added it, only operators of the optimizer read its results, and one of two things holds:
                the operator depends on a gradient, or it makes no results of the step but new parameters and optimizer state
    forward     all others; also every operator of a step without a backward pass

The name lists each part that makes up at least a tenth of the segment, measured in floating-point operations and bytes. If the
segment has less than nine tenths of a part, the name also lists the scopes of the part's operators in the segment, down to one
level below the network: `ResNet/Block_3`, not `ResNet/Block_3/Conv_0`. Ranges of numbered scopes are written `Block_12..15`. If
a name is too long, some of its scopes are left out. Segments that would share a name are numbered: `optimizer`,
`optimizer (2)`.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeVar

from tensile_jax.ir import Graph, Operator, TensorId
from tensile_jax.plan.analysis.liveness import Liveness

LONGEST = 60
"""Characters of the longest name."""

_PART_COUNTS_FROM = 0.1  # of a segment's weight: a part that has less is not named
_SCOPE_COUNTS_FROM = 0.1  # of the mean weight of the scopes of a part in a segment: a scope that has less is not named
_NEARLY_ALL = 0.9  # of the weight: so much counts as the whole

_Part = Literal["forward", "backward", "optimizer"]
_PARTS: tuple[_Part, ...] = ("forward", "backward", "optimizer")
_Path = tuple[str, ...]
_Key = TypeVar("_Key", bound=Hashable)
_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """What the names of segments are made of; `parts`, `scopes` and `weights` are by position of the operator.

    `network` is the scope of the network, and `scopes` are the scopes one level below it ("" for an operator outside of it).
    `order` is the order in which the step enters these scopes. `whole` is the weight of each part in the whole step.
    """

    parts: Sequence[_Part]
    scopes: Sequence[str]
    weights: Sequence[int]
    network: _Path
    order: Mapping[str, int]
    whole: Mapping[_Part, int]


def segment_names(liveness: Liveness, boundaries: Sequence[int]) -> list[str]:
    """The names of the segments between `boundaries`, which are positions of operators; no two are equal."""
    labels = _labels(liveness)
    taken: set[str] = set()
    names: list[str] = []
    for begin, end in pairwise(boundaries):
        name = _numbered(_name(labels, range(begin, end)), taken)
        taken.add(name)
        names.append(name)
    return names


def _name(labels: _Labels, places: range) -> str:
    share = _sums((labels.parts[i], labels.weights[i]) for i in places)
    scopes: dict[_Part, list[str]] = {}
    for part in _PARTS:
        if share.get(part, 0) < _PART_COUNTS_FROM * sum(share.values()):
            continue
        seen = _sums((labels.scopes[i], labels.weights[i]) for i in places if labels.parts[i] == part and labels.scopes[i])
        least = _SCOPE_COUNTS_FROM * sum(seen.values()) / max(len(seen), 1)
        is_whole = share[part] >= _NEARLY_ALL * labels.whole[part]
        scopes[part] = [] if is_whole else sorted((s for s in seen if seen[s] >= least), key=lambda s: labels.order[s])
    return _shortened(scopes, labels.network)


@lru_cache(maxsize=4)  # a search makes hundreds of plans of one step
def _labels(liveness: Liveness) -> _Labels:
    graph = liveness.graph
    parts = _parts(graph)
    paths = [_path(operator) for operator in graph.operators]
    weights = [operator.flops + operator.nbytes + 1 for operator in graph.operators]
    network = _network(paths, weights)
    depth = len(network)
    scopes = [path[depth] if len(path) > depth and path[:depth] == network else "" for path in paths]
    order = {scope: place for place, scope in enumerate(dict.fromkeys(scopes))}
    return _Labels(parts, scopes, weights, network, order, _sums(zip(parts, weights, strict=True)))


def _parts(graph: Graph) -> list[_Part]:
    """The part of each operator. In a step without a gradient all are forward."""
    added = [operator.in_backward_pass for operator in graph.operators]
    if not any(added):
        return ["forward"] * len(graph.operators)
    from_gradient = {t.id for t in graph.tensors if t.role == "gradient"}
    follows: list[bool] = []
    for operator in graph.operators:
        follows.append(not from_gradient.isdisjoint(operator.inputs))
        if follows[-1]:
            from_gradient.update(operator.outputs)
    updated = {t for t in graph.outputs if graph.tensors[t].role in ("parameter", "optimizer_state")}
    other_results = set(graph.outputs) - updated
    read_elsewhere: set[TensorId] = set()  # by operators that are not the optimizer's
    parts: list[_Part] = []
    for operator, is_added, is_late in zip(reversed(graph.operators), reversed(added), reversed(follows), strict=True):
        serves_update = bool(operator.outputs) and other_results.isdisjoint(operator.outputs)
        if not is_added and read_elsewhere.isdisjoint(operator.outputs) and (is_late or serves_update):
            parts.append("optimizer")
        else:
            parts.append("backward" if is_added else "forward")
            read_elsewhere.update(operator.inputs)
    return parts[::-1]


def _path(operator: Operator) -> _Path:
    return tuple(part for part in operator.scope.split("/") if part)


def _sums(weighted: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    """The sum of the weights of each key, in the order in which the keys come."""
    total: defaultdict[_Key, int] = defaultdict(int)
    for key, weight in weighted:
        total[key] += weight
    return total


def _network(paths: Sequence[_Path], weights: Sequence[int]) -> _Path:
    """The scope of the network: the innermost one that holds nearly everything that has a scope."""
    below = _sums((path, weight) for path, weight in zip(paths, weights, strict=True) if path)
    total = sum(below.values())
    network: _Path = ()
    while True:
        children = _sums((path[len(network)], w) for path, w in below.items() if len(path) > len(network))
        largest = max(children, key=lambda child: children[child], default="")
        if not children or children[largest] < _NEARLY_ALL * total:
            return network
        below = {path: w for path, w in below.items() if path[: len(network) + 1] == (*network, largest)}
        if all(len(path) == len(network) + 1 for path in below):  # nothing would be left to tell segments apart
            return network
        network = (*network, largest)


def _shortened(scopes: Mapping[_Part, Sequence[str]], network: _Path) -> str:
    """The parts with their scopes, as many of them as fit."""
    prefix = "".join(f"{part}/" for part in network)

    def joined_name(ranges: Mapping[_Part, str]) -> str:
        return " + ".join(f"{part} {prefix}{text}" if (text := ranges[part]) else part for part in scopes)

    every = joined_name({part: _ranges(several) for part, several in scopes.items()})
    ends = joined_name(
        {part: "..".join(dict.fromkeys((several[0], several[-1]))) if several else "" for part, several in scopes.items()}
    )
    for text in (every, ends, every.replace(prefix, ""), ends.replace(prefix, "")):
        if len(text) <= LONGEST - len(" (99)"):
            return text
    return " + ".join(scopes)


def _ranges(scopes: Sequence[str]) -> str:
    """`Stem,Block_0..3,Block_5` for the scopes `Stem`, `Block_0`, ..., `Block_3` and `Block_5`."""
    numbers: dict[str, list[int]] = {}  # by what comes before the number; none for a scope that has no number
    for scope in scopes:
        match = _NUMBERED.fullmatch(scope)
        stem, number = (match[1], [int(match[2])]) if match and str(int(match[2])) == match[2] else (scope, [])
        numbers[stem] = sorted({*numbers.get(stem, ()), *number})
    written: list[str] = []
    for stem, several in numbers.items():
        if not several:
            written.append(stem)
        begin = 0
        for place, number in enumerate(several):
            if place + 1 == len(several) or several[place + 1] != number + 1:
                written.append(f"{stem}{several[begin]}" + (f"..{number}" if place > begin else ""))
                begin = place + 1
    return ",".join(written)


def _numbered(name: str, taken: set[str]) -> str:
    """The name if it is not taken yet; otherwise the first of `name (2)`, `name (3)`, ... that is not."""
    count, free = 1, name
    while free in taken:
        count += 1
        free = f"{name} ({count})"
    return free
