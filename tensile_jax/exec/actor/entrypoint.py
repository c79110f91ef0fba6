"""Defines `Entrypoint`: the name and arguments of a function that makes a job. The job's process calls this function.

An `Entrypoint` names the function by a `target`:

    target ::= package.module:function      called with `args`; returns the job's (step, state, batches), or a *model*:
                                            an object with `step`, `batches`, and `init`, which makes the state
             | name                         an installed model (`installed_models.py`), made with `args` as its sizes

An entrypoint is plain data. It can therefore be written to a file and sent to another process. Functions and arrays often cannot.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Self

from tensile_jax.installed_models import MODELS

_TARGET = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*(?:\.[^\W\d]\w*)*)\Z")
_NAME = re.compile(r"[^\W\d]\w*\Z")

Made = tuple[Callable[..., Any], Any, Any]
"""(step, state, batches), as `Runtime.submit` takes them."""


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """The function that makes a job, or the name of a model, and its arguments.

    >>> Entrypoint("mlp", {"batch_size": 8})
    Entrypoint('mlp', batch_size=8)
    """

    target: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or not (_TARGET.match(self.target) or _NAME.match(self.target)):
            raise ValueError(
                f"entrypoint {self.target!r} cannot be read. Write package.module:function, such as 'train.jobs:make_job', or "
                "the name of a model."
            )
        if not isinstance(self.args, Mapping) or not all(isinstance(key, str) for key in self.args):
            raise TypeError(f"args of entrypoint {self.target!r} must be a table of arguments by name, got {self.args!r}.")
        object.__setattr__(self, "args", dict(self.args))

    @classmethod
    def of_model(cls, name: str, args: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """The model `name`, with its sizes.

        Raises:
            ValueError: there is no such model.
        """
        if name not in MODELS:
            raise ValueError(f"model {name!r} is not known. Choose one of: {', '.join(MODELS)}.")
        return cls(name, args)

    @property
    def name(self) -> str:
        """The default name of a job that is made from this: the name of the function or of the model."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def __repr__(self) -> str:
        return f"Entrypoint({', '.join([repr(self.target), *(f'{key}={value!r}' for key, value in self.args.items())])})"

    def make(self) -> Made:
        """Imports the module, calls the function, and returns the job's (step, state, batches).

        Raises:
            ImportError: the module cannot be imported, or has no such function.
            TypeError: the target is no function, does not take these arguments, or returns something else.
            ValueError: there is no such model, or the function raised an error, which is the `__cause__`.
        """
        return self._step_state_batches(self.call())

    def call(self) -> Any:
        """Imports the module, calls the function, and returns what it returns.

        Raises:
            ImportError, TypeError, ValueError: as `make`, except for what the function returns.
        """
        function = self._function()
        try:
            inspect.signature(function).bind(**self.args)
        except TypeError as error:
            raise TypeError(f"{self._story} does not take these arguments: {error}. It takes {_signature(function)}.") from error
        try:
            made = function(**self.args)
        except TypeError as error:
            raise TypeError(f"{self._story} raised TypeError: {error}") from error
        except Exception as error:
            raise ValueError(f"{self._story} raised {type(error).__name__}: {error}") from error
        return made

    @property
    def _story(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.args.items())
        return f"entrypoint {self.target!r} with {given}" if given else f"entrypoint {self.target!r}"

    def _function(self) -> Callable[..., Any]:
        if ":" not in self.target:
            self.of_model(self.target)
            return MODELS[self.target]
        module, _, path = self.target.partition(":")
        try:
            found: Any = import_module(module)
        except Exception as error:
            raise ImportError(
                f"entrypoint {self.target!r}: module {module!r} cannot be imported: {type(error).__name__}: {error}. Is it on "
                "the path of Python modules (PYTHONPATH)?"
            ) from error
        for part in path.split("."):
            if not hasattr(found, part):
                raise ImportError(f"entrypoint {self.target!r}: {module!r} has no {path!r}. Name a function of the module.")
            found = getattr(found, part)
        if not callable(found):
            raise TypeError(
                f"entrypoint {self.target!r} is {type(found).__name__}, and no function. Name one that makes the job."
            )
        return found

    def _step_state_batches(self, made: Any) -> Made:
        if not isinstance(made, tuple) and all(callable(getattr(made, part, None)) for part in ("step", "init", "batches")):
            step, state, batches = made.step, made.init(), made.batches
        elif isinstance(made, tuple) and len(made) == 3:
            step, state, batches = made
        else:
            what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
            raise TypeError(f"{self._story} returned {what}. It must return (step, state, batches), or a model.")
        if not callable(step):
            raise TypeError(f"{self._story} returned a {type(step).__name__} for step. It must be a function (state, batch).")
        return step, state, batches


def _signature(function: Callable[..., Any]) -> str:
    names = [
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    return f"({', '.join(names)})"
