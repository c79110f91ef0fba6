"""Builds small graphs and small train steps for tests, and measures planned steps.

A graph is written as lines such as `"y = heavy(x, w)"`. A train step is a stack of dense layers, for which the test chooses loss,
optimizer and state. At 512 rows of 32 numbers one activation is 64 KiB, the smallest tensor that the planner swaps.
"""

import dataclasses
import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.running.instructions import Launch
from tensile_jax.exec.running.runner import Runner
from tensile_jax.ir import Carried, Graph, Kind, Operator, OperatorId, Role, Tensor, TensorId
from tensile_jax.plan import CompiledSizes, DeviceProfile
from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.policies.registry import lowest
from tensile_jax.plan.result.build import build_plan, empty_plan
from tensile_jax.plan.result.layout import layout_of
from tensile_jax.plan.search.choice import Policy, peak_of
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan

ROWS, WIDTH, LAYERS = 512, 32, 5
ACTIVATION = ROWS * WIDTH * 4

PROFILE = dataclasses.replace(
    load_profile("cpu"),
    name="paper",
    flops_per_us=100.0,
    bytes_per_us=100.0,
    device_to_host_bytes_per_us=10.0,
    host_to_device_bytes_per_us=10.0,
    launch_us=1.0,
    canonical_layouts=False,
    late_weight=1.0,
    early_weight=0.0,
    copy_share=0.0,
)
"""Round rates, so that latencies can be worked out on paper."""


def with_link(out_rate: float, in_rate: float | None = None) -> DeviceProfile:
    """`PROFILE` with these rates of the link, in bytes per microsecond; one rate is that of both directions."""
    return dataclasses.replace(PROFILE, device_to_host_bytes_per_us=out_rate, host_to_device_bytes_per_us=in_rate or out_rate)


# -- graphs by hand -----------------------------------------------------------------------------------------------------

_LINE = re.compile(
    r"\s*(?:(?P<scope>[\w/ ]+):)?(?P<outputs>[\w\s,]+)=\s*(?P<kind>heavy|conv|light|reduction)\((?P<inputs>[\w\s,]*)\)\s*\Z"
)


def graph_of(
    lines: Sequence[str],
    *,
    sizes: Mapping[str, int] | None = None,
    inputs: str = "",
    constants: str = "",
    outputs: str,
    carried: Mapping[str, str] | None = None,
    donated: str = "",
    flops: int = 0,
) -> Graph:
    """A graph of lines such as `"y, z = heavy(x, w)"`; tensors are of 100 bytes unless `sizes` says otherwise.

    A line may begin with the scope of its operator (`"Net/Block_0: y = heavy(x)"`), or with `backward` and a scope or none.
    `conv` is a heavy operator, a convolution.
    """
    sizes = sizes or {}
    number: dict[str, TensorId] = {}
    tensors: list[Tensor] = []

    def add(name: str, producer: OperatorId | None, role: Role) -> None:
        number[name] = TensorId(len(tensors))
        nbytes = sizes.get(name, 100)
        tensors.append(Tensor(number[name], name, role, nbytes, (nbytes,), "uint8", producer))

    carried = carried or {}
    for name in inputs.split():
        add(name, None, "parameter" if name in carried else "batch")
    for name in constants.split():
        add(name, None, "constant")
    operators: list[Operator] = []
    for place, line in enumerate(lines):
        match = _LINE.match(line)
        assert match is not None, line
        o = OperatorId(place)
        kind: Kind = "light" if match["kind"] == "light" else "reduction" if match["kind"] == "reduction" else "heavy"
        primitive = "conv_general_dilated" if match["kind"] == "conv" else kind
        reads = [name.strip() for name in match["inputs"].split(",") if name.strip()]
        writes = [name.strip() for name in match["outputs"].split(",")]
        for name in writes:
            add(name, o, "output" if name in outputs.split() else "activation")
        touched = sum(sizes.get(name, 100) for name in (*dict.fromkeys(reads), *writes))
        operators.append(
            Operator(
                id=o,
                name=_named(match["scope"], primitive) if match["scope"] else f"{kind}_{place}",
                primitive=primitive,
                kind=kind,
                inputs=tuple(dict.fromkeys(number[name] for name in reads)),
                outputs=tuple(number[name] for name in writes),
                flops=flops,
                nbytes=touched,
                relayout=0,
            )
        )
    return Graph(
        name="by_hand",
        operators=tuple(operators),
        tensors=tuple(tensors),
        inputs=tuple(number[name] for name in inputs.split()),
        outputs=tuple(number[name] for name in outputs.split()),
        carried=tuple(Carried(number[a], number[b]) for a, b in carried.items()),
        donated=frozenset(number[name] for name in donated.split()),
        fingerprint="by hand",
    )


