"""Traces a user's step, without running it, into a flat program (one list of equations, without calls) and that program's graph.

`jax.jit` itself traces the step, so static and donated arguments mean what they mean for `jax.jit`. This module adds three
things: it refuses mutable references from outside, finds the state, and names every argument and result by its place in the
caller's pytrees.

An argument, or a part of an argument, is state if a result, or a part of a result, has the same tree, shapes and dtypes. The
state of `(state, batch) -> (state, metrics)` is `state`. The state of `(params, opt_state, batch) -> (params, opt_state, loss)`
is `params` and `opt_state`. It does not matter which arguments are donated.

A step on Flax NNX objects changes these objects in place. `tensile_jax/nnx_steps` turns it into a pure step, whose pytrees the
user never sees. The pure step therefore has a method `boundary(args_info, out_info, static)`, which says what the arrays are
called in the user's objects, and which of them are state.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure, treedef_is_leaf

from tensile_jax.errors import TraceError
from tensile_jax.ir import Graph, OperatorId, Origin
from tensile_jax.trace.avals import in_host_memory
from tensile_jax.trace.graph import build_graph
from tensile_jax.trace.loops.notes import notes_on_loops
from tensile_jax.trace.loops.rules import treatments_of
from tensile_jax.trace.origins import origin_of
from tensile_jax.trace.program import Nested, Program, StepShardings
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.reading.mutable_references import refuse_outer_references
from tensile_jax.trace.reading.named_places import shardings_in
from tensile_jax.trace.reading.source_lines import source_line
from tensile_jax.trace.reading.treatment import Driven
from tensile_jax.trace.rewrites.rewrite import Rewrite


@dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """A step for one set of shapes.

    Attributes:
        traced: JAX's own trace of `jitted`. Its `lower()` gives the plain program.
        program, graph: the flat program, in which loops and conditionals may be opened, and its graph.
        whole_program, whole_graph: those of plain jit, in which each loop and each conditional is one operator.
        in_tree: the structure of `(args, kwargs)` without static arguments.
        out_tree: the structure of the result.
        results: the name of each flat result in the pytrees, or the objects, of the user.
        shardings: the devices and memory spaces that the step itself names (`reading/named_places.py`).
        graph_of: makes the graph of another program of the step.
        rewrites: those that have made `program` (`rewrites/`), in order.
        driven: the loops that run under plans of their bodies.
        divided: how values are divided among several devices. The graphs then have the sizes of one device
            (`devices/per_device.py`).
        moved: pairs (argument, result) of positions of state that the step returns in another memory than it takes it from.
    """

    jitted: Any
    traced: Any
    program: Program
    graph: Graph
    whole_program: Program
    whole_graph: Graph
    in_tree: Any
    out_tree: Any
    results: Sequence[str]
    shardings: tuple[Any, ...]
    graph_of: Callable[[Program], Graph]
    rewrites: tuple[Rewrite, ...] = ()
    driven: tuple[Driven, ...] = ()
    divided: StepShardings | None = None
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user of a plan should know about the trace: sentences on loops, on rewrites, and on driven loops."""
        driven = {loop.operator for loop in self.driven}
        loops = notes_on_loops((e for o, e in enumerate(self.program.equations) if o not in driven), of_plan=True)
        return tuple(dict.fromkeys([*loops, *(r.note for r in self.rewrites), *(loop.note for loop in self.driven)]))

    @property
    def loop_notes(self) -> tuple[str, ...]:
        """What everybody should know about the trace: sentences on its loops."""
        return tuple(notes_on_loops(self.program.equations, of_plan=False))

    @property
    def on_host(self) -> frozenset[int]:
        """The positions of the arguments that the step takes from host memory."""
        return frozenset(i for i, t in enumerate(self.graph.inputs) if self.graph.tensors[t].in_host_memory)

    def refuse_crossed_donations(self) -> None:
        """Raises TraceError if an argument is donated in one memory and `jax.jit` gives its memory to a result in the other one.

        Such a step ends the process (`reading/donated_inputs.py`).
        """
        for i, o in self.program.crossed:
            given, result = (self.graph.tensors[t] for t in (self.graph.inputs[i], self.graph.outputs[o]))
            there, then = ("host", "device") if given.in_host_memory else ("device", "host")
            raise TraceError(
                f"{given.name} is donated in {there} memory, and jax.jit gives its memory to {result.name}, which the step "
                f"returns in {then} memory. XLA then ends the process. Do not donate {given.name}, give it in {then} memory, or "
                f"return the result in {there} memory (jax.device_put in the step, with a sharding or a jax.memory.Space)."
            )

    @property
    def devices(self) -> int:
        """On how many devices the step runs."""
        return 1 if self.divided is None else self.divided.mesh.size

    def source_of(self, operator: OperatorId) -> str:
        """Where the user's code has this operator of the graph, such as `train.py:17`; empty if that is not known."""
        return source_line(self.program.equations[operator].tracebacks)

    def whole_origin_of(self, operator: OperatorId, result: int | None) -> Origin:
        """Where the user's code has an operator of `whole_graph`, or makes its result of this number, from 0 on."""
        return origin_of(self.whole_program.equations[operator], self.whole_program.avals, result)

    def rewritten(self, rewrite: Rewrite) -> "TracedStep | None":
        """The same step with its program rewritten; None if nothing can be rewritten so, or if it runs on several devices."""
        program = None if self.divided is not None else rewrite.apply(self.program)
        if program is None:
            return None
        rewrites = (rewrite,) if rewrite.starts_anew else (*self.rewrites, rewrite)
        return replace(self, program=program, graph=self.graph_of(program), rewrites=rewrites)


