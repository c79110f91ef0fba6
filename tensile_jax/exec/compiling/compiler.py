"""Compiles the segments of a plan, each a stretch of operators that becomes one executable, and reads their memory from XLA.

Equal segments (equal in `SegmentCode.content`, `segment_code.py`) are compiled once. Lowering a segment holds Python's global
interpreter lock, so it happens in the calling thread. Compiling releases that lock, so a pool of threads compiles several
segments at once. If the user has set `jax_compilation_cache_dir`, segments are kept there too, even those that compile quickly.

XLA for CPUs orders the operators of an executable so that many of them can run at the same time. That takes more memory than
other orders. A segment can be compiled in an order that takes less (`SegmentCode.saves_memory`). The results are the same to the
bit.

For a plan that is only tried, the sizes of segments are needed, not their code. On CPUs, sizes do not depend on how far XLA
optimizes the code. So the sizes are read from an executable that XLA has not optimized (`Compiler.sizes`).

A plan counts the tensors on the device. It knows a size for each of a segment's outputs and donated inputs. The workspace of a
segment is what its executable needs in addition:

    workspace = temporary bytes + (XLA's output bytes - XLA's aliased bytes) - (plan's output bytes - plan's donated bytes)

XLA's aliased bytes are those of outputs placed in the memory of donated inputs. The bytes of the plan's tensors plus this
workspace are the memory in use while the executable runs.
"""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from tensile_jax.exec.compiling.async_copies import read_copies
from tensile_jax.exec.compiling.segment_code import LaidOut, SegmentCode
from tensile_jax.exec.transfer import DEVICE, HOST, Device, may_move, on_host, own_layout
from tensile_jax.trace import TracedStep, array_type, in_host_memory, is_packed, shape_struct, shard_of, size_of

GPUS = ("gpu", "cuda", "rocm")
"""The names that JAX has for GPUs as platforms."""

_FOR_SIZES: Mapping[str, Any] = {"xla_backend_optimization_level": 0}
"""With it, XLA for CPUs assigns the same buffers and compiles sooner (`make bench-first-call`)."""