def training_graph(layers: int = 4, *, activation: int = 100_000, weight: int = 1_000, donated: bool = True) -> Graph:
    """Forward, backward and update of a stack of `y = tanh(x @ w)`: seven operators a layer."""
    lines: list[str] = []
    sizes: dict[str, int] = {"x": activation}
    for k in range(layers):
        before = "x" if k == 0 else f"y{k - 1}"
        lines += [f"a{k} = heavy({before}, w{k})", f"y{k} = light(a{k})"]
        sizes |= {f"a{k}": activation, f"y{k}": activation, f"w{k}": weight}
    lines += [f"loss = reduction(y{layers - 1})", f"d{layers} = light(y{layers - 1})"]
    sizes |= {"loss": 4, f"d{layers}": activation}
    for k in reversed(range(layers)):
        before = "x" if k == 0 else f"y{k - 1}"
        lines += [f"e{k} = light(d{k + 1}, y{k})", f"g{k} = heavy({before}, e{k})"]
        lines += [f"d{k} = heavy(e{k}, w{k})"] if k else []
        sizes |= {f"e{k}": activation, f"g{k}": weight, f"d{k}": activation}
    for k in range(layers):
        lines.append(f"v{k} = light(w{k}, g{k})")
        sizes[f"v{k}"] = weight
    weights = [f"w{k}" for k in range(layers)]
    return graph_of(
        lines,
        sizes=sizes,
        inputs=" ".join([*weights, "x"]),
        outputs=" ".join([*(f"v{k}" for k in range(layers)), "loss"]),
        carried={f"w{k}": f"v{k}" for k in range(layers)},
        donated=" ".join(weights) if donated else "",
        flops=200_000,
    )


def _named(scope: str, primitive: str) -> str:
    return f"{scope} {primitive}" if scope == "backward" else f"{scope}/{primitive}"


def convolutions(layers: int = 3, *, activation: int = 100_000, weight: int = 1_000, kernels: str = "conv") -> Graph:
    """Forward and backward of a stack of `y = relu(conv(x, w))` in the scopes `Net/Conv_k`, with the update of its weights.

    `backward Net/Conv_k` has the gradient of the kernel first, then that of its input, as in JAX.
    """
    lines: list[str] = []
    sizes = {"x": activation, "loss": 4, f"d{layers}": activation}
    for k in range(layers):
        before = "x" if k == 0 else f"y{k - 1}"
        lines += [f"Net/Conv_{k}: a{k} = {kernels}({before}, w{k})", f"Net: y{k} = light(a{k})"]
        sizes |= {f"a{k}": activation, f"y{k}": activation, f"w{k}": weight, f"v{k}": weight}
    lines += [f"loss = reduction(y{layers - 1})", f"backward: d{layers} = light(y{layers - 1})"]
    for k in reversed(range(layers)):
        before = "x" if k == 0 else f"y{k - 1}"
        lines += [f"backward Net: e{k} = light(d{k + 1}, y{k})", f"backward Net/Conv_{k}: g{k} = {kernels}({before}, e{k})"]
        lines += [f"backward Net/Conv_{k}: d{k} = {kernels}(e{k}, w{k})"] if k else []
        lines += [f"v{k} = light(w{k}, g{k})"]
        sizes |= {f"e{k}": activation, f"g{k}": weight, f"d{k}": activation}
    weights = " ".join(f"w{k}" for k in range(layers))
    return graph_of(
        lines,
        sizes=sizes,
        inputs=f"{weights} x",
        outputs=" ".join([*(f"v{k}" for k in range(layers)), "loss"]),
        carried={f"w{k}": f"v{k}" for k in range(layers)},
        donated=weights,
        flops=200_000,
    )


