"""Finds how every value of a step is divided among the devices of a mesh, without compiling the step.

A step whose arguments are sharded is one program for all devices. XLA's *propagation* (Shardy) derives the shardings of all
values from those of the arguments and from the constraints in the step. This module runs the same propagation on a function
that computes the step's flat program (one list of equations, without calls) and returns every value. Later, each *segment* of
the step, a stretch of operators that is compiled as one executable, is compiled for exactly these shardings.

Any sharding would give right results. These are the shardings of plain `jax.jit`, so a value moves between devices only if it
does so under plain `jax.jit` (except in loops, which XLA changes before its own propagation).

Two kinds of results of the propagation cannot be expressed by a `NamedSharding`, and differ here. If the propagation divides a
dimension by a part of a mesh axis, the dimension is not divided by that axis here. If it divides a dimension into parts of
unequal sizes, the dimension stays whole on each device here.

For a step with 10,000 equations, lowering takes 0.9 s and the propagation 2.4 s (a decoder of 24 layers, 2 CPU cores).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from tensile_jax.trace.avals import in_host_memory, shape_of, shape_struct
from tensile_jax.trace.program import Program, StepShardings
from tensile_jax.trace.reading.shard_maps import Mapped
from tensile_jax.trace.run_equations import run_all

_PASSES = "builtin.module(sdy-propagation-pipeline)"
_Spec = tuple[tuple[str, ...], ...]


def propagated(program: Program, given: Sequence[Any], wanted: Sequence[Any], meshes: Sequence[Mesh]) -> StepShardings:
    """The shardings of all variables of the program.

    Args:
        given: for each input its sharding; None if it may be anything.
        wanted: for each output the sharding that the caller asks for; None if it may be anything.
        meshes: the meshes that the step and its arguments name. Those beyond the first have the same devices, in the same order.
    """
    mesh = meshes[0]
    made = [v for e in program.equations for v in e.outputs]
    reads = [*program.inputs, *program.constants]
    whole = NamedSharding(mesh, PartitionSpec())
    captured = [_own(value, mesh) or whole for value in program.constants.values()]
    avals = [
        shape_struct(program.avals[v], _in_memory_of(program.avals[v], sharding, whole))
        if hasattr(program.avals[v], "shape")
        else program.avals[v]
        for v, sharding in zip(reads, [*given, *captured], strict=True)
    ]
    asked = {v: sharding for v, sharding in zip(program.outputs, wanted, strict=True) if sharding is not None}

    wanted_values = frozenset(made)

    def every_value(*values: Any) -> tuple[Any, ...]:
        environment: dict[int, Any] = dict(zip(reads, values, strict=True))
        run_all(program.equations, environment, wanted_values)
        return tuple(environment[v] for v in made)

    lowered = jax.jit(every_value, keep_unused=True, out_shardings=tuple(asked.get(v) for v in made)).lower(*avals)
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = _main(module)
        _make_transparent(module, list(main.regions[0].blocks[0].operations))
        PassManager.parse(_PASSES).run(module.operation)
        main = _main(module)
        arguments, results = (list(ir.ArrayAttr(main.attributes[name])) for name in ("arg_attrs", "res_attrs"))
        specs = [_spec(attributes) for attributes in (*arguments[len(arguments) - len(reads) :], *results)]
    of: dict[int, NamedSharding] = {}
    for v, (axes, spec) in zip((*reads, *made), specs, strict=True):
        if hasattr(program.avals[v], "shape"):
            aval = program.avals[v]
            typed = _typed_as(aval, _mesh_with(axes, meshes))
            of[v] = NamedSharding(typed, aval.sharding.spec) if _is_explicit(aval) else _sharding(aval, spec, typed)
    for e in program.equations:
        if isinstance(e.primitive, Mapped):
            of.update((v, NamedSharding(of[v].mesh, place.spec)) for v, place in zip(e.outputs, e.primitive.outputs, strict=True))
    of.update({v: s for v, s in zip(program.inputs, given, strict=True) if s is not None and v in of})
    of.update({v: s for v, s in asked.items() if v in of})
    return StepShardings(mesh, {v: _in_memory_of(program.avals[v], sharding) for v, sharding in of.items()})


def _in_memory_of(aval: Any, sharding: Any, by_default: Any = None) -> Any:
    """The sharding, in host memory if the value is there; `by_default` is then the sharding if there is none.

    What the caller asks for is there already, and may also say the layout.
    """
    place = sharding or by_default
    if not in_host_memory(aval) or not isinstance(place, NamedSharding):
        return sharding
    return place.with_memory_kind("pinned_host")


def _own(value: Any, mesh: Mesh) -> NamedSharding | None:
    """The sharding of a captured array that lies on the devices of the mesh already."""
    sharding = getattr(value, "sharding", None)
    lies_there = isinstance(sharding, NamedSharding) and sharding.device_set == set(mesh.devices.flat)
    return sharding if lies_there and getattr(value, "committed", False) else None


def _functions(module: Any) -> dict[str, Any]:
    """The functions of a module, by name."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in functions}


