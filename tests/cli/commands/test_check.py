"""`tensile check`: a named model or a step of the user's own, under a plan and as plain jit."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main
from tests.checking.small_steps import has_form, spoil

OWN = """
import jax, jax.numpy as jnp

def train_step(w, x):
    def loss(w):
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)
    return w - 0.1 * jax.grad(loss)(w)

def make_step(batch_size=512):
    return jax.jit(train_step, donate_argnums=0), (jnp.eye(32), jnp.ones((batch_size, 32)))

def make_shapes():
    return train_step, (jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32))

def make_job():
    return lambda state, batch: (state - batch.mean(), {"loss": batch.sum()}), jnp.ones(3), [jnp.ones(5)]
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
    options = ["--device-profile", "cpu", "--steps", "2", "--timed-calls", "1"]
    return CliRunner().invoke(main, ["check", *arguments, *options], catch_exceptions=False)


def test_a_step_of_the_users_own_is_checked_under_a_budget(own: str) -> None:
    done = asked(f"{own}:make_step", "--budget", "80%", "-o", "check.json")
    assert done.exit_code == 0 and done.stdout.startswith("Check of 'train_step': agrees.")
    assert "running the plan: 2/2" in done.stderr and "running plain jit: 2/2" in done.stderr and "tracing" in done.stderr
    written = Path("check.json").read_text()
    assert str(tensile.CheckReport.from_json(written)) in done.stdout and "Written to check.json" in done.stdout
    schema = CliRunner().invoke(main, ["schema", "check"])
    jsonschema.validate(json.loads(written), json.loads(schema.stdout))


def test_a_plan_that_differs_ends_with_exit_code_1(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, has_form((32, 32), "float32"), lambda w: w + 1e-3)
    done = asked(f"{own}:make_step", "--policy", "none")
    assert done.exit_code == 1 and "differs. 1 of 1 outputs" in done.stdout and "DIFFERS  result " in done.stdout


def test_a_job_and_a_model_are_checked_with_their_own_arguments(own: str) -> None:
    job = asked(f"{own}:make_job", "--policy", "none")
    assert job.exit_code == 0 and "result[1]['loss']" in job.stdout
    model = asked("mlp", "--batch-size", "8", "--policy", "none")
    assert model.exit_code == 0 and "(20 arrays)" in model.stdout


def test_what_cannot_be_checked_is_refused_in_a_sentence(own: str) -> None:
    shapes = asked(f"{own}:make_shapes")
    assert shapes.exit_code == 2 and "Error: Argument w is a shape, float32[32, 32], and check runs the step." in shapes.stderr
    tight = asked(f"{own}:make_step", "--budget", "1KiB")
    assert tight.exit_code == 3 and "is too small for 'train_step'" in tight.stderr
    assert asked("rsnet50").exit_code == 2
    assert (shapes.stdout, tight.stdout) == ("", "")
