"""The traffic of a program that was compiled for an H200 is what its kernels read and write."""

from typing import NamedTuple

from benchmarks.h200_device import kernels, traffic

WITH_A_COPY = """\
ENTRY %main (x: f32[8], h: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %h = f32[8]{0:S(5)} parameter(1)
  %copy-start = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%h)
  %twice = f32[8]{0} add(%x, %x)
  %copy-done = f32[8]{0} copy-done(%copy-start)
  ROOT %sum = f32[8]{0} add(%twice, %copy-done)
}
"""


class Compiled(NamedTuple):
    text: str

    def as_text(self) -> str:
        return self.text


def test_a_copy_from_host_memory_is_no_kernel() -> None:
    compiled = Compiled(WITH_A_COPY)
    assert [one.nbytes for one in kernels(compiled)] == [3 * 32, 3 * 32]
    assert traffic(compiled) == 6 * 32
