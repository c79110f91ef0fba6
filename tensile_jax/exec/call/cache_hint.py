"""Tells a user, once per process, that JAX's compilation cache would shorten a first call that took long."""

import threading

import jax

from tensile_jax.progress.display import DISPLAY
from tensile_jax.progress.screens import PREFIX

_LONG_S = 10.0
"""A first call that took less gives no hint."""


class CacheHint:
    """The hint, which is given once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = False

    def give(self, name: str, seconds: float) -> None:
        """Give the hint if the first call of the function `name` has taken long, and JAX keeps no executables."""
        if seconds <= _LONG_S or _keeps_executables():
            return
        with self._lock:
            given, self._given = self._given, True
        if not given:
            DISPLAY.say(
                f"{PREFIX}the first call of {name!r} took {seconds:.0f} s. With JAX's compilation cache, the next process starts "
                'in a fraction of that:\n    jax.config.update("jax_compilation_cache_dir", "/a/folder/of/yours")'
            )


CACHE_HINT = CacheHint()


def _keeps_executables() -> bool:
    """Whether the user has set JAX's compilation cache, or has turned it off."""
    return bool(getattr(jax.config, "jax_compilation_cache_dir", None)) or not getattr(
        jax.config, "jax_enable_compilation_cache", True
    )
