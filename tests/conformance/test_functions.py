"""Steps with each public function of JAX, and with state, batches and constants of each dtype, look the same as under `jax.jit`.

The steps are made from what JAX itself lists (`functions.py`), with the gradient of each function that has one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tensile_jax.ir import Graph
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan_format import Plan
from tensile_jax.trace import trace_step
from tensile_jax.trace.reading.named_places import shardings_in
from tests.builders import fresh
from tests.conformance.functions import NOT_CALLED, Step, X, public_functions, step_for, step_of
from tests.conformance.observation import Jit, Seen, expect_same, see, segments
from tests.trace.reading.test_primitives import CALLS as CONTROL_FLOW
from tests.trace.reading.test_primitives import in_single_operators

LISTED_FOR = "0.10.2"
"""The version of JAX whose functions are all called or listed. Another version may have more."""

NAMES_A_PLACE = {"jax.lax.with_sharding_constraint"}
SAMPLE = (
    "jax.lax.cond", "jax.lax.switch", "jax.lax.while_loop", "jax.lax.scan", "jax.lax.empty", "jax.lax.sort", "jax.lax.composite",
    "jax.lax.with_sharding_constraint", "jax.lax.linalg.cholesky", "jax.nn.softmax", "jax.random.normal", "jax.random.split",
    "jax.scipy.stats.norm.logpdf",
)  # fmt: skip


def _looks_the_same(step: Step) -> None:
    def called(jit: Jit) -> list[Seen]:
        jitted = jit(lambda x, *arrays: (x @ x, step.function(*arrays)))
        return [see(jitted, X, *step.arrays)]

    expect_same(called, segments, rtol=1e-4, atol=1e-5)


def _refuse_uncovered(names: Any) -> None:
    uncovered = [name for name in names if name not in NOT_CALLED and step_for(name) is None]
    if uncovered and jax.__version__ != LISTED_FOR:
        pytest.skip(f"not covered in this version of JAX: {', '.join(uncovered)}")
    assert not uncovered, "Add arguments to CALLS, or a reason to NOT_CALLED."


# -- functions ----------------------------------------------------------------------------------------------------------------


def test_every_function_of_lax_is_called_and_names_no_place_of_its_own_accord() -> None:
    names = [name for name in public_functions() if name.startswith("jax.lax.")]
    steps = [step for name in names if name not in NOT_CALLED and (step := step_for(name)) is not None]
    naming = {step.name for step in steps if shardings_in(jax.make_jaxpr(step.function)(*step.arrays).jaxpr)}
    assert naming == NAMES_A_PLACE
    _refuse_uncovered(names)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_with_a_function_looks_the_same_as_under_jit(name: str) -> None:
    step = step_for(name)
    assert step is not None
    _looks_the_same(step)


@pytest.mark.slow
def test_every_function_is_called() -> None:
    _refuse_uncovered(public_functions())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(public_functions().keys() - NOT_CALLED))
def test_a_step_with_any_function_looks_the_same_as_under_jit(name: str) -> None:
    step = step_for(name)
    if step is None:
        pytest.skip("see test_every_function_is_called")
    _looks_the_same(step)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_looks_the_same_as_under_jit(name: str) -> None:
    step = step_of(name, CONTROL_FLOW[name], (X,))
    if step is not None:
        _looks_the_same(step)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("name", sorted(name for name in public_functions().keys() - NOT_CALLED if ".random." in name))
def test_each_implementation_of_random_numbers_looks_the_same(name: str, implementation: str) -> None:
    step = step_for(name)
    if step is None:
        pytest.skip("see test_every_function_is_called")
    key = jax.random.key(0, impl=implementation)
    arrays = tuple(key if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in step.arrays)
    _looks_the_same(Step(name, step.function, arrays))


# -- dtypes -------------------------------------------------------------------------------------------------------------------

WIDTH = 8


@functools.cache
def dtypes() -> tuple[str, ...]:
    """The names of all dtypes of which a jitted function can take and return arrays, and `key`."""
    types = {jnp.dtype(value).name for name in dir(jnp) if isinstance(value := getattr(jnp, name), type(jnp.float32))}
    return (*sorted(name for name in types if _is_supported(name)), "key")


def _is_supported(dtype: str) -> bool:
    if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
        return False  # one of 64 bits
    if dtype.startswith("float6_"):
        return False  # plain jit aborts the process in some steps (jax 0.12)
    try:
        return bool(jax.jit(lambda a: a[::-1])(jnp.zeros(2, dtype)).dtype == dtype)
    except Exception:  # of whatever kind: XLA has no such type
        return False


def _of(dtype: str, seed: int) -> jax.Array:
    """A square of numbers, or a row of keys."""
    key = jax.random.key(seed)
    if dtype == "key":
        return jax.random.split(key, WIDTH)
    least = int("float" in dtype)  # float8_e8m0fnu has no zero, and int2 no two
    return (least + jax.random.bernoulli(key, 0.5, (WIDTH, WIDTH))).astype(dtype)


def _wide(a: jax.Array) -> jax.Array:
    """A square of numbers in single precision."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jax.vmap(lambda key: jax.random.uniform(key, (WIDTH,)))(a)
    return (a.real if jnp.iscomplexobj(a) else a).astype(jnp.float32)


