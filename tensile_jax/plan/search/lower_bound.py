# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The least time that a step can take under a budget, whatever the plan: a linear program.

Consider some places q of heavy operators. When q runs for the first time, everything that it reads and makes is on the device.
A tensor t that was made before and is needed later (by q itself, by a later operator, or as a result) is at that moment

    there(t, q)    on the device, or
    away(t, q)     on the host, and crosses the link twice, or
    again(o, q)    not there at all: its operator o runs once more after q, for which o's own inputs must be one of the three

as fractions between 0 and 1. Then

    minimise   T
    subject to T >= sum of all latencies + launch + sum over o of again(o) * (latency of running o again)
                    + copy_share * sum over t of away(t) * nbytes(t) / rate
               T >= sum over t of away(t) * nbytes(t) / rate                         for each direction of the link
               again(o) >= again(o, q),   away(t) >= away(t, q)
               there(t, q) + away(t, q) + again(o, q) >= 1                           for every t that is needed after q
               there(t, q) + away(t, q) + again(o, q) >= again(o', q)                for every input t of an o' that may run again
               sum over t of there(t, q) * nbytes(t) + nbytes(results of q) <= budget

Every plan of this planner is an integer solution of it, so the optimum (HiGHS) is a lower bound on the time of all of them, in
the planner's own model of the device. It stays one when only some places are considered: those at which most is stored. It leaves
out that copies take their turn, that segments are coarse, and that something must hold a chain while it runs.

That keeping, moving and recomputing are fractions of one linear program follows POET (Patil et al., 2022) and
Checkmate (Jain et al., 2020), whose programs are integer.
"""

from collections.abc import Set

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import slower_copy_us
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.residency import stored_unless_swapped
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.search.candidates import Candidates

_PLACES = 6


def least_step_us(candidates: Candidates, budget_bytes: float) -> float:
    """A lower bound on the microseconds of a step whose peak is at most `budget_bytes`; infinite if no plan can exist."""
    program = _Program(candidates)
    for place in _places(candidates.liveness, candidates.fusion, candidates.undropped, budget_bytes):
        program.consider(place, budget_bytes)
    return program.least(candidates.whole_us)


def _places(liveness: Liveness, fusion: Fusion, retention: Retention, budget_bytes: float) -> list[int]:
    """Heavy operators at which most is stored and made, far apart from each other."""
    stored = stored_unless_swapped(retention)
    aliases = {h for h in liveness.alias if h >= 0}
    need = {
        place: int(stored[place]) + _made(liveness, fusion, aliases, place)
        for place, op in enumerate(liveness.graph.operators)
        if op.kind == "heavy"
    }
    apart = max(1, len(liveness.graph.operators) // (4 * _PLACES))
    chosen: list[int] = []
    for place in sorted(need, key=lambda p: (-need[p], p)):
        if len(chosen) == _PLACES or need[place] <= budget_bytes:
            break
        if all(abs(place - other) >= apart for other in chosen):
            chosen.append(place)
    return chosen


def _made(liveness: Liveness, fusion: Fusion, aliases: Set[int], place: int) -> int:
    """Bytes of the results of an operator that take no one's place: those that are not `aliases`."""
    outputs = liveness.graph.operators[place].outputs
    return sum(liveness.graph.tensors[t].nbytes for t in outputs if t not in aliases and fusion.materialised[t])


class _Program:
    """Columns and rows of the linear program, in the order in which they come up. Column 0 is T."""

    def __init__(self, candidates: Candidates) -> None:
        self._liveness = candidates.liveness
        self._fusion = candidates.fusion
        self._rerun_us = candidates.rerun_us
        self._profile = candidates.profile
        self._aliases = {h for h in self._liveness.alias if h >= 0}
        self._columns: dict[tuple[str, int, int], int] = {("T", 0, 0): 0}
        self._rows: list[tuple[list[tuple[int, float]], float]] = []  # sum of coefficient * column <= bound
        self._fixed: set[int] = set()  # columns that must be 1

    def _column(self, kind: str, item: int, place: int = -1) -> int:
        return self._columns.setdefault((kind, item, place), len(self._columns))

    def consider(self, place: int, budget_bytes: float) -> None:
        """The rows of one place."""
        liveness, graph = self._liveness, self._liveness.graph
        begin, tensors = liveness.begin, graph.tensors
        count = len(graph.operators)
        own = graph.operators[place]
        needed = [
            t.id
            for t in tensors
            if begin[t.id] < place and t.nbytes and (any(p >= place for p in liveness.uses[t.id]) or liveness.end[t.id] >= count)
        ]
        seen: set[int] = set()
        waiting: list[tuple[TensorId, int | None]] = [(t, None) for t in needed]
        memory: dict[int, float] = {}
        while waiting:
            t, wanted_by = waiting.pop()
            if not tensors[t].nbytes:
                continue
            row: list[tuple[int, float]] = [(self._column("there", t, place), -1.0)]
            memory[row[0][0]] = float(tensors[t].nbytes)
            if t in own.inputs and self._fusion.materialised[t] or t in liveness.kept_by_caller:
                self._fixed.add(row[0][0])
            if t not in liveness.kept_by_caller:
                away = self._column("away", t, place)
                row.append((away, -1.0))
                self._rows.append(([(away, 1.0), (self._column("away", t), -1.0)], 0.0))
            producer = begin[t]
            if producer >= 0 and not graph.operators[producer].effectful:
                again = self._column("again", producer, place)
                row.append((again, -1.0))
                if producer not in seen:
                    seen.add(producer)
                    self._rows.append(([(again, 1.0), (self._column("again", producer), -1.0)], 0.0))
                    waiting += [(u, producer) for u in graph.operators[producer].inputs]
            if wanted_by is None:
                self._rows.append((row, -1.0))
            else:
                self._rows.append(([*row, (self._column("again", wanted_by, place), 1.0)], 0.0))
        self._rows.append((list(memory.items()), budget_bytes - _made(liveness, self._fusion, self._aliases, place)))

    def least(self, alone_us: float) -> float:
        """The optimum."""
        profile, tensors = self._profile, self._liveness.graph.tensors
        time = [(0, -1.0)]
        link = [(0, -1.0)]
        for (kind, item, place), column in self._columns.items():
            if place == -1 and kind == "again":
                time.append((column, self._rerun_us[item]))
            elif place == -1 and kind == "away":
                link.append((column, slower_copy_us(tensors[item].nbytes, profile)))
                time.append((column, slower_copy_us(profile.copy_share * tensors[item].nbytes, profile)))
        rows = [*self._rows, (time, -alone_us), (link, 0.0)]
        count = len(self._columns)
        entries = [(r, c, v) for r, (row, _) in enumerate(rows) for c, v in row]
        which, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        largest = np.zeros(len(rows))
        np.maximum.at(largest, which, np.abs(values))
        largest = np.maximum(largest, 1e-12)  # bytes and microseconds differ by many orders: every row is brought to 1
        matrix = csr_array((values / largest[which], (which, columns)), shape=(len(rows), count))
        bound = np.array([b for _, b in rows]) / largest
        bounds = [(0.0, None), *((1.0, 1.0) if c in self._fixed else (0.0, 1.0) for c in range(1, count))]
        objective = np.zeros(count)
        objective[0] = 1.0
        found = linprog(objective, A_ub=matrix, b_ub=bound, bounds=bounds, method="highs")
        if found.status == 2:  # infeasible
            return float("inf")
        return float(found.fun) if found.status == 0 else alone_us
