"""Finds the devices and memory spaces that the code of a step names: the shardings in its jaxpr and in all inner jaxprs.

Four things in a step name a device or a memory space: `jax.lax.with_sharding_constraint`, `jax.device_put` to a sharding or a
memory space, `jax.shard_map`, and an inner call of `jax.jit` with shardings. If a step names devices, `jax.jit` commits all
results of the step to these devices.

Where no mesh is in force, JAX notes a sharding on a mesh without axes beside some operators, such as the casts of a gradient that
is computed in fewer bits. Such a sharding names nothing.
"""

from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from tensile_jax.trace.avals import in_host_memory


def shardings_in(jaxpr: Any) -> tuple[Any, ...]:
    """Every `Sharding` and `jax.memory.Space` that an equation of the jaxpr has among its parameters, each once."""
    found: dict[Any, None] = {}
    _collect(jaxpr, found)
    return tuple(found)


def names_memory(jaxpr: Any) -> bool:
    """Whether an argument of the jaxpr is in host memory, or an equation in it, or in an inner jaxpr, names another memory than
    the device's. If not, `jax.jit` puts every result in device memory, also what it computes from captured arrays in host memory.
    """
    return any(in_host_memory(v.aval) for v in jaxpr.invars) or _moves_something(jaxpr)


def _moves_something(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        if any(in_host_memory(v.aval) for v in equation.outvars) and not any(in_host_memory(v.aval) for v in equation.invars):
            return True
        if any(_moves_something(inner) for inner in jaxprs_in_params(equation.params)):
            return True
    return False


def _collect(jaxpr: Any, found: dict[Any, None]) -> None:
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Sharding | jax.memory.Space) and not _names_nothing(item):
                    found[item] = None
        mesh = equation.params.get("mesh")
        if equation.primitive.name == "shard_map" and isinstance(mesh, Mesh):
            found[NamedSharding(mesh, PartitionSpec())] = None
        for inner in jaxprs_in_params(equation.params):
            _collect(inner, found)


def _names_nothing(place: Any) -> bool:
    return isinstance(place, NamedSharding) and isinstance(place.mesh, AbstractMesh) and not place.mesh.axis_names
