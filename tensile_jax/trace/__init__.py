"""Traces a step without running it.

The package takes a function and its arguments, and gives a *flat program*: a list of equations without calls (`program.py`
defines programs, `reading/flatten.py` makes them). It also gives the graph of the program's operators and tensors, on which the
planner works (`graph.py`).
"""

from tensile_jax.trace.avals import (
    array_type,
    in_host_memory,
    is_packed,
    nbytes_of,
    shape_struct,
    shard_of,
    size_of,
    type_on_host,
)
from tensile_jax.trace.devices.per_device import per_device
from tensile_jax.trace.graph import variable_ids
from tensile_jax.trace.keys import atom_key, params_key
from tensile_jax.trace.own_zeros import OwnZeros, with_own_zeros
from tensile_jax.trace.program import Equation, Immediate, Nested, Program, StepShardings
from tensile_jax.trace.rewrites.registry import REWRITES
from tensile_jax.trace.rewrites.rewrite import Part, Rewrite
from tensile_jax.trace.run_equations import run_all
from tensile_jax.trace.step import TracedStep, trace_step, trace_where_arguments_are

__all__ = [
    "REWRITES", "Equation", "Immediate", "Nested", "OwnZeros", "Part", "Program", "Rewrite", "StepShardings", "TracedStep",
    "array_type", "atom_key", "in_host_memory", "is_packed", "nbytes_of", "params_key", "per_device", "run_all",
    "shape_struct", "shard_of", "size_of", "trace_step", "trace_where_arguments_are", "type_on_host", "variable_ids",
    "with_own_zeros",
]  # fmt: skip
