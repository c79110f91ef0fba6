"""`make bench-scale`: measures the time and the memory that planning takes for steps of 10,000 to 100,000 equations.

The steps are those of a residual network. This module makes their graphs directly, without tracing: convolutions with
normalisation, their backward pass, and the optimizer Adam, with three heavy operators among some fifty equations per layer. Each
size is planned in a process of its own, from the graph in traced order to the checked plan. Writes
`benchmarks/results/scale.json`.

    plan_s          CPU seconds from the graph to the checked plan, the least of the repetitions
    us_per_equation plan_s per equation, in microseconds
    planner_bytes   growth of the process's largest resident set while it plans
"""

import json
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy
import scipy
from rich.console import Console
from rich.table import Table

from tensile_jax.device_profiles import load_profile
from tensile_jax.ir import Carried, Graph, Kind, Operator, OperatorId, Role, Tensor, TensorId
from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan_format import Plan

_RESULTS = Path(__file__).parent / "results" / "scale.json"
_EQUATIONS = (10_000, 30_000, 100_000)
_PROFILES = ("cpu", "h200")
_SHARES = (75, 50)  # budgets, in per cent of the peak without a plan
_BATCH = 64
_STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))  # height and width, channels
_EQUATIONS_OF_A_LAYER = 50


def train_step(equations: int) -> Graph:
    """About as many equations of one training step of a residual network whose state is donated."""
    layers = max(equations // (_EQUATIONS_OF_A_LAYER * len(_STAGES)), 2)
    step = _Step()
    step.network(layers)
    return step.graph(f"residual_{len(step.operators)}")


class _Step:
    """The operators and tensors of a step, while they are collected."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.tensors: list[Tensor] = []
        self.inputs: list[TensorId] = []
        self.carried: list[Carried] = []
        self.gradients: list[tuple[TensorId, TensorId]] = []  # parameter, its gradient

    def graph(self, name: str) -> Graph:
        """The graph of the collected operators. The state is donated, the batch is not."""
        outputs = [*(pair.output for pair in self.carried), TensorId(len(self.tensors) - 1)]
        donated = frozenset(pair.input for pair in self.carried)
        operators, tensors = tuple(self.operators), tuple(self.tensors)
        return Graph(name, operators, tensors, tuple(self.inputs), tuple(outputs), tuple(self.carried), donated, name)

    def _tensor(self, shape: tuple[int, ...], role: Role, producer: OperatorId | None) -> TensorId:
        t = TensorId(len(self.tensors))
        count = int(numpy.prod(shape, dtype=int))
        self.tensors.append(Tensor(t, f"{role}_{t}", role, 4 * count, shape, "float32", producer))
        return t

    def given(self, shape: tuple[int, ...], role: Role) -> TensorId:
        """An input of the step."""
        self.inputs.append(self._tensor(shape, role, None))
        return self.inputs[-1]

    def run(
        self,
        kind: Kind,
        primitive: str,
        *read: TensorId,
        shape: tuple[int, ...] = (),
        role: Role = "activation",
        flops: int = 0,
    ) -> TensorId:
        """The result of one more operator; of the shape of its first input unless told otherwise."""
        o = OperatorId(len(self.operators))
        result = self._tensor(shape or self.tensors[read[0]].shape, role, o)
        touched = sum(self.tensors[t].nbytes for t in (*read, result))
        relayout = touched if primitive == "filter_gradient" else 0  # a convolution over the batch
        work = flops or self.tensors[result].nbytes // 4
        self.operators.append(
            Operator(o, f"{primitive}_{o}", primitive, kind, tuple(dict.fromkeys(read)), (result,), work, touched, relayout)
        )
        return result

    def network(self, layers: int) -> None:
        """Forward, backward and update of four stages of as many layers each."""
        size, channels = _STAGES[0]
        x = self.given((_BATCH, size, size, channels), "batch")
        layer: list[_Layer] = []
        before = channels
        for stage, (_, channels) in enumerate(_STAGES):
            for index in range(layers):
                weight = self.given((3, 3, before, channels), "parameter")
                scale = self.given((channels,), "parameter")
                layer.append(_Layer(self, weight, scale, joins=index % 2 == 1 and (stage == 0 or index > 1)))
                before = channels
        shortcut = x
        for one in layer:
            x = one.forward(x, shortcut)
            shortcut = x if one.joins or self.tensors[shortcut].shape != self.tensors[x].shape else shortcut
        loss = self.run("reduction", "reduce_sum", x, shape=(1,), role="output")
        gradient = shortcut_gradient = self.run("light", "mul", x)
        for one in reversed(layer):
            gradient, shortcut_gradient = one.backward(gradient, shortcut_gradient)
        self.adam()
        self.run("light", "mul", loss, role="output")

    def adam(self) -> None:
        """The update of every parameter, in the order of the parameters, as optax emits it."""
        time = self.given((1,), "state")
        now = self.run("light", "add", time, role="state")
        self.carried.append(Carried(time, now))
        corrections = [self.run("light", "pow", now) for _ in range(2)]
        for parameter, gradient in sorted(self.gradients):
            shape = self.tensors[parameter].shape
            old_mean, old_square = (self.given(shape, "optimizer_state") for _ in range(2))
            part = self.run("light", "mul", gradient, role="gradient")
            mean = self.run("light", "add", self.run("light", "mul", old_mean), part, role="optimizer_state")
            part = self.run("light", "mul", self.run("light", "square", gradient))
            square = self.run("light", "add", self.run("light", "mul", old_square), part, role="optimizer_state")
            direction = self.run("light", "div", mean, corrections[0])
            length = self.run("light", "sqrt", self.run("light", "div", square, corrections[1]))
            change = self.run("light", "mul", self.run("light", "div", direction, self.run("light", "add", length)))
            new = self.run("light", "add", parameter, change, role="parameter")
            self.carried += [Carried(parameter, new), Carried(old_mean, mean), Carried(old_square, square)]


class _Layer:
    """A convolution, its normalisation and a rectifier; with a shortcut around it and the layer before it if it `joins`."""

    def __init__(self, step: _Step, weight: TensorId, scale: TensorId, *, joins: bool) -> None:
        self.step = step
        self.weight = weight
        self.scale = scale
        self.joins = joins
        self.saved: tuple[TensorId, ...] = ()

    def forward(self, x: TensorId, shortcut: TensorId) -> TensorId:
        """The layer's result. The tensors that the backward pass needs are kept in `saved`."""
        step = self.step
        height, width, before, channels = step.tensors[self.weight].shape
        inside = step.tensors[x].shape
        size = inside[1] if before == channels else inside[1] // 2
        shape = (_BATCH, size, size, channels)
        flops = 2 * _BATCH * size * size * channels * before * height * width
        made = step.run("heavy", "convolution", x, self.weight, shape=shape, flops=flops)
        mean = step.run("reduction", "reduce_sum", made, shape=(channels,))
        variance = step.run("reduction", "reduce_sum", step.run("light", "square", made), shape=(channels,))
        rate = step.run("light", "rsqrt", variance, mean)
        normal = step.run("light", "mul", step.run("light", "sub", made, mean), rate)
        scaled = step.run("light", "mul", normal, self.scale)
        total = step.run("light", "add", scaled, shortcut) if self.joins else scaled
        result = step.run("light", "max", total)
        self.saved = (x, normal, rate, result)
        return result

    def backward(self, gradient: TensorId, shortcut: TensorId) -> tuple[TensorId, TensorId]:
        """The gradients of the layer's input and of the shortcut's."""
        step = self.step
        x, normal, rate, result = self.saved
        shape = step.tensors[self.weight].shape
        flops = 2 * int(numpy.prod(step.tensors[result].shape, dtype=int)) * shape[0] * shape[1] * shape[2]
        alive = step.run("light", "select", gradient, result)
        shortcut = alive if self.joins else shortcut
        of_scale = step.run(
            "reduction", "reduce_sum", step.run("light", "mul", alive, normal), shape=(shape[-1],), role="gradient"
        )
        inner = step.run("light", "mul", alive, self.scale)
        centre = step.run("reduction", "reduce_sum", inner, shape=(shape[-1],))
        spread = step.run("light", "mul", normal, of_scale)
        inner = step.run("light", "sub", step.run("light", "sub", inner, centre), spread)
        inner = step.run("light", "mul", inner, rate)
        turned = step.run("light", "rev", self.weight)
        of_weight = step.run("heavy", "filter_gradient", x, inner, shape=shape, role="gradient", flops=flops)
        of_input = step.run("heavy", "convolution", inner, turned, shape=step.tensors[x].shape, flops=flops)
        if not self.joins and step.tensors[shortcut].shape == step.tensors[of_input].shape and shortcut != gradient:
            of_input = shortcut = step.run("light", "add", of_input, shortcut)
        step.gradients += [(self.weight, of_weight), (self.scale, of_scale)]
        return of_input, shortcut


def plan_of(graph: Graph, profile_name: str, share: int | None) -> Plan:
    """The checked plan under `share` per cent of the unplanned peak."""
    planner = Planner(graph, load_profile(profile_name))
    limit = planner.model.unplanned_bytes * (share or 100) // 100
    found = planner.plan(Goal(limit), CompiledSizes())
    if found is None:
        raise SystemExit(f"{graph.name}: {limit} bytes are below the floor of {planner.floor_bytes(CompiledSizes())}.")
    return found.plan


def measure(equations: int, profile: str, share: int, repetitions: int) -> dict[str, Any]:
    """Plan one size and say what it took."""
    graph = train_step(equations)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: list[float] = []
    plans: list[Plan] = []
    for _ in range(repetitions):
        plans.clear()
        began = time.process_time()
        plans.append(plan_of(graph, profile, share))
        seconds.append(time.process_time() - began)
    plan = plans[-1]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "equations": len(graph.operators),
        "heavy": sum(op.kind == "heavy" for op in graph.operators),
        "profile": profile,
        "budget_share": share / 100,
        "plan_s": round(min(seconds), 3),
        "us_per_equation": round(min(seconds) / len(graph.operators) * 1e6, 1),
        "planner_bytes": grown,
        "unplanned_peak_bytes": plan.unplanned_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "segments": len(plan.segments),
        "step_us": plan.step_us,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="planning a synthetic train step, one process")
    for column in ("equations", "heavy", "profile", "budget", "plan s", "us / equation", "planner MB", "segments", "peak"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            str(r["equations"]), str(r["heavy"]), r["profile"], f"{r['budget_share']:.0%}", f"{r['plan_s']:.2f}",
            f"{r['us_per_equation']:.0f}", f"{r['planner_bytes'] / 1e6:.0f}", str(r["segments"]),
            f"{r['peak_bytes'] / r['unplanned_peak_bytes']:.3f}",
        )  # fmt: skip
    return table


@click.command()
@click.option("--repetitions", default=2, help="Of each case; the least counts.")
@click.option("--one", nargs=3, type=(int, str, int), help="One case in this process: equations, profile, per cent.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS, help="Where to write the JSON.")
def main(repetitions: int, one: tuple[int, str, int] | None, output: Path) -> None:
    if one is not None:
        print(json.dumps(measure(*one, repetitions)))
        return
    rows: list[dict[str, Any]] = []
    for equations in _EQUATIONS:
        for profile in _PROFILES:
            for share in _SHARES:
                case = ["--one", str(equations), profile, str(share), "--repetitions", str(repetitions)]
                command = [sys.executable, "-m", "benchmarks.scale", *case]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
    versions = f"Python {platform.python_version()}, numpy {numpy.__version__}, scipy {scipy.__version__}"
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {versions}",
        "command": "make bench-scale",
        "cases": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    Console(width=120).print(table_of(rows))


if __name__ == "__main__":
    main()
