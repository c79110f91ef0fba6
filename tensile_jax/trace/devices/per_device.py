"""Turns a traced step whose arguments are sharded into the step that one device sees.

The graph of such a step has the shapes of one device's shards, so sizes, floating-point operations and memory traffic are those
of one device. The planner plans for one device, and all devices run the same plan. `Operator.exchanged` is the number of bytes
that the devices exchange for an operator (`collectives.py`). The names of operators and tensors, the
roles of tensors (parameter, activation and so on), and what each operator reads are those of the step as its user wrote it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from tensile_jax.ir import Graph, Operator
from tensile_jax.trace.avals import shard_of
from tensile_jax.trace.cost.ragged_products import RAGGED_PRODUCT
from tensile_jax.trace.devices.collectives import exchange_of
from tensile_jax.trace.devices.propagation import propagated
from tensile_jax.trace.program import Program, StepShardings
from tensile_jax.trace.reading.shard_maps import Mapped
from tensile_jax.trace.step import TracedStep


def per_device(step: TracedStep, given: Sequence[Any], wanted: Sequence[Any], meshes: Sequence[Mesh]) -> TracedStep:
    """The step with the sizes of one device.

    Args:
        given: for each argument, flat, its sharding; None if it may be anything.
        wanted: for each result, flat, the sharding that the caller asks for; None if it may be anything.
        meshes: the meshes that the step and its arguments name, the first of them with all devices.
    """
    divided = whole_divided = propagated(step.whole_program, given, wanted, meshes)
    graph = whole_graph = _local(step, step.whole_program, step.whole_graph, whole_divided)
    if step.whole_program is not step.program:  # with loops opened, the results are divided as plain jit divides them
        results = [whole_divided.of.get(v) for v in step.whole_program.outputs]
        divided = propagated(step.program, given, results, meshes)
        graph = _local(step, step.program, step.graph, divided)
    return replace(step, graph=graph, whole_graph=whole_graph, divided=divided)


def _local(step: TracedStep, program: Program, whole: Graph, divided: StepShardings) -> Graph:
    avals = list(program.avals)
    for v, sharding in divided.of.items():
        avals[v] = shard_of(avals[v], sharding)
    local_program = replace(program, avals=tuple(avals))
    local = step.graph_of(local_program)
    tensors = tuple(replace(mine, role=its.role) for mine, its in zip(local.tensors, whole.tensors, strict=True))
    operators: list[Operator] = []
    for equation, mine, its in zip(program.equations, local.operators, whole.operators, strict=True):
        exchange = exchange_of(local_program, equation, divided.of)
        flops, inner = mine.flops * exchange.work, mine.inner
        of_body = its.inner and its.primitive != RAGGED_PRODUCT
        if of_body and not isinstance(equation.primitive, Mapped):  # it has the shapes of all devices together
            share = mine.nbytes / max(its.nbytes, 1)
            flops, inner = int(flops * share), int(inner * share)
        operators.append(replace(mine, flops=flops, inner=inner + exchange.gathered, exchanged=exchange.nbytes))
    placed = ";".join(f"{v}{divided.of[v].spec}" for v in sorted(divided.of))
    digest = hashlib.sha256(f"{whole.fingerprint}{tuple(divided.mesh.shape.items())}{placed}".encode())
    return replace(local, tensors=tensors, operators=tuple(operators), fingerprint=digest.hexdigest()[:32])