_FOR_LITTLE_MEMORY: Mapping[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""With it, XLA for CPUs orders operators so that they need little memory (`make bench-workloads`)."""

_FOR_COPIES: Mapping[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_async_compute_limit": 1000,
}
"""With them, XLA for GPUs runs copies beside kernels. By default, two copies at most are under way at once
(`make bench-launches`)."""

Told = Callable[[int, int], None]
_Made = TypeVar("_Made")


class Sizes(NamedTuple):
    """XLA's sizes of a segment, in bytes."""

    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int

    def workspace(self, *, outputs: int, donated: int) -> int:
        """The workspace, by the formula above, where the plan counts `outputs` and `donated` bytes."""
        return self.temporary_bytes + (self.output_bytes - self.aliased_bytes) - (outputs - donated)


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A compiled segment: `call` takes its inputs and returns the tuple of its outputs.

    `fault` says, as a clause of a sentence, why its copies to and from the host do not run beside kernels; None if they do.
    `layouts` are the memory layouts, each from major to minor, of every argument and result in `SegmentCode.laid_out`.
    """

    call: Callable[..., Any]
    sizes: Sizes
    fault: str | None = None
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


class CompiledWhole(NamedTuple):
    """The executable of a whole step, as plain `jax.jit` makes it, and how many seconds that took."""

    executable: Any
    seconds: float


class Compiler:
    """Compiles segments for one device or for all of a mesh, and keeps the executables, so that equal segments share one.

    Args:
        device: where the segments run; one of several, if the code of the segments says where their values lie.
        committed: whether their results are committed to the device, as the results of `jax.jit` are or are not.
        compiler_options: options of XLA, as in `jax.jit`.
        debugs_numbers: whether JAX is set to look for NaNs or infinities. If so, segments do not donate their inputs. A segment
            that makes such a number can then run again, operator by operator, so that the error names the operator.

    Attributes:
        turn: on GPUs, a lock that is held while segments are compiled. XLA tries kernels on a GPU while it compiles, which takes
            memory beside that of the step. A thread that runs a step while another one may compile holds this lock, too.
    """

    def __init__(
        self,
        device: Device,
        *,
        committed: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        debugs_numbers: bool = False,
    ) -> None:
        self.device = device
        self.committed = committed
        self._compiler_options = options_on(device.platform, compiler_options)
        self._debugs_numbers = debugs_numbers
        self.turn: AbstractContextManager[object] = threading.RLock() if device.platform in GPUS else nullcontext()
        self._done: dict[Hashable, Executable] = {}
        self._quick: dict[Hashable, Executable] = {}  # that were compiled quickly, and may run more slowly
        self._sizes: dict[Hashable, Sizes] = {}  # of code of which only the sizes were asked for
        self._left: dict[Hashable, Future[Executable]] = {}  # what compiles for a call that has ended before
        self._left_quick: dict[Hashable, Future[Executable]] = {}
        self._left_sizes: dict[Hashable, Future[Sizes]] = {}

    @property
    def kind(self) -> Hashable:
        """What must be equal for two compilers to make the same of the same code."""
        return self.device.device_kind, repr(self._compiler_options), self._debugs_numbers

    def __len__(self) -> int:
        return len(self._done)

    @property
    def sizes_quickly(self) -> bool:
        """Whether the sizes of code are known sooner than its executable."""
        return self.device.platform == "cpu" and not (self._compiler_options or {}).keys() & _FOR_SIZES.keys()

    @property
    def can_save_memory(self) -> bool:
        """Whether `SegmentCode.saves_memory` makes a difference."""
        return self.device.platform == "cpu" and not (self._compiler_options or {}).keys() & _FOR_LITTLE_MEMORY.keys()

    def compile(self, codes: Sequence[SegmentCode], progress: Told | None = None, *, quickly: bool = False) -> list[Executable]:
        """The executables for `codes`, in order. `progress(done, of)` is called after each that had to be compiled.

        On Ctrl-C, or if one fails, this ends at once. XLA cannot be interrupted, so what it is compiling is compiled to its end,
        and is there for the next call.

        Args:
            quickly: whether the executables are to be there soon, and may run more slowly. Their sizes are the same. That makes
                no difference where `sizes_quickly` is false.
        """
        quickly = quickly and self.sizes_quickly
        done, left = (self._quick, self._left_quick) if quickly else (self._done, self._left)
        known = {**self._quick, **self._done} if quickly else self._done

        def begin(code: SegmentCode, pool: ThreadPoolExecutor) -> Future[Executable]:
            jitted, lowered = self._lower(code, _FOR_SIZES if quickly else None)
            refused = any(map(self._is_refused, code.avals))
            is_placed = code.out_shardings is not None or code.on_host is not None
            call = self._call_of(jitted, is_placed=is_placed) if refused else None
            return pool.submit(_compile, lowered, call, laid_out=code.laid_out, has_copies=self._has_copies(code))

        if any(code.content not in known for code in codes):
            with self.turn:
                self._wait_for_launched()
                for code, executable in _in_a_pool(codes, known, begin, left, progress):
                    done[code.content] = known[code.content] = self._finished(code, executable)
        return [known[code.content] for code in codes]

    def _wait_for_launched(self) -> None:
        """On a GPU, wait for what was launched there: its memory is in use until then."""
        if self.device.platform in GPUS:
            jax.device_put(np.zeros(()), self.device).block_until_ready()

    def sizes(self, codes: Sequence[SegmentCode], progress: Told | None = None) -> list[Sizes]:
        """XLA's sizes of `codes`, in order, and no executables where the sizes are known sooner."""
        if not self.sizes_quickly:
            return [executable.sizes for executable in self.compile(codes, progress)]

        def begin(code: SegmentCode, pool: ThreadPoolExecutor) -> Future[Sizes]:
            _, lowered = self._lower(code)
            return pool.submit(_sizes_of, lowered)

        executables = {**self._quick, **self._done}
        known = self._sizes | {content: executable.sizes for content, executable in executables.items()}
        for code, sizes in _in_a_pool(codes, known, begin, self._left_sizes, progress):
            self._sizes[code.content] = known[code.content] = sizes
        return [known[code.content] for code in codes]

    def compile_whole(self, traced: Any) -> Any:
        """The executable of a whole step, as plain `jax.jit` makes it."""
        return self.begin_whole(traced).result().executable

    def begin_whole(self, traced: Any, *, for_sizes: bool = False) -> Future[CompiledWhole]:
        """Begin to compile a whole step, as plain `jax.jit` does, in a thread of its own.

        Args:
            for_sizes: whether only the sizes of the executable are asked for. It may then run more slowly.
        """
        began = time.perf_counter()
        lowered = self._lower_whole(traced)
        pool = ThreadPoolExecutor(1, thread_name_prefix="tensile-compile-whole")
        options = _FOR_SIZES if for_sizes and self.sizes_quickly else None
        compiling = pool.submit(_compile_whole, lowered, time.perf_counter() - began, options)
        pool.shutdown(wait=False)
        return compiling

    def whole_call(self, executable: Any, step: TracedStep) -> Callable[..., Any]:
        """What runs a whole step, of which `executable` was compiled, and takes all its arguments."""
        refused = any(map(self._is_refused, map(step.program.aval, step.program.inputs)))
        return self._call_of(step.jitted, is_placed=step.divided is not None) if refused else executable

    def identity(self, values: Sequence[jax.Array]) -> Callable[..., Sequence[jax.Array]]:
        """An executable that returns its arguments in the same memory. The results are committed as this compiler's are."""
        several = any(len(value.sharding.device_set) > 1 for value in values)
        there = tuple(map(on_host, values))
        avals = tuple(
            array_type(value.aval) if host and not several else shape_struct(value, value.sharding if several else None)
            for value, host in zip(values, there, strict=True)
        )
        laid_out = () if several else tuple(_not_row_major(values))
        content = ("identity", there, tuple((a.shape, a.dtype, a.weak_type, a.sharding) for a in avals), laid_out)
        out_shardings = tuple(value.sharding for value in values) if several else None
        memories = there if (any(there) or laid_out) and not several else None
        taken = tuple(range(len(avals)))
        code = SegmentCode(lambda *xs: xs, avals, taken, content, out_shardings, memories, laid_out=laid_out)
        return self.compile([code])[0].call

    def _lower_whole(self, traced: Any) -> Any:
        return traced.lower()

    def _lower(self, code: SegmentCode, more: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """The segment's code as a jitted function, and what it is lowered to.

        Args:
            more: options of XLA beside the compiler's own.
        """
        if code.out_shardings is not None:
            jitted = self._jitted(code, more, out_shardings=code.out_shardings)
            return jitted, jitted.lower(*code.avals)
        if code.on_host is not None:
            jitted = self._jitted(code, more, **self._memories(code, code.on_host))
            return jitted, jitted.lower(*code.avals)
        sharding = SingleDeviceSharding(self.device) if self.committed else None
        avals = [shape_struct(a, sharding) if isinstance(a, jax.ShapeDtypeStruct) else a for a in code.avals]
        # without inputs, only the sharding of the outputs names the device
        placed: dict[str, Any] = {"out_shardings": sharding} if self.committed and not avals else {}
        jitted = self._jitted(code, more, **placed)
        with nullcontext() if self.committed else jax.default_device(self.device):
            return jitted, jitted.lower(*avals)

    def _memories(self, code: SegmentCode, on_host: Sequence[bool]) -> dict[str, Any]:
        """Where arguments and results lie on one device: in which of its memories, and in which layout."""
        memory = {host: SingleDeviceSharding(self.device, memory_kind=HOST if host else DEVICE) for host in (True, False)}
        given: list[Any] = [memory[in_host_memory(a)] if hasattr(a, "shape") else None for a in code.avals]
        made: list[Any] = [memory[there] for there in on_host]
        for one in code.laid_out:
            given[one.argument] = made[one.result] = Format(layout_of(one), memory[False])
        return {"in_shardings": tuple(given), "out_shardings": tuple(made)}

    def _jitted(self, code: SegmentCode, more: Mapping[str, Any] | None, **placed: Any) -> Any:
        return jax.jit(
            code.function,
            donate_argnums=() if self._debugs_numbers else code.donated,
            keep_unused=True,
            compiler_options=self._options_for(code) if more is None else {**(self._options_for(code) or {}), **more},
            **placed,
        )

    def _options_for(self, code: SegmentCode) -> dict[str, Any] | None:
        if code.saves_memory and self.can_save_memory:
            return {**_FOR_LITTLE_MEMORY, **(self._compiler_options or {})}
        return {**_FOR_COPIES, **(self._compiler_options or {})} if self._has_copies(code) else self._compiler_options

    def _has_copies(self, code: SegmentCode) -> bool:
        """Whether the code copies to or from the host beside kernels; on a CPU, all memory is the host's."""
        return code.copies and self.device.platform in GPUS

    def _is_refused(self, aval: Any) -> bool:
        """Whether a compiled function refuses an input that a jitted function accepts.

        Tokens, which have no shape, are such inputs. In jax 0.10.2 arrays with several numbers in a byte are as well, if they
        are committed to a device: "Computation was compiled for input layouts that disagree with the layouts of arguments
        passed to it".
        """
        return not hasattr(aval, "shape") or (self.committed and is_packed(aval))

    def _call_of(self, jitted: Any, *, is_placed: bool) -> Callable[..., Any]:
        """A call of `jitted` on this device, with arguments so placed that JAX finds what it has compiled already."""
        if is_placed:
            return jitted
        if not self.committed:
            return partial(_on, self.device, jitted)
        return partial(_bound_to, SingleDeviceSharding(self.device), jitted)

    def _finished(self, code: SegmentCode, executable: Executable) -> Executable:
        if not self._debugs_numbers:
            return executable
        return replace(executable, call=_naming_the_operator(code.function, executable.call))


def _not_row_major(values: Sequence[jax.Array]) -> Iterator[LaidOut]:
    """Those of the arrays in device memory that are not row-major, to be returned with the layouts that they have."""
    for place, value in enumerate(values):
        layout = None if on_host(value) else own_layout(value)
        if layout is not None:
            yield LaidOut(place, place, layout)


def layout_of(one: LaidOut) -> Any:
    """The layout with which an argument and a result are compiled; `Layout.AUTO` if XLA chooses it."""
    return Layout.AUTO if one.major_to_minor is None else Layout(one.major_to_minor)


_LIMIT_PERCENT = 1000
"""Of the memory that XLA believes the device to have, 95 by default. A decoder of 1.3 billion parameters on eight H200, with 280
texts a device and a budget of 141 GB (`python -m benchmarks.mesh_largest --how ours --batch 280`): with 95, XLA computes kernels
again whose results the plan keeps, and the step multiplies 5 % more; with 1000, none."""


def memory_of(device: Device) -> float:
    """The limit of the device's allocator in bytes; infinite if it has none, or if the device is not at hand.

    Where a step needs more, XLA for GPUs may compute tensors of plain jit's executable again by itself.
    """
    try:
        stats = device.memory_stats()
    except RuntimeError:  # of a device of another process, or of one for which XLA only compiles
        return float("inf")
    return float(stats["bytes_limit"]) if stats and "bytes_limit" in stats else float("inf")


def options_on(platform: str, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The options with which segments are compiled for devices of a platform: those given, and on GPUs two more.

    XLA for GPUs may move an operator to the host if its operands lie there. A plan says where operators run, so XLA is told not
    to. XLA also computes tensors again by itself where it finds that an executable needs more than most of the device's memory.
    A plan says what is computed again, and its peak is compared with the budget once it is compiled, so XLA is told not to.
    """
    if platform not in GPUS:
        return None if given is None else dict(given)
    own = {"xla_disable_automatic_host_compute_offload": True, "xla_gpu_memory_limit_slop_factor": _LIMIT_PERCENT}
    return {**own, **(given or {})}


def _naming_the_operator(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `call`. If `call` makes a number for which JAX looks, it also runs `function`, operator by operator.

    JAX then raises `FloatingPointError` in the operator that makes the number. The class of the error that a compiled function
    raises has no public name, so it is recognised by the name of the class.
    """

    def checked(*values: Any) -> Any:
        try:
            return call(*values)
        except Exception as error:
            if type(error).__name__ != "InternalFloatingPointError":
                raise
            function(*values)
            what = error.args[1] if len(error.args) > 1 else "nan"
            raise FloatingPointError(
                f"invalid value ({what}) encountered in a compiled segment; its operators one by one do not make it"
            ) from error

    return checked


def _on(device: Device, jitted: Any, *values: Any) -> Any:
    """The results of `jitted` on this device, for arguments of which none is committed to a device."""
    with jax.default_device(device):
        return jitted(*values)


def _bound_to(sharding: SingleDeviceSharding, jitted: Any, *args: Any, **kwargs: Any) -> Any:
    """The results of `jitted` for these arguments, once those that are not committed to a device are committed to this one."""

    def bound(value: Any) -> Any:
        is_free = may_move(value) and not getattr(value, "committed", False)
        return jax.device_put(value, sharding) if is_free else value

    args, kwargs = jax.tree.map(bound, (args, kwargs))
    return jitted(*args, **kwargs)


def _compile(lowered: Any, call: Callable[..., Any] | None, *, laid_out: Sequence[LaidOut], has_copies: bool) -> Executable:
    """Compile a lowered segment. If `call` is not None, it is called instead of the compiled function."""
    with _short_compilations_cached():
        compiled = lowered.compile()
    fault = read_copies(compiled.as_text()).fault() if has_copies else None
    return Executable(call or compiled, _read_sizes(compiled), fault, tuple(_read_layouts(compiled, laid_out)))


def _read_layouts(compiled: Any, laid_out: Sequence[LaidOut]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The memory layouts of these arguments and results."""
    if laid_out:
        (given, _), made = compiled.input_formats, compiled.output_formats
        for one in laid_out:
            yield given[one.argument].layout.major_to_minor, made[one.result].layout.major_to_minor


def _sizes_of(lowered: Any) -> Sizes:
    return _read_sizes(lowered.compile(dict(_FOR_SIZES)))


def _read_sizes(compiled: Any) -> Sizes:
    memory = compiled.memory_analysis()
    return Sizes(int(memory.temp_size_in_bytes), int(memory.output_size_in_bytes), int(memory.alias_size_in_bytes))


def _in_a_pool(
    codes: Sequence[SegmentCode],
    known: Mapping[Hashable, object],
    begin: Callable[[SegmentCode, ThreadPoolExecutor], Future[_Made]],
    left: dict[Hashable, Future[_Made]],
    progress: Told | None,
) -> Iterator[tuple[SegmentCode, _Made]]:
    """What `begin` begins to make of each code of which nothing is known, in a pool of threads; equal code is made once.

    Code of many operators comes first, so that no thread is left alone with it at the end.

    Args:
        left: what is being made for a call that has ended before. It is taken from there, and what this call leaves is put there.
    """
    missing = {code.content: code for code in codes if code.content not in known}
    if not missing:
        return
    if progress is not None:
        progress(0, len(missing))
    pool = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), thread_name_prefix="tensile-compile")
    running: dict[Hashable, Future[_Made]] = {}
    try:
        for content, code in sorted(missing.items(), key=lambda one: -one[1].operators):
            before = left.pop(content, None)
            running[content] = begin(code, pool) if before is None else before
        for done, (content, future) in enumerate(running.items(), start=1):
            yield missing[content], future.result()
            if progress is not None:
                progress(done, len(running))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        left.update({content: future for content, future in running.items() if future.running()})


def _compile_whole(lowered: Any, lowering_s: float, options: Mapping[str, Any] | None) -> CompiledWhole:
    began = time.perf_counter()
    with _short_compilations_cached():
        compiled = lowered.compile(None if options is None else dict(options))
    return CompiledWhole(compiled, lowering_s + time.perf_counter() - began)


def peak_of(compiled: Any) -> int:
    """The peak of an executable that runs alone: arguments, outputs and temporaries, less outputs in the memory of arguments."""
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return int(peak) - (0 if memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes else _host_bytes(compiled))


def _host_bytes(compiled: Any) -> int:
    """What arguments and results take in host memory. XLA for CPUs, unlike others, counts it as if it were device memory.

    A donated argument and the result that takes over its memory count once.
    """
    there = [
        place for place in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)) if place.memory_kind == HOST
    ]
    if not there:
        return 0
    places = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda place: place is None)  # there is none for what is not used
    given = zip(jax.tree.leaves(compiled.args_info), places, strict=True)
    made = jax.tree.leaves(compiled.out_info)
    kept = [(info, place) for info, place in given if place is not None and not info.donated]
    several = [*kept, *((info, info.sharding) for info in made)]
    return sum(size_of(shard_of(info, place)) for info, place in several if place.memory_kind == HOST)


_CACHED_FROM = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
_lowered = threading.Lock()
_lowering = 0  # how many are inside `_short_compilations_cached` now
_before: dict[str, Any] = {}  # the user's own values of the settings, while somebody is inside


@contextmanager
def _short_compilations_cached() -> Iterator[None]:
    """Have JAX's persistent cache, if the user has set one, also keep executables that compile quickly or are small.

    These settings are the same for all threads, and several threads compile at once. So the first thread that enters sets
    them, and the last one that leaves restores the user's values, unless the user has changed them meanwhile.
    """
    global _lowering
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        yield
        return
    with _lowered:
        _lowering += 1
        if _lowering == 1:
            for name in _CACHED_FROM:
                _before[name] = getattr(jax.config, name)
                jax.config.update(name, 0)
    try:
        yield
    finally:
        with _lowered:
            _lowering -= 1
            if not _lowering:
                for name, value in _before.items():
                    if getattr(jax.config, name) == 0:
                        jax.config.update(name, value)
                _before.clear()
