"""The runs for a GPU (`benchmarks/gpu`, `benchmarks.paper measure`) work before there is one."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import case, cases
from benchmarks.cases import Cases, Row
from benchmarks.device_time import PROFILED, Profile, read_profile
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import peaks, results, times, trained
from benchmarks.gpu.rows import Run, Wanted, record
from benchmarks.paper import __main__ as paper
from benchmarks.paper import measured
from benchmarks.paper.published import MODELS
from benchmarks.run import TIME_IS_UP, run_case
from benchmarks.training_steps import TrainingStep, training_step

RUNS = {"results": results.run_of, "times": times.run_of, "peaks": peaks.run_of}


# -- what is asked ----------------------------------------------------------------------------------------------------------


class Asked:
    """Stands for `Cases`, and reads the arguments of each row as its program would."""

    def start(self, name: str, *options: str) -> Future[Row]:
        case.main.make_context("case", [name, *options])
        return Future()

    def start_program(self, program: str, *arguments: str) -> Future[Row]:
        assert program == trained.__name__
        trained.main.make_context("trained", [*arguments])
        return Future()


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_the_rows_of_a_run_have_names_of_their_own_and_options_that_there_are(name: str, small: bool) -> None:
    wanted = RUNS[name](small=small).wanted
    assert len({tuple(one.asked.values()) for one in wanted}) == len(wanted) > 0
    for one in wanted:
        one.start(Asked())  # pyright: ignore[reportArgumentType] # it has what is called


def test_the_first_rows_are_the_ways_of_launching_resnet50_with_16_images() -> None:
    first = [one.asked for one in times.run_of(small=False).wanted[:4]]
    assert {(one["model"], one["batch_size"], one["graphs"]) for one in first} == {("resnet50", 16, "default")}
    assert [one["launch"] for one in first] == ["segments", "one_program", "one_program", "program"]
    assert [one["state_layout"] for one in first] == ["row_major", "row_major", "auto", "row_major"]


def test_a_gpu_is_needed_but_for_small_sizes_which_are_no_results() -> None:
    assert "jax sees no GPU" in CliRunner().invoke(gpu.main, ["peaks"]).output
    assert "--small needs --output" in CliRunner().invoke(gpu.main, ["peaks", "--small"]).output
    assert "--small needs --output" in CliRunner().invoke(paper.main, ["measure", "--small"]).output


def test_a_workload_and_a_model_are_steps_of_one_form() -> None:
    for step in (training_step("lstm"), training_step("gpt", 2, {"sequence_length": 8, "width": 8, "heads": 2, "layers": 1})):
        state, metrics = jax.eval_shape(step.step, step.state_shape, next(step.batches()))
        assert jax.tree.map(lambda a: a.shape, state) == jax.tree.map(lambda a: a.shape, step.state_shape)
        assert metrics["loss"].shape == ()
    with pytest.raises(ValueError, match="no model with a batch size"):
        training_step("gpt")
    with pytest.raises(ValueError, match="lstm has one size"):
        training_step("lstm", 4)


# -- rows -------------------------------------------------------------------------------------------------------------------

ABOUT = {"device": "NVIDIA H200", "jax": "0.11.2"}


def measured_rows(file: Path, rows: dict[str, Row], **about: str) -> tuple[list[str], int]:
    """Which rows were measured, and how many are missing."""
    begun: list[str] = []

    def wanted(name: str, row: Row) -> Wanted:
        def start(_: Cases) -> Future[Row]:
            begun.append(name)
            future: Future[Row] = Future()
            future.set_result(row)
            return future

        return Wanted({"model": name, "batch_size": ""}, start)

    run = Run([wanted(name, row) for name, row in rows.items()], shown=str)
    left = record(file, ABOUT | about, run, None)  # pyright: ignore[reportArgumentType] # no row uses it
    return begun, left


def test_rows_are_kept_as_they_come_and_only_those_that_are_missing_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.json"
    good, up, failed = {**ABOUT, "ms": 1.0}, {"error": TIME_IS_UP}, {"error": "out\nof memory"}
    assert measured_rows(file, {"a": good, "b": up, "c": failed, "d": {**good, "cut_off": True}}) == (["a", "b", "c", "d"], 1)
    document = json.loads(file.read_text())
    assert {key: document[key] for key in ABOUT} == ABOUT and "made" in document
    assert {row["asked"]["model"] for row in document["rows"]} == {"a", "c", "d"}
    assert measured_rows(file, dict.fromkeys("abcd", good)) == (["b", "c", "d"], 0)
    assert measured_rows(file, dict.fromkeys("abcd", up)) == ([], 0)
    assert measured_rows(file, {"a": up}, jax="0.12.0") == (["a"], 1)
    assert len(json.loads(file.read_text())["rows"]) == 4


def test_a_part_of_the_rows_is_chosen_by_their_names() -> None:
    run = times.run_of(small=False).only(["vgg16, 16", "kept"])
    assert {(one.asked["model"], one.asked["graphs"]) for one in run.wanted} == {("vgg16", "kept")}


# -- processes --------------------------------------------------------------------------------------------------------------

TRUE_JSON = "print('{\"losses\": 200}', flush=True)"


@pytest.mark.parametrize(
    ("code", "found"), [(TRUE_JSON, {"losses": 200, "cut_off": True}), ("print('{', end='', flush=True)", {"error": TIME_IS_UP})]
)
def test_a_process_for_which_the_time_is_up_leaves_the_lines_that_it_has_printed(code: str, found: Row) -> None:
    sleeps = ("-n1", "-r1", "import time", code, "time.sleep(60)")
    assert run_case(sleeps, program="timeit", seconds=3) == {"case": list(sleeps), **found}


class Processes:
    """Stands for processes: `begun` are the cases that were compiled, with a bracket, and timed, in this order."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def __call__(self, arguments: Sequence[str], *options: str, program: str = "", seconds: float | None = None) -> Row:
        compiles = options[options.index("--steps") + 1] == "0" if "--steps" in options else False
        self.begun.append(f"({arguments[0]})" if compiles else arguments[0])
        return {"peak_bytes": 1, "trace_to_plan_s": 1.0, "seconds": seconds}