def _with_dtype(dtype: str) -> tuple[Any, Any, Any]:
    """A train step whose state, batch and constant are of the dtype, its state and its batch."""
    constant = _of(dtype, 0)

    def step(state: Any, batch: Any) -> Any:
        weights, frozen, moved = state

        def loss_of(weights: Any) -> Any:
            x = _wide(batch) + _wide(constant)
            for w, f, m in zip(weights, frozen, moved, strict=True):
                x = jnp.tanh(x @ (w + 0.1 * _wide(f)) + 0.1 * _wide(m))
            return jnp.mean(x**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return (weights, frozen, [m[::-1] for m in moved]), (loss, batch, constant, constant[::-1])

    weights = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH**0.5 for i in range(3)]
    return step, (weights, [_of(dtype, 10 + i) for i in range(3)], [_of(dtype, 20 + i) for i in range(3)]), _of(dtype, 30)


def _swapping(graph: Graph, leaves: int) -> Plan:
    """Every operator a segment; and on the host each of so many leaves of the state, between its first use and its last."""
    activity = find_liveness(graph)
    absences: dict[Any, tuple[Absence, ...]] = {}
    for tensor in graph.inputs[:leaves]:
        uses = activity.uses[tensor]
        if uses and uses[0] + 1 < uses[-1] - 2:
            absences[tensor] = (Absence(tensor, uses[0] + 1, uses[-1] - 2, 0.0),)
    return in_single_operators(graph, absences)


def _dtype_looks_the_same(dtype: str, *, swaps: bool, committed: bool = False) -> None:
    step, state, batch = _with_dtype(dtype)
    jit: Jit = segments
    if swaps:
        graph = order(trace_step(jax.jit(step, donate_argnums=0), step, (state, batch), {}).graph)
        plan = _swapping(graph, len(jax.tree.leaves(state)))
        assert plan.swapped_in_bytes > 0
        jit = functools.partial(tensile.jit, plan=plan)
    if committed:
        batch = jax.device_put(batch, jax.devices()[0])

    def trained(jit: Jit) -> list[Seen]:
        jitted, given, seen = jit(step, donate_argnums=0), fresh(state), list[Seen]()
        results: list[Any] = []

        def call(given: Any) -> Any:
            results.append(jitted(given, batch))
            return results[-1]

        for _ in range(2):
            seen.append(see(call, given))
            given = results[-1][0]
        return seen

    expect_same(trained, jit)


@pytest.mark.parametrize(("dtype", "swaps"), [("int4", False), ("int4", True), ("float8_e4m3fn", True), ("key", False)])
def test_state_batch_and_constant_of_a_dtype_look_the_same_as_under_jit(dtype: str, swaps: bool) -> None:
    _dtype_looks_the_same(dtype, swaps=swaps)


@pytest.mark.slow
@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
@pytest.mark.parametrize("swaps", [False, True], ids=["kept", "swapped"])
@pytest.mark.parametrize("dtype", dtypes())
def test_state_batch_and_constant_of_every_dtype_look_the_same_as_under_jit(dtype: str, swaps: bool, committed: bool) -> None:
    _dtype_looks_the_same(dtype, swaps=swaps, committed=committed)
