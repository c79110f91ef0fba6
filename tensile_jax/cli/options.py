"""Defines the options that several commands share: for a model and its sizes, a budget, the planning, and the files to write."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from tensile_jax.atomic_file import try_to_write
from tensile_jax.budget import parse_budget, parse_host_budget
from tensile_jax.cli.errors import Refusal, did_you_mean, in_options, refusing_options
from tensile_jax.errors import BudgetError
from tensile_jax.installed_models import MODELS, Model

if TYPE_CHECKING:  # at run time these would import NumPy
    from click.shell_completion import CompletionItem

    from tensile_jax.plan import PolicyName

_LARGEST = 2**63 - 1  # the largest integer that JAX and all readers of JSON accept
_SEED = click.IntRange(0, _LARGEST)
POSITIVE_COUNT = click.IntRange(1, _LARGEST)
_SIZE = click.IntRange(max=2**31 - 1)  # of a dimension of an array; each model checks the smallest size
_READS_TEXT = "gpt"
_JOBS_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model, and the sizes and the dtype that were typed. What is None is the model's default."""

    name: str
    batch_size: int
    image_size: int | None
    sequence_length: int | None
    dtype: str | None
    seed: int

    def __post_init__(self) -> None:
        if self.name == _READS_TEXT and self.image_size is not None:
            raise Refusal(f"--image-size={self.image_size} is not for {self.name}, which reads text. Use --sequence-length.")
        if self.name != _READS_TEXT and self.sequence_length is not None:
            raise Refusal(
                f"--sequence-length={self.sequence_length} is not for {self.name}, which reads images. Use --image-size."
            )

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.name}, batch {self.batch_size}"

    def build(self) -> Model:
        """Make the model. This imports JAX."""
        sizes = {"image_size": self.image_size, "sequence_length": self.sequence_length, "dtype": self.dtype}
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        make = MODELS[self.name]
        if self.dtype is not None and "dtype" not in inspect.signature(make).parameters:
            raise Refusal(f"--dtype={self.dtype} is not for {self.name}, which computes in one type only. Leave it out.")
        with refusing_options():
            return make(batch_size=self.batch_size, seed=self.seed, **given)


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget and how it may be kept, as `tensile_jax.jit` takes them."""

    budget: str | None
    policy: "PolicyName"
    device_profile: str | None
    state_memory: Literal["device", "any"]
    max_slowdown: float | None = None
    host_budget: str | None = None


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _gathered(name: str, make: Callable[..., Any], parameters: Collection[str], *decorators: _Decorator) -> _Decorator:
    """A decorator that adds `decorators`, which are options and arguments, to a command.

    The command gets one argument `name` instead of `parameters`, with the value `make(**parameters)`.
    """

    def decorator(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gathering(**values: Any) -> Any:
            taken = {parameter: values.pop(parameter) for parameter in parameters}
            return command(**{name: make(**taken)}, **values)

        return functools.reduce(lambda decorated, decorate: decorate(decorated), decorators, gathering)

    return decorator


# -- a model, a function of the user, or a file of jobs -----------------------------------------------------------------------

_SIZES = ("batch_size", "image_size", "sequence_length", "dtype", "seed")
_SIZE_OPTIONS = (
    click.option(
        "--seed",
        metavar="N",
        type=_SEED,
        default=0,
        show_default=True,
        help="Of the first state and the input.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="In which layers compute; parameters are float32. Without it: float32.",
    ),
    click.option("--sequence-length", metavar="N", type=_SIZE, help="Tokens in a row, for gpt."),
    click.option("--image-size", metavar="N", type=_SIZE, help="Pixels along each side of an image."),
    click.option("--batch-size", metavar="N", type=_SIZE, default=32, show_default=True, help="Images or texts in a step."),
)


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A function of the user, `module:function`, that makes a step. `batch_size` is what it is called with, if that was typed."""

    target: str
    batch_size: int | None

    @property
    def title(self) -> str:
        """What it is, for people."""
        return self.target if self.batch_size is None else f"{self.target}, batch {self.batch_size}"