def begun_by(monkeypatch: pytest.MonkeyPatch, use: Callable[[Cases], None], folder: Path, **options: Any) -> list[str]:
    processes = Processes()
    monkeypatch.setattr(cases, "run_case", processes)
    with Cases(folder, 2, **options) as many:
        use(many)
    return processes.begun


def test_cases_are_compiled_in_the_order_in_which_they_are_asked_for_and_then_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def use(many: Cases) -> None:
        with many._turns:
            many._running = many.at_once  # until all have asked
            started = [many.start(name, "--without-plain") for name in "abcd"]
            many._turns.wait_for(lambda: len(many._waiting) == len(started), 10)
            many._running = 0
            many._turns.notify_all()
        for one in started:
            one.result()

    begun = begun_by(monkeypatch, use, tmp_path)
    assert sorted(begun) == ["(a)", "(b)", "(c)", "(d)", "a", "b", "c", "d"]
    assert set(begun[:2]) == {"(a)", "(b)"} and begun.index("(d)") < min(begun.index(name) for name in "cd")


def test_no_process_is_begun_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: list[Row] = []

    def use(many: Cases) -> None:
        rows.extend([many("a"), many("b", "--without-plain"), many.start_program("program", "c").result()])

    assert begun_by(monkeypatch, use, tmp_path, seconds=0.0) == []
    assert rows == [{"error": TIME_IS_UP}] * 3


def test_compiling_ends_before_the_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds: list[float] = []

    def use(many: Cases) -> None:
        seconds.append(many("a", "--without-plain")["seconds"])
        seconds.append(json.loads(next(tmp_path.glob("*/compiled.json")).read_text())["seconds"])

    assert begun_by(monkeypatch, use, tmp_path, seconds=1000.0) == ["(a)", "a"]
    assert 900 < seconds[0] <= 1000 and 500 < seconds[1] <= 600


# -- results ----------------------------------------------------------------------------------------------------------------

