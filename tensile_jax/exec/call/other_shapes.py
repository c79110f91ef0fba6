"""Warns when a call was planned and compiled again because of other shapes, such as those of an epoch's smaller last batch."""

import warnings
from collections.abc import Hashable
from typing import NamedTuple

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.call.signature import Signature
from tensile_jax.exec.call.user_code import level_of_the_user
from tensile_jax.ir import Graph


class _FirstCall(NamedTuple):
    """A call for which a plan was made, and the seconds that took."""

    signature: Signature
    seconds: float


class ShapesCalled:
    """The shapes with which a function was called. It warns once.

    Args:
        name: the function's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: list[_FirstCall] = []
        self._intended: set[Hashable] = set()
        self._warned = False

    def intend(self, signature: Signature) -> None:
        """Expect calls with these shapes: the user has asked about them before, so their plan is made on purpose."""
        self._intended.add(signature.forms)

    def forget(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def add(self, signature: Signature, graph: Graph, seconds: float, *, whole: bool) -> None:
        """A plan was made for a call.

        It warns unless that plan is plain jit's step. It does not warn if state has another shape as well, which is then the
        state of another model.

        Args:
            graph: the step's; its inputs are the arguments of the call.
            seconds: how long it took to make the plan.
            whole: whether the plan runs the step as plain jit does.
        """
        if not whole and not self._warned and signature.forms not in self._intended:
            self._compare(signature, graph, seconds)
        self._calls.append(_FirstCall(signature, seconds))

    def explain(self, error: BudgetTooSmall, signature: Signature, graph: Graph) -> None:
        """Add to the error of a call without a plan that an earlier call had other shapes, if there was one."""
        found = self._other_call(signature, graph)
        if found is not None:
            error.add_note(f"This call needs a plan of its own, since {found[1]}.")

    def _compare(self, signature: Signature, graph: Graph, seconds: float) -> None:
        found = self._other_call(signature, graph)
        if found is None:
            return
        self._warned = True
        before, difference = found
        warnings.warn(
            f"{self._name!r} was planned and compiled again, in {seconds:.1f} s (its first call: {before.seconds:.1f} s), since "
            f"{difference}. Drop a batch of another shape or pad it. If several shapes are intended, call .plan(...) with each "
            "before.",
            stacklevel=level_of_the_user(),
        )

    def _other_call(self, signature: Signature, graph: Graph) -> tuple[_FirstCall, str] | None:
        """The first call that had other shapes, of no state, and how they differ."""
        state = {pair.input for pair in graph.carried}
        for before in self._calls:
            differ = signature.differing_shapes(before.signature)
            if differ and not any(graph.inputs[place] in state for place in differ):
                place = differ[0]
                argument = graph.tensors[graph.inputs[place]].name
                others = f" (and {len(differ) - 1} more arguments have other shapes)" if len(differ) > 1 else ""
                return before, (
                    f"{argument} has the shape {signature.shape(place)}, and had {before.signature.shape(place)} before{others}"
                )
        return None
