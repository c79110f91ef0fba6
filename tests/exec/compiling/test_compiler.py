"""Compiling leaves JAX's settings and options as the user has them."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tensile_jax.exec.compiling import compiler
from tensile_jax.exec.compiling.compiler import Compiler, Executable, Sizes, _short_compilations_cached, options_on
from tensile_jax.exec.compiling.segment_code import SegmentCode

NAME = "jax_persistent_cache_min_compile_time_secs"
LIMIT_S = 10.0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    """The user has a cache, which keeps what takes two seconds to compile."""
    before = jax.config.values["jax_compilation_cache_dir"], getattr(jax.config, NAME)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()  # JAX reads its folder once
    jax.config.update(NAME, 2.0)
    yield
    reset_cache()
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update(NAME, before[1])


def test_two_that_compile_at_once_put_the_users_settings_back(cache: None) -> None:
    """The one that began first ends first."""
    second_in, first_out = threading.Event(), threading.Event()

    def second() -> None:
        with _short_compilations_cached():
            second_in.set()
            assert first_out.wait(LIMIT_S)

    thread = threading.Thread(target=second)
    with _short_compilations_cached():
        thread.start()
        assert second_in.wait(LIMIT_S)
        assert getattr(jax.config, NAME) == 0
    first_out.set()
    thread.join(LIMIT_S)
    assert getattr(jax.config, NAME) == 2.0


@pytest.mark.parametrize("for_sizes", [False, True])
def test_plain_jit_is_kept_in_the_users_cache_though_it_compiles_quickly(cache: None, tmp_path: Path, for_sizes: bool) -> None:
    Compiler(jax.devices()[0]).begin_whole(jax.jit(lambda x: x * 3).trace(jnp.ones(7)), for_sizes=for_sizes).result(LIMIT_S)
    assert len(list(tmp_path.glob("*-cache"))) == 1


def test_what_the_user_sets_meanwhile_stays(cache: None) -> None:
    with _short_compilations_cached():
        jax.config.update(NAME, 5.0)
    assert getattr(jax.config, NAME) == 5.0


def test_a_failed_compilation_puts_them_back(cache: None) -> None:
    with pytest.raises(ZeroDivisionError), _short_compilations_cached():
        raise ZeroDivisionError
    assert getattr(jax.config, NAME) == 2.0


def test_on_a_gpu_xla_is_told_to_follow_the_plan_unless_the_user_says_otherwise() -> None:
    offload, limit = "xla_disable_automatic_host_compute_offload", "xla_gpu_memory_limit_slop_factor"
    assert options_on("cuda", None) == {offload: True, limit: 1000}
    given = {offload: False, limit: 95, "xla_cpu_enable_fast_math": True}
    assert options_on("gpu", given) == given


def test_on_a_cpu_no_option_is_added() -> None:
    assert options_on("cpu", None) is None
    assert options_on("cpu", {"xla_cpu_enable_fast_math": True}) == {"xla_cpu_enable_fast_math": True}


def test_xla_knows_the_options_that_are_added() -> None:
    compiled = jax.jit(jnp.sin, compiler_options=options_on("cuda", None)).lower(jnp.ones(2)).compile()
    assert compiled(jnp.zeros(2)).tolist() == [0.0, 0.0]


def test_ctrl_c_ends_a_call_while_xla_compiles_and_what_it_compiles_is_there_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, compiled = threading.Event(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def compile_slowly(lowered: object, call: object, **options: object) -> Executable:
        compiled.append(lowered)
        time.sleep(0.05)  # until the caller waits for this
        os.kill(os.getpid(), signal.SIGINT)
        assert may_end.wait(LIMIT_S)
        return Executable(jnp.sin, Sizes(0, 0, 0))

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    one, code = Compiler(jax.devices()[0]), SegmentCode(lambda x: (x,), (jax.ShapeDtypeStruct((2,), "float32"),), (), "same")
    try:
        with pytest.raises(KeyboardInterrupt):
            one.compile([code])
        assert len(one) == 0 and not may_end.is_set()
        may_end.set()
        assert [found.call for found in one.compile([code])] == [jnp.sin]
    finally:
        may_end.set()
        signal.signal(signal.SIGINT, before)
    assert len(compiled) == 1
