"""A plan that was saved with schema version 1, before segments had names of their own, can be used by later versions."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile

SAVED = Path(__file__).parent / "saved_plan_version_1.json"


def step(w: Any, x: Any) -> Any:
    """What the plan was made for: the name of the function and what it computes are part of the plan's fingerprint."""

    def loss(w: Any) -> Any:
        h = jnp.tanh(x @ w["a"])
        return ((h @ w["b"]) ** 2).mean()

    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, q: p - 0.1 * q, w, g), value


def test_a_plan_of_version_1_is_read_and_written_with_nothing_but_new_defaults(tmp_path: Path) -> None:
    plan = tensile.Plan.load(SAVED)
    assert [segment.name for segment in plan.segments] == ["segment_000", "segment_001", "segment_002"]
    plan.save(tmp_path / "again.json")
    new = {
        "budget_basis": "",
        "loops": [],
        "rates": "measured",
        "reason": "",
        "launch": "segments",
        "launches": None,
        "barriers": None,
        "devices": 1,
        "launch_us": 0.0,
        "host_peak_bytes": None,
        "host_budget_bytes": None,
        "donated": None,
        "jax_version": "",
        "allocator_bytes": None,
        "jit_step_us": None,
        "state_layout": "row_major",
        "layouts": None,
    }
    saved = json.loads(SAVED.read_text())
    new["tensors"] = [{**tensor, "host_bytes": None} for tensor in saved["tensors"]]
    new["segments"] = [{**segment, "allocator_bytes": 0} for segment in saved["segments"]]
    assert json.loads((tmp_path / "again.json").read_text()) == {**saved, **new}


def test_a_plan_of_version_1_runs_or_is_refused_with_the_reason() -> None:
    """Another version of jax may trace the step to another program."""
    rng = np.random.default_rng(0)
    w = {name: jnp.asarray(rng.normal(size=(256, 256)), jnp.float32) for name in "ab"}
    x = jnp.asarray(rng.normal(size=(64, 256)), jnp.float32)
    expected = jax.jit(step)(w, x)
    function = tensile.jit(step, plan=tensile.Plan.load(SAVED), donate_argnums=0)
    try:
        got = function(jax.tree.map(jnp.copy, w), x)
    except tensile.PlanFileError as refused:
        pytest.skip(str(refused)) if "was made for another program" in str(refused) else pytest.fail(str(refused))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
