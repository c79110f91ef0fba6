"""Checkpoints: whatever a state is made of comes back bit for bit, and no crash, full disk or damage costs more than one."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

import tensile_jax as tensile
from tensile_jax.exec.checkpoint import orbax_state
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tests.builders import batch, device_bytes, optimizer_state, optimizer_step, weights

_SCALARS = (bool, int, float, complex)


@flax.struct.dataclass
class Training:
    params: Any
    count: Any
    name: str = flax.struct.field(pytree_node=False, default="training")


class Pair(NamedTuple):
    first: Any
    second: Any


class Unnamed:
    """A node of which JAX knows no names."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = first, second


jax.tree_util.register_pytree_node(Unnamed, lambda node: (node.parts, None), lambda _, parts: Unnamed(*parts))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def on_host(tree: Any) -> Any:
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)


def odd_floats(dtype: Any) -> np.ndarray:
    """Every pattern of bits for one byte, and some for more: NaNs of several kinds, signed zeros, subnormal numbers."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    raw = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else rng.integers(0, 256, 512, np.uint8)
    return np.concatenate([raw.view(dtype), np.zeros(1, dtype), -np.zeros(1, dtype)])


RARE_FLOATS = (
    ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu,
)  # fmt: skip

STATES: dict[str, Callable[[], Any]] = {
    "float32": lambda: {"w": jnp.asarray(odd_floats(np.float32)), "zeros": jnp.zeros((4, 5)), "minus": -jnp.zeros(3)},
    "narrow floats": lambda: [
        jnp.asarray(odd_floats(dtype)) for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    ],
    "narrow integers": lambda: [jnp.arange(-8, 8, dtype=jnp.int4), jnp.arange(16, dtype=jnp.uint4)],
    "rare dtypes": lambda: [odd_floats(name) for name in RARE_FLOATS] + [np.arange(3, dtype=np.uint16), np.zeros(2, np.int16)],
    "names that orbax would mix up": lambda: {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "c": jnp.zeros(0), "d": 2**80},
    "odd names": lambda: {"": jnp.ones(1), "..": jnp.zeros(1), "a/b": jnp.ones(2), "a": {"0": jnp.ones(3)}, "{0}": 1.5, "é\n": 1},
    "numbers for names": lambda: {3: jnp.ones(1), 4: [jnp.zeros(1), {0: np.int8(1)}]},
    "one array": lambda: jnp.arange(3),
    "one number": lambda: 5,
    "nodes without names": lambda: [Unnamed(jnp.ones(2), (np.zeros(1),)), Unnamed(None, 1)],
    "integers": lambda: [jnp.asarray([0, 1, 2**31], jnp.uint32), jnp.asarray([-128, 127], jnp.int8), jnp.asarray([True, False])],
    "complex": lambda: jnp.asarray([1 - 2j, complex("nan-infj")], jnp.complex64),
    "numpy": lambda: [odd_floats(np.float64), np.int64(7), np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">i4")],
    "empty arrays": lambda: {"a": jnp.zeros((0, 3), jnp.bfloat16), "b": np.zeros((2, 0)), "c": jnp.ones(2)},
    "nothing but empty": lambda: [jnp.zeros((0,)), None],
    "None itself": lambda: None,
    "no leaf": lambda: {"a": None, "b": ()},
    "scalars": lambda: [jnp.float32(1.5), jnp.asarray(True), jnp.bfloat16(2)],
    "weakly typed": lambda: [
        jnp.asarray(3),
        jnp.asarray(-0.0),
        jnp.full((2, 3), 1.5),
        jnp.asarray(float("nan")),
        jnp.asarray(1j),
    ],
    "python scalars": lambda: {"n": 2**80, "m": -1, "yes": True, "x": 0.1, "nan": float("nan"), "z": 1j, "none": None},
    "keys": lambda: [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), (2, 3)), jax.random.PRNGKey(3)],
    "containers": lambda: Training({"w": [jnp.ones(3), None]}, Pair(jnp.int32(1), (2.5,))),
    "optax": lambda: optimizer_state(optax.adamw(optax.linear_schedule(1e-3, 0, 10)), weights(2)),
    "nnx": lambda: nnx.state(Layer(nnx.Rngs(0))),
    "pinned": lambda: on_host([jnp.arange(5.0), jnp.asarray(odd_floats(jnp.bfloat16)), jnp.full((2,), 1.5), jax.random.key(4)]),
}


def expect_same(got: Any, saved: Any) -> None:
    """Leaf by leaf: kind, shape, dtype and bytes; and nothing of it in the device's memory."""
    assert jax.tree.structure(got) == jax.tree.structure(saved)
    for path, (there, here) in zip(
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(saved)],
        zip(jax.tree.leaves(got), jax.tree.leaves(saved), strict=True),
        strict=True,
    ):
        assert bits(there) == bits(here), path
        assert not isinstance(there, jax.Array) or there.sharding.memory_kind == "pinned_host", path


