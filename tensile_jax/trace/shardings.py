"""Find the devices and memories that a step names itself: the shardings in its jaxpr, however deep.

`jax.lax.with_sharding_constraint`, `jax.device_put` to a sharding or to a memory, `jax.shard_map` and inner calls of `jax.jit`
with shardings each name one. `jax.jit` then commits the results of the whole step to the devices that are named.
"""

from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def shardings_in(jaxpr: Any) -> tuple[Any, ...]:
    """Every `Sharding` and `jax.memory.Space` that an equation of the jaxpr has among its parameters, each once."""
    found: dict[Any, None] = {}
    _collect(jaxpr, found)
    return tuple(found)


def _collect(jaxpr: Any, found: dict[Any, None]) -> None:
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Sharding | jax.memory.Space):
                    found[item] = None
        mesh = equation.params.get("mesh")
        if equation.primitive.name == "shard_map" and isinstance(mesh, Mesh):
            found[NamedSharding(mesh, PartitionSpec())] = None
        for inner in jaxprs_in_params(equation.params):
            _collect(inner, found)
