"""Wraps a step that plain `jax.jit` has compiled whole in an `Executable`, the type that compiled segments have."""

from typing import Any

import jax
from jax.tree_util import tree_leaves, tree_unflatten

from tensile_jax.exec.compiling.compiler import Executable, Sizes
from tensile_jax.exec.compiling.step import Step


def whole_executable(step: Step, peak_bytes: int) -> Executable:
    """The executable of the only segment of a plan that runs `step` whole. It takes all arguments of the step, flat.

    Args:
        peak_bytes: what it needs in all, with arguments and results.
    """
    call, in_tree, device = step.whole_call(), step.traced.in_tree, step.compiler.device

    def whole(*values: Any) -> list[Any]:
        args, kwargs = tree_unflatten(in_tree, values)
        with jax.default_device(device):  # as where it was compiled, so that JAX finds that again
            results = tree_leaves(call(*args, **kwargs))
        if not results:  # there is nothing to wait for except the effects
            jax.effects_barrier()
        return results

    return Executable(whole, Sizes(peak_bytes, 0, 0))
