"""The report on a function's memory: its peak, what lives there, and what could be saved."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import msgspec
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.units import format_bytes
from tests.memory_report.small_functions import (
    BATCH,
    IMAGES,
    STATE,
    WEIGHTS,
    WIDTH,
    forward,
    loss_of,
    scanned,
    shape,
    train_step,
)

W = 4 * WIDTH * WIDTH  # bytes
X = 4 * BATCH * WIDTH
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "training": (train_step, (STATE, IMAGES), {"donate_argnums": 0}),
    "training, nothing donated": (train_step, (STATE, IMAGES), {}),
    "inference": (forward, (WEIGHTS, IMAGES), {}),
    "a gradient": (jax.grad(loss_of), (WEIGHTS, IMAGES), {}),
    "a loop": (scanned, (shape(8, WIDTH, WIDTH), IMAGES), {}),
    "nothing": (lambda x: x, (IMAGES,), {}),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def report_on(name: str, **options: Any) -> tensile.MemoryReport:
    function, args, given = FUNCTIONS[name]
    return tensile.memory(function, *args, device_profile="cpu", **given, **options)


def line_with(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of the function that has this text."""
    lines, begin = inspect.getsourcelines(function)
    return begin + next(i for i, line in enumerate(lines) if text in line)


@each_function
def test_what_lives_at_the_peak_adds_up_to_the_predicted_peak(name: str) -> None:
    report = report_on(name)
    assert sum(part.nbytes for part in report.held) == report.predicted_peak_bytes
    packing = sum(part.nbytes for part in report.at_peak if part.role == "packing")
    assert abs(packing) <= 0.25 * report.predicted_peak_bytes


@each_function
@pytest.mark.smoke
def test_the_compiled_peak_is_that_of_jax_jit(name: str) -> None:
    function, args, given = FUNCTIONS[name]
    compiled = jax.jit(function, **given).lower(*args).compile()
    report = report_on(name, compile=True)
    assert report.compiled_peak_bytes == peak_of(compiled) == report.peak_bytes


@each_function
def test_the_curve_is_highest_where_the_peak_is_reached(name: str) -> None:
    report = report_on(name)
    used = [sum(at) for at in zip(*(curve.nbytes for curve in report.curves), strict=True)]
    at = 0 if report.peak is None else report.peak.operator
    held = sum(part.nbytes for part in report.at_peak if part.role not in ("reserved", "packing"))
    assert used[at] == max(used) == held


def test_the_lives_of_a_forward_pass_are_those_counted_by_hand() -> None:
    report = report_on("inference")
    first, second, third = (t for t in report.tensors if t.made_by == "dot_general")
    # a product, tanh of it as the operand of the next product, and so on; the last tanh is summed
    assert [(t.nbytes, t.begin, t.end) for t in (first, second, third)] == [(X, 0, 2), (X, 2, 4), (X, 4, 6)]
    arguments = {t.name: (t.nbytes, t.role, t.begin, t.end, t.made_at) for t in report.tensors if not t.made_by}
    assert arguments == {"w": (W, "argument", 0, 7, ""), "images": (X, "argument", 0, 7, "")}


def test_tensors_name_the_lines_that_make_them_and_use_them_last() -> None:
    report = report_on("inference")
    line = f"small_functions.py:{line_with(forward, '@ w')}"
    assert {(t.made_at, t.code) for t in report.tensors if t.made_by == "dot_general"} == {
        (line, "images = jnp.tanh(images @ w)")
    }
    assert report.peak is not None and (report.peak.source, report.peak.code) == (line, "images = jnp.tanh(images @ w)")


def test_roles_are_those_of_a_training_step() -> None:
    roles = {part.role for part in report_on("training").at_peak}
    assert {"parameter", "optimizer_state", "batch", "activation"} <= roles
    assert "argument" not in roles


