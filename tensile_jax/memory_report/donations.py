"""Finds arguments whose memory a result could take over and does not, and arguments that nothing reads.

`jax.jit` gives the memory of a donated argument to a result of the same shape and dtype (`trace/reading/donated_inputs.py` has
the exact rule). State, which is an argument whose new value the step returns, can always be donated if the caller no longer needs
the old value. Sizes are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensile_jax.ir import Graph, TensorId
from tensile_jax.memory_report.records import MissedDonation, UnusedArgument


@dataclass(frozen=True, slots=True)
class Argument:
    """A flat argument: how it can be donated (`donate_argnums=0`), whether it is, and whether jit reads it and takes its
    memory."""

    how: str
    donated: bool
    used: bool
    taken: bool


def missed_donations(graph: Graph, arguments: Sequence[Argument]) -> tuple[MissedDonation, ...]:
    """The arguments whose donation is missing or in vain, the largest first.

    Args:
        arguments: of each of `graph.inputs`, in order.
    """
    new_value = {pair.input: pair.output for pair in graph.carried}
    found: list[MissedDonation] = []
    for t, argument in zip(graph.inputs, arguments, strict=True):
        tensor = graph.tensors[t]
        if not argument.used or argument.taken or not tensor.nbytes:
            continue
        if argument.donated:
            reason = f"it is donated, and {_why_in_vain(graph, t)}"
            found.append(MissedDonation(tensor.name, tensor.nbytes, reason, "Return a result of this form, or do not donate it."))
        elif t in new_value and new_value[t] != t and _form(graph, t) == _form(graph, new_value[t]):
            reason = f"it is not donated, so it stays beside its new value {graph.tensors[new_value[t]].name}"
            found.append(MissedDonation(tensor.name, tensor.nbytes, reason, f"Pass {argument.how}."))
    return tuple(sorted(found, key=lambda missed: (-missed.nbytes, missed.name)))


def unused_arguments(graph: Graph, arguments: Sequence[Argument]) -> tuple[UnusedArgument, ...]:
    """The arguments that nothing reads, the largest first."""
    found = [
        UnusedArgument(graph.tensors[t].name, graph.tensors[t].nbytes)
        for t, argument in zip(graph.inputs, arguments, strict=True)
        if not argument.used
    ]
    return tuple(sorted(found, key=lambda unused: (-unused.nbytes, unused.name)))


def _why_in_vain(graph: Graph, t: TensorId) -> str:
    tensor = graph.tensors[t]
    form = f"{tensor.dtype}{list(tensor.shape)}".replace(" ", "")
    same_shape = [graph.tensors[o] for o in graph.outputs if graph.tensors[o].shape == tensor.shape]
    if any(result.dtype == tensor.dtype for result in same_shape):
        return f"every result of its form {form} takes over the memory of another argument"
    if same_shape:
        return f"no result has its form {form}: {same_shape[0].name} is {same_shape[0].dtype}"
    return f"no result has its form {form}"


def _form(graph: Graph, t: TensorId) -> tuple[tuple[int, ...], str, bool]:
    tensor = graph.tensors[t]
    return tensor.shape, tensor.dtype, tensor.in_host_memory