def tensor_named(graph: Graph, name: str) -> TensorId:
    """The id of the tensor of that name."""
    return next(t.id for t in graph.tensors if t.name == name)


def header_for(graph: Graph, *, state_memory: str = "device") -> Plan:
    """A plan without segments and events, which `build_plan` takes as its header."""
    out = "any" if state_memory == "any" else "device"
    return dataclasses.replace(empty_plan(graph), device_profile="paper", state_memory=out)


def floor_bytes(model: StepModel, measured: CompiledSizes, policy: Policy) -> int:
    """The smallest limit for which the policy has a plan, in bytes."""
    return peak_of(model, lowest(model, measured, policy), measured)


def plan_by_hand(
    graph: Graph,
    retention: Retention,
    boundaries: Sequence[int],
    absences: Absences | None = None,
    *,
    workspace: int = 0,
    state_memory: Literal["device", "any"] = "device",
) -> Plan:
    """The plan of what is kept and what is absent, cut there, with the same workspace for every segment, on `PROFILE`."""
    step = StepModel(graph, PROFILE, state_may_stay_out=state_memory == "any")
    layout = layout_of(retention, absences or {}, boundaries)
    workspaces = [workspace] * (len(boundaries) - 1)
    return build_plan(layout, retention.liveness, workspaces, step.costs, header_for(graph, state_memory=state_memory))


# -- train steps ----------------------------------------------------------------------------------------------------------

Step = Callable[..., Any]


