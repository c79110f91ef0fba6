"""The sizes of code that is only tried, and plain jit's peak, from executables that XLA does not optimize."""

import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.plain_jit import PlainJit
from tensile_jax.exec.compiling.segment_code import SegmentCode
from tensile_jax.exec.processes.agreement import ALONE


def block(width: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (width, width)) for key in keys)


def code(width: int) -> SegmentCode:
    """A segment with products, a reduction, temporaries, and an output in the memory of a donated input."""

    def segment(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        h = jax.nn.gelu(x @ w) @ v
        return (x + h / jnp.linalg.norm(h), jnp.sum(h, 0))

    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in block(width))
    return SegmentCode(segment, avals, (0,), ("block", width))


def test_sizes_are_those_of_the_executable_and_nothing_is_kept_to_run() -> None:
    compiler = Compiler(jax.devices("cpu")[0], committed=False)
    codes = [code(64), code(96), code(64)]
    told: list[tuple[int, int]] = []
    sizes = compiler.sizes(codes, lambda done, of: told.append((done, of)))
    assert told == [(0, 2), (1, 2), (2, 2)] and len(compiler) == 0
    assert sizes[0].temporary_bytes > 0 and sizes[0].aliased_bytes > 0 and sizes[0] == sizes[2]
    executables = compiler.compile(codes)
    assert [executable.sizes for executable in executables] == sizes and len(compiler) == 2
    told.clear()
    assert compiler.sizes(codes, lambda done, of: told.append((done, of))) == sizes and told == []
    expected = jax.jit(codes[0].function)(*block(64))
    for mine, theirs in zip(executables[0].call(*block(64)), expected, strict=True):
        assert jnp.allclose(mine, theirs, rtol=1e-5)


def test_plain_jits_peak_is_read_from_an_executable_that_does_not_run() -> None:
    jitted = jax.jit(code(64).function, donate_argnums=0)
    compiler = Compiler(jax.devices("cpu")[0], committed=False)
    plain = PlainJit(compiler, jitted.trace(*block(64)), ALONE)
    plain.begin()
    sized = plain.sized()
    assert plain.is_known() and not plain.is_known(to_run=True)
    assert plain.sized() is sized
    compiled = plain.compiled()
    assert compiled.executable is not sized.executable and compiled.peak_bytes == sized.peak_bytes
    assert plain.compiled() is compiled and plain.is_known(to_run=True)


def test_where_the_user_sets_the_level_of_optimization_sizes_are_those_of_that_level() -> None:
    own = Compiler(jax.devices("cpu")[0], committed=False, compiler_options={"xla_backend_optimization_level": 3})
    assert not own.sizes_quickly
    assert own.sizes([code(64)])[0].temporary_bytes > 0 and len(own) == 1
    plain = PlainJit(own, jax.jit(code(64).function).trace(*block(64)), ALONE)
    assert plain.sized() is plain.compiled()


def test_what_is_compiled_quickly_runs_and_is_compiled_again_with_all_optimizations() -> None:
    compiler = Compiler(jax.devices("cpu")[0], committed=False)
    quick = compiler.compile([code(64), code(96)], quickly=True)
    assert compiler.compile([code(64)], quickly=True)[0] is quick[0] and len(compiler) == 0
    told: list[tuple[int, int]] = []
    assert compiler.sizes([code(64)], lambda done, of: told.append((done, of))) == [quick[0].sizes] and told == []
    optimized = compiler.compile([code(64)])
    assert optimized[0] is not quick[0] and optimized[0].sizes == quick[0].sizes
    assert compiler.compile([code(64), code(96)], quickly=True) == [optimized[0], quick[1]]
    for mine, theirs in zip(quick[0].call(*block(64)), jax.jit(code(64).function)(*block(64)), strict=True):
        assert jnp.allclose(mine, theirs, rtol=1e-5)


def test_where_the_user_sets_the_level_of_optimization_quick_executables_are_those_of_that_level() -> None:
    own = Compiler(jax.devices("cpu")[0], committed=False, compiler_options={"xla_backend_optimization_level": 3})
    assert own.compile([code(64)], quickly=True)[0] is own.compile([code(64)])[0]


def test_nothing_is_compiled_during_another_threads_turn() -> None:
    """On a GPU, where XLA tries kernels; here the compiler of a CPU is given a lock."""
    compiler, done = Compiler(jax.devices("cpu")[0], committed=False), threading.Event()
    compiler.turn = threading.RLock()

    def compile_both() -> None:
        compiler.compile([code(64)])
        done.set()

    with compiler.turn:
        thread = threading.Thread(target=compile_both)
        thread.start()
        assert compiler.compile([code(96)]) and not done.wait(0.3)  # the thread whose turn it is may compile
    assert done.wait(60)
    thread.join()


def test_code_of_many_operators_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    lower = Compiler._lower

    def lowering(self: Compiler, code: SegmentCode, *more: Any) -> tuple[object, object]:
        lowered.append(code.operators)
        return lower(self, code, *more)

    monkeypatch.setattr(Compiler, "_lower", lowering)
    codes = [replace(code(width), operators=operators) for width, operators in ((8, 3), (16, 9), (24, 5))]
    executables = Compiler(jax.devices("cpu")[0], committed=False).compile(codes)
    assert lowered == [9, 5, 3]
    for width, executable in zip((8, 16, 24), executables, strict=True):
        assert executable.call(*block(width))[0].shape == block(width)[0].shape


def branches() -> SegmentCode:
    """A segment of 24 branches that XLA for CPUs may run at the same time. Each has a large temporary and a small result."""

    def segment(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        norms = [jnp.linalg.norm(jax.nn.softmax(jnp.tanh(x * i) @ w) @ w.T) for i in range(1, 25)]
        return (sum(norms, jnp.zeros(())),)

    avals = (jax.ShapeDtypeStruct((256, 32), jnp.float32), jax.ShapeDtypeStruct((32, 256), jnp.float32))
    return SegmentCode(segment, avals, (), "branches")


def test_code_that_saves_memory_needs_less_and_gives_the_same_results_to_the_bit() -> None:
    compiler = Compiler(jax.devices("cpu")[0], committed=False)
    assert compiler.can_save_memory
    codes = [branches(), branches().saving_memory()]
    usual, saving = compiler.sizes(codes)
    assert saving.temporary_bytes < usual.temporary_bytes / 2
    executables = compiler.compile(codes)
    assert [executable.sizes for executable in executables] == [usual, saving]
    keys = jax.random.split(jax.random.key(1))
    values = jax.random.normal(keys[0], (256, 32)), jax.random.normal(keys[1], (32, 256))
    assert executables[0].call(*values)[0] == executables[1].call(*values)[0]


def test_where_the_user_chooses_xlas_order_it_stays() -> None:
    own = Compiler(
        jax.devices("cpu")[0],
        committed=False,
        compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"},
    )
    assert not own.can_save_memory
    usual, saving = own.sizes([branches(), branches().saving_memory()])
    assert usual == saving
