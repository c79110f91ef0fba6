"""Writes a state as an ordinary orbax checkpoint, and reads it back bit for bit. Orbax can restore it without tensile_jax.

The checkpoint has the structure of the user's pytree, as orbax sees it. Most leaves are stored as they are. In these cases,
something else is stored:

    `jax.Array` of numbers       a NumPy array, so that the checkpoint names no device
    NumPy scalar                 an array without dimensions
    Python complex number        an array without dimensions
    Python int beyond 64 bits    a string
    uint4 and the like           an array of bytes, one for each number: tensorstore, which orbax writes with, has no such dtype
    empty array                  None, since orbax refuses empty arrays
    state without any leaf       {"state": None}, since orbax refuses a state without leaves
    state with ambiguous names   a list of its leaves: orbax gives {"a.b": x, "a": {"b": y}} one name, "a.b", for x and for y

A description of each leaf (`leaves.py`) says what the leaf was before. `format.py` writes these descriptions into the manifest, a
JSON file beside the orbax checkpoint. Importing this module imports orbax, which takes about a second. So `format.py` imports
this module only when a checkpoint is written or read.
"""

import asyncio
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from tensile_jax.exec.checkpoint.leaves import Leaf, from_host, keys_on_host, to_host

_types = ocp.type_handlers
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")  # in the texts of tensorstore's errors


def write_state(folder: Path, leaves: Sequence[Leaf], state: Any) -> None:
    """Write an orbax checkpoint of `state`, which `leaves` describes, as the new folder `folder`.

    Needs host memory for a copy of those arrays that NumPy cannot read in place, and no device memory.

    Raises:
        OSError: the operating system refuses to write, for example since the disk is full.
    """
    stored = [_to_stored(leaf, value) for leaf, value in zip(leaves, jax.tree.leaves(state), strict=True)]
    tree = _arranged(stored, state)
    if tree is None or not jax.tree.leaves(tree, is_leaf=lambda node: node is None):
        tree = {"state": None}
    scalars, strings, keys = _Scalars(), _types.get_type_handler(str), _types.get_type_handler(jax.Array)
    handlers = _types.create_type_handler_registry(
        (int, scalars), (float, scalars), (np.ndarray, _Arrays()), (str, strings), (jax.Array, keys)
    )
    with (
        _quiet_log(),
        ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)  # weights hardly compress
        ) as checkpointer,
    ):
        try:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
        except ValueError as error:
            code = _SYSTEM_ERROR.search(str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None  # of which tensorstore writes 500 characters


def read_state(folder: Path, leaves: Sequence[Leaf], like: Any) -> Any:
    """The state that `write_state` has written, in the structure of `like`; `leaves` describes what was written."""
    numbers: list[Any] = [None] * len(leaves)
    if any(leaf.has_numbers for leaf in leaves):
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = [None if 0 in leaf.shape else 0 for leaf in leaves]
        kinds = [None if 0 in leaf.shape else as_numpy if leaf.has_numbers else ocp.RestoreArgs() for leaf in leaves]
        args = ocp.args.PyTreeRestore(item=_arranged(wanted, like), restore_args=_arranged(kinds, like))
        with _quiet_log(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(folder, args=args)
        stored = jax.tree.structure(_arranged([0] * len(leaves), like)).flatten_up_to(found)
        numbers = [_from_stored(leaf, value) if leaf.has_numbers else None for leaf, value in zip(leaves, stored, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), map(from_host, leaves, numbers))


def _arranged(values: Sequence[Any], like: Any) -> Any:
    """`values`, one for each leaf of `like`, in the structure of `like`; a list if orbax would confuse two leaves."""
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(like)]
    return jax.tree.unflatten(jax.tree.structure(like), values) if len(set(names)) == len(names) else list(values)


def _to_stored(leaf: Leaf, value: Any) -> Any:
    """The value that is given to orbax for a leaf."""
    if 0 in leaf.shape:
        return None
    if leaf.kind in ("bool", "float"):
        return value
    if leaf.kind == "int":
        return value if -(2**63) <= value < 2**63 else str(value)
    if leaf.kind == "key":
        return keys_on_host(to_host(value), leaf.text)
    host = to_host(value)
    return host if _has_dtype(leaf.dtype) else host.view(np.uint8)


def _from_stored(leaf: Leaf, value: np.ndarray) -> np.ndarray:
    return value if leaf.kind == "key" or _has_dtype(leaf.dtype) else value.view(np.dtype(leaf.dtype))


def _has_dtype(name: str) -> bool:
    try:
        tensorstore.dtype(name)
    except (TypeError, ValueError):
        return False
    return True


class _AllAwaited:
    """Makes one of orbax's type handlers wait for all of its writes even if some fail.

    Orbax's own handlers stop waiting at the first failure. The other writes would then go on in the background while the files
    are removed, and each would print a traceback because nobody waits for it any more.
    """

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Write `values`. The result raises the first of the errors."""

        async def write(value: Any, info: Any) -> None:
            host = np.asarray(value)
            spec = _types.get_json_tspec_write(
                info, info.is_ocdbt_checkpoint, host.shape, host.shape, host.dtype, process_index=0
            )
            spec = {"dtype": host.dtype.name, **spec}  # orbax before 0.12.5 leaves it to another function
            array = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
            await array.write(host)

        return [_Written(await asyncio.gather(*map(write, values, infos), return_exceptions=True))]


class _Arrays(_AllAwaited, _types.NumpyHandler):
    """Writes NumPy arrays, without the copies of them that orbax's own handler makes."""


class _Scalars(_AllAwaited, _types.ScalarHandler):
    """Writes Python scalars."""


class _Written:
    """A future in the sense of orbax, for writes that are all over."""

    def __init__(self, outcomes: Sequence[BaseException | None]) -> None:
        self._errors = [outcome for outcome in outcomes if outcome is not None]

    def result(self, timeout: float | None = None) -> None:
        del timeout
        if self._errors:
            raise self._errors[0]


@contextmanager
def _quiet_log() -> Iterator[None]:
    """A `with` block in which orbax logs nothing: its log repeats, in several tracebacks, what the exception says."""
    logger = logging.getLogger("absl")

    def is_from_elsewhere(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    logger.addFilter(is_from_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_from_elsewhere)
