"""Steps whose values move between device memory and host memory look the same as under `jax.jit`.

A drawn step takes a state of three arrays and a batch of one, each of them in device memory or in pinned host memory. It computes
with them in both memories, moves values between these in every way that JAX has, also in loops, branches and checkpoints, and
returns the new state, each array of it in a memory that is drawn. Arrays have 64 KiB, so that plans may swap them.
"""

import functools
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax.ad_checkpoint import Offloadable, Recompute, checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

import tensile_jax as tensile
from tests.conformance.observation import VARIANTS as JITS
from tests.conformance.observation import Jit, Seen, see
from tests.conformance.observation import expect_same as look_the_same

SHAPE = (128, 128)
MEMORIES = ("device", "pinned_host")
WAYS = ("space", "sharding", "format")
KINDS = ("unary", "binary", "product", "move", "stay", "scan", "moving scan", "cond", "while", "host compute", "offloaded")

_EVERY_CHECK = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)  # compiling takes its time
_NO_SHRINKING = (Phase.explicit, Phase.generate)  # a drawn step takes a second or two

operations = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7), st.sampled_from(WAYS))
memories = st.sampled_from(MEMORIES)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    given = [draw(memories) for _ in range(4)]
    return {
        "given": given,  # the state's arrays and the batch
        "returned": [draw(memories) if draw(st.integers(0, 3)) == 0 else given[i] for i in range(3)],
        "operations": draw(st.lists(operations, min_size=2, max_size=7)),
        "donated": draw(st.booleans()),
    }


def sharding(memory: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=memory)


def place(memory: str, way: str) -> Any:
    if way == "space":
        return jax.memory.Space.Host if memory == "pinned_host" else jax.memory.Space.Device
    return sharding(memory) if way == "sharding" else Format(None, sharding(memory))


def memory_of(value: Any) -> str:
    return MEMORIES[jax.typeof(value).memory_space is jax.memory.Space.Host]


def step_of(case: dict[str, Any]) -> Callable[..., Any]:
    """The drawn step (state, batch) -> (state, metric)."""

    def step(state: Any, batch: Any) -> Any:
        values = [*state, batch]

        def of(number: int, memory: str | None = None) -> Any:
            fitting = [v for v in values if memory in (None, memory_of(v))]
            return fitting[number % len(fitting)] if fitting else jnp.ones(SHAPE)

        for kind, a, b, way in case["operations"]:
            x = of(a)
            memory = memory_of(x)
            other = MEMORIES[memory == "device"]
            match kind:
                case "unary":
                    made = jnp.tanh(x) * 0.5
                case "binary":
                    made = x * of(b, memory) + x
                case "product":
                    made = jnp.tanh(of(a, "device") @ of(b, "device"))
                case "move":
                    made = jax.device_put(x, place(other, way))
                case "stay":
                    made = jax.device_put(x, place(memory, way))
                case "scan":
                    last, all_of_them = jax.lax.scan(lambda c, _: (c * 0.9, c), x, None, length=3)
                    made = last + jax.lax.index_in_dim(all_of_them, 1, keepdims=False)
                case "moving scan":

                    def body(carry: Any, _: Any, way: str = way, memory: str = memory, other: str = other) -> Any:
                        there = jax.device_put(carry, place(other, way))
                        return jax.device_put(there * 0.9, place(memory, way)), there

                    made, there = jax.lax.scan(body, x, None, length=3)
                    values.append(jax.lax.index_in_dim(there, 2, keepdims=False))
                case "cond":
                    sign = of(b, "device")[0, 0] > 0
                    made = jax.lax.cond(sign, lambda x: x * 0.5, lambda x: x + 1.0, x)
                case "while":
                    made = jax.lax.fori_loop(0, jnp.int32(b % 3), lambda _, c: c * 0.9, x)
                case "host compute":
                    with compute_on("device_host"):
                        made = x * 0.7
                case _:
                    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                        names_which_can_be_saved=[],
                        names_which_can_be_offloaded=["kept"],
                        offload_src="device",
                        offload_dst="pinned_host",
                    )

                    def loss(x: Any) -> Any:
                        return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x @ x) * 0.5, "kept")) @ x)

                    made = jax.grad(jax.checkpoint(loss, policy=policy))(of(a, "device")) / 256
            values.append(made)

        new: list[Any] = []
        for i, wanted in enumerate(case["returned"]):
            value = values[-1 - i]
            new.append(value if memory_of(value) == wanted else jax.device_put(value, place(wanted, WAYS[i % 2])))
        return tuple(new), sum(jnp.mean(value) for value in values if memory_of(value) == "device")

    return step


