"""Makes every plan of a tiny graph, one by one, without pruning. Tests compare the oracle (`oracle.py`) with the result.

The space of plans is that of the oracle. An absence is any two places in a gap. Each combination of absences has a boundary table
of its own, so that its workspaces take these absences into account.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import DeviceProfile, Measured
from tensile_jax.plan.analysis.absence import Absence, find_residencies
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.result.build import Layout, build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.segmentation import boundary_table
from tests.builders import header_for
from tests.plan.oracle import SMALLEST, drops


def unpruned(graph: Graph, profile: DeviceProfile, *, swaps: bool) -> list[tuple[int, float]]:
    """(peak, step) of every plan, each replayed: every retention, subset of boundaries, and set of absences."""
    candidates = Candidates(graph, profile, state_may_stay_out=False)
    liveness = candidates.liveness
    count = len(graph.operators)
    header = header_for(graph)
    plans = [(whole_peak(candidates, Measured()), sum(candidates.latencies) + profile.launch_us)]
    inner = range(1, count)
    cuts = [(0, *some, count) for k in range(1 if count > 1 else 0, count) for some in combinations(inner, k)]
    for dropped in drops(liveness):
        retention = retain(liveness, dropped)
        for absences in all_absences(retention) if swaps else [{}]:
            places = tuple(range(count + 1))
            residencies = find_residencies(retention, absences)
            work = boundary_table(retention, candidates.fusion, profile, residencies=residencies, boundaries=places).estimates(
                profile.workspace_growth
            )
            for bounds in cuts:
                if any(not any(a.leave < b <= a.back for b in bounds) for several in absences.values() for a in several):
                    continue
                layout = Layout(retention, absences, bounds, tuple(int(work[a, b]) for a, b in pairwise(bounds)))
                plan = build_plan(layout, candidates.costs, header)
                check(plan, graph)
                plans.append((plan.peak_bytes, plan.step_us))
    return plans


def all_absences(retention: Retention) -> Iterator[dict[TensorId, tuple[Absence, ...]]]:
    """Every set of absences of the tensors that may be swapped: in each gap none, or any two places of it."""
    liveness, graph = retention.liveness, retention.liveness.graph
    count = len(graph.operators)
    choices: list[list[Absence | None]] = []
    for tensor in graph.tensors:
        t = tensor.id
        if tensor.nbytes < SMALLEST or t in liveness.kept_by_caller:
            continue
        points = [liveness.begin[t], *(p for p in retention.needs[t] if p <= retention.end[t])]
        points += [count] if retention.end[t] >= count else []
        for after, before in pairwise(points):
            pairs = [(x, y) for x in range(max(after, 0), before) for y in range(x + 1, min(before, count - 1) + 1)]
            if pairs:
                choices.append([None, *(Absence(t, x, y, 0.0) for x, y in pairs)])
    for chosen in product(*choices):
        absences: dict[TensorId, tuple[Absence, ...]] = {}
        for absence in chosen:
            if absence is not None:
                absences[absence.tensor] = (*absences.get(absence.tensor, ()), absence)
        yield absences
