"""Provides an NVIDIA H200 for which XLA can compile, but which runs nothing: schedules and memory figures without a GPU.

The compiler is XLA's real GPU compiler. Without a GPU it does not autotune, so the workspaces of cuDNN and cuBLAS are missing and
memory figures are lower bounds. Needs the CUDA plugin of JAX (see `make bench-h200`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from tensile_jax.device_profiles import DeviceProfile
from tensile_jax.exec.compiling.compiler import Compiler, Executable, layout_of
from tensile_jax.exec.compiling.segment_code import SegmentCode
from tensile_jax.exec.transfer import DEVICE, HOST
from tensile_jax.installed_models import Model
from tensile_jax.trace import TracedStep, in_host_memory, shape_struct, trace_step

# Data sheet and CUDA programming guide (compute capability 9.0), as XLA's GpuTargetConfig names them.
_LIMITS = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472, "threads_per_core_limit": 2048, "core_count": 132, "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
    "memory_bandwidth": 4800000000000, "l2_cache_size": 52428800, "clock_rate_ghz": 1.98,
    "device_memory_size": 151397597184, "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
}  # fmt: skip


def h200(memory_bytes: int | None = None) -> Any:
    """A compile-only H200 device; `memory_bytes` is the memory that XLA believes it has, if that is not an H200's."""
    return _topology("1x1x1", memory_bytes)[0]


def h200s() -> tuple[Any, ...]:
    """Eight compile-only H200 devices of one machine."""
    return _topology("1x1x8", None)


def _topology(sizes: str, memory_bytes: int | None) -> tuple[Any, ...]:
    known = _LIMITS if memory_bytes is None else {**_LIMITS, "device_memory_size": memory_bytes}
    limits = "\n".join(f"  {name}: {value}" for name, value in known.items())
    target = (
        f"gpu_device_info {{\n{limits}\n  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 2 }\n"
        "runtime_version { major: 12 minor: 9 }\n"
        'device_description_str: "NVIDIA H200"\n'
    )
    topology = topologies.get_topology_desc(platform="cuda", topology_name="H200", topology=sizes, target_config=target)
    return tuple(topology.devices)


class H200Compiler(Compiler):
    """Compiles segments for the H200, and counts how often it was asked to."""

    rounds = 0

    def compile(
        self, codes: Sequence[SegmentCode], progress: Callable[[int, int], None] | None = None, *, quickly: bool = False
    ) -> list[Executable]:
        self.rounds += 1
        return super().compile(codes, progress, quickly=quickly)

    def _wait_for_launched(self) -> None:
        """Nothing is launched on a device that is not there."""

    def _lower_whole(self, traced: Any) -> Any:
        """`traced` must have been traced on `placed` shapes."""
        return traced.lower(lowering_platforms=("cuda",))

    def _lower(self, code: SegmentCode, more: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        if code.out_shardings is not None:
            jitted = self._jitted(code, more, out_shardings=code.out_shardings)
            return jitted, jitted.trace(*code.avals).lower(lowering_platforms=("cuda",))
        placed: dict[str, Any] = self._formats(code)
        if not code.avals:  # without inputs, only the sharding of the outputs names the device
            placed = {"out_shardings": SingleDeviceSharding(self.device)}
        jitted = self._jitted(code, more, **placed)
        return jitted, jitted.trace(*map(self._placed, code.avals)).lower(lowering_platforms=("cuda",))

    def _formats(self, code: SegmentCode) -> dict[str, Any]:
        """The formats of what is laid out; what shapes say of all others holds."""
        if code.on_host is None or not code.laid_out:
            return {}
        given: list[Any] = [None] * len(code.avals)
        made: list[Any] = [None] * len(code.on_host)
        for one in code.laid_out:
            given[one.argument] = Format(layout_of(one), _InDeviceMemory(self.device))
            made[one.result] = Format(layout_of(one), SingleDeviceSharding(self.device))  # JAX names no memory of results here
        return {"in_shardings": tuple(given), "out_shardings": tuple(made)}

    def _placed(self, aval: Any) -> Any:
        if not hasattr(aval, "shape"):
            return aval
        memory = _InHostMemory if in_host_memory(aval) else _InDeviceMemory
        return shape_struct(aval, memory(self.device))


class _InDeviceMemory(SingleDeviceSharding):
    """A sharding that names a memory, which JAX cannot know of a device that is not there."""

    _memory = DEVICE

    @property
    def memory_kind(self) -> str:
        return self._memory

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((type(self), super().__hash__()))


class _InHostMemory(_InDeviceMemory):
    _memory = HOST


def traced_for(model: Model, device: Any) -> TracedStep:
    """The step of a model, traced for the device, with its state donated."""
    return traced_on(device, model.step, (model.state_shape, model.batch_shape))


def traced_on(device: Any, step: Callable[..., Any], shapes: tuple[Any, ...]) -> TracedStep:
    """A step, traced for the device and arguments of these shapes, of which it takes over the first."""
    return trace_step(jax.jit(step, donate_argnums=0), step, placed(shapes, device), {})


def write_compiled(file: Path, command: str, *, devices: int = 1, **figures: Any) -> None:
    """Write figures that were compiled for the H200, or for several, with when and how they were made."""
    about = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "what": f"compiled for {'an H200' if devices == 1 else f'{devices} H200'} without a GPU; nothing ran",
        "command": command,
    }
    file.write_text(json.dumps(about | figures, indent=1) + "\n")