KeyPath = tuple[Any, ...]
"""A path of `jax.tree_util`: the keys from a pytree's root to a leaf."""


class Boundary(NamedTuple):
    """The names of a step's flat arguments and of its flat results, and pairs of their positions where they are state."""

    arguments: Sequence[str]
    results: Sequence[str]
    carried: Sequence[tuple[int, int]]


def trace_step(
    jitted: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    static: Collection[int] = (),
    keep_unused: bool = False,
    open_loops: bool | None = None,
    respect_checkpoint: bool = False,
) -> TracedStep:
    """Trace `jitted`, which is `jax.jit(function, ...)`, on arguments or their `ShapeDtypeStruct`s.

    Args:
        static: positions of the static arguments, which have no place among the traced ones.
        keep_unused: as given to `jax.jit`.
        open_loops: whether the iterations of loops become operators of their own: always, never, or (None) where it is worth it
            (`loops/rules.py`).
        respect_checkpoint: whether everything is computed again that `jax.checkpoint` in the step says to compute again.

    Raises:
        TraceError: the step is given a mutable reference, or captures one.
        TypeError: an argument is not an array (raised by jax, which names it).
    """
    traced = jitted.trace(*args, **kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    closed = traced.jaxpr
    find_boundary: Callable[..., Boundary] | None = getattr(function, "boundary", None)
    if find_boundary is not None:
        boundary = find_boundary(traced.args_info, traced.out_info, static)
    else:
        boundary = _boundary(parameter_names(function, static), traced.args_info, traced.out_info)
    refuse_outer_references(closed.in_avals, [f"The argument {name}" for name in boundary.arguments], name)
    refuse_outer_references([jax.typeof(c) for c in closed.consts], ["A captured value"] * len(closed.consts), name)
    donated = [bool(info.donated) for info in tree_leaves(traced.args_info)]
    stated = [_stated(info) for info in tree_leaves(traced.out_info)]
    results_on_host = [None if place is None else place.memory_kind == "pinned_host" for place in stated]
    all_placed = None not in stated and all(_is_placed(leaf) for leaf in tree_leaves((args, kwargs)))

    nested = Nested(closed, donated, keep_unused, open_loops, respect_checkpoint, results_on_host, all_placed)
    program = flatten(nested, treatments_of(nested))
    _warn_of_unusable(traced, program, donated)
    moved = tuple(
        (i, o) for i, o in boundary.carried if _on_host(program, program.inputs[i]) != _on_host(program, program.outputs[o])
    )
    carried = [pair for pair in boundary.carried if pair not in moved]

    def graph_of(program: Program) -> Graph:
        return build_graph(
            program,
            name=name,
            input_names=boundary.arguments,
            output_names=boundary.results,
            carried=carried,
            donated=program.taken,
        )

    graph = graph_of(program)
    whole_program = program
    if program.opened:
        whole_program = flatten(replace(nested, respect_checkpoint=False))
    whole_graph = graph_of(whole_program) if program.opened else graph
    return TracedStep(
        jitted,
        traced,
        program,
        graph,
        whole_program,
        whole_graph,
        tree_structure(traced.args_info),
        tree_structure(traced.out_info),
        boundary.results,
        shardings_in(closed.jaxpr, keep_unused=keep_unused),
        graph_of,
        moved=moved,
    )


def trace_where_arguments_are(trace: Callable[[frozenset[int]], TracedStep], on_host: frozenset[int]) -> TracedStep:
    """The step traced with its arguments in the memories in which they are, as `jax.jit` traces it, if that is possible.

    JAX refuses operators that mix values of the two memories. State may be in host memory although the step does not expect it
    there: a plan has left it there, or it comes from a checkpoint. So if JAX refuses the step, it is traced again as if every
    argument were in device memory whose new value is not in host memory. A call then copies these arguments to the device.

    Args:
        trace: traces the step with the arguments at these flat positions in host memory, and all others in device memory.
        on_host: the positions of the arguments that are in host memory.

    Raises:
        ValueError: what `trace` raises for the arguments as they are, if it refuses them in device memory, too.
    """
    if not on_host:
        return trace(on_host)
    try:
        return trace(on_host)
    except ValueError as error:
        try:
            step = trace(frozenset())
        except ValueError:
            raise error from None
    returned_there = frozenset(i for i, _ in step.moved) & on_host
    if not returned_there:
        return step
    try:
        return trace(returned_there)
    except ValueError:
        return step


def _stated(result: Any) -> Any:
    """The sharding that the caller asks for; None if there is none. A sharding that is part of a type names no device."""
    place = getattr(result, "sharding", None)
    return None if isinstance(place, NamedSharding) and isinstance(place.mesh, AbstractMesh) else place


def _is_placed(argument: Any) -> bool:
    """Whether the caller says where the argument is."""
    return getattr(argument, "committed", True) and getattr(argument, "sharding", None) is not None


def _on_host(program: Program, variable: int) -> bool:
    return in_host_memory(program.avals[variable])


def _boundary(named: Sequence[str], args_info: Any, out_info: Any) -> Boundary:
    """The boundary of a step whose arguments and results are the pytrees of its user."""
    arguments, _ = tree_flatten_with_path(args_info)
    results, _ = tree_flatten_with_path(out_info)
    return Boundary(
        [name_of(named, path) for path, _ in arguments],
        ["result" + keystr(path) for path, _ in results],
        _carried(args_info, out_info),
    )


def _warn_of_unusable(traced: Any, program: Program, donated: Sequence[bool]) -> None:
    """Lower the step, so that JAX warns of donated arguments that are used and whose memory no result can take over."""
    if any(d and u and not t for d, u, t in zip(donated, program.used, program.taken, strict=True)):
        traced.lower()


def parameter_names(function: Callable[..., Any], static: Collection[int]) -> list[str]:
    """The names of the parameters that take the traced positional arguments, in order."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [name for place, name in enumerate(positional) if place not in static]


def name_of(named: Sequence[str], path: KeyPath) -> str:
    """`state.params['Dense_0']['kernel']` for a leaf of `(args, kwargs)`."""
    where = getattr(path[0], "idx", 0)
    if where == 1:
        return getattr(path[1], "key", "") + keystr(path[2:])
    position = getattr(path[1], "idx", 0)
    stem = named[position] if position < len(named) else f"args[{position}]"
    return stem + keystr(path[2:])


def _carried(args_info: Any, out_info: Any) -> list[tuple[int, int]]:
    """Pairs of flat positions (input, output) of the state."""
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    used: set[int] = set()
    results = list(_subtrees(out_info, 0, depth=3))
    for start, argument in _subtrees(args_info, 0, depth=4):
        count = len(tree_leaves(argument))
        if count == 0 or start in used:
            continue
        for out_start, result in results:
            if out_start in taken or not _same(argument, result):
                continue
            pairs += [(start + k, out_start + k) for k in range(count)]
            used.update(range(start, start + count))
            taken.update(range(out_start, out_start + count))
            break
    return sorted(pairs)


def _subtrees(tree: Any, start: int, *, depth: int) -> Iterator[tuple[int, Any]]:
    """`tree` and its descendants, outermost first, each with the flat position of its first leaf."""
    level = [(start, tree)]
    for _ in range(depth):
        yield from level
        below: list[tuple[int, Any]] = []
        for begin, node in level:
            children = _children(node)
            for child in children:
                below.append((begin, child))
                begin += len(tree_leaves(child))
        level = below


def _children(node: Any) -> list[Any]:
    if treedef_is_leaf(tree_structure(node)):
        return []
    return jax.tree_util.tree_flatten(node, is_leaf=lambda x: x is not node)[0]


def _same(argument: Any, result: Any) -> bool:
    if tree_structure(argument) != tree_structure(result):
        return False
    pairs = zip(tree_leaves(argument), tree_leaves(result), strict=True)
    return all((form := _form(a)) is not None and form == _form(r) for a, r in pairs)


def _form(leaf: Any) -> tuple[Any, Any] | None:
    """Shape and type of the numbers of a leaf; None for a token, for which jax raises a TypeError."""
    try:
        return leaf.shape, leaf.dtype
    except (AttributeError, TypeError):
        return None
