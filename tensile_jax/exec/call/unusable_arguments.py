"""Refuses a call with deleted arguments, or with donated arguments that share memory with others, before any segment runs.

A *segment* is a part of the step that is compiled as one executable. XLA checks the arguments of each executable just before it
runs that executable. So XLA would find a deleted or shared argument only in the middle of the iteration, when part of the donated
state is deleted already. This module looks for the same faults before the iteration begins.
"""

from collections.abc import Sequence
from typing import Any

import jax

from tensile_jax.exec.call.donated_before import explain_deleted
from tensile_jax.exec.call.signature import Call
from tensile_jax.exec.transfer import is_divided
from tensile_jax.ir import Graph


def refuse_unusable(call: Call, graph: Graph) -> None:
    """Refuse a call of the step with this graph if an argument cannot be used.

    Raises:
        RuntimeError: an array was deleted.
        JaxRuntimeError: a donated array has the same memory as another argument. `jax.jit` raises this error too.
    """
    leaves = call.leaves
    if call.all_arrays and not any([leaf.is_deleted() for leaf in leaves]):  # a quick test for the usual case
        if not graph.donated:
            return
        memory = [_address(leaf) for leaf in leaves]
        if len(set(memory)) == len(memory):
            return
    _refuse_deleted(leaves, graph)
    if graph.donated:
        _refuse_shared_memory(leaves, graph)


def _address(array: jax.Array) -> int:
    """Where the array lies; if it is divided among devices, where its first shard lies."""
    if not is_divided(array):
        return array.unsafe_buffer_pointer()
    return array.addressable_data(0).unsafe_buffer_pointer()


def _refuse_deleted(leaves: Sequence[Any], graph: Graph) -> None:
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            error = RuntimeError(f"Array has been deleted with shape={leaf.aval.str_short()}.")
            explain_deleted(error, graph, leaves)
            raise error


def _refuse_shared_memory(leaves: Sequence[Any], graph: Graph) -> None:
    given: set[int] = set()
    others: set[int] = set()
    for place, (leaf, tensor) in enumerate(zip(leaves, graph.inputs, strict=True)):
        if not isinstance(leaf, jax.Array) or leaf.size == 0:  # arrays without elements may all have one address
            continue
        where = _address(leaf)
        name = graph.tensors[tensor].name
        donated = tensor in graph.donated
        if donated and where in given:
            raise jax.errors.JaxRuntimeError(
                f"INVALID_ARGUMENT: Attempt to donate the same buffer twice in Execute() (flattened argument {place}, {name}): "
                "another donated argument has the same memory. Copy one of the two first (jax.numpy.copy)."
            )
        if where in given or (donated and where in others):
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: Attempt to use a buffer that was previously donated in the same call to Execute() (flattened "
                f"argument {place}, {name}): f(donate(a), a). Copy one of the two first (jax.numpy.copy)."
            )
        (given if donated else others).add(where)
