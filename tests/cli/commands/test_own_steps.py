"""`tensile memory|plan|compare|max-batch MODULE:FUNCTION`: the step of a function of the user's own."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main

OWN = """
import jax, jax.numpy as jnp

def forward(w, x):
    return jnp.tanh(x @ w)

def train(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w) ** 2))(w)

def make_step(batch_size=4):
    return forward, (jnp.ones((8, 8)), jax.ShapeDtypeStruct((batch_size, 8), jnp.float32))

def make_training(batch_size=256):
    return jax.jit(train, donate_argnums=0), (jnp.ones((32, 32)), jax.ShapeDtypeStruct((batch_size, 32), jnp.float32))

def make_job():
    return lambda state, batch: (state - batch.mean(), {"loss": 0.0}), jnp.ones(3), [jnp.ones(5)]

def make_nnx_step(batch_size=64):
    from flax import nnx
    @nnx.jit
    def nnx_step(layer, x):
        layer.bias[...] += 1.0
        return jnp.tanh(layer(x))
    return nnx_step, (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((batch_size, 8)))

def make_nnx_job():
    from flax import nnx
    import tensile_jax as tensile
    def nnx_step(layer, x):
        layer.bias[...] += 1.0
        return jnp.tanh(layer(x))
    return tensile.nnx.jit(nnx_step), (nnx.Linear(8, 8, rngs=nnx.Rngs(0)),), [jnp.ones((4, 8))]

def wrong(batch_size=1):
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


def asked(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, *arguments, "--device-profile", "cpu"], catch_exceptions=False)


def test_a_report_on_memory_names_the_lines_of_the_users_module(own: str) -> None:
    done = asked("memory", f"{own}:make_step", "--batch-size", "64")
    assert done.exit_code == 0 and "float32[64,8]" in done.stdout and f"{own}.py:5" in done.stdout
    assert "float32[4,8]" in asked("memory", f"{own}:make_step").stdout
    assert asked("memory", f"{own}:make_job").exit_code == 0


def test_a_plan_is_that_of_the_step_with_its_donation(own: str) -> None:
    done = asked("plan", f"{own}:make_training", "--budget", "85%", "-o", "plan.json")
    assert done.exit_code == 0, done.stderr
    plan = tensile.Plan.load("plan.json")
    assert plan.program == "train" and plan.donated == (0,) and plan.bound_us is not None and not plan.whole
    assert str(plan) in done.stdout and 'tensile.jit(step, plan=tensile.Plan.load("plan.json"))' in done.stdout
    assert asked("plan", f"{own}:make_training", "--batch-size", "512", "--budget", "80%", "-o", "larger.json").exit_code == 0
    assert tensile.Plan.load("larger.json").peak_bytes > plan.peak_bytes


def test_the_plan_of_a_job_donates_its_state(own: str) -> None:
    assert asked("plan", f"{own}:make_job", "-o", "plan.json").exit_code == 0
    assert tensile.Plan.load("plan.json").donated == (0,)


def test_policies_are_compared_on_the_step(own: str) -> None:
    done = asked("compare", f"{own}:make_training", "--batch-size", "64", "-o", "made.json")
    assert done.exit_code == 0, done.stderr
    assert f"{own}:make_training, batch 64 (cpu, state memory any, predicted)" in done.stdout.replace("\n", " ")
    made = json.loads(Path("made.json").read_text())
    assert made["program"] == "train" and len(made["budgets"]) == 6
    assert "planning with every policy: " in done.stderr


def test_the_largest_batch_is_found(own: str) -> None:
    found = asked("max-batch", f"{own}:make_step", "--budget", "8KiB")
    assert found.exit_code == 0 and "plain jit can run a batch of" in found.stdout
    assert "planning batches, in samples: " in found.stderr


@pytest.mark.parametrize(
    "command",
    [["memory"], ["plan"], ["compare"], ["max-batch", "--budget", "16KiB"], ["check", "--steps", "1", "--timed-calls", "1"]],
)
def test_every_command_takes_a_step_on_nnx_objects(own: str, command: list[str]) -> None:
    done = asked(*command, f"{own}:make_nnx_step")
    assert done.exit_code == 0, done.stderr
    assert ("layer.bias" in done.stdout) == (command[0] in ("memory", "check"))


@pytest.mark.parametrize("command", ["memory", "plan", "check"])
def test_a_job_on_nnx_objects_is_taken_as_its_runtime_trains_it(own: str, command: str) -> None:
    done = asked(command, f"{own}:make_nnx_job")
    assert done.exit_code == 0 and "Donations missed" not in done.stdout, done.stderr


@pytest.mark.parametrize("command", [["memory"], ["plan"], ["compare"], ["max-batch", "--budget", "8KiB"]])
def test_what_makes_no_step_is_refused(own: str, command: list[str]) -> None:
    for target, message in (
        (f"{own}:wrong", "must return (step, args), (step, state, batches) or a model. It returned a int"),
        (f"{own}:nothing", "has no 'nothing'"),
        ("no_such_module:f", "cannot be imported"),
        ("rsnet50", "nor a function of yours that returns (step, args), such as train:make_step"),
        ("code/own.py", "that makes your step and returns (step, args), such as code.own:make_step. docs/memory.md"),
        ("./own.py:make_step", "write the module without .py: own:make_step"),
        (f"{own}:train", "It takes (w, x). Name a function that makes your step: it returns (step, args)"),
        ("rsnet50", "Did you mean resnet50?"),
    ):
        refused = asked(*command, target)
        assert (refused.exit_code, refused.stdout) == (2, "") and message in refused.stderr
    assert "--seed is for a model" in asked(*command, f"{own}:make_step", "--seed", "1").stderr


def test_limits_of_an_own_step_that_contradict_each_other_are_refused(own: str) -> None:
    refused = asked("plan", f"{own}:make_training", "--budget", "80%", "--max-slowdown", "1.1")
    assert (refused.exit_code, refused.stdout) == (2, "") and "--max-slowdown" in refused.stderr