_A_FUNCTION = "a function of yours that returns (step, args), such as train:make_step"
_PYTHON_SUFFIX = ".py"
_A_JOBS_FILE = "a file of jobs, which ends in .toml"


def _refuse_unknown(value: str, *others: str) -> None:
    """Raises: Refusal: `value` is no model; `others` are what it could be besides."""
    if value not in MODELS:
        if value.endswith(_PYTHON_SUFFIX) and _A_FUNCTION in others:
            raise Refusal(
                f"{value!r} is a file. Name a function in it that makes your step and returns (step, args), such as "
                f"{_module_of(value)}:make_step. docs/memory.md has an example."
            )
        known = f"neither a model ({', '.join(sorted(MODELS))}) nor {' nor '.join(others)}"
        raise Refusal(f"{value!r} is {known}.{did_you_mean(value.lower(), MODELS)}")


def _module_of(file: str) -> str:
    """The name by which Python imports a file of the folder in which the command was typed."""
    return ".".join(part for part in Path(file.removesuffix(_PYTHON_SUFFIX)).parts if part not in (".", ".."))


def _model_or_function(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    del ctx, parameter
    if ":" not in value:
        _refuse_unknown(value, _A_FUNCTION)
    return value


def _step_choice(name: str, batch_size: int, **sizes: Any) -> ModelChoice | OwnStep:
    if ":" not in name:
        return ModelChoice(name, batch_size, **sizes)
    module, _, function = name.partition(":")
    if module.endswith(_PYTHON_SUFFIX):
        raise Refusal(f"{name!r}: write the module without {_PYTHON_SUFFIX}: {_module_of(module)}:{function}")
    refuse_typed(tuple(sizes), f"is for a model, and {name} is a function. Leave it out.")
    return OwnStep(name, batch_size if _is_typed("batch_size") else None)


takes_step = _gathered(
    "source",
    _step_choice,
    ("name", *_SIZES),
    *_SIZE_OPTIONS,
    click.argument("name", metavar="MODEL|MODULE:FUNCTION", callback=_model_or_function),
)
"""Adds MODEL|MODULE:FUNCTION and the sizes of a model, handed to the command as `source`."""


def _is_typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def takes_step_or_jobs(
    *, for_jobs: Collection[str], for_both: Collection[str], own_steps: bool, required: bool = True
) -> _Decorator:  # fmt: skip
    """A decorator that adds the argument MODEL|JOBS.toml, with `own_steps` MODEL|MODULE:FUNCTION|JOBS.toml, and the sizes of a
    model.

    The command gets them as `source`: a `ModelChoice`, an `OwnStep`, the path of a jobs file, or None if the argument is not
    required and was not typed. `for_jobs` names the parameters of the command that are allowed with a jobs file only, and
    `for_both` those that are always allowed. All others are allowed with a model or a function only.
    """

    def is_own(source: str) -> bool:
        return own_steps and ":" in source and not source.endswith(_JOBS_SUFFIX)

    def known(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        del ctx, parameter
        if value is not None and not value.endswith(_JOBS_SUFFIX) and not is_own(value):
            _refuse_unknown(value, *([_A_FUNCTION] if own_steps else []), _A_JOBS_FILE)
        return value

    def make(source: str | None, **sizes: Any) -> ModelChoice | OwnStep | Path | None:
        if source is not None and not source.endswith(_JOBS_SUFFIX):
            what = "function" if is_own(source) else "model"
            refuse_typed(for_jobs, f"is for a jobs file, and {source} is a {what}. Leave it out.")
            return _step_choice(source, **sizes) if is_own(source) else ModelChoice(source, **sizes)
        names = (parameter.name or "" for parameter in click.get_current_context().command.params)
        for_model = {*names} - {"source", *for_jobs, *for_both}
        where = "a jobs file" if source is None else source
        refuse_typed(for_model, f"is for a model; {where} says that in keys of its own. Leave it out, or write it there.")
        return None if source is None else Path(source)

    metavar = "MODEL|MODULE:FUNCTION|JOBS.toml" if own_steps else "MODEL|JOBS.toml"
    argument = click.argument("source", metavar=metavar, required=required, callback=known)
    return _gathered("source", make, ("source", *_SIZES), *_SIZE_OPTIONS, argument)


def refuse_typed(names: Collection[str], story: str) -> None:
    """Raises: Refusal: one of these parameters was typed."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise Refusal(f"{max(parameter.opts, key=len)} {story}")


# -- a budget -----------------------------------------------------------------------------------------------------------------


def _readable_budget(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    del ctx
    if value is not None:
        try:
            parse_budget(value) if parameter.name == "budget" else parse_host_budget(value)
        except BudgetError as error:
            raise Refusal(in_options(str(error))) from error
    return value


device_profile_option = click.option(
    "--device-profile",
    metavar="NAME",
    help="Rates to plan with: a100, b200, cpu, h100, h200, l4, rtx4090, or a .toml file. Without it: those of this machine.",
)
state_memory_option = click.option(
    "--state-memory",
    type=click.Choice(["device", "any"]),
    default="device",
    show_default=True,
    help='"any": parameters and moments may wait in host memory.',
)
host_budget_option = click.option(
    "--host-budget",
    metavar="B",
    callback=_readable_budget,
    help='Host memory for what is swapped: bytes, or a size such as "8GiB". Without it: what is free, less a reserve.',
)


class _PolicyType(click.ParamType):
    """One of the names of policies. They are looked up when they are needed, since that imports NumPy."""

    name = "policy"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return _names_of_policies().get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return _names_of_policies().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        return _names_of_policies().shell_complete(ctx, param, incomplete)


def _names_of_policies() -> "click.Choice[str]":
    from tensile_jax.plan import PolicyName  # imports NumPy

    return click.Choice(get_args(PolicyName))


POLICY = _PolicyType()
takes_limits = _gathered(
    "limits",
    Limits,
    [field.name for field in fields(Limits)],
    state_memory_option,
    device_profile_option,
    click.option(
        "--policy",
        type=POLICY,
        default="auto",
        show_default=True,
        help='"auto" is the planner; the others are there to compare it with.',
    ),
    click.option(
        "--max-slowdown",
        metavar="X",
        type=float,
        help="Instead of a budget: the least memory for a step of at most X times plain jit's time.",
    ),
    host_budget_option,
    click.option(
        "--budget",
        metavar="B",
        callback=_readable_budget,
        help='Bytes, a size such as "1.2GiB", or a share of plain jit\'s peak, "60%". Without it: no limit.',
    ),
)
"""Adds the budget and how it may be kept, handed to the command as `limits`."""


# -- files --------------------------------------------------------------------------------------------------------------------


def writable_file(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A callback of an option: refuses, before the command does any work, a file that cannot be written."""
    del ctx
    name = max(parameter.opts, key=len)
    if value is None:
        return value
    try:
        if value.is_dir():
            raise Refusal(f"{name}={value} is a folder. Name a file in it.")
        if not value.parent.is_dir():
            raise Refusal(f"{name}={value}: there is no folder {value.parent}. Make it first.")
        try_to_write(value)
    except OSError as error:
        raise Refusal.of_path(error, f"{name}={value} cannot be written", "Name another file.") from error
    return value


def _writable_page(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """The same for a page, which also needs plotly."""
    if value is not None and find_spec("plotly") is None:
        raise Refusal("--html needs plotly: pip install 'tensile_jax[html]'")
    return writable_file(ctx, parameter, value)


html_option = click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=_writable_page,
    help="Write a page for a browser: one HTML file, which needs no network.",
)
"""Adds the file of a page, handed to the command as `html`."""
