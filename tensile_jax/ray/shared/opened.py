"""Opens the place for checkpoints that a user has named, by the path of a folder or by a URL (`open_place`)."""

import re
from pathlib import Path

from tensile_jax.arguments import shown
from tensile_jax.ray.shared.folder import SharedFolder
from tensile_jax.ray.shared.place import SharedPlace


def open_place(where: "str | Path") -> SharedPlace:
    """The place at a path or URL. Nothing is read there yet.

    Raises:
        TypeError: `where` is neither a text nor a path.
        ValueError: it is empty, or a URL of a kind that fsspec does not know or lacks a package for.
    """
    text = str(where)
    if not isinstance(where, str) and not hasattr(where, "__fspath__"):
        raise TypeError(f"checkpoints must be the path of a folder, or a URL, got {shown(where)}.")
    if isinstance(where, Path) and re.match(r"[a-z][a-z0-9+.-]+:/", text):
        raise ValueError(f"checkpoints={where!r}: a Path drops a slash of a URL. Pass the URL as a text.")
    if not text:
        raise ValueError('checkpoints="" names no folder. Name one that all nodes share, or a URL such as "gs://bucket/runs".')
    if "://" not in text:
        return SharedFolder(Path(text).absolute())
    from tensile_jax.ray.shared.object_store import ObjectStore  # imports fsspec

    return ObjectStore(text)
