"""What passes between files are values: no file changes what another one has made, and no module changes while it is used.

Hidden state is what makes a package hard to carry on: a field that five files assign, a dictionary of the process that decides
what the next call does. So this reads the code of the package and looks for both.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensile_jax

PACKAGE = Path(tensile_jax.__file__).parent
FILES = sorted(file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py"))
_CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
MAY_ASSIGN = {
    "cli/commands/compare.py": {"table.caption"},
    "cli/commands/show.py": {"table.caption"},
    "cli/formatting.py": {"console.width"},
    "cli/program.py": {"_END.code", "warnings.formatwarning"},
    "exec/child_process/carried_exception.py": {"error.args"},
    "exec/runtime/runtime.py": {"self._ending.atexit"},
    "nnx/function.py": {"self._flax.jitted_fn"},
    "plan/analysis/flow_network.py": {"residual.data"},
    "ray/device_jobs.py": {"sys.path"},
    "tracebacks.py": {  # an error has its traceback and its cause as attributes
        "cause.__cause__",
        "cause.__context__",
        "cause.__suppress_context__",
        "error.__cause__",
        "one.__traceback__",
    },
}
"""Attributes of objects of other packages, which offer no other way."""
MAY_CHANGE = {
    "atomic_file.py": {"_unfinished"},  # files to remove, whatever ends the process
    "device_profiles/calibrations.py": {"_models", "_only_here"},  # files that could not be written last as long as the process
    "exec/call/donated_before.py": {"_ALL"},  # what one function was given is used by another one
    "exec/checkpoint/folder_lock.py": {"_held"},  # locks that a forked process must let go
    "exec/child_process/payload.py": {"importing_main"},  # the main module is one for the process
    "exec/runtime/lane.py": {"_lanes"},  # threads to end, whatever ends the process
    "exec/compiling/compiler.py": {"_before", "_lowering"},  # JAX's settings are those of the process
}
"""The globals that change: of what the process itself has one."""


def own_attributes(tree: ast.Module) -> set[str]:
    """The attributes that the classes of a file have."""
    found: set[str] = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    pass
    return found


def assigned_from_outside(tree: ast.Module) -> Iterator[str]:
    """`name.attribute` of each attribute that the file assigns although none of its classes has it."""
    own = own_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield ast.unparse(node)


def changing_globals(tree: ast.Module) -> Iterator[str]:
    """The names of the module that its functions assign, or whose content they change."""
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        local = {a.arg for a in (*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs)} | {
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        declared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
        yield from declared
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in _CHANGES:
                    pass
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    pass
                case _:
                    continue
            if name in names and name not in local:
                yield name


@pytest.mark.parametrize("file", FILES)
def test_no_file_assigns_an_attribute_of_an_object_of_another_file(file: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    assert set(assigned_from_outside(tree)) <= MAY_ASSIGN.get(file, set())


@pytest.mark.parametrize("file", FILES)
def test_no_module_has_a_global_that_changes(file: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    assert set(changing_globals(tree)) <= MAY_CHANGE.get(file, set())