def arguments(case: dict[str, Any]) -> tuple[Any, Any]:
    numbers = np.linspace(-1, 1, SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    made = [jax.device_put(numbers * (1 - 0.2 * i), sharding(memory)) for i, memory in enumerate(case["given"])]
    return tuple(made[:3]), made[3]


def called(function: Any, case: dict[str, Any], calls: int = 2) -> Any:
    """What is seen of calls one after another, each of which gets the state that the one before has returned."""
    state, batch = arguments(case)
    seen: list[Any] = []
    for _ in range(calls):
        given = jax.tree.leaves((state, batch))
        try:
            state, metric = jax.block_until_ready(function(state, batch))
        except Exception as error:
            if isinstance(error, tensile.BudgetTooSmall) or "is donated in" in str(error):
                raise
            return [*seen, (type(error).__name__, [array.is_deleted() for array in given])]
        deleted = [array.is_deleted() for array in given]
        results = [*state, metric]
        seen.append((
            [a.sharding.memory_kind for a in results],
            [(a.committed, a.dtype, a.aval.weak_type) for a in results],
            deleted,
            [np.asarray(a) for a in results],
        ))  # fmt: skip
    return seen


def expect_same(case: dict[str, Any], **options: Any) -> None:
    """With these options, drawn calls look the same as with `jax.jit`, or are refused since they would end the process."""
    step, donated = step_of(case), 0 if case["donated"] else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # donated arrays that nothing can use
        while True:
            try:
                got = called(tensile.jit(step, donate_argnums=donated, **options), case)
                break
            except tensile.BudgetTooSmall as error:  # for the first call, or for one that gets its state in other memories
                options["budget"] = error.floor_bytes
            except ValueError as error:
                assert "is donated in" in str(error)
                assert donated == 0
                assert len({*case["given"][:3], *case["returned"], "device"}) == 2  # some result is in the other memory
                return
        wanted = called(jax.jit(step, donate_argnums=donated), case)
    assert len(got) == len(wanted)
    for call, (mine, its) in enumerate(zip(got, wanted, strict=True)):
        if isinstance(its[0], str):
            assert mine == its
            continue
        if options.get("state_memory") == "any":
            assert all(mine[0][i] == its[0][i] or (its[0][i] == "device" and i < 3) for i in range(4))
        else:
            assert mine[:2] == its[:2], call
        if call == 0:  # later, state that a plan has left in host memory is not deleted there
            assert mine[2] == its[2]
        for a, b in zip(mine[3], its[3], strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "segments": {"policy": "none"},
    "whole": {},
    "auto": {"budget": 1},
    "state on the host": {"budget": 1, "state_memory": "any"},
    "as one program": {"budget": "80%", "launch": "program"},
    "loops opened": {"policy": "none", "open_loops": True},
    "checkpoints respected": {"budget": 1, "respect_checkpoint": True},
    "vdnn": {"policy": "vdnn"},
    "capuchin": {"policy": "capuchin", "budget": "60%", "state_memory": "any"},
    "tensile": {"policy": "tensile", "budget": 1, "state_memory": "any"},
}


@pytest.mark.parametrize("variant", ["segments", "state on the host"])
def test_drawn_steps_with_values_in_host_memory_look_the_same_as_of_jit(variant: str) -> None:
    @settings(max_examples=6, phases=_NO_SHRINKING, deadline=None, derandomize=True, suppress_health_check=_EVERY_CHECK)
    @given(cases())
    def hold(case: dict[str, Any]) -> None:
        expect_same(case, **VARIANTS[variant])

    hold()


CROSSING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "to the device": ("pinned_host", lambda a: jax.device_put(a, sharding("device")) + 1),
    "to the host": ("device", lambda a: jax.device_put(a + 1, jax.memory.Space.Host)),
    "to the device first": (
        "pinned_host",
        lambda a: (
            jax.device_put(a, sharding("device")) + 1,
            jax.device_put(jax.device_put(a, sharding("device")), sharding("pinned_host")),
        ),
    ),
}


