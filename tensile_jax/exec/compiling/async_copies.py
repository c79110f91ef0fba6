"""Reads a compiled program, and checks that its copies between device memory and host memory run beside kernels.

XLA for GPUs gives the instructions of a program in the order in which they are issued. A copy between the memories that runs
beside kernels is a pair of instructions, with kernels in between:

    %start = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%h)
    %kernel = f32[8]{0} fusion(%x), ...
    %done = f32[8]{0} copy-done(%start)

The tuple of `copy-start` has the target first and the source second. `S(5)` marks host memory, so this copy goes from the host
to the device.

Three things can go wrong, none of which changes a result. XLA may leave a copy synchronous. It may let a kernel read or write
host memory itself, over the link. Or it may put the two instructions of a copy next to each other, so that kernels wait for the
copy. A copy before the first kernel or after the last one has nothing to run beside, so it is no fault.
"""

import re
from typing import NamedTuple

_ON_HOST = "S(5)"
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,.*)?$")
_NO_KERNELS = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier", "after-all",
    "partition-id", "replica-id",
})  # fmt: skip
_SHOWN = 3  # how many instructions a message names


class AsyncCopy(NamedTuple):
    """A copy between the memories, and how many kernels begin before it starts, and between its start and its end."""

    name: str
    to_host: bool
    before: int
    beside: int


class Copies(NamedTuple):
    """The copies of a program, the number of its kernels, and those that read or write host memory themselves."""

    copies: tuple[AsyncCopy, ...]
    kernels: int
    in_place: tuple[str, ...]

    @property
    def exposed(self) -> tuple[AsyncCopy, ...]:
        """The copies for which kernels wait: none runs beside them, though some run before and after them."""
        return tuple(c for c in self.copies if not c.beside and 0 < c.before < self.kernels)

    def fault(self) -> str | None:
        """What is wrong, as a clause of a sentence; None if each copy runs beside kernels."""
        if self.in_place:
            return f"{len(self.in_place)} kernels read or write host memory themselves ({_some(self.in_place)})"
        if self.exposed:
            names = _some([copy.name for copy in self.exposed])
            return f"no kernel runs beside {len(self.exposed)} of {len(self.copies)} copies ({names})"
        return None


def read_copies(text: str) -> Copies:
    """The copies of a compiled program, of which this is the text (`compiled.as_text()`)."""
    on_host: set[str] = set()
    under_way: dict[str, tuple[bool, int]] = {}
    copies: list[AsyncCopy] = []
    in_place: list[str] = []
    kernels = 0
    for line in text[max(text.find("\nENTRY"), 0) :].splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode, operands = match.groups()
        read = [operand.strip().split(" ")[-1].lstrip("%") for operand in operands.split(",")]
        touches_host = _ON_HOST in shape or any(one in on_host for one in read)
        if opcode.endswith("-start"):
            if touches_host:
                under_way[name] = not any(one in on_host for one in read), kernels
            continue
        if _ON_HOST in shape:
            on_host.add(name)
        if opcode.endswith("-done"):
            begun = under_way.pop(read[0], None)
            if begun is not None:
                to_host, before = begun
                copies.append(AsyncCopy(name, to_host, before, kernels - before))
        elif opcode not in _NO_KERNELS:
            kernels += 1
            if touches_host:
                in_place.append(name)
    return Copies(tuple(copies), kernels, tuple(in_place))


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