def placed(tree: Any, device: Any) -> Any:
    """The shapes of `tree`, on the device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda a: shape_struct(a, sharding), tree)


_ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_SHAPE = re.compile(r"\b(" + "|".join(_ITEM) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(,.*|$)")
_CALLS = re.compile(r"(?:calls|body|to_apply)=%?([\w.\-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]+)\}")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_SLICES = {"dynamic-slice", "slice"}
_PARTS = {*_SLICES, "dynamic-update-slice"}
_ON_HOST = "S(5)"  # how XLA names host memory in a shape
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


class _Instruction(NamedTuple):
    name: str
    nbytes: int
    opcode: str
    operands: list[str]
    rest: str
    shown: str  # what stands in the parentheses
    shape: str


class Kernel(NamedTuple):
    """A scheduled instruction: the bytes that it reads and writes, its products' floating-point operations, how often it runs."""

    nbytes: int
    flops: int
    times: int


def traffic(compiled: Any) -> int:
    """Bytes that the kernels of an executable read and write: operands and results of every scheduled instruction.

    Of an operand of which a kernel only reads or replaces slices, the slices count. Bodies of loops count as often as they run.
    Copies to and from the host do not count: they run beside kernels, and between segments they are in no executable at all.
    """
    return sum(one.times * one.nbytes for one in kernels(compiled))


class Cost(NamedTuple):
    """What the kernels of executables take: their traffic, the operations of their products, and their time.

    A kernel takes as long as it reads and writes, or multiplies, at the rates of a device profile, whatever is longer.
    """

    traffic: int
    multiplied: int
    us: float


def cost_of(executables: Sequence[Any], profile: DeviceProfile) -> Cost:
    """What the kernels of all these executables take."""
    found = [one for compiled in executables for one in kernels(compiled)]
    return Cost(
        sum(one.times * one.nbytes for one in found),
        sum(one.times * one.flops for one in found),
        sum(one.times * max(one.nbytes / profile.bytes_per_us, one.flops / profile.flops_per_us) for one in found),
    )


def kernels(compiled: Any) -> Iterator[Kernel]:
    """The kernels of an executable. Collectives are among them, as if they read and wrote their operands and results.

    A copy within the device that XLA has made asynchronous is one kernel. Copies to and from the host are none.
    """
    entry, computations = _computations(compiled)
    return _kernels_of(entry, computations, 1)


class Exchanged(NamedTuple):
    """What a device exchanges with others: bytes of operands by collective, and how many of all these bytes are overlapped."""

    by_kind: dict[str, int]
    overlapped: int


def exchanged(compiled: Any) -> Exchanged:
    """What an executable exchanges. A collective is overlapped if a kernel stands between its beginning and its end.

    Bodies of loops count as often as they run.
    """
    entry, computations = _computations(compiled)
    found = Exchanged(dict.fromkeys(_COLLECTIVES, 0), 0)
    return _exchanged_of(entry, computations, 1, found)


def _exchanged_of(name: str, computations: Mapping[str, Sequence[_Instruction]], times: int, found: Exchanged) -> Exchanged:
    size: dict[str, int] = {}
    kernels = 0
    under_way: dict[str, tuple[int, int]] = {}  # by the name of the instruction: bytes, and how many kernels had begun
    by_kind, overlapped = dict(found.by_kind), found.overlapped
    for one in computations[name]:
        size[one.name] = one.nbytes
        called = _CALLS.search(one.rest)
        kind, started, _ = one.opcode.partition("-start")
        begun = under_way.pop(one.operands[0], None) if one.opcode.endswith("-done") else None
        if kind in by_kind:
            nbytes = times * sum(size.get(o, 0) for o in one.operands)
            by_kind[kind] += nbytes
            if started:
                under_way[one.name] = nbytes, kernels
        elif begun is not None:
            overlapped += begun[0] if kernels > begun[1] else 0
        elif one.opcode in ("while", "call") and called is not None:
            turns = _TURNS.search(one.rest)
            inner = times * (int(turns[1]) if turns else 1)
            by_kind, overlapped = _exchanged_of(called[1], computations, inner, Exchanged(by_kind, overlapped))
        elif one.opcode in ("fusion", "custom-call"):
            kernels += 1
    return Exchanged(by_kind, overlapped)


