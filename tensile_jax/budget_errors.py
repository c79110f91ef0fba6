"""Writes the errors for budgets that are too small: what needs the memory, which smallest budget works, and what would help."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.ir import BACKWARD, Graph, Operator, OperatorId, Tensor, TensorId
from tensile_jax.plan_format import Plan, PlannedTensor, Segment, unranged
from tensile_jax.units import format_bytes


class HostNeed(NamedTuple):
    """Why a host budget of `limit_bytes` is a reason for a refusal: with `host_bytes`, the step needs only `device_bytes`.

    `basis` says for people where the limit comes from; it is empty if the user gave it.
    """

    limit_bytes: float
    basis: str
    device_bytes: int
    host_bytes: int


_WORTH_NAMING = 10  # a remedy is named if it could save at least one part in so many of what the budget lacks
_MAIN_SHARE = 0.5  # of the smallest budget: an operator that needs more is named, also if it would fit alone


def too_small_for_step(
    graph: Graph,
    limit: float,
    floor_bytes: int,
    *,
    about: str,
    basis: str,
    state_memory: Literal["device", "any"],
    stored: Callable[[TensorId], bool],
    source: Callable[[OperatorId], str],
    least: Plan | None = None,
    devices: int = 1,
    host: HostNeed | None = None,
) -> BudgetTooSmall:
    """The error that no plan of a step keeps its budget: the smallest budget that works, what needs it, and what would help.

    Args:
        about: the text before the smallest budget: "about " if that is an estimate, otherwise empty.
        basis: what the budget was computed from (`Budget.basis`).
        stored: whether a tensor is stored in device memory. XLA fuses other tensors into the operators that read them.
        source: where the user's code has an operator, such as "train.py:17"; empty if that is not known.
        least: the plan that needs `floor_bytes`, if it is at hand. Its largest segment is what the budget is too small for.
        devices: on how many devices the step runs; all sizes are those of one of them.
        host: if the step needs less on the device with more host memory, how much of both.
    """

    def worth_naming(saved: int) -> bool:
        return 0 < saved and saved * _WORTH_NAMING >= floor_bytes - limit

    needs = _what_needs_it(least)
    remedies = [f"Give a budget of {about}{format_bytes(floor_bytes)} or more."]
    if host is not None:
        remedies.append(
            f"Give more host memory (host_budget). With {format_bytes(host.host_bytes)} of host memory the step needs about "
            f"{format_bytes(host.device_bytes)} on the device; with host_budget={format_bytes(host.limit_bytes)}"
            f"{f' ({host.basis})' if host.basis else ''} at least {about}{format_bytes(floor_bytes)}."
        )
    needs_most = _operator_that_needs_most(graph, least, stored)
    touched: set[TensorId] = set()
    if needs_most is not None and needs_most.nbytes > min(limit, floor_bytes * _MAIN_SHARE):
        touched = {*needs_most.operator.inputs, *needs_most.operator.outputs}
        why, remedy = _undivided(needs_most.operator)
        needs.append(f"{_what_it_needs(needs_most, source(needs_most.operator.id))} {why}")
        remedies.append(remedy)
    alone = [t for t in graph.tensors if t.nbytes > limit and stored(t.id)]
    if alone:
        one = max(alone, key=lambda t: t.nbytes)
        needs.append(f"One tensor alone is larger than the budget: {one.name} ({format_bytes(one.nbytes)}).")
    held = [t for t in graph.tensors if t.producer is None]
    taken_over = {pair.output for pair in graph.carried if pair.input in graph.donated}
    results = sum(graph.tensors[t].nbytes for t in graph.outputs if t not in taken_over)
    beside = f" Its results hold {format_bytes(results)} beside them." if worth_naming(results) else ""
    needs.append(f"Arguments of the step hold {format_bytes(sum(t.nbytes for t in held))}{_largest(held)}.{beside}")
    kept = sum(graph.tensors[p.input].nbytes for p in graph.carried if p.input not in graph.donated)
    if worth_naming(kept):
        remedies.append(
            f"Donate the state (donate_argnums=0). Now old and new state ({format_bytes(kept)} each) lie side by side."
        )
    if least is not None and least.segments:  # what its largest segment itself reads and makes is there in any memory
        touched |= {*least.segments[least.peak_segment].inputs, *least.segments[least.peak_segment].outputs}
    state = sum(graph.tensors[p.input].nbytes for p in graph.carried if touched.isdisjoint((p.input, p.output)))
    if state_memory == "device" and worth_naming(state):
        remedies.append(
            f'Pass state_memory="any". The state ({format_bytes(state)}) may then stay in host memory between its uses.'
        )
    return BudgetTooSmall(
        f"budget {_in_full(int(limit), basis)} is too small for {graph.name!r}: the "
        f"smallest that works{f' on each of the {devices} devices' if devices > 1 else ''} is "
        f"{about}{format_bytes(floor_bytes)} ({floor_bytes} bytes)."
        f"{_listed('What needs it', needs)}{_listed('What to do', remedies)}",
        budget_bytes=int(limit),
        floor_bytes=floor_bytes,
    )


def _in_full(nbytes: int, basis: str) -> str:
    """A size, its bytes where the size is rounded, and what it was computed from: `64 KiB (65536 bytes, 0.5 of ...)`."""
    shown = format_bytes(nbytes)
    more = ", ".join([f"{nbytes} bytes"] * (shown != f"{nbytes} B") + [basis] * bool(basis))
    return f"{shown} ({more})" if more else shown


def _listed(title: str, sentences: Sequence[str]) -> str:
    """Lines to be added to a message: a title, and below it the sentences."""
    return "".join([f"\n{title}:", *(f"\n    {sentence}" for sentence in sentences)])


def _what_needs_it(least: Plan | None) -> list[str]:
    """A sentence about what is in memory while the largest segment of a plan runs; none if there is no such plan."""
    if least is None:
        return []
    if least.whole:
        return ["This is the peak of plain jit, and no plan needs less."]
    peak = least.segments[least.peak_segment]
    if peak.device_bytes > peak.resident_bytes + peak.workspace_bytes + peak.allocator_bytes:
        return ["This is what its arguments or its results hold when an iteration begins or ends."]
    used = {*peak.inputs, *peak.outputs}
    tensors = [t for t in least.tensors if t.id in used]
    return [
        f"The segment {peak.name!r} has {format_bytes(peak.resident_bytes)} of tensors{_largest(tensors)}, and "
        f"{format_bytes(peak.workspace_bytes)} of XLA's working memory{_of_the_allocator(peak)}."
    ]


def _of_the_allocator(segment: Segment) -> str:
    """What the allocator hands out without being asked while a segment runs, if it is a hundredth of all that is in use."""
    if segment.allocator_bytes <= segment.device_bytes / 100:
        return ""
    return f"; the device's allocator hands out {format_bytes(segment.allocator_bytes)} more"


class _Need(NamedTuple):
    """An operator, and the bytes on the device while it runs: what it reads and makes, and what it has inside."""

    operator: Operator
    nbytes: int


def _operator_that_needs_most(graph: Graph, least: Plan | None, stored: Callable[[TensorId], bool]) -> _Need | None:
    """The first of the operators of which none needs more, in the largest segment of the plan if it has segments."""
    segments = () if least is None or least.whole else (least.segments[least.peak_segment],)
    among = {o for segment in segments for o in unranged(segment.operators)}
    taken_over = {pair.output: pair.input for pair in graph.carried if pair.input in graph.donated}

    def need(operator: Operator) -> _Need:
        made = [t for t in operator.outputs if taken_over.get(t) not in operator.inputs]
        return _Need(operator, operator.inner + sum(graph.tensors[t].nbytes for t in {*operator.inputs, *made} if stored(t)))

    needs = [need(operator) for operator in graph.operators if not segments or operator.id in among]
    return max(needs, key=lambda one: one.nbytes, default=None)


class _Undivided(NamedTuple):
    """Why no plan divides an operator, and what the user can do about it: a sentence each, or two."""

    why: str
    remedy: str


_BY_PRIMITIVE = {
    "while": _Undivided(
        "It is a loop whose number of iterations is not known beforehand, so no plan divides it.",
        "If the loop always has the same number of iterations, use jax.lax.scan, or jax.lax.fori_loop with Python integers as "
        "bounds.",
    ),
    "cond": _Undivided(
        "Which of its branches runs is not known beforehand, so no plan divides it.",
        "Take what needs most out of the branches, or compute all of them and select the result with jax.numpy.where.",
    ),
    "scan": _Undivided(
        "It is a loop that runs as one operator, so no plan divides it.",
        "Pass open_loops=True. The iterations of the loop are then planned one by one.",
    ),
}


def _undivided(operator: Operator) -> _Undivided:
    if "callback" in operator.primitive:
        remedy = "Give the callback less at a time, such as a part of an array."
        return _Undivided("It calls Python, so no plan divides it.", remedy)
    smaller = _Undivided("No plan divides it.", "Give the operator smaller arrays, such as those of a smaller batch.")
    return _BY_PRIMITIVE.get(operator.primitive, smaller)


def _what_it_needs(need: _Need, line: str) -> str:
    """The sentence about the operator that needs most: where it is, and what it needs."""
    backward = ", in the backward pass," if need.operator.in_backward_pass else ""
    name = need.operator.name.removeprefix(BACKWARD)
    inner = need.operator.inner
    touched = f"{format_bytes(need.nbytes - inner)} for what it reads and makes"
    needs = f"{format_bytes(need.nbytes)}: {touched}, and {format_bytes(inner)} inside" if inner else touched
    return f"The operator {name!r}{f' at {line}' if line else ''}{backward} alone needs {needs}."


def _largest(tensors: Sequence[Tensor | PlannedTensor]) -> str:
    """The names and sizes of the three largest tensors."""
    three = sorted((t for t in tensors if t.nbytes), key=lambda t: -t.nbytes)[:3]
    return ", the largest being " + ", ".join(f"{t.name} ({format_bytes(t.nbytes)})" for t in three) if three else ""


def too_small_for_parked_job(job: str, host_budget_bytes: float, needed_bytes: int) -> BudgetTooSmall:
    """The error that the host budget of a runtime cannot hold a job while the job is parked."""
    return BudgetTooSmall(
        f"host_budget {format_bytes(host_budget_bytes)} is too small for {job!r}: while other jobs run its state is "
        f"parked in host memory, and it needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) there.",
        budget_bytes=int(host_budget_bytes),
        floor_bytes=needed_bytes,
    )


def too_small_for_jobs(budget_bytes: int, count: int, smallest_bytes: int, largest_job: str, floor_bytes: int) -> str:
    """The message that the device budget of a jobs file cannot hold its jobs, of which `largest_job` alone needs most."""
    return (
        f"device.budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small for these "
        f"{count} jobs: the smallest that works is about {format_bytes(smallest_bytes)} ({smallest_bytes} bytes). "
        f"{largest_job} alone needs about {format_bytes(floor_bytes)}."
    )


def host_too_small_for_states(host_budget_bytes: float, states_bytes: int) -> str:
    """The message that the host budget of a jobs file cannot hold the jobs' states and their checkpoints."""
    return (
        f"device.host_budget of {format_bytes(host_budget_bytes)} is too small: the jobs' states come to "
        f"{format_bytes(states_bytes)}, and host memory must hold them and their checkpoints while these are written. Give at "
        f"least twice that ({2 * states_bytes} bytes)."
    )


def too_small_for_job_of_cluster(job: str, budget_bytes: int, floor_bytes: int) -> str:
    """The message that a job of a cluster fits on none of its devices, even alone. The sizes are those of the nearest miss."""
    return (
        f"{job} fits on no device: no plan keeps the budget of {format_bytes(budget_bytes)} a device. The smallest that works is "
        f"about {format_bytes(floor_bytes)}."
    )


def host_too_small_for_job_of_cluster(job: str, host_budget_bytes: float, needed_bytes: int) -> str:
    """The message that the host budget of no device of a cluster can hold a job."""
    return (
        f"{job} fits on no device: host_budget={format_bytes(host_budget_bytes)} is too small. Give it at least "
        f"{format_bytes(needed_bytes)}."
    )