def bits(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) in _SCALARS:
        return type(leaf), np.asarray(leaf).tobytes() if type(leaf) is not int else leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    weak = isinstance(leaf, jax.Array) and leaf.weak_type
    host = np.asarray(leaf)
    return weak, host.dtype.newbyteorder("="), host.shape, host.astype(host.dtype.newbyteorder("=")).tobytes()


# -- round trips ------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    before = [bits(leaf) for leaf in jax.tree.leaves(state)]
    Checkpoints(tmp_path).save(3, state)
    assert [bits(leaf) for leaf in jax.tree.leaves(state)] == before
    reopened = Checkpoints(tmp_path)
    assert reopened.latest() == 3
    expect_same(reopened.restore(3, state), state)


def test_64_bits_come_back_where_jax_has_them(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state = [jnp.asarray(odd_floats(np.float64)), jnp.asarray(2**40), jnp.arange(3, dtype=jnp.uint64), jnp.full(2, 0.1)]
        Checkpoints(tmp_path).save(1, state)
        expect_same(Checkpoints(tmp_path).restore(1, state), state)


def test_shapes_and_dtypes_are_enough_to_restore_into(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "key": jax.random.split(jax.random.key(0)), "weak": jnp.asarray(1), "n": 3}
    Checkpoints(tmp_path).save(1, state)
    expect_same(Checkpoints(tmp_path).restore(1, jax.eval_shape(lambda: state)), state)


def test_the_state_before_the_first_step_is_enough_to_restore_into(tmp_path: Path) -> None:
    """It may hold scalars, NumPy's 64 bits and weak types, which a step turns into something else."""
    before = {"count": 0, "rate": 0.1, "w": np.zeros(3), "weak": jnp.asarray(0.0)}
    after = {"count": jnp.int32(1), "rate": jnp.asarray(0.2), "w": jnp.ones(3), "weak": jnp.float32(2)}
    Checkpoints(tmp_path).save(1, after)
    expect_same(Checkpoints(tmp_path).restore(1, before), after)


def test_a_restored_state_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    optimizer = optax.adam(1e-3)
    step = jax.jit(optimizer_step(optimizer))
    state, _ = step(optimizer_state(optimizer, weights(2)), batch())
    Checkpoints(tmp_path).save(1, state)
    restored = Checkpoints(tmp_path).restore(1, jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.map(bits, step(restored, batch())) == jax.tree.map(bits, step(state, batch()))


# -- what it costs, and where it runs ---------------------------------------------------------------------------------------


def test_neither_saving_nor_restoring_takes_device_memory(tmp_path: Path) -> None:
    state = {"here": weights(2), "there": on_host(weights(2, seed=1)), "key": jax.random.key(0)}
    checkpoints = Checkpoints(tmp_path)
    before = device_bytes()
    most: list[int] = []

    def measure(frame: Any, event: str, argument: Any) -> None:
        if event == "return" and "tensile_jax" in frame.f_code.co_filename:
            most.append(device_bytes())

    sys.setprofile(measure)
    try:
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, state)
    finally:
        sys.setprofile(None)
    assert max(most) == before
    assert {type(leaf) for leaf in jax.tree.leaves([restored["here"], restored["there"]])} == {np.ndarray}


def test_many_threads_save_at_once_without_a_word_and_leave_no_thread(tmp_path: Path, caplog: Any, capfd: Any) -> None:
    before = threading.enumerate()
    states = {f"job-{i}": [jnp.full((50, i + 1), i, jnp.int32), jax.random.key(i)] for i in range(4)}
    wrong: list[BaseException] = []
    together = threading.Barrier(len(states))

    def work(name: str) -> None:
        try:
            checkpoints = Checkpoints(tmp_path / name)
            together.wait()
            for step in (1, 2, 3):
                checkpoints.save(step, states[name])
            expect_same(checkpoints.restore(3, states[name]), states[name])
            checkpoints.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for thread in set(threading.enumerate()) - set(before):
        thread.join(1.0)  # one of asyncio's that runs no more may take 10 ms to end
    assert threading.enumerate() == before
    assert [record.getMessage() for record in caplog.records] == []
    assert tuple(capfd.readouterr()) == ("", "")


# -- which of them there are ------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    """What is there, but for the mark of the folder itself."""
    return sorted(path.name for path in folder.iterdir() if path.name != "tensile.json")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.latest() is None
    for step in (0, 5, 10, 100):
        checkpoints.save(step, [np.int32(step)])
    assert names(tmp_path / "new" / "folder") == ["10", "100"]
    assert checkpoints.latest() == 100
    assert checkpoints.restore(10, [np.int32(0)]) == [10]


def test_a_step_saved_again_replaces_itself_and_what_came_after_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, [np.int32(step)])
    checkpoints.save(2, [np.int32(20)])
    assert names(tmp_path) == ["1", "2-1"]
    assert checkpoints.latest() == 2
    assert checkpoints.restore(2, [np.int32(0)]) == [20]