def _computations(compiled: Any) -> tuple[str, dict[str, list[_Instruction]]]:
    """The name of the computation at which an executable begins, and all computations by their names."""
    text = compiled.as_text()
    computations: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    entry = ""
    for line in text.splitlines():
        begins, match = _COMPUTATION.match(line), _INSTRUCTION.match(line)
        if begins is not None:
            body = computations.setdefault(begins[1], [])
            entry = begins[1] if line.startswith("ENTRY") else entry
        elif match is not None:
            name, shape, opcode, shown, rest = match.groups()
            operands = [o.strip().split(" ")[-1].lstrip("%") for o in shown.split(",")]
            body.append(_Instruction(name, _nbytes(_SHAPE.findall(shape)), opcode, operands, rest, shown, shape))
    return entry, computations


def _kernels_of(name: str, computations: Mapping[str, Sequence[_Instruction]], times: int) -> Iterator[Kernel]:
    size: dict[str, int] = {}
    to_or_from_host: set[str] = set()  # copies that have started
    for found in computations[name]:
        size[found.name] = found.nbytes
        called = _CALLS.search(found.rest)
        if found.opcode in _FREE:
            continue
        if found.opcode == "copy-start":  # has its operand in its result as well, so it counts where it is done
            to_or_from_host |= {found.name} if _ON_HOST in found.shape else set()
            continue
        if found.opcode == "copy-done":
            if found.operands[0] not in to_or_from_host:
                yield Kernel(2 * found.nbytes, 0, times)
            continue
        if found.opcode in ("while", "call") and called is not None:
            turns = _TURNS.search(found.rest)
            yield from _kernels_of(called[1], computations, times * (int(turns[1]) if turns else 1))
            continue
        read, written = [size.get(o, 0) for o in found.operands], found.nbytes
        if found.opcode in _SLICES:
            read = [found.nbytes]
        elif found.opcode == "fusion" and called is not None:
            inside = computations[called[1]]
            read = [min(n, most) for n, most in zip(read, _sliced(inside, len(read)), strict=True)]
            written -= sum(_in_place(inside))
        elif found.opcode == "dynamic-update-slice":
            read, written = [size.get(found.operands[1], 0)], size.get(found.operands[1], 0)
        fused = computations[called[1]] if found.opcode == "fusion" and called is not None else None
        body, candidates = (computations[name], [found]) if fused is None else (fused, fused)
        products = [i for i in candidates if i.opcode == "dot"]
        yield Kernel(written + sum(read), sum(_flops(one, body) for one in products), times)


def _flops(product: _Instruction, body: Sequence[_Instruction]) -> int:
    """The floating-point operations of a product: two for each number of its result and each number that is contracted."""
    left = next(_dimensions(i.shape) for i in body if i.name == product.operands[0])
    contracted = _CONTRACTED.search(product.rest)
    assert contracted is not None
    return 2 * prod(_dimensions(product.shape)) * prod(left[int(i)] for i in contracted[1].split(","))


def _dimensions(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(d) for d in found[2].split(",") if d] if found else []


def _sliced(body: Sequence[_Instruction], count: int) -> list[int]:
    """Of each parameter of a fused computation, the bytes that it reads at most: those of the slices, if it only takes slices."""
    most = [2**62] * count
    for parameter in (i for i in body if i.opcode == "parameter"):
        users = _users(parameter.name, body)
        if users and all(i.opcode in _PARTS and i.operands[0] == name for name, i in users):
            most[int(parameter.shown)] = sum(i.nbytes for _, i in users if i.opcode in _SLICES)
    return most


def _users(name: str, body: Sequence[_Instruction]) -> list[tuple[str, _Instruction]]:
    """The instructions that read a value, itself or in another shape; each with the name by which it reads it."""
    found: list[tuple[str, _Instruction]] = []
    for i in body:
        if name in i.operands:
            found += _users(i.name, body) if i.opcode == "bitcast" else [(name, i)]
    return found


def _in_place(body: Sequence[_Instruction]) -> list[int]:
    """Of each part of an operand that a fused computation replaces in place, what its result has beside that part."""
    size = {i.name: i.nbytes for i in body}
    return [i.nbytes - size.get(i.operands[1], 0) for i in body if i.opcode == "dynamic-update-slice"]


def _nbytes(shapes: Sequence[tuple[str, str]]) -> int:
    total = 0
    for item, dimensions in shapes:
        nbytes = _ITEM[item]
        for d in filter(None, dimensions.split(",")):
            nbytes *= int(d)
        total += nbytes
    return total