@pytest.mark.parametrize("name", CROSSING)
def test_a_donation_that_jit_gives_to_a_result_in_the_other_memory_is_refused(name: str) -> None:
    memory, step = CROSSING[name]
    given = jax.device_put(jnp.ones(SHAPE), sharding(memory))
    for options in VARIANTS.values():
        with pytest.raises(tensile.TraceError, match="a is donated in .* memory, and jax.jit gives its memory to result"):
            tensile.jit(step, donate_argnums=0, **options)(given)
    assert not given.is_deleted()


def _offloads_pairs(primitive: Any, *_: Any, **__: Any) -> Any:
    return Offloadable("device", "pinned_host") if primitive.multiple_results else Recompute


@functools.partial(jax.checkpoint, policy=_offloads_pairs)  # pyright: ignore[reportUntypedFunctionDecorator] # jax's
def offloaded_in_pairs(x: Any) -> Any:
    """JAX offloads the two results of an operator by one copy that names one place."""
    return jnp.sum(jax.lax.approx_max_k(x, k=2)[0])


def odd_places(jit: Jit) -> list[Seen]:
    """Arrays in the third memory of a CPU, without elements, and twice the same; a captured array in host memory."""
    x, there = jnp.ones(SHAPE), jax.device_put(jnp.ones(SHAPE), sharding("pinned_host"))
    nothing = jax.device_put(jnp.zeros((0, 4)), sharding("pinned_host"))
    return [
        see(jit(lambda a, b: (a, b @ b)), jax.device_put(x, sharding("unpinned_host")), x),
        see(jit(lambda a, b: (a * 2, b @ b, jax.device_put(a, sharding("device")))), nothing, x),
        see(jit(lambda a, b: (a * 2, b * 3)), there, there),
        see(jit(lambda a: (there * 2, jax.device_put(a, jax.memory.Space.Host))), x),
        see(jit(lambda a, b: (a + 1, b @ b)), jax.device_put(jnp.float32(3), sharding("pinned_host")), x),
        see(jit(jax.grad(offloaded_in_pairs)), jnp.arange(128.0)),
    ]


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_arrays_in_odd_places_look_the_same_as_of_jit(jit: Jit) -> None:
    look_the_same(odd_places, jit)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSSING)
def test_jit_ends_the_process_for_such_a_donation(name: str) -> None:
    script = f"""
        import jax, jax.numpy as jnp
        from tests.conformance.test_memories import CROSSING, SHAPE, sharding
        memory, step = CROSSING[{name!r}]
        jax.block_until_ready(jax.jit(step, donate_argnums=0)(jax.device_put(jnp.ones(SHAPE), sharding(memory))))
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=os.environ | {"PYTHONPATH": "."}, check=False)
    assert ended.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_drawn_steps_with_values_in_host_memory_look_the_same_as_of_jit(variant: str) -> None:
    @settings(max_examples=40, phases=_NO_SHRINKING, deadline=None, suppress_health_check=_EVERY_CHECK)
    @given(cases())
    def hold(case: dict[str, Any]) -> None:
        expect_same(case, **VARIANTS[variant])

    hold()
