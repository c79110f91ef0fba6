# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Computes a lower bound on the time of a step under a budget, whatever the plan, by linear programs.

A *segment* is a stretch of operators that is compiled as one executable, with one launch. A *place* is the position of an
operator in the order of execution. A *heavy* operator is one that XLA runs as a kernel of its own; XLA fuses *light* ones into
their neighbours. Consider the places q(1) < ... < q(K) of some heavy operators. Place 0 is the beginning of the iteration, and
place K + 1 its end. Interval k reaches from q(k) to q(k + 1). For each large tensor t and each operator o, fractions between 0
and 1 describe a plan:

    there(t, k)    the part of t that is on the device when the operator at q(k) runs for the first time
    host(t, k)     the part of which the host has a copy by then; it never falls, because a tensor is copied out once
    in(t, k)       the part that is copied to the device during interval k
    again(o, k)    the part of o that runs again during interval k
    later(o, k)    the part of o that runs again at any time after q(k)

Constraints on the tensors, where operator o makes t, and t is made before q(k):

    there(t, k + 1) <= there(t, k) + in(t, k) + again(o, k)
    in(t, k)        <= host(t, k + 1)
    there(t, k) + in(t, k) + again(o, k)   >= 1           if an operator in interval k reads t, or t is a result and k = K
    there(u, k) + in(u, k) + again(o', k)  >= again(o, k) for each input u of o, where o' makes u
    there(t, k) + host(t, k) + later(o, k) >= 1           if an operator after q(k) reads t, or t is a result
    there(u, k) + host(u, k) + later(o', k) >= later(o, k)
    again(o, k) + again(o, k + 1) + ...    >= later(o, k)

The last three constraints say where a tensor that is needed after q(k) comes from: it is on the device, on the host, or made
again later. To make a part of it again, as large a part of each input must be available. Without these constraints, a solution
could keep only half of u, run half of o again in each of two intervals, and count the two halves as all of t.

Constraints on the memory, at every place:

    caller + sum over t of there(t, k) * nbytes(t) + new results of the operator at q(k) <= budget

`caller` is the size of the inputs that are not donated, which stay on the device for the whole step. there(t, k) is 1 for each
t that the operator reads from memory. A result is new unless it takes over the memory of the state that it updates.

Constraints on the time. at(k) is when the operator at q(k) begins, work(k) is the computation until then, and delay(k) is what
copies have taken from computation until then. rerun_us(o) is how much longer a segment takes if it runs o again. `launch` is
the overhead of one launch, since a step has at least one. The time of the step is T = at(K + 1), which is minimised.

    work(k + 1) - work(k) = latencies of the operators in interval k + sum over o of again(o, k) * rerun_us(o)
    at(k + 1) - at(k)    >= work(k + 1) - work(k)
    delay(k + 1) - delay(k) = the part of the copies in interval k that takes time from computation (`DeviceProfile.copy_share`)
    at(k)                >= launch + work(k) + delay(k)
    at(k + 1) - at(k)    >= sum over t of (host(t, k + 1) - host(t, k)) * nbytes(t) / rate to the host
    at(k + 1) - at(k)    >= sum over t of in(t, k) * nbytes(t) / rate to the device

So a tensor that is away at a place was copied out before that place, and is copied in after it. At the end, all results are on
the device. If the state may be on the host across the iteration boundary, a part of each donated state tensor begins on the host,
and the same part of its update is copied there by the end. A copy that is issued after the last segment takes nothing from
computation, so it adds nothing to the delay.

Why this is a lower bound: every plan that `simulate.py` can simulate gives a solution of these constraints. In it, there(t, k)
is 1 if t occupies memory while the segment with q(k) runs. If t is being copied when the operator at q(k) begins, only the part
that has been transferred by then counts: in host(t, k) for a copy out, and in there(t, k) for a copy in. What a segment
computes again counts as computed in the interval in which it is first read. The bound shares three assumptions with the
planner: operators run in the order of the graph; what a heavy operator reads or makes is in memory while it runs; and what a
segment makes and needs later stays in memory until then.

XLA does not write the results of most light operators: they are computed where they are read, at no cost. So if a tensor t
costs nothing to compute from one other tensor that is no larger than t, the linear program has only the other tensor. A *join*
is a light operator that adds large tensors, such as a residual sum. Computing it again costs nothing if one segment runs both
the join and the next reader of its result, and something otherwise. So rerun_us(o) of a join o is left out of work(k). It
counts only in an interval k for which a segment from the join to the first reader after q(k) would need more than the budget.
For all these intervals together, it counts once: the right side of at(K + 1) >= launch + work(K + 1) + delay(K + 1) has one
more term, the largest of their again(o, k) and later(o, k), times rerun_us(o).

A copy can hide only beside a segment, and each segment has a launch. A copy that must end at the boundary at which it is issued
is *exposed*: nothing is computed meanwhile. If a tensor is away and neither of its copies is exposed, the plan has at least
five segments: the one that makes the tensor, one beside the copy out, one without the tensor, one beside the copy in, and one
that reads the tensor. For state, four suffice: the state may begin on the host, and its update may be copied there beside the
last segment. So three linear programs are solved, which differ in which tensors expose a copy if they come back to the device.
The bound is the least of the three values of T, each with the launches that are added to it:

    three segments or fewer   all tensors expose a copy
    four                      only tensors that are neither inputs nor results expose a copy; three launches are added
    five or more              no tensor exposes a copy; four launches are added

If t exposes a copy, the right side of this constraint on at(K + 1) has a further term: the largest in(t, k) over all k, times
half of the time of the shorter one of the two copies of t. Only half counts, because two exposed copies in opposite directions
may overlap at the end of the iteration.

Only some places are considered, which keeps the program small (cutting planes): first those at which most is stored. The solution
says what is in memory at all other heavy operators. The places above the budget are added, and the program is solved again, until
there are none or the program takes longer than a few seconds. Each program gives a lower bound, and the largest counts. Two
things lower the bound a little: small tensors take no memory, and a segment need not hold its inputs to its end.

POET (Patil et al., 2022) and Checkmate (Jain et al., 2020) also describe keeping, moving and recomputing by one program, with
whole numbers instead of fractions. HiGHS solves the program. Sizes in bytes, times in microseconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.liveness import Liveness

# Each trades the height of the bound for the time to find it (`make bench-constants`; `_FEW_LAUNCHES`: `make bench-planning`).
_PLACES = 2  # added in a round, at most
_MOST_ROUNDS = 8
_MOST_COLUMNS = 6_000  # of a program; a larger one is the last that is solved
_SMALL = 1 / 4000  # of the budget: smaller tensors count as if they took no memory
_SLACK = 1e-4  # smaller fractions, and smaller parts of the budget as excesses, count as zero
_FEW_LAUNCHES = 0.003  # of the bound: if four launches take less, they are left out, which saves two programs
_TOLERANCE = 1e-6  # of the optimum: HiGHS may be off by so much

Terms = list[tuple[int, float]]
"""Columns and their coefficients: one row of a linear program."""


def least_step_us(
    liveness: Liveness, fusion: Fusion, costs: StepCosts, budget_bytes: float, *, state_may_stay_out: bool
) -> float:
    """A lower bound on the microseconds of a step whose peak is at most `budget_bytes`; infinite if no plan can exist.

    Args:
        state_may_stay_out: whether donated state may be on the host when the iteration begins and ends.
    """
    step = _reduce(liveness, fusion, costs, _SMALL * budget_bytes, state_may_stay_out=state_may_stay_out)
    launch_us = costs.profile.launch_us
    hidden_us = _solved(step, budget_bytes, frozenset())
    if 4 * launch_us < _FEW_LAUNCHES * hidden_us:
        return hidden_us
    exposed_us = max(hidden_us, _solved(step, budget_bytes, frozenset(range(len(step.nbytes)))))
    if exposed_us <= hidden_us + 3 * launch_us:
        return exposed_us
    inner = frozenset(i for i, begin in enumerate(step.begin) if begin >= 0 and not step.result[i])
    partly_us = max(hidden_us, _solved(step, budget_bytes, inner))
    return min(exposed_us, partly_us + 3 * launch_us, hidden_us + 4 * launch_us)


def _solved(step: "_Step", budget_bytes: float, exposed: frozenset[int]) -> float:
    """The largest optimum of the programs in which these items expose a copy if they leave; infinite if one has no solution."""
    places = _crowded(step, step.stored, (), budget_bytes)
    best = 0.0
    for _ in range(_MOST_ROUNDS):
        program = _Program(step, places, budget_bytes, exposed)
        solution = program.solve()
        if solution is None:
            return float("inf")
        best = max(best, solution.us * (1 - _TOLERANCE))
        more = _crowded(step, solution.memory(), places, budget_bytes)
        if not more or program.count > _MOST_COLUMNS:
            break
        places = sorted([*places, *more])
    return best


@dataclass(frozen=True, slots=True)
class _Maker:
    """An operator that makes items. If it is `fused`, a segment that contains it and a reader of its results need not
    store them.
    """

    place: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rerun_us: float
    runs_again: bool
    fused: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The tensors that matter, called items, and their makers.

    By item: `nbytes`; `begin` and `uses`, places; `last`, the last place that may need it, itself or to run something again;
    `maker`, the index of its maker or -1; `result`, whether the step returns it; `readers`, the places that read it, themselves
    or through results that are not written. `update` maps state that may stay out to its update. By heavy place: `read`, the
    items that its operator reads from memory, and `made`, the bytes of its new results; `stored`, the bytes that are needed if
    nothing runs again or leaves. `before_us` are the latencies of all operators before a place.
    """

    nbytes: list[float]
    begin: list[int]
    uses: list[list[int]]
    last: list[int]
    maker: list[int]
    result: list[bool]
    readers: list[list[int]]
    update: dict[int, int]
    makers: list[_Maker]
    read: dict[int, tuple[int, ...]]
    made: dict[int, float]
    stored: dict[int, float]
    before_us: np.ndarray
    caller_bytes: float
    liveness: Liveness
    fusion: Fusion
    costs: StepCosts


def _reduce(liveness: Liveness, fusion: Fusion, costs: StepCosts, small: float, *, state_may_stay_out: bool) -> _Step:
    """The items of a step: tensors of more than `small` bytes, without those that cost nothing to compute from one other item."""
    graph = liveness.graph
    tensors, operators, count = graph.tensors, graph.operators, len(graph.operators)
    results = frozenset(graph.outputs)
    aliases = frozenset(h for _, h in liveness.possible_aliases)
    item: dict[TensorId, int] = {}  # of each tensor that is an item or is computed from one
    nbytes: list[float] = []
    begin: list[int] = []
    uses: list[list[int]] = []
    maker: list[int] = []
    makers: list[_Maker] = []

    def add(t: TensorId, made_by: int) -> None:
        item[t] = len(nbytes)
        nbytes.append(float(tensors[t].nbytes))
        begin.append(liveness.begin[t])
        uses.append([])
        maker.append(made_by)

    for tensor in tensors:
        if tensor.producer is None and tensor.id not in liveness.kept_by_caller and tensor.nbytes > small:
            add(tensor.id, -1)
    for place, op in enumerate(operators):
        inputs = tuple(dict.fromkeys(item[t] for t in op.inputs if t in item))
        for i in inputs:
            uses[i].append(place)
        outputs = [t for t in op.outputs if tensors[t].nbytes > small]
        if costs.rerun_us[place] == 0.0 and not op.effectful and len(inputs) <= 1:
            free = [t for t in outputs if not fusion.materialised[t] and t not in results]
            if inputs:
                free = [t for t in free if tensors[t].nbytes >= nbytes[inputs[0]]]
                item.update((t, inputs[0]) for t in free)
            outputs = [t for t in outputs if t not in free]
        if outputs:
            for t in outputs:
                add(t, len(makers))
            fused = not all(fusion.materialised[t] for t in outputs)
            makers.append(_Maker(place, inputs, tuple(item[t] for t in outputs), costs.rerun_us[place], not op.effectful, fused))
    returned = {item[t] for t in results if t in item}
    end = [count if i in returned else max([begin[i], *uses[i]]) for i in range(len(nbytes))]
    last = list(end)
    readers = [set(places) for places in uses]
    for made_by in reversed(makers):
        if made_by.fused:
            for i in made_by.inputs:
                readers[i].update(*(readers[o] for o in made_by.outputs))
        if made_by.runs_again:
            for i in made_by.inputs:
                last[i] = max(last[i], *(last[o] for o in made_by.outputs))
    update: dict[int, int] = {}
    for pair in graph.carried if state_may_stay_out else ():
        if (
            pair.input in graph.donated
            and pair.input in item
            and pair.output in item
            and tensors[pair.output].producer is not None
        ):
            update[item[pair.input]] = item[pair.output]
    heavy = [place for place, op in enumerate(operators) if op.kind == "heavy"]
    made = {
        p: float(sum(tensors[t].nbytes for t in operators[p].outputs if t not in aliases and fusion.materialised[t]))
        for p in heavy
    }
    stored = _live(np.array(begin, dtype=np.int64), np.array(end, dtype=np.int64), np.array(nbytes), count)
    caller_bytes = float(sum(tensors[t].nbytes for t in liveness.kept_by_caller))
    return _Step(
        nbytes=nbytes, begin=begin, uses=uses, last=last, maker=maker, result=[i in returned for i in range(len(nbytes))],
        readers=[sorted(places) for places in readers], update=update, makers=makers,
        read={
            p: tuple(dict.fromkeys(item[t] for t in operators[p].inputs if t in item and fusion.materialised[t])) for p in heavy
        },
        made=made, stored={p: caller_bytes + float(stored[p]) + made[p] for p in heavy},
        before_us=np.concatenate([[0.0], np.cumsum(costs.latencies)]), caller_bytes=caller_bytes,
        liveness=liveness, fusion=fusion, costs=costs,
    )  # fmt: skip


def _live(begin: np.ndarray, end: np.ndarray, nbytes: np.ndarray, count: int) -> np.ndarray:
    """For each place, the bytes of the tensors with begin < place <= end."""
    change = np.zeros(count + 2)
    np.add.at(change, begin + 1, nbytes)
    np.add.at(change, end + 1, -nbytes)
    return np.cumsum(change)[: count + 1]


def _crowded(step: _Step, needed: dict[int, float], taken: Sequence[int], budget_bytes: float) -> list[int]:
    """Places at which more than the budget is needed: first those with most, and far apart from each other; ascending."""
    apart = max(1, len(step.before_us) // (4 * (_PLACES + len(taken))))
    chosen: list[int] = []
    for place in sorted(needed, key=lambda p: (-needed[p], p)):
        if len(chosen) == _PLACES or needed[place] <= budget_bytes * (1 + _SLACK):
            break
        if place not in taken and all(abs(place - other) >= apart for other in chosen):
            chosen.append(place)
    return sorted(chosen)


class _Program:
    """The linear program for some places. Bytes are in units of the budget, and times in units of the step's own time."""

    def __init__(self, step: _Step, places: Sequence[int], budget_bytes: float, exposed: frozenset[int]) -> None:
        self.step = step
        self.places = places
        self.exposed = exposed
        self.budget_bytes = budget_bytes
        self.columns: dict[tuple[str, int, int], int] = {}
        self.rows: list[tuple[Terms, float]] = []  # sum of coefficient * column <= bound
        self._ones: set[int] = set()  # columns that must be 1
        self._unit_us = float(step.before_us[-1]) + step.costs.profile.launch_us
        k = len(places)
        self._lanes: list[tuple[Terms, Terms]] = [([], []) for _ in range(k + 1)]  # by interval: copies out, copies in
        self._delays: list[Terms] = [[] for _ in range(k + 1)]
        self._reruns: list[Terms] = [[] for _ in range(k + 1)]
        self._once: Terms = []  # what is paid for at any time
        self._memory: list[Terms] = [[] for _ in range(k + 1)]
        self._first = [bisect_right(places, b) + 1 if b >= 0 else 0 for b in step.begin]  # the first k for which the item is made
        self._until = [k if r else bisect_right(places, p) for r, p in zip(step.result, step.last, strict=True)]  # the last k
        for item in range(len(step.nbytes)):
            self._add_item(item)
        for index in range(len(step.makers)):
            self._add_reruns(index)
        self._add_places()
        self._add_times()

    @property
    def count(self) -> int:
        """The number of columns."""
        return len(self.columns)

    def _column(self, kind: str, item: int, k: int) -> int:
        return self.columns.setdefault((kind, item, k), len(self.columns))

    def _at_most(self, terms: Terms, bound: float) -> None:
        self.rows.append((terms, bound))

    def _run(self, item: int, k: int, coefficient: float) -> Terms:
        """The term of again(o, k), where o makes the item; no term if o never runs again."""
        o = self.step.maker[item]
        return [(self._column("again", o, k), coefficient)] if o >= 0 and self.step.makers[o].runs_again else []

    def _supply(self, item: int, k: int) -> Terms:
        """Minus what makes the item available in interval k."""
        return [(self._column("there", item, k), -1.0), (self._column("in", item, k), -1.0), *self._run(item, k, -1.0)]

    def _source(self, item: int, k: int) -> Terms:
        """Minus the ways to have the item after place k: it is on the device, on the host, or made again later."""
        o = self.step.maker[item]
        run = [(self._column("later", o, k), -1.0)] if o >= 0 and self.step.makers[o].runs_again else []
        return [(self._column("there", item, k), -1.0), *self._hosted(item, k, -1.0), *run]

    def _hosted(self, item: int, k: int, coefficient: float) -> Terms:
        """host(item, k). Nothing is on the host when the iteration begins, except a part of the state that may stay out."""
        if k > 0 or item in self.step.update:
            return [(self._column("host", item, k), coefficient)]
        return []

    def _add_item(self, item: int) -> None:
        step, last = self.step, len(self.places)
        nbytes, profile = step.nbytes[item], step.costs.profile
        first, until = self._first[item], self._until[item]
        out_us, in_us = copy_out_us(nbytes, profile) / self._unit_us, copy_in_us(nbytes, profile) / self._unit_us
        begins_out = [old for old, new in step.update.items() if new == item] if step.update else []
        used = {bisect_right(self.places, p) for p in step.uses[item]}
        needed = last if step.result[item] else max(used, default=0)
        for k in range(first, until + 1):
            there, into = self._column("there", item, k), self._column("in", item, k)
            if item in self.exposed:
                self._at_most([(into, 1.0), (self._column("exposed", item, 0), -1.0)], 0.0)
            self._memory[k].append((there, nbytes / self.budget_bytes))
            out = self._hosted(item, k + 1, 1.0)
            before = self._hosted(item, k, -1.0)
            self._at_most([(into, 1.0), *self._hosted(item, k + 1, -1.0)], 0.0)
            self._at_most([*self._hosted(item, k, 1.0), *self._hosted(item, k + 1, -1.0)], 0.0)
            if 0 < k <= needed:
                self._at_most(self._source(item, k), -1.0)
            if k in used:
                self._at_most(self._supply(item, k), -1.0)
            if k < until:
                self._at_most([*self._supply(item, k), (self._column("there", item, k + 1), 1.0)], 0.0)
            moved = [(c, v * out_us) for c, v in (*out, *before)]
            self._lanes[k][0].extend(moved)
            self._lanes[k][1].append((into, in_us))
            if k < last:
                self._delays[k].extend((c, v * profile.copy_share) for c, v in moved)
            if k < last or k in used:  # otherwise the copy may be issued after the last segment
                self._delays[k].append((into, in_us * profile.copy_share))
        if ("exposed", item, 0) in self.columns:
            self._once.append((self._column("exposed", item, 0), min(out_us, in_us) / 2))
        if 0 < first <= until:
            moved = self._hosted(item, first, 1.0)
            self._lanes[first - 1][0].extend((c, v * out_us) for c, v in moved)
            self._delays[first - 1].extend((c, v * out_us * profile.copy_share) for c, v in moved)
        if first == 0 and item in step.update:
            self._at_most([(self._column("there", item, 0), 1.0), (self._column("host", item, 0), 1.0)], 1.0)
        if step.result[item]:
            on_host = [(self._column("host", old, 0), -1.0) for old in begins_out]
            if first > last:
                self._lanes[last][0].extend((c, -v * out_us) for c, v in on_host)
            else:
                self._at_most([*self._supply(item, last), *on_host], -1.0)
                if on_host:
                    self._at_most([*((c, -v) for c, v in on_host), *self._hosted(item, last + 1, -1.0)], 0.0)

    def _add_reruns(self, index: int) -> None:
        made_by = self.step.makers[index]
        if not made_by.runs_again:
            return
        until, last = max(self._until[i] for i in made_by.outputs), len(self.places)
        readers = sorted({p for i in made_by.outputs for p in self.step.readers[i]})
        for k in range(bisect_right(self.places, made_by.place) + 1, until + 1):
            again = self._column("again", index, k)
            for i in made_by.inputs:
                self._at_most([*self._supply(i, k), (again, 1.0)], 0.0)
                if 0 < k <= last:
                    self._at_most([*self._source(i, k), (self._column("later", index, k), 1.0)], 0.0)
            pays = [again]
            if 0 < k <= last:
                later = self._column("later", index, k)
                self._at_most([(later, 1.0), *((self._column("again", index, j), -1.0) for j in range(k, until + 1))], 0.0)
                pays.append(later)
            if not made_by.fused:
                self._reruns[k].append((again, made_by.rerun_us / self._unit_us))
            elif made_by.rerun_us:
                reader = bisect_left(readers, self.places[k - 1])
                if reader == len(readers) or self._exceeds(made_by.place, readers[reader]):
                    for column in pays:
                        self._at_most([(column, 1.0), (self._column("once", index, 0), -1.0)], 0.0)
        if ("once", index, 0) in self.columns:
            self._once.append((self._column("once", index, 0), made_by.rerun_us / self._unit_us))

    def _exceeds(self, begin: int, place: int) -> bool:
        """Whether one segment that contains both places needs more than the budget for what it makes and reads in between."""
        liveness = self.step.liveness
        reads = liveness.reads
        read = reads.place <= place
        last = np.full(len(liveness.begins), -1)
        np.maximum.at(last, reads.tensor[read], reads.place[read])
        made = self.step.fusion.written & (liveness.begins >= begin) & (last > liveness.begins)
        made[[h for _, h in liveness.possible_aliases]] = False
        live = _live(liveness.begins[made], last[made], liveness.nbytes[made].astype(float), len(liveness.graph.operators))
        return self.step.caller_bytes + float(live.max(initial=0.0)) > self.budget_bytes

    def _add_places(self) -> None:
        step = self.step
        for k, place in enumerate(self.places, start=1):
            self._ones.update(self._column("there", i, k) for i in step.read[place])
            room = self.budget_bytes - step.caller_bytes - step.made[place]
            self._at_most(self._memory[k], room / self.budget_bytes)

    def _add_times(self) -> None:
        step, last = self.step, len(self.places)
        edges = [0, *self.places, len(step.before_us) - 1]
        launch = step.costs.profile.launch_us / self._unit_us

        def moment(kind: str, k: int, coefficient: float) -> Terms:
            return [(self._column(kind, -1, k), coefficient)] if k else []

        for k in range(last + 1):
            own = float(step.before_us[edges[k + 1]] - step.before_us[edges[k]]) / self._unit_us
            self._at_most([*self._reruns[k], *moment("work", k, 1.0), *moment("work", k + 1, -1.0)], -own)
            self._at_most([*self._delays[k], *moment("delay", k, 1.0), *moment("delay", k + 1, -1.0)], 0.0)
            at = [*moment("at", k, 1.0), *moment("at", k + 1, -1.0)]
            self._at_most([*moment("work", k + 1, 1.0), *moment("work", k, -1.0), *at], 0.0)
            once = self._once if k == last else []
            both = [*moment("work", k + 1, 1.0), *moment("delay", k + 1, 1.0)]
            self._at_most([*both, *once, *moment("at", k + 1, -1.0)], -launch)
            for lane in self._lanes[k]:
                self._at_most([*lane, *at], 0.0)

    def solve(self) -> "_Solution | None":
        """The optimum; None if the program has no solution."""
        from scipy.optimize import linprog  # slow to import, and plans are made without it
        from scipy.sparse import csr_array

        count, objective = self.count, self.columns["at", -1, len(self.places) + 1]
        lengths = [len(terms) for terms, _ in self.rows]
        entries = np.array([term for terms, _ in self.rows for term in terms])
        matrix = csr_array(
            (entries[:, 1], (np.repeat(np.arange(len(lengths)), lengths), entries[:, 0].astype(np.int64))),
            shape=(len(lengths), count),
        )
        lower, upper, cost = np.zeros(count), np.ones(count), np.zeros(count)
        lower[list(self._ones)] = 1.0
        upper[[c for (_, item, _), c in self.columns.items() if item < 0]] = np.inf
        cost[objective] = 1.0
        found = linprog(
            cost, A_ub=matrix, b_ub=np.array([b for _, b in self.rows]), bounds=np.array([lower, upper]).T, method="highs"
        )
        if found.status == 2:  # infeasible
            return None
        if found.status != 0:
            return _Solution(self, np.zeros(count), self._unit_us)
        return _Solution(self, found.x, float(found.fun) * self._unit_us)


class _Solution:
    """The optimal fractions of a program, and its optimum in microseconds."""

    def __init__(self, program: _Program, fractions: np.ndarray, us: float) -> None:
        self.us = us
        self._program = program
        self._fractions = fractions

    def _of(self, kind: str, item: int, k: int) -> float:
        column = self._program.columns.get((kind, item, k))
        return 0.0 if column is None else float(self._fractions[column])

    def memory(self) -> dict[int, float]:
        """The bytes at each heavy place, if everything is copied in or computed again as late as possible."""
        step, places = self._program.step, self._program.places
        count = len(step.before_us) - 1
        need = np.zeros(count + 1)
        edges = [0, *places, count]
        may_stay_out = set(step.update.values())
        for k, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
            first = self._first_needs(k, low, high)
            for i, nbytes in enumerate(step.nbytes):
                if step.begin[i] >= high or step.last[i] < low:
                    continue
                until = bisect_left(step.uses[i], high)
                last = step.uses[i][until - 1] if until and step.uses[i][until - 1] >= low else low - 1
                after = self._of("there", i, k + 1)
                if k == len(places):
                    after = float(step.result[i] and i not in may_stay_out)
                begin = max(step.begin[i], low) + 1
                came = again = 0.0
                if step.begin[i] < low:
                    came, again = self._of("in", i, k), self._of("again", step.maker[i], k)
                need[begin : last + 1] += max(0.0, 1.0 - came - again) * nbytes
                need[max(begin, first[i] + 1) : last + 1] += min(1.0, again) * nbytes
                need[max(begin, last + 1) : high] += max(0.0, after - came - (again if last < low else 0.0)) * nbytes
        return {p: step.caller_bytes + float(need[p]) + made for p, made in step.made.items()}

    def _first_needs(self, k: int, low: int, high: int) -> list[int]:
        """For each item, the first place in the interval `[low, high)` that needs it, itself or to run something again."""
        step = self._program.step
        first = [high] * len(step.nbytes)
        for i, uses in enumerate(step.uses):
            at = bisect_left(uses, low)
            if at < len(uses):
                first[i] = min(high, uses[at])
        for index in range(len(step.makers) - 1, -1, -1):
            made_by = step.makers[index]
            if made_by.place < low and self._of("again", index, k) > _SLACK:
                soonest = min(first[i] for i in made_by.outputs)
                for i in made_by.inputs:
                    first[i] = min(first[i], soonest)
        return first
