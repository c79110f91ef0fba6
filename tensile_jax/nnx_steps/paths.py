"""Finds the path of each array in a user's NNX objects, such as `model.linear1.kernel`, from the pytrees that Flax makes of them.

Flax turns a step on NNX objects into a pure function of pytrees. In these pytrees, the arrays of a model are in a plain tuple, or
under keys that only Flax uses. So a path in the pytrees, such as `[0][0].states[0][3]`, means nothing to a person.

This module also finds the results that take the place of arguments in the next iteration. A Variable that the step was given and
a Variable that it returns are the same one if their paths agree. If the arrays of both have the same shape and dtype, the
Variable is state.

Flax makes one of two kinds of pure function. The options `graph` and `graph_updates` of `flax.nnx.jit` choose the kind:

    with graph updates     (args, kwargs) -> (args, kwargs, result); each object is a `flax.nnx.NodeStates`
    without graph updates  (args, kwargs) -> (result, updates); `updates` lists the Variables that have changed, by their paths
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    SequenceKey,
    all_leaves,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from tensile_jax.trace.step import Boundary, KeyPath, name_of

_ARGUMENTS, _NAMED, _RESULT = SequenceKey(0), SequenceKey(1), SequenceKey(2)
_FLAX_STATE = GetAttrKey("__state__")
_FLAX_VALUES = (GetAttrKey("value"), GetAttrKey("raw_value"))


@dataclass(frozen=True, slots=True)
class _Place:
    """Takes the place of the flat argument or result with this number, to find its path."""

    number: int


def boundary_with_updates(named: Sequence[str], args_info: Any, out_info: Any, static: Collection[int]) -> Boundary:
    """The boundary of a pure function with graph updates, whose parameters are `named`."""
    results = [_without_static(path, static) for path in _paths_in_objects(out_info)]
    return _boundary(named, args_info, out_info, _paths_in_objects(args_info), results)


def boundary_without_updates(named: Sequence[str], args_info: Any, out_info: Any, static: Collection[int]) -> Boundary:
    """The boundary of a pure function without graph updates, whose parameters are `named`."""
    arguments = [path_in_objects(path) for path, _ in tree_flatten_with_path(args_info)[0]]
    result, updates = out_info
    results = [path_in_objects((_RESULT, *path)) for path, _ in tree_flatten_with_path(result)[0]]
    for group in updates:
        for path, variable in zip(group.paths, group.leaves, strict=True):
            root = _ARGUMENTS if path[0].name == "args" else _NAMED
            results += [
                _without_static(path_in_objects((root, *path[1:], *inside)), static)
                for inside, _ in tree_flatten_with_path(variable)[0]
            ]
    return _boundary(named, args_info, out_info, arguments, results)


def _boundary(
    named: Sequence[str], args_info: Any, out_info: Any, arguments: Sequence[KeyPath], results: Sequence[KeyPath]
) -> Boundary:
    """Pairs arguments and results of the same path, shape and dtype."""
    before, after = tree_leaves(args_info), tree_leaves(out_info)
    position = {path: i for i, path in enumerate(arguments)}
    carried: list[tuple[int, int]] = []
    for o, path in enumerate(results):
        i = position.get(path)
        if i is not None and before[i].shape == after[o].shape and before[i].dtype == after[o].dtype:
            carried.append((i, o))
    return Boundary(
        [name_of(named, path) for path in arguments],
        ["result" + keystr(path[1:]) if path[0] == _RESULT else name_of(named, path) for path in results],
        sorted(carried),
    )


def _paths_in_objects(info: Any) -> list[KeyPath]:
    """The path of each leaf of `info` in the objects that Flax would make of it."""
    structure = tree_structure(info)
    numbered = tree_unflatten(structure, [_Place(number) for number in range(structure.num_leaves)])
    paths = [path for path, _ in tree_flatten_with_path(numbered)[0]]
    in_objects = {
        place.number for node in tree_leaves(numbered, is_leaf=_is_object) if _is_object(node) for place in tree_leaves(node)
    }
    for path, place in _places_in(nnx.from_tree(numbered, merge_fn=_merge, is_inner=False)):
        if place.number in in_objects:
            paths[place.number] = path
    return paths


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.NodeStates)


def _merge(context: nnx.MergeContext, path: Any, prefix: Any, leaf: Any) -> Any:
    return context.unflatten(leaf.graphdef, *leaf.states)


def leaves_in(arguments: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of `(args, kwargs)` of a step, also the arrays in NNX objects, with their paths in the user's objects.

    An array that several objects share comes several times.
    """
    for path, leaf in tree_flatten_with_path(arguments, is_leaf=is_nnx_object)[0]:
        if not is_nnx_object(leaf):
            yield path, leaf
            continue
        for inside, value in nnx.iter_graph(leaf, graph=True):
            if isinstance(value, nnx.Variable):
                held, _ = tree_flatten_with_path(value.get_raw_value())
                yield from (((*path, *map(_key, inside), *within), array) for within, array in held)
            elif all_leaves([value]):
                yield (*path, *map(_key, inside)), value


def is_nnx_object(value: Any) -> bool:
    """Whether it is an NNX object: a Module, an Optimizer, a Variable and the like."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _places_in(objects: Any) -> Iterator[tuple[KeyPath, _Place]]:
    for path, value in nnx.iter_graph(objects, graph=True):
        held = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        if isinstance(value, nnx.Variable | _Place):
            for inside, place in tree_flatten_with_path(held)[0]:
                if isinstance(place, _Place):
                    yield (*_keys(path), *inside), place


def _keys(path: Sequence[Any]) -> KeyPath:
    """A path of Flax as a key path. `(0, 1, "layers", 0, "kernel")` is `.layers[0].kernel` of the second positional argument."""
    root, *rest = path
    if root == _NAMED.idx:
        return (_NAMED, DictKey(rest[0]), *map(_key, rest[1:]))
    return (SequenceKey(root), *map(_key, rest))


def _key(part: Any) -> Any:
    if isinstance(part, int):
        return SequenceKey(part)
    return GetAttrKey(part) if isinstance(part, str) and part.isidentifier() else DictKey(part)


def path_in_objects(path: KeyPath) -> KeyPath:
    """`path` in pytrees that Flax has made of objects, without the keys that Flax has added."""
    if _FLAX_STATE in path:
        begin = path.index(_FLAX_STATE)
        path = (*path[:begin], *(_key(_part(key)) for key in path[begin + 1 :]))
    return path[:-1] if len(path) > 2 and path[-1] in _FLAX_VALUES else path


def _part(key: Any) -> Any:
    """The content of a key of `jax.tree_util`: a name, a number, or a key of a dictionary."""
    return next(getattr(key, held) for held in ("name", "idx", "key") if hasattr(key, held))


def _without_static(path: KeyPath, static: Collection[int]) -> KeyPath:
    """`path` with its argument counted among the traced ones. In its results, Flax counts the static arguments too."""
    if path[0] != _ARGUMENTS:
        return path
    place = path[1].idx
    return (_ARGUMENTS, SequenceKey(place - sum(number < place for number in static)), *path[2:])
