"""Models by name: entry points of installed packages, listed without importing them."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import tensile_jax
from tensile_jax import installed_models
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.installed_models import GROUP, MODELS

NAMES = ["bert", "cnn", "densenet121", "gpt", "gpt_scan", "inceptionv3", "inceptionv4", "mlp", "resnet50", "vgg16"]


def install(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """As if packages with these entry points were installed; `a__b` is another entry point for `a`."""
    points = EntryPoints(EntryPoint(name.partition("__")[0], value, GROUP) for name, value in values.items())
    installed_models._found.cache_clear()
    monkeypatch.setattr(installed_models, "entry_points", lambda group: points.select(group=group))
    monkeypatch.setattr(installed_models, "_found", installed_models._found.__wrapped__)


def test_the_models_of_this_project_are_installed() -> None:
    assert list(MODELS) == NAMES
    assert len(MODELS) == 10
    assert "resnet" not in MODELS
    assert MODELS["mlp"](batch_size=4).name == "mlp"


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match="'resnet' is not known. Choose one of: bert, cnn, densenet121, gpt, gpt_scan, inceptionv3, inceptionv4, mlp, "
        "resnet50, vgg16",
    ):
        Entrypoint.of_model("resnet")
    with pytest.raises(KeyError):
        MODELS["resnet"]


def test_a_model_of_another_package_is_found_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, small="tensile_models.mlp:mlp", mlp="tensile_models.mlp:mlp")
    assert list(MODELS) == ["mlp", "small"]
    step, _, _ = Entrypoint.of_model("small", {"batch_size": 4}).make()
    assert step.__name__ == "train_step"


def test_a_name_that_two_packages_give_is_refused_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mlp="tensile_models.mlp:mlp", mlp__2="another.module:mlp")
    assert "mlp" in MODELS
    with pytest.raises(ImportError, match="'mlp' is installed twice: another.module:mlp .* Uninstall one of the packages"):
        MODELS["mlp"]


def test_a_model_that_cannot_be_imported_costs_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="no_such_module:model", mlp="tensile_models.mlp:mlp")
    assert MODELS["mlp"](batch_size=2).name == "mlp"
    with pytest.raises(ImportError, match="'broken' .no_such_module:model. cannot be imported: No module named"):
        MODELS["broken"]


def test_listing_the_models_loads_neither_jax_nor_a_model() -> None:
    script = """
import json, sys
from tensile_jax.installed_models import MODELS
print(json.dumps([list(MODELS), [name for name in ("jax", "flax", "optax", "numpy", "tensile_models") if name in sys.modules]]))
"""
    root = Path(tensile_jax.__file__).parents[1]
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(listed.stdout) == [NAMES, []]


def test_models_are_importable_under_their_own_name_only() -> None:
    script = "import tensile_models\ntry:\n    import models\nexcept ImportError:\n    print('no models')"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/", env=environment)
    assert done.stdout == "no models\n"
