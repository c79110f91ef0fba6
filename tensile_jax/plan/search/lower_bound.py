# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Computes a lower bound on the time of a step under a budget, whatever the plan, by a linear program.

Consider some places q of heavy operators; a place is the position of an operator in the order of execution. When the operator at
q runs for the first time, everything that it reads and makes is on the device. At that moment, each tensor t that was made before
and is needed later (by q itself, by a later operator, or as a result) is divided into three parts, fractions between 0 and 1:

    there(t, q)    on the device
    away(t, q)     on the host, so that it crosses the link twice
    again(o, q)    nowhere: the operator o that makes it runs once more after q, and each input of o is divided in the same way

Then the bound is the optimum of

    minimise   T
    subject to T >= sum of all latencies + launch + sum over o of again(o) * (latency of running o again)
                    + copy_share * sum over t of away(t) * nbytes(t) / rate
               T >= sum over t of away(t) * nbytes(t) / rate
               again(o) >= again(o, q),   away(t) >= away(t, q)
               there(t, q) + away(t, q) + again(o, q) >= 1                           for every t that is needed after q
               there(t, q) + away(t, q) + again(o, q) >= again(o', q)                for every input t of an o' that may run again
               sum over t of there(t, q) * nbytes(t) + nbytes(new results of q) <= budget

T is the time of the step, `launch` is the time to launch one executable, `rate` is the rate of the link in its slower
direction, and `copy_share` is the part of a copy's time that computation loses. A result of q is new unless it takes over the
memory of the state that it updates. What the caller owns is always there, and so are those inputs of q that XLA writes to
memory rather than fuses into q. Operators with effects do not run again.

Every plan of this planner is an integer solution of the program, so the optimum (found by HiGHS) is a lower bound on the time of
all plans, in the planner's own model of the device. It remains a lower bound if only some places are considered; the places at
which most is stored are taken. The program leaves out that copies wait for one another, that segments are coarse, and that
recomputation itself needs memory.

That keeping, moving and recomputing are fractions of one linear program follows POET (Patil et al., 2022) and Checkmate (Jain et
al., 2020), whose programs are integer. Sizes in bytes, times in microseconds.
"""

from collections.abc import Set

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import slower_copy_us
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.search.step_model import StepModel

_PLACES = 6  # that are considered at most


def least_step_us(candidates: StepModel, budget_bytes: float) -> float:
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
    """Bytes of the new results of an operator: those that are not `aliases`, which take over the memory of other state."""
    outputs = liveness.graph.operators[place].outputs
    return sum(liveness.graph.tensors[t].nbytes for t in outputs if t not in aliases and fusion.materialised[t])


class _Program:
    """Columns and rows of the linear program, in the order in which they are added. Column 0 is T."""

    def __init__(self, candidates: StepModel) -> None:
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
        """Add the rows of one place."""
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
        """The optimum; `alone_us` is the time of the step without copies and recomputation."""
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
