"""Finds the places that the code of a step names: the shardings and memory spaces for which `jax.jit` commits its results.

If the code of a step names a place, `jax.jit` runs the step on the named devices, and *commits* all results of the step to them:
later computations stay on these devices. The following equations name places, also in inner jaxprs:

    sharding_constraint   its sharding, unless that is on an abstract mesh
    device_put            a sharding or a memory space; but not a device or a `Format`, for which `jax.jit` commits nothing
    jit                   the shardings of an inner call
    shard_map             its mesh, if it has arguments or results and the mesh is not abstract
    compute_on            the memory spaces of its results
    call_exported         the memory spaces of its results

Some equations have such parameters but name no place: a `convert_element_type` whose sharding is on an abstract mesh without
axes, and `empty2`, JAX's placeholder for a value that one branch of a `cond` does not give to the backward pass. Dead equations
name no place either, since `jax.jit` removes them first. With the option `keep_unused`, `jax.jit` keeps dead equations, and
their places count.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from tensile_jax.trace.avals import in_host_memory


def shardings_in(jaxpr: Any, *, keep_unused: bool = False) -> tuple[Any, ...]:
    """Every `Sharding` and `jax.memory.Space` that the step names, each once.

    Args:
        jaxpr: the jaxpr of the step.
        keep_unused: as given to `jax.jit`.
    """
    kept = jaxpr if keep_unused else dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return tuple(dict.fromkeys(_places(kept)))


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


def _places(jaxpr: Any) -> Iterable[Any]:
    for equation in jaxpr.eqns:
        yield from _named(equation)
        for inner in jaxprs_in_params(equation.params):
            yield from _places(inner)


def _named(equation: Any) -> Iterable[Any]:
    """The places that the equation itself names."""
    params = equation.params
    match equation.primitive.name:
        case "sharding_constraint":
            sharding = params["sharding"]
            return () if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh) else (sharding,)
        case "device_put":
            return [place for place in params["devices"] if isinstance(place, Sharding | jax.memory.Space)]
        case "jit" | "pjit":
            return [place for place in (*params["in_shardings"], *params["out_shardings"]) if isinstance(place, Sharding)]
        case "shard_map":
            mesh, specs = params["mesh"], (*params["in_specs"], *params["out_specs"])
            return [NamedSharding(mesh, spec) for spec in specs] if isinstance(mesh, Mesh) else ()
        case "compute_on":
            return params["out_memory_spaces"]
        case "call_exported":
            return [aval.memory_space for aval in params["exported"].out_avals]
        case _:
            return ()