def _main(module: Any) -> Any:
    return _functions(module)["main"]


def _make_transparent(module: Any, operations: Sequence[Any]) -> None:
    """Remove the operations through which the propagation cannot look. The module is never run.

    Each call is replaced by the body of the called function. An elementwise operation of the dialect `chlo`, which XLA expands
    before its propagation, is replaced by its operand, which is divided as its result is; so is a copy to the other memory.
    """
    functions = _functions(module)
    waiting = list(operations)
    while waiting:
        op = waiting.pop()
        if (op.operation.name.startswith("chlo.") and len(op.results) == 1) or _is_copy(op):
            alike = [operand for operand in op.operands if operand.type == op.results[0].type]
            if alike:
                op.results[0].replace_all_uses_with(alike[0])
                op.operation.erase()
            continue
        if op.operation.name != "func.call":
            waiting += [inner for region in op.regions for block in region.blocks for inner in block.operations]
            continue
        copy = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].operation.clone()
        body = copy.regions[0].blocks[0]
        for parameter, operand in zip(body.arguments, op.operands, strict=True):
            parameter.replace_all_uses_with(operand)
        *inner, returned = body.operations
        for one in inner:
            one.operation.move_before(op.operation)
        for result, value in zip(op.results, returned.operands, strict=True):
            result.replace_all_uses_with(value)
        op.operation.erase()
        copy.erase()
        waiting += inner


def _is_copy(op: Any) -> bool:
    """Whether an operation copies a value between device memory and host memory."""
    if op.operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(op.operation.attributes["call_target_name"]).value == "annotate_device_placement"


def _spec(attributes: Any) -> tuple[tuple[str, ...] | None, _Spec]:
    """(the axes of the mesh that the sharding names; for each dimension, the axes that divide it) of one argument or result."""
    named = ir.DictAttr(attributes)
    if "sdy.sharding" not in named:
        return None, ()
    sharding = sdy.TensorShardingAttr(named["sdy.sharding"])
    dimensions: list[tuple[str, ...]] = []
    for dimension in sharding.dimension_shardings:
        axes: list[str] = []
        for reference in sdy.DimensionShardingAttr(dimension).axes:
            axis = sdy.AxisRefAttr(reference)
            if axis.sub_axis_info is not None:
                break
            axes.append(axis.name)
        dimensions.append(tuple(axes))
    return tuple(axis for axes in dimensions for axis in axes), tuple(dimensions)


def _mesh_with(axes: tuple[str, ...] | None, meshes: Sequence[Mesh]) -> Mesh:
    return next((mesh for mesh in meshes if set(axes or ()) <= set(mesh.axis_names)), meshes[0])


def _typed_as(aval: Any, mesh: Mesh) -> Mesh:
    """The mesh with its axes explicit or automatic as they are in the type of the value (`jax.sharding.AxisType`)."""
    known = aval.sharding.mesh
    if known.empty or known.axis_names != mesh.axis_names or known.axis_types == mesh.axis_types:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=known.axis_types)


def _is_explicit(aval: Any) -> bool:
    """Whether the type of the value says how it is divided along every axis of the mesh."""
    return not aval.sharding.mesh.empty and aval.sharding.mesh.are_all_axes_explicit


def _sharding(aval: Any, spec: _Spec, mesh: Mesh) -> NamedSharding:
    """The sharding that divides each dimension by its axes, as far as that is even; written as JAX writes it."""
    dimensions: list[Any] = []
    for size, axes in zip(shape_of(aval), spec, strict=False):
        count = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
        even = axes if size % count == 0 else ()
        dimensions.append(None if not even else even[0] if len(even) == 1 else even)
    while dimensions and dimensions[-1] is None:
        dimensions.pop()
    return NamedSharding(mesh, PartitionSpec(*dimensions))