def test_beside_the_bytes_lies_what_they_are(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "resnet").save(7, {"w": jnp.ones((2, 3))})
    mark = {"what": "checkpoints of tensile_jax", "format": 3, "job": "resnet"}
    assert json.loads((tmp_path / "resnet" / "tensile.json").read_text()) == mark
    assert json.loads((tmp_path / "resnet" / "7" / "tensile.json").read_text()) == mark
    said = json.loads((tmp_path / "resnet" / "7" / "manifest.json").read_text())["manifest"]
    assert (said["job"], said["step"], said["versions"]["jax"]) == ("resnet", 7, jax.__version__)
    assert said["leaves"] == [{"path": "state['w']", "kind": "array", "dtype": "float32", "shape": [2, 3], "text": ""}]
    state = tmp_path / "resnet" / "7" / "state"
    there = {str(path.relative_to(state)): path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert said["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in there.items()}


def test_what_is_the_users_in_the_folder_is_left_alone_and_is_no_checkpoint(tmp_path: Path) -> None:
    """Files and folders with numbers for names, links, and what lies inside a checkpoint."""
    users = tmp_path / "elsewhere"
    users.mkdir()
    folder = tmp_path / "job"
    for path in ("2024/thesis.txt", "1/notes/a.txt", ".tensile-writing-2-1/b.txt", ".tensile-removing-mine/c.txt", "3/state"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    for path in ("events.jsonl", "12.txt", "2", "99999999999999999999999999"):
        (folder / path).write_text(path)
    (folder / "4").mkdir()
    (folder / "5").symlink_to(users)
    before = contents(folder)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.remove_leftovers()
    assert (checkpoints.latest(), checkpoints.steps(), checkpoints.find_last()) == (None, (), (None, ""))
    for step in range(7):
        assert checkpoints.save(step, [np.int32(step)]) == ""
        assert checkpoints.latest() == step
        assert checkpoints.restore(step, [np.int32(0)]) == [step]
    assert contents(folder).items() >= before.items()
    assert checkpoints.steps() == (6,)
    (folder / "6" / "thesis.txt").write_text("mine")
    checkpoints.save(7, [np.int32(7)])
    checkpoints.save(8, [np.int32(8)])
    assert checkpoints.steps() == (8, 6)
    assert (folder / "6" / "thesis.txt").read_text() == "mine"
    assert list(users.iterdir()) == []


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, and every folder and link, by its path."""
    paths = [path for path in folder.rglob("*")]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in paths}


def test_a_folder_whose_mark_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensile.json").write_text("{}")
    with pytest.raises(tensile.CheckpointError, match="tensile.json is damaged, or not written by tensile_jax"):
        Checkpoints(tmp_path).save(1, [1])
    with pytest.raises(tensile.CheckpointError, match="cannot hold the checkpoints of a job"):
        FolderLock(tmp_path)
    assert contents(tmp_path) == {"tensile.json": b"{}"}


def test_a_job_without_readable_checkpoints_is_not_resumed_and_told_what_is_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, [np.arange(1000)])
    flip(data_file(tmp_path / "1"))
    (tmp_path / "2" / "manifest.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(tensile.CheckpointError) as caught:
        Checkpoints(tmp_path).find_last()
    assert str(caught.value) == (
        f"The job in {tmp_path} cannot be resumed: the checkpoint 2 cannot be read: it is damaged: [Errno 2] No such file or "
        f"directory: '{tmp_path}/2/manifest.json'; the checkpoint 1 cannot be read: {data_file(tmp_path / '1')} is not as "
        "it was written. Nothing was changed. Bring them back from a copy; or, to begin anew, move them away, give the job "
        "another name, or the runtime another folder."
    )
    assert contents(tmp_path) == before


def test_a_job_goes_on_from_an_older_checkpoint_and_keeps_the_damaged_one(tmp_path: Path) -> None:
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, [np.arange(1000)])
    flip(data_file(tmp_path / "2"))
    damaged = contents(tmp_path / "2")
    for step in range(2, 6):
        checkpoints = Checkpoints(tmp_path)  # as after a new start
        last, said = checkpoints.find_last()
        assert last == step - 1
        assert ("the checkpoint 2 cannot be read" in said) == (step == 2)
        checkpoints.save(step, [np.arange(1000)])
    assert names(tmp_path) == ["2", "4", "5"]
    assert contents(tmp_path / "2") == damaged


@pytest.mark.parametrize("newest", [True, False])
def test_what_a_later_version_has_written_stops_a_run_and_is_kept(tmp_path: Path, newest: bool) -> None:
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, [np.arange(1000)])
    reword(tmp_path / ("2" if newest else "1") / "tensile.json", b'"format":3', b'"format":4,"more":{}')
    if newest:
        with pytest.raises(
            tensile.CheckpointError, match="2 cannot be read: it was written by a later version.*Resume with that"
        ):
            Checkpoints(tmp_path).find_last()
    else:
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.find_last() == (2, "")
        for step in (3, 4):
            checkpoints.save(step, [1])
        assert names(tmp_path) == ["1", "3", "4"]


def test_a_checkpoint_under_another_name_is_no_other_step(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, [1])
    (tmp_path / "1").rename(tmp_path / "7")
    with pytest.raises(tensile.CheckpointError, match="it is that of step 1, and its folder was renamed"):
        Checkpoints(tmp_path).find_last()


def test_a_checkpoint_of_the_first_format_is_told_and_kept(tmp_path: Path) -> None:
    (tmp_path / "4" / "state").mkdir(parents=True)
    (tmp_path / "4" / "checkpoint.json").write_text('{"crc32": 1, "description": {"format": 1}}')
    with pytest.raises(tensile.CheckpointError, match="the checkpoint 4 cannot be read: .*tensile.json is missing"):
        Checkpoints(tmp_path).find_last()
    Checkpoints(tmp_path, keep=1).save(5, [1])
    assert names(tmp_path) == ["4", "5"]


def test_a_checkpoint_of_the_format_before_is_told_and_kept(tmp_path: Path) -> None:
    """That one had the bytes of all leaves in a file `state`."""
    (tmp_path / "4").mkdir()
    for folder in (tmp_path, tmp_path / "4"):
        (folder / "tensile.json").write_text('{"what":"checkpoints of tensile_jax","format":2,"job":"job"}')
    (tmp_path / "4" / "state").write_bytes(bytes(8))
    (tmp_path / "4" / "checkpoint.json").write_text('{"crc32": 1, "description": {"name": "job", "step": 4}}')
    before = contents(tmp_path / "4")
    story = (
        r"the checkpoint 4 cannot be read: it was written by an earlier version of tensile_jax \(format 2; this version reads 3\)"
    )
    with pytest.raises(tensile.CheckpointError, match=story):
        Checkpoints(tmp_path).find_last()
    assert Checkpoints(tmp_path).steps() == (4,)
    Checkpoints(tmp_path, keep=1).save(5, [1])
    assert names(tmp_path) == ["4", "5"]
    assert contents(tmp_path / "4") == before


# -- one run at a time --------------------------------------------------------------------------------------------------------


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(tensile.CheckpointError, match=f"{tmp_path} is in use by another job of this process. Two runs must not"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path({str(tmp_path)!r}))
print("held", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(tensile.CheckpointError, match=f"in use by another run, that of process {other.pid}"):
            FolderLock(tmp_path)
        other.kill()
    FolderLock(tmp_path).release()


def test_a_process_that_is_forked_does_not_hold_the_lock_on(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    theirs, ours = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and Python, about forks and threads
        pid = os.fork()
    if not pid:  # a data loader's worker, say
        os.write(theirs[1], b"1")
        os.close(ours[1])
        os.read(ours[0], 1)
        os._exit(0)
    assert os.read(theirs[0], 1) == b"1"
    with pytest.raises(tensile.CheckpointError, match="in use"):
        FolderLock(tmp_path)
    assert lock.descriptor is not None
    os.close(lock.descriptor)  # as when this process ends
    lock.descriptor = None
    FolderLock(tmp_path).release()
    for end in (*ours, *theirs):
        os.close(end)
    os.waitpid(pid, 0)


def test_orbax_may_leave_the_dtype_to_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = orbax_state._types.get_json_tspec_write  # pyright: ignore[reportPrivateUsage] # as in orbax 0.12.1 to 0.12.4

    def without_dtype(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in given(*args, **kwargs).items() if key != "dtype"}

    monkeypatch.setattr(orbax_state._types, "get_json_tspec_write", without_dtype)  # pyright: ignore[reportPrivateUsage]
    state = {"w": np.arange(6, dtype=np.float32), "narrow": jnp.ones(3, jnp.bfloat16), "count": 3}
    Checkpoints(tmp_path).save(1, state)
    expect_same(Checkpoints(tmp_path).restore(1, state), state)


def test_where_nothing_can_be_locked_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be locked .*Function not implemented"):
        FolderLock(tmp_path).release()


def test_a_file_of_the_users_with_the_locks_name_is_left(tmp_path: Path) -> None:
    (tmp_path / "tensile.lock").write_text("my own")
    with pytest.raises(tensile.CheckpointError, match="tensile.lock was not written by tensile_jax"):
        FolderLock(tmp_path)
    assert (tmp_path / "tensile.lock").read_text() == "my own"


# -- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "story"),
    [
        ({"a": jnp.ones(3), "c": jnp.ones(2)}, r"the checkpoint has state\['b'\] where `like` has state\['c'\]"),
        ({"a": jnp.ones(3)}, r"the checkpoint has state\['b'\], which `like` has not"),
        ({"a": jnp.ones(3), "b": jnp.ones(2), "c": 1}, r"`like` has state\['c'\], which the checkpoint has not"),
        ({"a": jnp.ones(3), "b": jnp.ones(4)}, r"state\['b'\] is float32\[2\] in the checkpoint and float32\[4\] in `like`"),
        ({"a": jnp.ones(3, jnp.bfloat16), "b": None}, r"state\['a'\] is float32\[3\] in .* and bfloat16\[3\] in `like`"),
        ({"a": jnp.ones(3), "b": jax.random.split(jax.random.key(0))}, r"float32\[2\] in the .* and key<fry>\[2\] in `like`"),
        ([jnp.ones(3), jnp.ones(2)], r"the checkpoint has state\['a'\] where `like` has state\[0\]"),
    ],
)
def test_another_structure_is_refused_by_the_first_path_that_differs(like: Any, story: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": jnp.ones(3), "b": jnp.ones(2)})
    with pytest.raises(tensile.CheckpointError, match=f"step 1 in {tmp_path} could not be restored: .*{story}.* Pass a state"):
        checkpoints.restore(1, like)


@pytest.mark.parametrize("leaf", ["text", object(), np.asarray(["text"]), np.asarray([1], object), np.zeros(1, "datetime64[s]")])
def test_what_is_neither_array_nor_number_is_refused_by_its_path(leaf: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is .* which no checkpoint holds. State is made of"):
        Checkpoints(tmp_path).save(1, {"a": [1, leaf]})
    assert names(tmp_path) == []


def test_arguments_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step must not be below zero, got -1"):
        Checkpoints(tmp_path).save(-1, [])


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, [])
    checkpoints.save(2, [])
    with pytest.raises(tensile.CheckpointError, match=r"step 3 .* there are those of steps \[1, 2\]") as caught:
        checkpoints.restore(3, [])
    assert (caught.value.folder, caught.value.step) == (str(tmp_path), 3)


def test_nothing_is_saved_once_closed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.close()
    with pytest.raises(tensile.CheckpointError, match="it was closed"):
        checkpoints.save(1, [])


# -- faults -----------------------------------------------------------------------------------------------------------------


def data_file(folder: Path) -> Path:
    """The file of a checkpoint that holds the numbers of the largest leaf."""
    return max((path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def reword(path: Path, old: bytes, new: bytes) -> None:
    before = path.read_bytes()
    assert old in before
    path.write_bytes(before.replace(old, new))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the data": lambda folder: flip(data_file(folder)),
    "data cut short": lambda folder: truncate(data_file(folder)),
    "data missing": lambda folder: data_file(folder).unlink(),
    "data too long": lambda folder: data_file(folder).write_bytes(data_file(folder).read_bytes() + b"0"),
    "a file of orbax missing": lambda folder: (folder / "state" / "_METADATA").unlink(),
    "a bit of orbax's own description": lambda folder: flip(folder / "state" / "_METADATA"),
    "all data missing": lambda folder: shutil.rmtree(folder / "state"),
    "mark missing": lambda folder: (folder / "tensile.json").unlink(),
    "mark cut short": lambda folder: truncate(folder / "tensile.json"),
    "description missing": lambda folder: (folder / "manifest.json").unlink(),
    "description cut short": lambda folder: truncate(folder / "manifest.json"),
    "description empty": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "description not text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"),
    "a word of the description": lambda folder: reword(folder / "manifest.json", b"float32", b"float16"),
    "of a later format": lambda folder: reword(folder / "tensile.json", b'"format":3', b'"format":4'),
    "all but the mark missing": lambda folder: (shutil.rmtree(folder / "state"), (folder / "manifest.json").unlink()),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_refused(name: str, tmp_path: Path) -> None:
    state = {"w": jnp.arange(1000.0)}
    Checkpoints(tmp_path).save(1, state)
    Checkpoints(tmp_path).save(2, state)
    DAMAGES[name](tmp_path / "2")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 1
    expect_same(checkpoints.restore(1, state), state)
    with pytest.raises(tensile.CheckpointError, match=r"step 2 in .* could not be restored: .* Restore an older one"):
        checkpoints.restore(2, state)
    checkpoints.save(2, state)
    expect_same(checkpoints.restore(2, state), state)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "folder")
    assert checkpoints.latest() is None
    for write in (lambda: checkpoints.save(4, [jnp.ones(3)]), lambda: FolderLock(tmp_path / "file" / "folder")):
        with pytest.raises(tensile.CheckpointError, match="/file/folder cannot hold the checkpoints of a job: .*Not a directory"):
            write()


def test_an_older_one_that_cannot_be_removed_is_told_though_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, [1])

    def refuse(self: Checkpoints, path: Path) -> None:
        raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(Checkpoints, "_remove", refuse)
    assert checkpoints.save(2, [2]) == f"an older checkpoint could not be removed: not allowed: {tmp_path}/1"
    assert checkpoints.latest() == 2
