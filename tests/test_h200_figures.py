"""What the benchmarks compile for an H200, and count there: kernels, and the bytes that these read and write."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.h200_device import H200Compiler, kernels, traffic
from tensile_jax.exec.compiling.segment_code import SegmentCode

_PROGRAM = """HloModule jit_program

ENTRY %main (p: f32[1000], h: f32[1000]) -> (f32[1000], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %h = f32[1000]{0:S(5)} parameter(1)
COPY
  %negated = f32[1000]{0} negate(%p)
DONE
  ROOT %both = (f32[1000]{0}, f32[1000]{0}) tuple(%negated, %arrived)
}
"""


def _compiled(start: str, done: str) -> object:
    text = _PROGRAM.replace("COPY", start).replace("DONE", done)
    return SimpleNamespace(as_text=lambda: text)


def test_a_copy_to_or_from_the_host_is_no_kernel_and_no_traffic() -> None:
    there = _compiled(
        "  %start = (f32[1000]{0}, f32[1000]{0:S(5)}, u32[]) copy-start(%h)", "  %arrived = f32[1000]{0} copy-done(%start)"
    )
    back = _compiled(
        "  %start = (f32[1000]{0:S(5)}, f32[1000]{0}, u32[]) copy-start(%p)", "  %arrived = f32[1000]{0:S(5)} copy-done(%start)"
    )
    for compiled in (there, back):
        assert traffic(compiled) == 8000  # what is negated, and the result
        assert len(list(kernels(compiled))) == 1


def test_an_asynchronous_copy_within_the_device_reads_and_writes_its_bytes_once() -> None:
    compiled = _compiled(
        "  %start = (f32[1000]{0}, f32[1000]{0}, u32[]) copy-start(%p)", "  %arrived = f32[1000]{0} copy-done(%start)"
    )
    assert traffic(compiled) == 16000
    assert len(list(kernels(compiled))) == 2


def test_a_segment_without_inputs_is_compiled_for_the_device_of_the_others() -> None:
    device = jax.devices()[-1]
    code = SegmentCode(lambda: (jnp.full((16, 1), 0.5),), (), (), "a constant")
    _, lowered = H200Compiler(device)._lower(code)
    assert lowered.out_info[0].sharding == SingleDeviceSharding(device)
