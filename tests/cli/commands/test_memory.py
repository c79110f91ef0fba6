"""`tensile memory`: what a named model or a function of the user's own needs."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main

OWN = """
import jax, jax.numpy as jnp

def forward(w, x):
    return jnp.tanh(x @ w)

def make_step(batch_size=4):
    return forward, (jnp.ones((8, 8)), jax.ShapeDtypeStruct((batch_size, 8), jnp.float32))

def make_job():
    return lambda state, batch: (state - batch.mean(), {"loss": 0.0}), jnp.ones(3), [jnp.ones(5)]

def wrong():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's, in the present folder."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments, "--device-profile", "cpu"], catch_exceptions=False)


def test_a_model_is_reported_on_as_text_json_and_page(tmp_path: Path) -> None:
    done = asked("mlp", "--batch-size", "8", "--compile", "-o", f"{tmp_path}/m.json", "--html", f"{tmp_path}/m.html")
    assert done.exit_code == 0 and "On the device at the peak" in done.stdout and "as XLA compiles it" in done.stdout
    report = tensile.MemoryReport.from_json((tmp_path / "m.json").read_bytes())
    assert str(report) in done.stdout and report.missed_donations == ()
    assert "<!doctype html>" in (tmp_path / "m.html").read_text()
    schema = CliRunner().invoke(main, ["schema", "memory"])
    jsonschema.validate(json.loads((tmp_path / "m.json").read_text()), json.loads(schema.stdout))


def test_a_function_of_the_users_own_is_named_by_its_module(own: str) -> None:
    done = asked(f"{own}:make_step", "--batch-size", "64")
    assert done.exit_code == 0 and "float32[64,8]" in done.stdout and f"{own}.py:5" in done.stdout
    assert "float32[4,8]" in asked(f"{own}:make_step").stdout
    assert asked(f"{own}:make_job").exit_code == 0


def test_the_largest_batch_of_a_function_of_the_users_own_is_found(own: str) -> None:
    found = CliRunner().invoke(
        main, ["max-batch", f"{own}:make_step", "--budget", "8KiB", "--device-profile", "cpu"], catch_exceptions=False
    )
    assert found.exit_code == 0 and "plain jit can run a batch of" in found.stdout


def test_what_makes_no_step_is_refused(own: str) -> None:
    for target, message in (
        (f"{own}:wrong", "must return (step, args), (step, state, batches) or a model. It returned a int"),
        (f"{own}:nothing", "has no 'nothing'"),
        ("no_such_module:f", "cannot be imported"),
        ("rsnet50", "Did you mean resnet50?"),
    ):
        refused = asked(target)
        assert (refused.exit_code, refused.stdout) == (2, "") and message in refused.stderr
    assert "--seed is for a model" in asked(f"{own}:make_step", "--seed", "1").stderr
