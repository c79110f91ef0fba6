"""Defines the graph of one iteration of a step: its operators and its tensors.

`tensile_jax/trace` makes the graph of a step, and the planner reads it.

    Graph    ::= Operator*  Tensor*  inputs=(TensorId*)  outputs=(TensorId*)  carried=(Carried*)
    Operator ::= id name primitive kind inputs=(TensorId*) outputs=(TensorId*) flops nbytes effectful alone ...
    Tensor   ::= id name role nbytes shape dtype producer=(OperatorId | none) host_bytes
    Carried  ::= input=TensorId output=TensorId
    kind     ::= "heavy" | "reduction" | "light"
    role     ::= "parameter" | "optimizer_state" | "state" | "batch" | "constant"
               | "activation" | "gradient" | "output"

An operator is one equation of the flattened jaxpr; the class `Operator` lists its further fields. The `nbytes` of an operator
are the bytes that it reads and writes. Operators are listed in the order in which they run, and that order is topological. XLA
runs *heavy* operators (convolutions, products, sorts, loops) as kernels of their own, which read and write device memory. XLA
fuses *light* operators into their neighbours. A *reduction* is in between: XLA may fuse the operators before it into the
reduction, but mostly does not fuse the reduction into the operators that read its result.

An *effectful* operator does more than make its outputs: it prints, or calls back into Python. It runs exactly once in an
iteration and is never recomputed. Effectful operators run in the order in which the step has them. An operator that is *alone*
shares no executable with other operators. It is a loop whose body has a plan of its own, which every iteration of the loop
follows (`trace/plannable_loops.py`). An operator that is alone also counts as effectful.

A tensor is in device memory, or in host memory if the step's caller or the step itself puts it there. A tensor in host memory
takes no device memory and is never swapped: its `nbytes` are 0, and `host_bytes` is its size. An operator that moves values from
one memory to the other is heavy.

A tensor's *role* says what the tensor is for (`trace/graph.py` has the rules). A tensor without producer is an input of the step,
or a constant: an array that the step's function captures. `carried` pairs an input of the step with the output that takes its
place in the next iteration. The step may reuse the memory of donated inputs. All other inputs belong to the caller and stay on
the device.

Sizes are in bytes. A tensor's id is its position: `graph.tensors[t].id == t`. An operator's id is its position in the step as it
was traced. The planner may later change the order of `graph.operators` (`plan/analysis/operator_order.py`). So an index into
`graph.operators` is a position in the changed order, and not an id.
"""

from dataclasses import dataclass
from typing import Literal, NewType

TensorId = NewType("TensorId", int)
OperatorId = NewType("OperatorId", int)

Kind = Literal["heavy", "reduction", "light"]
BACKWARD = "backward "
"""The names of operators that differentiation added begin with this (`trace/graph.py`)."""
OUTER_PRODUCTS = "outer_products"
"""The primitive of a product that is light (`trace/rewrites/outer_products.py`)."""
EXPENSIVE = frozenset("cos erf sin tan tanh".split())
"""Light primitives whose results XLA writes, on any device, rather than computing them in several kernels
(`plan/analysis/fusion.py`)."""
UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter-max scatter-min scatter-mul".split())
"""The primitives that give their first operand with a part of it changed. XLA changes it in place if nothing else needs it."""
Role = Literal["parameter", "optimizer_state", "state", "batch", "constant", "activation", "gradient", "output"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value between operators; `producer` is None for inputs of the step and for constants.

    `nbytes` are its bytes in device memory. For a tensor in host memory, `nbytes` are 0, and `host_bytes` are its bytes there.
    """

    id: TensorId
    name: str
    role: Role
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    producer: OperatorId | None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes < 0 or (self.host_bytes or 0) < 0:
            raise ValueError(f"Tensor {self.name} must have a size of 0 bytes or more: got {self.nbytes}, {self.host_bytes}.")
        if self.nbytes and self.host_bytes is not None:
            raise ValueError(f"Tensor {self.name} is in host memory and has {self.nbytes} bytes on the device.")

    @property
    def in_host_memory(self) -> bool:
        """Whether the step has it in host memory."""
        return self.host_bytes is not None


@dataclass(frozen=True, slots=True)
class Operator:
    """One equation of the step: what it reads, what it writes, and what that costs.

    Attributes:
        relayout: bytes that the operator copies to bring its operands into the layout that the backend needs.
        relaid: operands of a product that every backend copies, since their batch, free and contracted dimensions are mixed.
        over_rows: whether the operator is a reduction over the last axes, as those of a softmax.
        inner: bytes that a loop or a branch holds inside, beside its inputs and outputs.
        iterations: for an operator of an opened loop (one whose iterations are written out), the indices of its iterations, from
            the outermost loop to the innermost one.
        position: which equation of the loops' bodies it is. The same equation has the same position in every iteration.
        least_us: microseconds that the operator takes at least, whatever its flops and bytes say.
        features: numbers that describe a heavy operator, from which its latency is predicted (`trace/cost/features.py`); empty if
            it cannot be predicted from them.
        exchanged: bytes that a device sends to other devices for the operator, if the step runs on several.
        bytes_out, bytes_in: bytes that the operator itself copies from device memory to host memory, and back.
    """

    id: OperatorId
    name: str
    primitive: str
    kind: Kind
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    flops: int
    nbytes: int
    relayout: int
    relaid: tuple[TensorId, ...] = ()
    effectful: bool = False
    over_rows: bool = False
    inner: int = 0
    position: tuple[int, ...] = ()
    iterations: tuple[int, ...] = ()
    alone: bool = False
    least_us: float = 0.0
    features: tuple[float, ...] = ()
    exchanged: int = 0
    bytes_out: int = 0
    bytes_in: int = 0

    @property
    def in_backward_pass(self) -> bool:
        """Whether differentiation added it, which the first word of its name says."""
        return self.name.startswith(BACKWARD)

    @property
    def scope(self) -> str:
        """The scope in which the user wrote it: its name without `backward` and without its primitive."""
        return self.name.removeprefix(BACKWARD).rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the user's code makes a tensor.

    `made_by` is the name of the operator that makes it, `made_at` the file and line, such as `train.py:17`, and `code` the text
    of that line. `called_from` is the line that called the function. A loop stacks what its iterations make: `made_by`,
    `made_at` and `code` are then those of the operator in the loop's body, and `stacked_at` is the line of the loop. What is
    not known is empty.
    """

    made_by: str
    made_at: str
    code: str
    stacked_at: str
    called_from: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A state tensor: `output` of this iteration is `input` of the next one."""

    input: TensorId
    output: TensorId


@dataclass(frozen=True, slots=True)
class Graph:
    """One iteration of a step. `donated` are the inputs whose memory the step may reuse."""

    name: str
    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    carried: tuple[Carried, ...]
    donated: frozenset[TensorId]
    fingerprint: str

    def __post_init__(self) -> None:
        if any(tensor.id != place for place, tensor in enumerate(self.tensors)):
            raise ValueError("The tensors of a graph must stand at the place that their id names.")
        known = {t.id for t in self.tensors if t.producer is None}
        for operator in self.operators:
            missing = [t for t in operator.inputs if t not in known]
            if missing:
                raise ValueError(
                    f"Operators must stand in topological order: {operator.name} reads "
                    f"{self.tensors[missing[0]].name} before it is there."
                )
            known.update(operator.outputs)
