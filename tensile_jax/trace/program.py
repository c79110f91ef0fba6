"""Defines the program of a step: one flat list of equations, without calls.

    Program  ::= Equation*  inputs=(Variable*)  constants={Variable: array}  outputs=(Variable*)
    Equation ::= primitive params inputs=(Atom*) outputs=(Variable*) scope
    Atom     ::= Variable | Immediate(value)

Variables are integers in the order in which they are made. An immediate is a scalar that is written into the program. A scope is
the name scope (`jax.named_scope`, or a layer of a network) in which the user wrote the equation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.sharding import Mesh, NamedSharding

from tensile_jax.trace.avals import shape_of


@dataclass(frozen=True, slots=True, eq=False)
class Immediate:
    """A value written into the program itself: a Python or NumPy scalar."""

    value: Any
    aval: Any


Atom = int | Immediate


@dataclass(frozen=True, slots=True)
class TooLong:
    """Why a loop stays whole although an iteration is worth a launch.

    It has so many `iterations` of `body` equations. Loops like it are opened if they have at most `most` iterations, and all
    iterations together have at most `equations` (`loops/rules.py`).
    """

    iterations: int
    body: int
    most: int
    equations: int


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """`outputs = primitive(*inputs, **params)`, in the name scope and the JAX context in which the user wrote it.

    JAX keeps one object for each context, so two contexts are equal exactly if they are the same object. An equation is
    `effectful` if it does more than give its outputs. It must then run exactly once an iteration, and effectful equations must
    run in their order.

    In opened loops, `iterations` are the indices of the equation's iterations, from the outermost loop to the innermost one, and
    `position` says which equation of the loops' bodies it is: equal for the same equation in different iterations. Elsewhere both
    are empty. `repeat` is the number of the checkpoint in whose backward pass the equation repeats another one; 0 if there is
    none. Only equations with equal numbers are merged. `tracebacks` are JAX's, of the equation and of the calls around it, from
    the inside outwards (`reading/source_lines.py`). `too_long` says of some loops why they stay whole.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    scope: str
    context: Any
    effectful: bool = False
    position: tuple[int, ...] = ()
    iterations: tuple[int, ...] = ()
    repeat: int = 0
    tracebacks: tuple[Any, ...] = ()
    too_long: TooLong | None = None

    def run(self, values: Sequence[Any]) -> Sequence[Any]:
        """The results for these operands, which may be tracers, in the equation's own context."""
        with self.context.manager:
            return results_of(self.primitive, values, self.params)


def results_of(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """The results of a primitive for these operands, as a sequence even if there is only one."""
    results = primitive.bind(*values, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


@dataclass(frozen=True, slots=True)
class WrappedPrimitive:
    """A primitive that an equation runs in another way. It has what `Equation` uses of a primitive; subclasses define `bind`."""

    multiple_results: ClassVar[bool] = True
    primitive: Any

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.primitive.name

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters for `bind`: those of the equation, unchanged."""
        return params


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """A jaxpr, open or closed, and what is needed to flatten it.

    Attributes:
        donated: for each input, whether the caller donates it. None: no input is donated.
        keep_unused: whether inputs that nothing uses count as used, as in `jax.jit`.
        open_loops: whether loops are opened: always, never, or (None) where it is worth it (`loops/rules.py`).
        respect_checkpoint: whether what `jax.checkpoint` repeats in the backward pass is not merged with its originals.
        results_on_host: for each result, whether its caller wants it in host memory. None: the result stays where the step puts
            it.
        all_placed: whether the caller says of every argument and every result where it is.
    """

    jaxpr: Any
    donated: Sequence[bool] | None = None
    keep_unused: bool = False
    open_loops: bool | None = None
    respect_checkpoint: bool = False
    results_on_host: Sequence[bool | None] | None = None
    all_placed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A flat step.

    `avals[v]` is the abstract value of variable `v`, strongly typed. `used[i]` says whether input i counts as used. `taken[i]`
    says whether input i is donated and an output takes over its memory, and `crossed` are the pairs (input, output) of which one
    is in host memory and the other is not (`reading/donated_inputs.py`). `weak` are the outputs that are returned weakly typed.
    `opened` is the number of loops and conditionals in whose place iterations, shorter loops or branches stand. The program was
    flattened from `made_from`.
    """

    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    outputs: tuple[int, ...]
    used: tuple[bool, ...] = ()
    taken: tuple[bool, ...] = ()
    crossed: tuple[tuple[int, int], ...] = ()
    weak: frozenset[int] = frozenset()
    opened: int = 0
    made_from: Nested = Nested(None)

    def aval(self, atom: Atom) -> Any:
        """The abstract value of a variable, or of a value that is written into the program."""
        return self.avals[atom] if isinstance(atom, int) else atom.aval

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """The shape of its abstract value."""
        return shape_of(self.aval(atom))


@dataclass(frozen=True, slots=True, eq=False)
class StepShardings:
    """How the values of a program are divided among the devices of `mesh`: `of` has the sharding of each variable but tokens."""

    mesh: Mesh
    of: Mapping[int, NamedSharding]
