"""The copies of a compiled program are read from its text, and their faults are named."""

import pytest

from tensile_jax.exec.compiling.async_copies import AsyncCopy, read_copies

HEAD = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %copy.9 = f32[8]{0:S(5)} copy(%p)
}

ENTRY %main (h: f32[8], x: f32[8]) -> (f32[8], f32[8]) {
  %h = f32[8]{0:S(5)} parameter(0), sharding={replicated}
  %x = f32[8]{0} parameter(1), metadata={op_name="x"}
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="a"}
  %both = (f32[8]{0}, f32[8]{0:S(5)}) tuple(%a, %h)
  %h.1 = f32[8]{0:S(5)} get-tuple-element(%both), index=1
"""
IN = "  %in = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%h.1), backend_config={}\n"
IN_DONE = "  %in.done = f32[8]{0} copy-done(%in)\n"
KERNEL = "  %b = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused\n"
USE = '  %c = f32[8]{0} custom-call(%b, %in.done), custom_call_target="__cublas$gemm"\n'
OUT = "  %out = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%c)\n"
LAST = "  %d = f32[8]{0} fusion(%c), kind=kLoop, calls=%fused\n"
OUT_DONE = "  %out.done = f32[8]{0:S(5)} copy-done(%out)\n"
END = "  ROOT %tuple = (f32[8]{0:S(5)}, f32[8]{0}) tuple(%out.done, %d)\n}\n"


def test_copies_with_kernels_beside_them_are_no_fault() -> None:
    found = read_copies(HEAD + IN + KERNEL + IN_DONE + USE + OUT + LAST + OUT_DONE + END)
    assert found.copies == (AsyncCopy("in.done", False, 1, 1), AsyncCopy("out.done", True, 3, 1))
    assert found.kernels == 4 and found.in_place == ()
    assert found.fault() is None


def test_a_copy_at_the_beginning_or_at_the_end_has_no_kernel_beside_it() -> None:
    begin = HEAD.replace("  %a =", "  %zero = f32[] constant(0)\n  %a =")
    early = "  %in = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%h)\n" + IN_DONE
    text = begin.replace("  %a =", early + "  %a =") + KERNEL + USE + LAST + OUT + OUT_DONE + END
    found = read_copies(text)
    assert [(c.before, c.beside) for c in found.copies] == [(0, 0), (4, 0)]
    assert found.fault() is None


def test_a_copy_for_which_kernels_wait_is_a_fault() -> None:
    fault = read_copies(HEAD + IN + IN_DONE + KERNEL + USE + OUT + LAST + OUT_DONE + END).fault()
    assert fault == "no kernel runs beside 1 of 2 copies (in.done)"


@pytest.mark.parametrize(
    "line",
    [
        "  %in.done = f32[8]{0} copy(%h.1)\n",  # synchronous
        "  %in.done = f32[8]{0} fusion(%a, %h.1), kind=kLoop, calls=%fused\n",  # read in place
        "  %in.done = f32[8]{0:S(5)} fusion(%a), kind=kLoop, calls=%fused\n",  # written in place
        "  %in.done = (f32[8]{0:S(5)}, f32[8]{0}) fusion(%a), kind=kLoop, calls=%fused\n",
        "  %in.done = f32[8]{0} call(%both), to_apply=%fused\n",
    ],
)
def test_what_touches_host_memory_without_a_copy_beside_it_is_a_fault(line: str) -> None:
    fault = read_copies(HEAD + KERNEL + line + USE + OUT + LAST + OUT_DONE + END).fault()
    assert fault is not None and "kernels read or write host memory themselves (in.done" in fault


def test_a_program_without_copies_has_none() -> None:
    text = HEAD.replace(":S(5)", "") + KERNEL + LAST.replace("%c", "%b") + "  ROOT %r = (f32[8]{0}) tuple(%d)\n}\n"
    assert read_copies(text).copies == () and read_copies(text).fault() is None