def test_nothing_runs_and_arrays_are_kept() -> None:
    ran: list[int] = []

    def step(w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return w + 1

    w = jnp.ones((WIDTH, WIDTH))
    report = tensile.memory(step, w, donate_argnums=0, compile=True)
    jax.effects_barrier()
    assert (ran, w.is_deleted(), report.predicted_peak_bytes >= W) == ([], False, True)


def test_state_that_is_not_donated_is_named_with_the_option_that_donates_it() -> None:
    missed = report_on("training, nothing donated").missed_donations
    assert [(m.name, m.nbytes, m.remedy) for m in missed] == [
        ("state['opt_m']", W, "Pass donate_argnums=0."),
        ("state['w']", W, "Pass donate_argnums=0."),
    ]
    assert report_on("training").missed_donations == ()


def test_a_donation_in_vain_says_why() -> None:
    report = tensile.memory(lambda w, x: (w @ x).astype(jnp.bfloat16), WEIGHTS, WEIGHTS, donate_argnums=0)
    (missed,) = report.missed_donations  # JAX itself does not warn of it
    assert "no result has its form float32[64,64]: result is bfloat16" in missed.reason

    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        report = tensile.memory(lambda w: w[0], WEIGHTS, donate_argnums=0)
    assert [m.reason for m in report.missed_donations] == ["it is donated, and no result has its form float32[64,64]"]


def test_arguments_that_are_not_used_are_named() -> None:
    report = tensile.memory(lambda w, unread: w + 1, WEIGHTS, IMAGES)
    assert [(a.name, a.nbytes) for a in report.unused_arguments] == [("unread", X)]
    assert "Not used by the function" in str(report)


def test_a_jitted_function_and_a_planned_one_keep_their_donation() -> None:
    expected = report_on("training")
    for made in (jax.jit(train_step, donate_argnums=0), tensile.jit(train_step, donate_argnums=0, budget="90%")):
        assert tensile.memory(made, STATE, IMAGES, device_profile="cpu") == expected


def test_keyword_and_static_arguments_are_taken_as_jit_takes_them() -> None:
    def layers(w: jax.Array, count: int, *, x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x

    report = tensile.memory(layers, WEIGHTS, 4, kwargs={"x": IMAGES}, static_argnums=1)
    assert len(report.operators) == 8
    assert {t.name for t in report.tensors if not t.made_by} == {"w", "x"}


def test_the_report_is_read_back_as_it_was_written_and_keeps_its_schema() -> None:
    report = report_on("training", compile=True)
    assert tensile.MemoryReport.from_json(report.to_json()) == report
    jsonschema.validate(msgspec.json.decode(report.to_json()), msgspec.json.schema(tensile.MemoryReport))
    with pytest.raises(ValueError, match="not the JSON of a memory report"):
        tensile.MemoryReport.from_json("{}")
    with pytest.raises(ValueError, match="report_version 99"):
        tensile.MemoryReport.from_json(report.to_json().replace('"report_version":2', '"report_version":99'))


def test_budgets_are_compared_only_when_asked_for() -> None:
    assert report_on("training").budgets == () and report_on("training").smallest_budget_bytes is None
    report = report_on("training", budgets=True)
    assert report.smallest_budget_bytes is not None and report.smallest_budget_bytes < report.predicted_peak_bytes
    assert all(b.peak_bytes <= b.budget_bytes and b.time_ratio > 0 for b in report.budgets)
    assert "Under a budget (the smallest that works" in str(report)


def test_a_note_says_where_xla_leaves_memory_out_of_its_figure() -> None:
    def means(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w).mean(axis=1)

    report = tensile.memory(means, shape(256, 256), shape(4096, 256), compile=True)
    hides = "ynn_fusion" in jax.jit(means).lower(shape(256, 256), shape(4096, 256)).compile().as_text()  # pyright: ignore[reportOperatorIssue] # text
    assert any("leaves that memory out of its own peak of " in note for note in report.notes) == hides


def test_the_text_is_one_screen() -> None:
    report = report_on("training, nothing donated", compile=True)
    lines = str(report).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 130
    text = " ".join(" ".join(lines).split())
    for part in (
        "as XLA compiles it",
        f"operator {report.peak.operator if report.peak else -1} of {len(report.operators)}, counted from 0",
        "On the device at the predicted peak",
        f"together {format_bytes(report.predicted_peak_bytes)} the predicted peak",
        "The largest there",
        "return jnp.mean((hidden @ w) ** 2)",
        "in 2 arguments. Pass donate_argnums=0. The largest, of 16 KiB, is state['opt_m']: it is not donated",
    ):
        assert part in text


def test_the_largest_tensors_are_values_that_name_a_tie() -> None:
    report = report_on("training")
    largest = report.largest(2)
    assert list(largest) == [part.tensor for part in report.at_peak if part.tensor is not None][:2]
    assert [t.nbytes for t in largest] == [X, X] and largest.tied == 1
    assert "1 more tensor is as large as the last one: report.largest(3) has them, too." in str(largest)
    assert report.largest(3).tied == 0 and len(report.largest(100)) < 100
    with pytest.raises(ValueError, match="count must be a positive integer"):
        report.largest(0)


def test_what_is_at_the_peak_has_its_tensors_and_is_printed_as_a_table() -> None:
    at_peak = report_on("training").at_peak
    assert at_peak[0].tensor is not None and at_peak[0].tensor.shape == (BATCH, WIDTH)
    lines = str(at_peak).splitlines()
    assert lines[0].split() == ["size", "each", "role", "form", "what", "made", "at"]
    assert lines[-1].endswith("together, the predicted peak") and len(lines) <= 27
    assert "float32[256,64]" in str(at_peak[0]) and "\n" not in str(at_peak[0])


def test_what_a_loop_keeps_is_named_by_the_operator_and_the_line_in_its_body() -> None:
    report = report_on("a loop")
    kept = [t for t in report.tensors if t.stacked_at]
    body, loop = (f"small_functions.py:{line_with(scanned, text)}" for text in ("jnp.tanh(x @ w)", "jax.lax.scan"))
    assert {(t.made_at, t.stacked_at, t.code) for t in kept if not t.is_made_backward} == {
        (body, loop, "return jnp.tanh(x @ w), None")
    }
    assert f"stacked by the loop at {loop}" in str(report)


def test_a_note_on_a_loop_names_no_option_that_the_report_does_not_take() -> None:
    def steps(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=500)[0]

    (note,) = tensile.memory(steps, shape(200, 128), shape(128, 128)).notes
    assert re.match(r"The loop at test_memory\.py:\d+ \(500 iterations", note) and "open_loops" not in note


def test_a_captured_mutable_reference_is_refused() -> None:
    cell = jax.new_ref(jnp.ones(3))
    with pytest.raises(tensile.TraceError, match="mutable"):
        tensile.memory(lambda x: x + cell[...], shape(3))


def test_what_a_reduction_reads_lives_until_the_reduction_and_not_until_its_result_is_read() -> None:
    def norm_of_products(w: jax.Array, x: jax.Array) -> jax.Array:
        total = jnp.sum(jnp.square(x @ w))
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x / jnp.sqrt(total)

    report = tensile.memory(norm_of_products, WEIGHTS, IMAGES, device_profile="cpu")
    squares = next(t for t in report.tensors if t.made_by == "square")
    reduction = report.operators.index("reduce_sum")
    assert squares.end == reduction + 1 < len(report.operators)
