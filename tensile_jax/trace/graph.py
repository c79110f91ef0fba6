"""From a flat program to the graph of operators and tensors, with names and roles that a person recognises.

Names of tensors of the step's arguments and results are their paths in the pytrees (`state.params['Dense_0']['kernel']`);
names of operators are the scope in which the user wrote them (`ResNet/Block_3/Conv_1`), the primitive, and `'` for the
part that differentiation added.

Roles follow from where a value stands:

    parameter        carried input from which a heavy operator can be reached
    optimizer_state  carried input whose path says so, or that has the shape of a parameter and reaches no heavy operator
    state            any other carried input (statistics, counters, keys)
    batch, constant  inputs that are not carried; captured arrays
    gradient         a result of differentiation, in the shape of a parameter, that reaches a carried output
    output           what the step returns
    activation       everything else
"""

import hashlib
import re
from collections.abc import Sequence

from tensile_jax.ir import Carried, Graph, Operator, OperatorId, Role, Tensor, TensorId
from tensile_jax.trace.avals import dtype_of, nbytes_of, shape_of
from tensile_jax.trace.cost import bytes_touched, flops_of, kind_of, relayout_bytes
from tensile_jax.trace.flatten import Program, atom_key, params_key

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
    scopes = [_readable(e.scope) for e in program.equations]
    producer: dict[int, int] = {v: o for o, e in enumerate(program.equations) for v in e.outputs}
    roles = _roles(program, input_names, carried)
    names = _tensor_names(program, scopes, input_names, output_names)
    tensors = tuple(
        Tensor(
            id=ids[v],
            name=names[v],
            role=roles[v],
            nbytes=nbytes_of(program.avals[v]),
            shape=shape_of(program.avals[v]),
            dtype=dtype_of(program.avals[v]),
            producer=OperatorId(producer[v]) if v in producer else None,
        )
        for v in ids
    )
    operators = tuple(
        Operator(
            id=OperatorId(o),
            name=f"{scopes[o]}/{e.primitive.name}" if scopes[o] else e.primitive.name,
            primitive=e.primitive.name,
            kind=kind_of(e),
            inputs=tuple(dict.fromkeys(ids[v] for v in e.inputs if isinstance(v, int))),
            outputs=tuple(ids[v] for v in e.outputs if v in ids),
            flops=flops_of(program, e),
            nbytes=bytes_touched(program, e),
            relayout=relayout_bytes(program, e),
            effectful=e.effectful,
        )
        for o, e in enumerate(program.equations)
    )
    inputs = tuple(ids[v] for v in program.inputs)
    outputs = tuple(ids[v] for v in program.outputs if isinstance(v, int))
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


def _readable(scope: str) -> str:
    """`transpose(jvp(ResNet))/Block_3` -> `ResNet/Block_3'`: a prime for what differentiation added."""
    backward = "transpose(" in scope
    text = scope.replace("transpose(", "jvp(")
    while True:
        shorter = _WRAPPED.sub(r"\1", text)
        if shorter == text:
            break
        text = shorter
    text = "/".join(part for part in text.split("/") if part and part != "()")
    return f"{text}'" if backward else text


def _reach_heavy(program: Program) -> set[int]:
    """The variables from which a heavy equation can be reached."""
    heavy: set[int] = set()
    for equation in reversed(program.equations):
        heavy_itself = kind_of(equation) == "heavy" and bool(equation.outputs)  # a print makes nothing of what it reads
        if heavy_itself or not heavy.isdisjoint(equation.outputs):
            heavy.update(v for v in equation.inputs if isinstance(v, int))
    return heavy


def _roles(program: Program, input_names: Sequence[str], carried: Sequence[tuple[int, int]]) -> dict[int, Role]:
    reaches_heavy = _reach_heavy(program)
    avals = program.avals
    carried_inputs = [program.inputs[i] for i, _ in carried]
    name_of = dict(zip(program.inputs, input_names, strict=True))
    roles: dict[int, Role] = {}
    for v in program.inputs:
        roles[v] = "batch"
    for v in program.constants:
        roles[v] = "constant"

    def says_optimizer(v: int) -> bool:
        return "opt" in name_of[v].lower().split("]")[0].split(".")[-1] or "opt_state" in name_of[v].lower()

    for v in carried_inputs:
        trainable = v in reaches_heavy and not says_optimizer(v) and shape_of(avals[v]) != ()
        roles[v] = "parameter" if trainable else "state"
    parameter_shapes = {shape_of(avals[v]) for v in carried_inputs if roles[v] == "parameter"}
    from_gradients = _depends_on_gradients(program, parameter_shapes)
    for i, o in carried:
        v, updated = program.inputs[i], program.outputs[o]
        shaped = shape_of(avals[v]) in parameter_shapes and updated in from_gradients
        if roles[v] == "state" and (says_optimizer(v) or shaped):
            roles[v] = "optimizer_state"
    for equation in program.equations:
        backward = "transpose(" in equation.scope
        for v in equation.outputs:
            shaped = shape_of(avals[v]) in parameter_shapes and shape_of(avals[v]) != ()
            roles[v] = "gradient" if backward and shaped else "activation"
    for atom in program.outputs:
        if isinstance(atom, int) and atom not in name_of:
            roles[atom] = "output"
    for i, o in carried:
        atom = program.outputs[o]
        if isinstance(atom, int) and atom not in name_of:
            roles[atom] = roles[program.inputs[i]]
    return roles


def _depends_on_gradients(program: Program, parameter_shapes: set[tuple[int, ...]]) -> set[int]:
    found: set[int] = set()
    for equation in program.equations:
        gradient = "transpose(" in equation.scope and any(
            shape_of(program.avals[v]) in parameter_shapes and shape_of(program.avals[v]) != () for v in equation.outputs
        )
        if gradient or any(v in found for v in equation.inputs if isinstance(v, int)):
            found.update(equation.outputs)
    return found


def _tensor_names(
    program: Program, scopes: Sequence[str], input_names: Sequence[str], output_names: Sequence[str]
) -> dict[int, str]:
    names: dict[int, str] = dict(zip(program.inputs, input_names, strict=True))
    for place, v in enumerate(program.constants):
        names[v] = f"constant_{place}"
    for atom, name in zip(program.outputs, output_names, strict=True):
        if isinstance(atom, int) and atom not in names:
            names[atom] = name
    count: dict[str, int] = {}
    for equation, scope in zip(program.equations, scopes, strict=True):
        for v in equation.outputs:
            stem = f"{scope}:{equation.primitive.name}" if scope else equation.primitive.name
            count[stem] = number = count.get(stem, -1) + 1
            names.setdefault(v, f"{stem}_{number}" if number else stem)
    return names


def _fingerprint(program: Program, carried: Sequence[tuple[int, int]], donated: Sequence[bool]) -> str:
    """The same for the same program in another process: primitives, wiring, shapes, types, state and donation."""
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
    """The key as text, without anything that names an address in this process."""
    if isinstance(key, tuple):
        if key and key[0] in ("identity", "extended"):
            return str(key[0])
        return "(" + ",".join(map(_stable, key)) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(key))