LINE = TrainingStep(
    step=lambda state, batch: (
        {"w": state["w"] - 0.1 * batch * state["w"], "fixed": state["fixed"]},
        {"loss": jnp.sum(state["w"])},
    ),
    init=lambda: {"w": jnp.arange(1.0, 5.0), "fixed": jnp.ones(2)},
    state_shape=None,
    batches=lambda: iter([np.float32(1 + i / 8) for i in range(40)]),
)


def compared(wrong: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Twelve steps, of which every fourth is compared; `wrong` changes the state after a step of that number."""
    plain, number = jax.jit(LINE.step), 0

    def planned(state: Any, batch: Any) -> Any:
        nonlocal number
        number += 1
        state, metrics = plain(state, batch)
        return wrong(state, number), metrics

    return trained.compared(LINE, planned, plain, 12, 4)


def test_steps_that_are_plain_jits_are_not_off() -> None:
    found = compared(lambda state, _: state)
    assert [row["step"] for row in found["compared"]] == [0, 4, 8] and len(found["losses"]) == 12
    assert all(row["off"] == row["off_most"] == 0.0 for row in found["compared"]) and found["not_finite_at"] is None
    assert found["losses"] == trained.losses_of(jax.jit(LINE.step), LINE, 12, 4)


def test_a_stale_tensor_is_off_by_a_whole_update_and_one_that_must_stay_by_infinity() -> None:
    found = compared(lambda state, number: {**state, "w": LINE.init()["w"]} if number == 1 else state)
    assert found["compared"][0]["off"] == pytest.approx(1.0) and found["compared"][1]["off"] == 0.0
    found = compared(lambda state, number: {**state, "fixed": 2 * state["fixed"]} if number == 5 else state)
    assert found["compared"][1]["off_most"] == np.inf and found["compared"][2]["off_most"] == 0.0


def test_a_training_ends_in_the_block_in_which_a_loss_is_not_finite() -> None:
    found = compared(lambda state, number: {**state, "w": jnp.nan * state["w"]} if number == 5 else state)
    assert found["not_finite_at"] == 5 and len(found["losses"]) == 8
    row = {**found, "launches": 1, "on_host": 3}
    assert results.shown(row) == "THE LOSS IS NOT FINITE after 5 steps; 1 launches, 3 tensors on the host"


def profile_of(*events: tuple[str, int, int, str]) -> Any:
    """A profile with these events on streams of a GPU: the name, begin and duration in microseconds, details of a copy."""
    lines = "".join(
        f'lines {{ name: "Stream #{i}" events {{ metadata_id: {i} offset_ps: {begin}000000 duration_ps: {lasts}000000 '
        f'stats {{ metadata_id: 1 str_value: "{details}" }} }} }} '
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
        for i, (name, begin, lasts, details) in enumerate(events, 1)
    )
    host = 'planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 9000000 } } } '
    names = 'stat_metadata { key: 1 value { id: 1 name: "memcpy_details" } }'
    text = host + f'planes {{ name: "/device:GPU:0" {lines} {names} }}'
    data = jax.profiler.ProfileData
    return data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text))


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # of JAX's own extension, once
def test_a_profile_shows_which_part_of_the_copies_runs_beside_kernels() -> None:
    #   fusion       0 ------ 6
    #   to device          4 ------ 10       a kernel beside 4 to 6 and 9 to 10
    #   product                    9 -- 12
    #   to host                              20 - 23
    #   on device                                      30 - 31       no copy between the memories
    found = read_profile(
        profile_of(
            ("fusion", 0, 6, ""),
            ("MemcpyH2D", 4, 6, ""),
            ("product", 9, 3, ""),
            ("MemcpyOther", 20, 3, "kind_src:device kind_dst:pinned size:8"),
            ("MemcpyD2D", 30, 1, "kind_src:device kind_dst:device size:8"),
        )
    )
    us = [0 if value is None else value * PROFILED * 1e3 for value in (found.busy_ms, found.copied_ms, found.beside_ms)]
    assert us == pytest.approx([16, 9, 3]) and found.kernels * PROFILED == pytest.approx(5)


def test_a_profile_without_a_gpu_shows_nothing() -> None:
    assert read_profile(profile_of()) == Profile(None, 0.0, 0.0, 0.0)


# -- the paper's experiments ------------------------------------------------------------------------------------------------


def test_the_models_of_a_gpu_are_those_of_the_paper_in_the_order_of_what_is_missing() -> None:
    assert sorted(measured.MODELS["gpu"]) == sorted(MODELS)
    assert set(measured.IN_ORDER) == {*measured.OF_A_MODEL, *measured.OF_A_DEVICE}


SIX = ("unplanned", "tensile", "vdnn", "checkpoint", "capuchin", "auto")


@pytest.mark.parametrize(
    ("experiment", "model", "found", "complete"),
    [
        ("single", "vgg16", None, False),
        ("single", "vgg16", dict.fromkeys(SIX, {"eor": 1.0}), True),
        ("single", "vgg16", dict.fromkeys(SIX[:4], {"eor": 1.0}), False),
        ("curve", "vgg16", [{"share": 0.75}, {"share": 0.5}, {"share": 0.4}, {"share": 0.3}], True),
        ("curve", "vgg16", [{"share": 0.5}], False),
        ("curve", "vgg16", [{"share": 0.75}, {"share": 0.5}, {"share": 0.4}, {"share": 0.3, "error": ""}], False),
        ("batch", "vgg16", [{"batch_size": size} for size in (4, 8, 16, 32)], False),
        ("scalability", "vgg16", {"1": {}, "2": {}, "3": {}, "4": {}}, True),
        ("mixed", None, {"tensile": {"error": TIME_IS_UP}}, False),
    ],
)
def test_an_experiment_is_complete_if_all_figures_are_there(
    experiment: str, model: str | None, found: Any, complete: bool
) -> None:
    assert measured.is_complete(experiment, model, found, "gpu") is complete


def test_figures_stay_where_the_time_was_up_before_there_were_new_ones() -> None:
    up = {"error": TIME_IS_UP}
    assert paper.merged({"tensile": {"eor": 1.0}, "vdnn": {"eor": 2.0}}, {"tensile": up, "vdnn": {"eor": 3.0}, "auto": up}) == {
        "tensile": {"eor": 1.0},
        "vdnn": {"eor": 3.0},
        "auto": up,
    }
    assert paper.merged([{"share": 0.5, "eor": 1.0}], [{"share": 0.75, **up}, {"share": 0.5, **up}]) == [
        {"share": 0.75, **up},
        {"share": 0.5, "eor": 1.0},
    ]
    assert paper.merged({"eors": [1.0, 1.1]}, {"eors": [1.2, 1.3]}) == {"eors": [1.2, 1.3]}
    assert paper.merged(None, up) == up and paper.merged({"methods": 1}, up) == {"methods": 1}


# -- each run, once ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("results", ["one_program, auto"]),
        ("times", ["gpt", "one_program, row_major", "kept"]),
        ("peaks", ["one_program, auto", "preallocated"]),
        ("peaks", ["plain jit", "growing"]),
    ],
)
@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_row_of_a_run_is_measured_in_small(name: str, parts: Sequence[str], at_once: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    only = [part for one in parts for part in ("--only", one)]
    ended = CliRunner().invoke(gpu.main, [name, "--small", "--at-once", at_once, "-o", str(file), *only])
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(file.read_text())["rows"]
    assert "error" not in row and row["device"] == "cpu", row
    if name == "results":
        assert len(row["losses"]) == row["asked"]["steps"] == row["repeated_until"] and row["profile"]["kernels"] == 0
        assert all(one["off"] < 1e-2 for one in row["compared"])  # gradients are rounded differently
    if name == "times":
        assert row["pipelined"]["pipelined_ms"] > 0 < row["jit_pipelined"]["pipelined_ms"] and row["peak_ratio"] <= 0.5


@pytest.mark.slow
def test_an_experiment_of_the_paper_is_measured_in_small_and_then_it_is_not_missing(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    command = ["measure", "--small", "--missing", "--experiment", "curve", "--experiment", "launches", "-o", str(file)]
    ended = CliRunner().invoke(paper.main, command)
    assert ended.exit_code == 0, ended.output
    document = json.loads(file.read_text())
    assert document["curve"]["vgg16"][0]["eor"] > 0 and set(document["launches"]) == {"gpt segments", "gpt program"}
    assert CliRunner().invoke(paper.main, command).output == ""
