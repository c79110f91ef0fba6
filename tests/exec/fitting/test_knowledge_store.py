"""Plans that an earlier process has confirmed are made again without a search, beside JAX's persistent compilation cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.knowledge import Entry, Knowledge
from tensile_jax.exec.fitting.knowledge_store import STORE, keep, kept_file, load
from tensile_jax.ir import TensorId
from tensile_jax.plan import Choice, CompiledSizes, Planner
from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Layout, Residency
from tensile_jax.plan.search.cost.workspace import Compared
from tests.builders import batch, fresh, low_budget, numbers, running, sgd_step, slow_but, weights

X = batch(rows=152)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans_are_not_kept: None) -> Iterator[Path]:
    """A folder in which JAX keeps what it compiles, and we what we plan."""
    monkeypatch.setattr(find_plan, "kept_file", kept_file)
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        yield tmp_path
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def budget() -> int:
    return low_budget(sgd_step, weights(5), X, part=0.5, donate_argnums=0)


def run(budget: int | str) -> tuple[Any, list[np.ndarray]]:
    """The function after its first call, and what that returned; nothing is known of the program but what is on the disk."""
    STORE.forget()
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    return function, list(numbers(function(fresh(weights(5)), X)))


def files(folder: Path) -> list[Path]:
    return sorted((folder / "tensile_jax").glob("*.json"))


def no_search(*_: Any) -> None:
    raise AssertionError("the planner searched")


def test_a_later_process_makes_the_same_plan_without_a_search(cache: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, expected = run(budget)
    assert len(files(cache)) == 1
    monkeypatch.setattr(Planner, "plan", no_search)
    monkeypatch.setattr(Planner, "revise", no_search)
    second, found = run(budget)
    assert running(second).plan == running(first).plan
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert running(second).plan.workspaces == "compiled"


def test_a_share_of_plain_jits_peak_is_known_to_a_later_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_plan, "_shown_ratio", lambda fitting: 0.1)  # as if far too much were predicted
    first, _ = run("85%")
    monkeypatch.setattr(Planner, "plan", no_search)
    second, _ = run("85%")
    plan = running(second).plan
    assert plan == running(first).plan
    assert plan.budget_basis is not None and plan.budget_basis.endswith("as compiled")
    assert plan.budget_bytes == int(0.85 * second.jit_peak_bytes(fresh(weights(5)), X))


def test_other_budgets_of_the_program_join_the_file(cache: Path, budget: int) -> None:
    first, _ = run(budget)
    higher, _ = run(int(1.1 * budget))
    (file,) = files(cache)
    kept = load(file)
    assert kept is not None
    assert [entry.limit for entry in kept.confirmed] == [budget, int(1.1 * budget)]
    assert [entry.peak_bytes for entry in kept.confirmed] == [running(f).plan.peak_bytes for f in (first, higher)]


@pytest.mark.parametrize("damage", slow_but([b"", b"{}", b"[1, 2", b"\xff\xfe", None], b"[1, 2", None))
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(cache: Path, budget: int, damage: bytes | None) -> None:
    first, _ = run(budget)
    (file,) = files(cache)
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"floor_bytes":', b'"floor_bytes":1') if damage is None else damage)
    assert load(file) is None
    second, _ = run(budget)
    assert running(second).plan == running(first).plan
    assert load(file) is not None


@pytest.mark.slow
def test_a_choice_that_is_none_of_the_step_is_not_taken(cache: Path, budget: int) -> None:
    first, _ = run(budget)
    (file,) = files(cache)
    kept = load(file)
    assert kept is not None
    last = kept.confirmed[0].choice.boundaries[-1]
    for boundaries in ((0, last - 1), (1, last), (0, last, last), (0, 1, last)):
        keep(file, Knowledge(confirmed=(Entry(budget, 1, Choice(Layout(boundaries, {}))),)), 1)
        second, _ = run(budget)
        assert running(second).plan == running(first).plan, boundaries


def test_nothing_is_written_without_a_local_cache(tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_plan, "kept_file", kept_file)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        run(budget)
        assert kept_file("a program") is None
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
        assert kept_file("a program") is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_warning(cache: Path, budget: int) -> None:
    (cache / "tensile_jax").write_text("this is no folder")
    STORE.forget()
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    with pytest.warns(RuntimeWarning, match="cannot be kept for later processes"):
        function(fresh(weights(5)), X)
    assert running(function).plan.peak_bytes <= budget


def test_what_is_kept_is_what_is_loaded(tmp_path: Path) -> None:
    several = (Residency(0, -1, BEGINS, True), Residency(3, 4, COPIED, False))
    layout = Layout((0, 7, 9), {TensorId(3): several, TensorId(5): (Residency(1, 2, MADE, False),)})
    shown = {(0, 7, frozenset({TensorId(3)}), frozenset({TensorId(5), TensorId(4)})): Compared(100, 92.5)}
    kept = Knowledge(CompiledSizes(shown, 30), (Entry(10.0, 9, Choice(layout)), Entry(20.0, 19, Choice(None))))
    keep(tmp_path / "new" / "file.json", kept, 8)
    found = load(tmp_path / "new" / "file.json")
    assert found is not None
    assert found.measured == kept.measured and found.floor_bytes == 8
    assert [(e.limit, e.peak_bytes, e.choice.key) for e in found.confirmed] == [
        (e.limit, e.peak_bytes, e.choice.key) for e in kept.confirmed
    ]
    assert load(tmp_path / "none.json") is None