def weights(layers: int = LAYERS, width: int = WIDTH, *, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Square matrices under which activations keep their size."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, dtype) for _ in range(layers)]


def batch(seed: int = 0, *, rows: int = ROWS, width: int = WIDTH, dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(100 + seed).normal(size=(rows, width)), dtype)


def dense(params: Any, x: jax.Array) -> jax.Array:
    """`tanh(x @ w)`, once for each matrix in `params`."""
    for w in jax.tree.leaves(params):
        x = jnp.tanh(x @ w)
    return x


def dense_loss(params: Any, x: jax.Array) -> jax.Array:
    """The loss: the distance of the stack's output from the reversed input."""
    return jnp.mean((dense(params, x) - 0.1 * x[:, ::-1]) ** 2)


def optimizer_step(optimizer: optax.GradientTransformation | optax.GradientTransformationExtraArgs) -> Step:
    """`(state, batch) -> (state, loss)` for `state = {"params", "opt_state"}`."""

    def train_step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(dense_loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def optimizer_state(optimizer: Any, params: Any = None) -> Any:
    """The first state of `optimizer_step`."""
    params = weights() if params is None else params
    return {"params": params, "opt_state": optimizer.init(params)}


def sgd_step(state: Any, batch: Any) -> Any:
    """`(params, batch) -> (params, loss)`, plain gradient descent."""
    loss, gradients = jax.value_and_grad(dense_loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss


def fresh(tree: Any) -> Any:
    """A copy of every array, which may be donated without harm to the original."""
    return jax.tree.map(lambda leaf: jax.random.clone(leaf) if _is_key(leaf) else jnp.copy(leaf), tree)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves as NumPy arrays; keys by their words, small floats widened."""
    found: list[np.ndarray] = []
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        found.append(array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array)
    return found


# -- planned functions ------------------------------------------------------------------------------------------------------


def trained_alike(
    function: Any, step: Step, state: Any, x: jax.Array, labels: Any, *, steps: int, rtol: float, atol: float
) -> Any:
    """The state after so many steps on rolled rows of `x`; asserts that losses and the state at last are those of `jax.jit`.

    The step returns the state, the loss, and maybe more.
    """
    plain, expected, state = jax.jit(step), state, fresh(state)
    for i in range(steps):
        rows = jnp.roll(x, i, axis=0)
        expected, loss, *_ = plain(expected, rows, labels)
        state, own, *_ = function(state, rows, labels)
        np.testing.assert_allclose(own, loss, rtol=1e-5)
    for a, b in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    return state


def low_budget(step: Step, *args: Any, part: float = 0.0, **options: Any) -> int:
    """A budget that cuts the step into segments: the floor and a twentieth (`part=0`), up to the peak of plain jit (`part=1`).

    Where compiling shows that the estimated floor is too low, the floor that the error names.
    """
    wide: dict[str, Any] = {**options, "budget": 2**50}
    probe = tensile.jit(step, **wide)
    plan = probe.plan(*args)
    ceiling = max(min(probe.jit_peak_bytes(*args), plan.unplanned_peak_bytes), plan.floor_bytes)
    return int(plan.floor_bytes * 1.05 + part * (ceiling - plan.floor_bytes * 1.05))


def planned(step: Step, args: Sequence[Any], *, part: float = 0.0, **options: Any) -> tensile.PlannedFunction:
    """The step under a low budget that is known to work, with its first plan compiled; `args` are left as they are."""
    budget = low_budget(step, *args, part=part, **options)
    try:
        function = tensile.jit(step, budget=budget, **options)
        function(*fresh_arguments(args, options))
    except tensile.BudgetTooSmall as error:
        assert error.floor_bytes > budget
        function = tensile.jit(step, budget=error.floor_bytes, **options)
        function(*fresh_arguments(args, options))
    return function


def fresh_arguments(args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Copies of the arguments, but for static ones."""
    static = options.get("static_argnums", ())
    static = {static} if isinstance(static, int) else set(static or ())
    return [a if i in static else fresh(a) for i, a in enumerate(args)]


def running(function: tensile.PlannedFunction) -> Runner:
    """What runs the latest plan of the function."""
    calls = function._calls
    assert calls._latest is not None, "The function has not been called."
    return calls._planned[calls._latest].runner


def within_budget(plan: Plan) -> bool:
    return plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes


def wrap_launches(function: tensile.PlannedFunction, wrap: Callable[[int, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(index, call)` in the place of the executable of each segment."""
    executor = running(function).executor
    code = tuple(
        dataclasses.replace(i, call=wrap(i.index, i.call)) if isinstance(i, Launch) else i for i in executor._program.code
    )
    executor._program = dataclasses.replace(executor._program, code=code)


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of a parameter. The tests with other values than `quick` take long, and are left to `make test-slow`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_if(values: Iterable[Any], *slow: Any) -> list[Any]:
    """The values of a parameter. The tests with values of `slow` take long, and are left to `make test-slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]


def device_bytes() -> int:
    """What every live array holds in device memory, as JAX counts it."""
    return sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted() and a.sharding.memory_kind == "device")


def measure_launches(function: tensile.PlannedFunction, baseline: int) -> list[int]:
    """A list that fills with the device bytes at each launch from now on: live arrays beyond `baseline`, and the workspace."""
    gc.collect()
    seen: list[int] = []
    workspaces = [segment.workspace_bytes for segment in running(function).plan.segments]

    def wrap(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*values: Any) -> Any:
            made = jax.block_until_ready(call(*values))
            seen.append(device_bytes() - baseline + workspaces[index])
            return made

        return launch

    wrap_launches(function, wrap)
    return seen


def kinds_of(plan: Plan) -> set[str]:
    """The kinds of events in the plan."""
    return {event.kind for event in plan.events}


def in_chunks(plan: Plan | None) -> bool:
    """Whether there is a plan, and a part of its step is evaluated in chunks of rows."""
    return plan is not None and any("chunks of rows" in note for note in plan.notes)


def something_happened(plan: Plan) -> bool:
    """Whether the plan does more than `jax.jit` would: several segments, and something dropped or swapped."""
    return len(plan.segments) > 1 and bool(kinds_of(plan) & {"swap_out", "swap_in", "recompute"})
