"""Runs the instructions of a plan, and recovers when the device is out of memory (TENSILE section III-D, "Executor").

The executor carries out the instructions in their order. Each launch runs a *segment*, a part of the step that is compiled as one
executable. The executor makes decisions only when it recovers from three faults:

    - A tensor is still on the host when a segment needs it on the device. The executor then copies it in (a *passive swap-in*,
      which is counted). It checks the arguments of every iteration for this fault, but the inputs of segments only in watched
      iterations (the first three, then every fiftieth). In other iterations, a launch with a missing input fails. The executor
      then copies the input in, launches again, and checks inputs for the rest of that iteration. The paper's executor checks
      before every operator. Here a checker has replayed the plan, so an input is missing only if this package has a mistake.
    - The device is out of memory. The executor copies to the host everything that the segment does not read, apart from constants
      and arguments that were not donated, and launches the segment again. It also sets `needs_lower_budget`, so that its caller
      plans again for less memory. These copies may exceed the budget of host memory: without them the step would be lost.
    - An input has another memory layout than the executable expects. The inputs are copied into the layouts that it expects, and
      the segment is launched again. Arguments that the plan has in a layout that is not row-major are copied when the iteration
      begins, if they are not committed to a device. At the launch, JAX would copy such an argument without an error, and the
      original would stay in memory although it was donated.

On a GPU, memory is allocated in the order of launches, so launches may run ahead of the device (`run_ahead`). On a CPU, a segment
takes its memory when it is launched, not when it runs, so each launch waits for the one before it.

Effects (callbacks, debug prints) happen once and in order, because segments run in the order of their launches: on a GPU because
they share a stream, and on a CPU because each launch waits. On a CPU, an iteration with effects also ends before the next one
begins. A segment for which the device had no memory has not begun, so launching it again repeats no effect.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tensile_jax.errors import OutOfMemory
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.running.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Instruction,
    Instructions,
    Launch,
    StartSwapIn,
    StartSwapOut,
)
from tensile_jax.exec.transfer import Transfer, device_bytes, may_move, nbytes_on_a_device, on_host, own_layout
from tensile_jax.plan_format import Memory


@dataclass(slots=True)
class Observation:
    """What was measured in one watched iteration: bytes on the device, microseconds of each segment and of waiting for copies.

    `live_bytes` are the bytes of live arrays plus the workspace at the latest launch. `peak_bytes` are the most of all launches,
    of the begin of the iteration, when its arguments have arrived where the plan expects them, and of the times right after
    copies to the device began; in between, bytes only leave the device. Unless the iteration is `timed`, only bytes are measured,
    and the executor does not wait for segments to end. If `copies_timed` is set, each copy is waited for at once, and `out` and
    `into` are the (bytes, microseconds) of all copies in each direction; `stall_us` then says nothing.
    """

    peak_bytes: int = 0
    segment_us: list[float] = field(default_factory=list[float])
    stall_us: float = 0.0
    step_us: float = 0.0
    timed: bool = True
    live_bytes: int = 0
    copies_timed: bool = False
    out: tuple[int, float] = (0, 0.0)
    into: tuple[int, float] = (0, 0.0)


class Executor:
    """Runs one plan, iteration after iteration. With `run_ahead` a launch does not wait for the launch before it."""

    def __init__(
        self,
        instructions: Instructions,
        constants: Sequence[Any],
        transfer: Transfer,
        *,
        run_ahead: bool,
    ) -> None:
        self._program = instructions
        self._constants = [  # copies, since the user may donate or delete the arrays that the step captured
            transfer.copy_out(c) if slot in instructions.always_on_host else transfer.copy_into(c)
            for (slot, _), c in zip(instructions.constants, constants, strict=True)
        ]
        self._transfer = transfer
        self._used = _slots_used(instructions)
        self._run_ahead = run_ahead
        self.passive_swap_ins = 0
        self.out_of_memory = 0
        self.needs_lower_budget = False

    def run(self, arguments: Sequence[Any], watch: Observation | None = None) -> list[Any]:
        """The results of one iteration on `arguments`, both flat. Donated arguments are deleted afterwards, as with `jax.jit`."""
        iteration = self.begin(arguments, watch)
        iteration.deletes_arrived = True
        perform = iteration.perform
        for instruction in self._program.code:
            if type(instruction) is not FinishSwapIn:  # here a launch may be issued before its inputs have arrived
                perform(instruction)
        results = self.end(iteration)
        if watch is not None:
            jax.block_until_ready(results)
        return results

    def begin(self, arguments: Sequence[Any], watch: Observation | None = None) -> "Iteration":
        """Begin an iteration on `arguments`, which are copied to where the plan expects them."""
        program = self._program
        iteration = Iteration(self, len(program.nbytes), watch)
        for slot, value in zip(program.inputs, arguments, strict=True):
            self._arrive(slot, value, iteration.env, iteration.host)
        for (slot, _), value in zip(program.constants, self._constants, strict=True):
            iteration.env[slot] = value
        if watch is not None:
            watch.peak_bytes = max(watch.peak_bytes, device_bytes(iteration.env))
        return iteration

    def end(self, iteration: "Iteration") -> list[Any]:
        """The results, flat, once every instruction has been performed."""
        program, env, host = self._program, iteration.env, iteration.host
        latest = iteration.latest
        if program.effectful and not self._run_ahead and latest is not None and not latest.is_deleted():
            jax.block_until_ready(latest)
        results = [env[slot] if env[slot] is not None else host[slot] for slot in program.outputs]
        if self.needs_lower_budget:  # copy back what recovery sent to the host, but not what the plan leaves there
            results = [
                self._transfer.into(value)
                if on_host(value) and slot not in host and slot not in program.always_on_host
                else value
                for slot, value in zip(program.outputs, results, strict=True)
            ]
        return results

    def forgive(self) -> None:
        """Take note that somebody has seen `needs_lower_budget`."""
        self.needs_lower_budget = False

    @property
    def rest_on_host(self) -> frozenset[int]:
        """Positions of the results that an iteration leaves on the host."""
        left = self._program.left_on_host | self._program.always_on_host
        return frozenset(place for place, slot in enumerate(self._program.outputs) if slot in left)

    @property
    def code(self) -> tuple[Instruction, ...]:
        """The instructions of an iteration."""
        return self._program.code

    def _arrive(self, slot: int, value: Any, env: list[Any], host: dict[int, Any]) -> None:
        """Copy an argument to where the plan expects it: on the device, or on the host if the plan or the step has it there."""
        if slot in self._program.arrive_on_host:
            host[slot] = self._on_host(slot, value, self._program.arrive_on_host[slot])
        elif slot in self._program.always_on_host:
            env[slot] = self._on_host(slot, value)
        elif on_host(value):
            self.passive_swap_ins += 1
            env[slot] = self._transfer.into(value)
        elif slot in self._program.layouts and not getattr(value, "committed", False):
            env[slot] = self.laid_out(slot, value)
        elif isinstance(value, jax.Array) or not may_move(value):
            env[slot] = value
        elif slot in self._used:  # like `jax.jit`, do not copy what nothing reads
            env[slot] = self._transfer.into(value)

    def laid_out(self, slot: int, value: Any) -> Any:
        """An input in the memory layout that the plan has it in; if the plan has none of its own, row-major.

        If a plan has a layout of its own, the tensor is donated. It is deleted once it is copied.
        """
        layout = self._program.layouts.get(slot)
        if layout is None:
            return value if own_layout(value) is None else jax.numpy.copy(value)
        copy = self._transfer.laid_out(value, layout)
        if isinstance(value, jax.Array) and copy is not value:
            jax.block_until_ready(copy)
            value.delete()
        return copy

    def _on_host(self, slot: int, value: Any, memory: Memory = "host") -> Any:
        """An argument off the device. In the first iteration, state may still be on the device; it is then moved to `memory`."""
        if on_host(value):
            return value
        copy = self._transfer.out(value, memory)
        if isinstance(value, jax.Array) and slot not in self._program.keep:
            jax.block_until_ready(copy)
            value.delete()
        return copy


def _with_copies(before: tuple[int, float], copies: Sequence[Any], began: float) -> tuple[int, float]:
    """The bytes and microseconds `before`, and in addition those of `copies`, which began at `began` and are waited for here."""
    jax.block_until_ready(copies)
    us = (time.perf_counter() - began) * 1e6
    return before[0] + sum(map(nbytes_on_a_device, copies)), before[1] + us


def _slots_used(program: Instructions) -> frozenset[int]:
    """The slots that an instruction reads or moves, or that hold a result."""
    used = set(program.outputs)
    for instruction in program.code:
        used.update(instruction.inputs if isinstance(instruction, Launch) else instruction.slots)
    return frozenset(used)


class Iteration:
    """A running iteration. `env` holds, by slot, the tensors on the device, and `host` those on the host.

    With `deletes_arrived`, donated arguments in host memory are deleted once the plan needs them there no more. Otherwise only
    the iteration's own references are dropped: a job's state may be in a snapshot that is being saved.
    """

    def __init__(self, executor: Executor, slots: int, watch: Observation | None) -> None:
        self.env: list[Any] = [None] * slots
        self.host: dict[int, Any] = {}
        self.latest: Any = None  # one result of the latest launch
        self.deletes_arrived = False
        self.watch = watch
        self._executor = executor
        self._transfer = executor._transfer
        self._wait = not executor._run_ahead
        self._careful = False

    def perform(self, instruction: Instruction) -> None:
        """Carry out one instruction. The instructions must come in their order."""
        env, host = self.env, self.host
        match instruction:
            case Launch():
                self._launch(instruction)
            case StartSwapOut(slots, memory):
                if self._careful:  # recovery may have copied some to the host already
                    host.update((slot, env[slot]) for slot in slots if on_host(env[slot]))
                    slots = [slot for slot in slots if slot not in host]
                began = time.perf_counter()
                host.update(zip(slots, self._transfer.out([env[slot] for slot in slots], memory), strict=True))
                if self.watch is not None and self.watch.copies_timed:
                    self.watch.out = _with_copies(self.watch.out, [host[slot] for slot in slots], began)
            case FinishSwapOut(slots):
                began = time.perf_counter()
                for slot in slots:
                    host[slot].block_until_ready()
                    if not (self._careful and on_host(env[slot])):
                        env[slot].delete()
                    env[slot] = None
                if self.watch is not None:
                    self.watch.stall_us += (time.perf_counter() - began) * 1e6
            case StartSwapIn(slots, forgotten):
                began = time.perf_counter()
                for slot, value in zip(slots, self._transfer.into([host[slot] for slot in slots]), strict=True):
                    env[slot] = value
                for slot in forgotten:
                    value = host.pop(slot)
                    if self.deletes_arrived and slot in self._executor._program.arrive_on_host:
                        value.delete()
                if self.watch is not None:
                    self.watch.peak_bytes = max(self.watch.peak_bytes, device_bytes(env))
                if self.watch is not None and self.watch.copies_timed:
                    self.watch.into = _with_copies(self.watch.into, [env[slot] for slot in slots], began)
            case FinishSwapIn(slots):
                for slot in slots:
                    env[slot].block_until_ready()
            case Free(slots):
                for slot in slots:
                    if isinstance(env[slot], jax.Array):
                        env[slot].delete()
                    env[slot] = None

    def _launch(self, launch: Launch) -> None:
        env, watch, previous = self.env, self.watch, self.latest
        if self._wait and previous is not None and not previous.is_deleted():
            jax.block_until_ready(previous)
        began = time.perf_counter() if watch is not None else 0.0
        if self._careful or watch is not None:
            self._fetch(launch.inputs)
            if watch is not None:
                watch.stall_us += (time.perf_counter() - began) * 1e6
                began = time.perf_counter()
        try:
            made = launch.call(*launch.arguments(env))
        except Exception as error:
            made = self._launch_again(launch.call, launch.inputs, error)
            self._careful = True
        outputs = launch.outputs
        env[outputs] = made[: outputs.stop - outputs.start]  # a segment with effects returns one value more
        if watch is not None:
            self._observe(watch, launch.workspace_bytes, made, began)
        self.latest = next((value for value in reversed(made) if isinstance(value, jax.Array)), previous)
        for slot in launch.drops:
            env[slot] = None

    def owned(self) -> list[Any]:
        """The values that belong to this iteration alone: not constants, and not arguments that were not donated."""
        program = self._executor._program
        others = program.keep | {slot for slot, _ in program.constants}
        return [value for slot, value in enumerate(self.env) if slot not in others]

    def _fetch(self, inputs: Sequence[int]) -> None:
        """Copy to the device what the segment reads there and is not there: passive swap-ins."""
        env, host = self.env, self.host
        always_on_host = self._executor._program.always_on_host
        for slot in inputs:
            if slot not in always_on_host and (env[slot] is None or on_host(env[slot])):
                self._executor.passive_swap_ins += 1
                env[slot] = self._transfer.into(env[slot] if env[slot] is not None else host.pop(slot))
                env[slot].block_until_ready()

    def _launch_again(self, call: Callable[..., Any], inputs: Sequence[int], error: Exception) -> Any:
        """Launch the segment once more, if the cause of its failure can be removed; otherwise raise `error`.

        Inputs with an unexpected memory layout are copied into the one that the executable expects. If the device is out of
        memory, everything that the segment does not read and that belongs to this iteration is copied to the host.
        """
        executor, env = self._executor, self.env
        if "input layouts that disagree" in str(error):  # JAX raises this before anything runs
            copies = [executor.laid_out(slot, env[slot]) for slot in inputs]
            made = call(*copies)
            for slot, copy in zip(inputs, copies, strict=True):
                if copy.is_deleted():  # it was donated, instead of the original
                    env[slot].delete()
            return made
        if not is_out_of_memory(error, effectful=executor._program.effectful):
            raise error
        executor.out_of_memory += 1
        executor.needs_lower_budget = True
        program = executor._program
        stays = set(inputs) | program.keep | {slot for slot, _ in program.constants}
        for slot, value in enumerate(env):
            if not isinstance(value, jax.Array) or slot in stays or slot in self.host or value.is_deleted():
                continue  # empty, a token, not to be moved, or donated to a segment
            if not on_host(value):
                copy = self._transfer.out(value)
                copy.block_until_ready()
                value.delete()
                env[slot] = copy
        try:
            return call(*[env[slot] for slot in inputs])
        except Exception as again:
            if not is_out_of_memory(again, effectful=False):
                raise
            raise OutOfMemory(
                "The device is out of memory with nothing on it but what one segment reads. Another process may hold "
                "its memory, or the budget is above what is free: lower budget=, or free memory on the device. The step "
                "did not finish; donated arguments are gone, as after any failed donated call."
            ) from again

    def _observe(self, watch: Observation, workspace_bytes: int, made: Any, began: float) -> None:
        """Record the bytes on the device while the segment runs: all live arrays, its outputs among them, and its workspace.

        The number that a segment with effects returns after its outputs is a part of its workspace.
        """
        if watch.timed:
            jax.block_until_ready(made)
            watch.segment_us.append((time.perf_counter() - began) * 1e6)
        watch.live_bytes = device_bytes(self.env) + workspace_bytes
        watch.peak_bytes = max(watch.peak_bytes, watch.live_bytes)
