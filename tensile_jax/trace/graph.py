"""Builds the graph of operators and tensors of a flat program, with names and roles that a person recognises.

A tensor that is an argument or a result of the step is named by its path in the user's pytrees, such as
`state.params['Dense_0']['kernel']`. An operator is named by the scope in which the user wrote it and by its primitive:
`ResNet/Block_3/Conv_1/conv_general_dilated`. If differentiation added the operator,
its name begins with `backward`: `backward ResNet/Block_3/Conv_1/conv_general_dilated`.

An input is *carried* if it is state: an output of the step takes its place in the next iteration. A tensor's *role* says what the
tensor is for: the first role in this table that fits. (A *heavy* operator, such as a matrix product, is one that XLA runs as a
kernel of its own.)

    parameter        carried input that is no scalar, that a heavy operator depends on, and whose path does not contain `opt` (an
                     optimizer)
    optimizer_state  carried input whose path names an optimizer, or that has the shape of a parameter and whose new value depends
                     on a gradient
    state            any other carried input (statistics, counters, keys)
    batch            an input that is not carried
    constant         an array that the step's function captures
    (the input's)    output that takes the place of a carried input, with the same role
    output           any other output of the step
    gradient         result of an operator of the backward pass (scope `transpose`), with the shape of a parameter
    activation       any other result
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

from tensile_jax.ir import BACKWARD, Carried, Graph, Operator, OperatorId, Role, Tensor, TensorId
from tensile_jax.trace.avals import dtype_of, host_bytes_of, in_host_memory, nbytes_of, shape_of
from tensile_jax.trace.cost.body_memory import inner_bytes
from tensile_jax.trace.cost.features import features_of
from tensile_jax.trace.cost.flops import flops_of
from tensile_jax.trace.cost.fusion_kinds import kind_of, reduces_rows
from tensile_jax.trace.cost.traffic import bytes_touched, copied_bytes, relaid_operands, relayout_bytes
from tensile_jax.trace.keys import atom_key, params_key
from tensile_jax.trace.program import Program

_WRAPPED = re.compile(r"\b(?:jvp|vmap|rematted_computation|checkpoint|remat|jit|pjit)\(([^()]*)\)")


def build_graph(
    program: Program,
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    carried: Sequence[tuple[int, int]],
    donated: Sequence[bool],
) -> Graph:
    """The graph of `program`; operator and tensor ids are the places of its equations and of its variables in use.

    Args:
        carried: pairs of positions (input, output) of the state.
        donated: for each input, whether its memory may be taken.
    """
    ids = variable_ids(program)
    producer: dict[int, int] = {v: o for o, e in enumerate(program.equations) for v in e.outputs}
    roles = _roles(program, input_names, carried)
    names = _tensor_names(program, input_names, output_names)
    tensors = tuple(
        Tensor(
            id=ids[v],
            name=names[v],
            role=roles[v],
            nbytes=nbytes_of(program.avals[v]),
            shape=shape_of(program.avals[v]),
            dtype=dtype_of(program.avals[v]),
            producer=OperatorId(producer[v]) if v in producer else None,
            host_bytes=host_bytes_of(program.avals[v]) if in_host_memory(program.avals[v]) else None,
        )
        for v in ids
    )
    copies = [copied_bytes(program, e) for e in program.equations]
    operators = tuple(
        Operator(
            id=OperatorId(o),
            name=readable(e.scope, e.primitive.name, "/"),
            primitive=e.primitive.name,
            kind=kind_of(e),
            inputs=tuple(dict.fromkeys(ids[v] for v in e.inputs if isinstance(v, int))),
            outputs=tuple(ids[v] for v in e.outputs if v in ids),
            flops=flops_of(program, e),
            nbytes=bytes_touched(program, e),
            relayout=relayout_bytes(program, e),
            relaid=tuple(ids[v] for v in relaid_operands(program, e)),
            effectful=e.effectful,
            over_rows=reduces_rows(program, e),
            inner=inner_bytes(program, e),
            position=e.position,
            iterations=e.iterations,
            features=features_of(program, e) if kind_of(e) == "heavy" else (),
            bytes_out=copies[o].out,
            bytes_in=copies[o].into,
        )
        for o, e in enumerate(program.equations)
    )
    inputs = tuple(ids[v] for v in program.inputs)
    outputs = tuple(ids[v] for v in program.outputs)
    return Graph(
        name=name,
        operators=operators,
        tensors=tensors,
        inputs=inputs,
        outputs=outputs,
        carried=tuple(Carried(inputs[i], outputs[o]) for i, o in carried),
        donated=frozenset(inputs[i] for i, given in enumerate(donated) if given),
        fingerprint=_fingerprint(program, carried, donated),
    )


def variable_ids(program: Program) -> dict[int, TensorId]:
    """The tensor id of each variable: inputs, constants, then results in the order in which they are made."""
    variables = [*program.inputs, *program.constants, *(v for e in program.equations for v in e.outputs)]
    return {v: TensorId(place) for place, v in enumerate(variables)}


def readable(scope: str, primitive: str, separator: str) -> str:
    """The scope and the primitive: `transpose(jvp(ResNet))/Block_3` and `add` become `backward ResNet/Block_3/add`."""
    backward = "transpose(" in scope
    text, replaced = scope.replace("transpose(", "jvp("), 1
    while replaced:
        text, replaced = _WRAPPED.subn(r"\1", text)
    text = "/".join(part for part in text.split("/") if part and part != "()")
    return f"{BACKWARD if backward else ''}{text}{separator if text else ''}{primitive}"


def _reach_heavy(program: Program) -> set[int]:
    """The variables from which a heavy equation can be reached."""
    heavy: set[int] = set()
    for equation in reversed(program.equations):
        heavy_itself = kind_of(equation) == "heavy" and bool(equation.outputs)  # a print has no outputs
        if heavy_itself or not heavy.isdisjoint(equation.outputs):
            heavy.update(v for v in equation.inputs if isinstance(v, int))
    return heavy


def _roles(program: Program, input_names: Sequence[str], carried: Sequence[tuple[int, int]]) -> dict[int, Role]:
    reaches_heavy = _reach_heavy(program)
    shapes = [shape_of(aval) for aval in program.avals]
    name_of = dict(zip(program.inputs, input_names, strict=True))
    state = {program.inputs[i]: program.outputs[o] for i, o in carried}

    def says_optimizer(v: int) -> bool:
        return "opt" in name_of[v].lower().split("]")[0].split(".")[-1] or "opt_state" in name_of[v].lower()

    parameters = {v for v in state if v in reaches_heavy and not says_optimizer(v) and shapes[v] != ()}
    parameter_shapes = {shapes[v] for v in parameters}
    backward = [v for equation in program.equations if "transpose(" in equation.scope for v in equation.outputs]
    gradients = {v for v in backward if shapes[v] in parameter_shapes}
    after_gradients = set(gradients)
    for equation in program.equations:
        if not after_gradients.isdisjoint(equation.inputs):
            after_gradients.update(equation.outputs)

    roles: dict[int, Role] = {**dict.fromkeys(program.inputs, "batch"), **dict.fromkeys(program.constants, "constant")}
    for v, updated in state.items():
        is_moment = shapes[v] in parameter_shapes and updated in after_gradients
        is_optimizer = says_optimizer(v) or is_moment
        roles[v] = "parameter" if v in parameters else "optimizer_state" if is_optimizer else "state"
    results: dict[int, Role] = {**dict.fromkeys(program.outputs, "output"), **{new: roles[old] for old, new in state.items()}}
    made = [v for equation in program.equations for v in equation.outputs]
    return {**roles, **{v: results.get(v, "gradient" if v in gradients else "activation") for v in made}}


def _tensor_names(program: Program, input_names: Sequence[str], output_names: Sequence[str]) -> dict[int, str]:
    names = {v: f"constant_{place}" for place, v in enumerate(program.constants)}
    names |= {**dict(zip(program.outputs, output_names, strict=True)), **dict(zip(program.inputs, input_names, strict=True))}
    count: Counter[str] = Counter()
    for equation in program.equations:
        stem = readable(equation.scope, equation.primitive.name, ":")
        for v in equation.outputs:
            names.setdefault(v, f"{stem}_{count[stem]}" if count[stem] else stem)
            count[stem] += 1
    return names


def _fingerprint(program: Program, carried: Sequence[tuple[int, int]], donated: Sequence[bool]) -> str:
    """A hash of primitives, parameters, wiring, shapes, dtypes, state and donation; equal for equal programs in any process."""
    digest = hashlib.sha256()
    for v in (*program.inputs, *program.constants):
        digest.update(f"{v}:{program.avals[v]}".encode())
    digest.update(repr((program.outputs, list(carried))).encode())
    digest.update(bytes(donated))
    for e in program.equations:
        stable = (e.primitive.name, [_stable(atom_key(a)) for a in e.inputs], e.outputs, _stable(params_key(e.params)))
        digest.update(repr(stable).encode())
        digest.update("".join(str(program.avals[v]) for v in e.outputs).encode())
    return digest.hexdigest()[:32]


def _stable(key: object) -> str:
    """The key as text, without addresses of objects in this process."""
    if isinstance(key, tuple):
        if key and key[0] in ("identity", "extended"):
            return str(key[0])
        return "(" + ",".join(map(_stable, key)) + ")"
    text = repr(key)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if " at 0x" in text else text
