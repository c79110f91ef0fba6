"""Jobs by name: what may be named, what may come back, and that every mistake names the entrypoint."""

import pickle
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tensile_jax.exec.actor.entrypoint import Entrypoint

HERE = __name__


def step(state: Any, batch: Any) -> Any:
    return state, batch


def pair(*, size: int, seed: int = 0) -> Any:
    return step, np.full(size, seed), [1, 2]


def raises(story: str) -> Any:
    raise KeyError(story)


def takes_wrong_type() -> Any:
    raise TypeError("mine")


def gives_two() -> Any:
    return step, 1


def gives_none() -> Any:
    return None


def gives_no_step() -> Any:
    return 3, 1, []


@dataclass
class Made:
    step: Any = staticmethod(step)

    def init(self) -> int:
        return 7

    def batches(self) -> list[int]:
        return [1]


class Nest:
    inner = Made


number = 3


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jobs_here", sys.modules[HERE])


def test_a_function_is_called_with_its_arguments() -> None:
    made, state, batches = Entrypoint("jobs_here:pair", {"size": 2, "seed": 5}).make()
    assert (made, state.tolist(), batches) == (step, [5, 5], [1, 2])


def test_a_model_is_taken_apart() -> None:
    made, state, batches = Entrypoint("jobs_here:Nest.inner").make()
    assert (made, state, list(batches())) == (step, 7, [1])


def test_a_model_is_made_by_its_name() -> None:
    made, state, batches = Entrypoint.of_model("mlp", {"batch_size": 4}).make()
    state, metrics = made(state, next(iter(batches())))
    assert int(state.step) == 1
    assert np.isfinite(metrics["loss"])


def test_it_crosses_to_another_process_as_it_is() -> None:
    one = Entrypoint("a.b:c", {"size": 2})
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one.name, Entrypoint("mlp").name, Entrypoint("a:B.c").name) == ("c", "mlp", "c")


def test_later_changes_of_the_arguments_are_not_seen() -> None:
    args = {"size": 2}
    one = Entrypoint("a:b", args)
    args["size"] = 3
    assert one.args == {"size": 2}


@pytest.mark.parametrize("target", ["", "a.b", "a:", ":b", "a b:c", "a:b()", "a.:b", "3:b", "a:b\n", 3])
def test_targets_that_cannot_be_read_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match=r"entrypoint .* cannot be read. Write package.module:function"):
        Entrypoint(target)


@pytest.mark.parametrize("args", [[1], {1: 2}, None])
def test_arguments_that_are_no_table_are_refused(args: Any) -> None:
    with pytest.raises(TypeError, match="args of entrypoint 'a:b' must be a table"):
        Entrypoint("a:b", args)


@pytest.mark.parametrize(
    ("target", "args", "kind", "story"),
    [
        ("no.such.module:f", {}, ImportError, "'no.such.module' cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
        ("jobs_here:absent", {}, ImportError, "'jobs_here' has no 'absent'"),
        ("jobs_here:Nest.absent", {}, ImportError, "'jobs_here' has no 'Nest.absent'"),
        ("jobs_here:number", {}, TypeError, "is int, and no function"),
        ("jobs_here:pair", {"seed": 1}, TypeError, r"missing a required .*argument.*It takes \(size, seed=0\)"),
        ("jobs_here:pair", {"size": 1, "sead": 1}, TypeError, "with size=1, sead=1 does not take these arguments"),
        ("jobs_here:raises", {"story": "mine"}, ValueError, "with story='mine' raised KeyError: 'mine'"),
        ("jobs_here:takes_wrong_type", {}, TypeError, "raised TypeError: mine"),
        ("jobs_here:gives_two", {}, TypeError, "returned a tuple of 2. It must return"),
        ("jobs_here:gives_none", {}, TypeError, "returned a NoneType. It must return"),
        ("jobs_here:gives_no_step", {}, TypeError, "returned a int for step"),
        ("mlp", {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ],
)
def test_what_goes_wrong_names_the_entrypoint(target: str, args: dict[str, Any], kind: type[Exception], story: str) -> None:
    with pytest.raises(kind, match=story) as raised:
        Entrypoint(target, args).make()
    assert type(raised.value) is kind
    assert f"entrypoint {target!r}" in str(raised.value)


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="model 'lenet' is not known. Choose one of: bert, cnn, densenet121, gpt"):
        Entrypoint.of_model("lenet")
    with pytest.raises(ValueError, match="model 'lenet' is not known"):
        Entrypoint("lenet").make()
