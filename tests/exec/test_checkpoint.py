"""Checkpoints: whatever a state is made of comes back bit for bit, and no crash, full disk or damage costs more than one."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

import tensile_jax as tensile
from tensile_jax.exec.checkpoint import Checkpoints
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


STATES: dict[str, Callable[[], Any]] = {
    "float32": lambda: {"w": jnp.asarray(odd_floats(np.float32)), "zeros": jnp.zeros((4, 5)), "minus": -jnp.zeros(3)},
    "narrow floats": lambda: [
        jnp.asarray(odd_floats(dtype)) for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    ],
    "narrow integers": lambda: [jnp.arange(-8, 8, dtype=jnp.int4), jnp.arange(16, dtype=jnp.uint4)],
    "integers": lambda: [jnp.asarray([0, 1, 2**31], jnp.uint32), jnp.asarray([-128, 127], jnp.int8), jnp.asarray([True, False])],
    "complex": lambda: jnp.asarray([1 - 2j, complex("nan-infj")], jnp.complex64),
    "numpy": lambda: [odd_floats(np.float64), np.int64(7), np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">i4")],
    "empty arrays": lambda: {"a": jnp.zeros((0, 3), jnp.bfloat16), "b": np.zeros((2, 0)), "c": jnp.ones(2)},
    "nothing but empty": lambda: [jnp.zeros((0,)), None],
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
    assert threading.enumerate() == before
    assert [record.getMessage() for record in caplog.records] == []
    assert tuple(capfd.readouterr()) == ("", "")


# -- which of them there are ------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    said = json.loads((tmp_path / "resnet" / "7" / "checkpoint.json").read_text())["description"]
    assert (said["name"], said["step"], said["versions"]["jax"]) == ("resnet", 7, jax.__version__)
    assert said["leaves"] == [{"path": "state['w']", "kind": "array", "dtype": "float32", "shape": [2, 3], "text": ""}]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "12.txt").touch()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, [1])
    checkpoints.save(2, [1])
    assert names(tmp_path) == ["12.txt", "2", "events.jsonl"]


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
    """The largest: it holds the bytes of the leaves."""
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
    "another file missing": lambda folder: (folder / "state" / "_METADATA").unlink(),
    "description missing": lambda folder: (folder / "checkpoint.json").unlink(),
    "description cut short": lambda folder: truncate(folder / "checkpoint.json"),
    "description empty": lambda folder: (folder / "checkpoint.json").write_bytes(b""),
    "description not text": lambda folder: (folder / "checkpoint.json").write_bytes(b"\xff\x00"),
    "a word of the description": lambda folder: reword(folder / "checkpoint.json", b"float32", b"float16"),
    "of a later format": lambda folder: reword(folder / "checkpoint.json", b'"format": 1', b'"format": 2'),
    "all missing": lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()],
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
    with pytest.raises(tensile.CheckpointError, match="step 4 in .*/file/folder could not be saved: .*Not a directory") as caught:
        checkpoints.save(4, [jnp.ones(3)])
    assert isinstance(caught.value.__cause__, OSError)


def in_a_process(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run `code`, with step 1 saved before it, in a process of its own."""
    script = f"""
import os, signal
from pathlib import Path
import numpy as np, orbax.checkpoint as ocp
from tensile_jax.errors import CheckpointError
from tensile_jax.exec import checkpoint
checkpoints, state = checkpoint.Checkpoints(Path({str(folder)!r})), [np.arange(100_000)]
checkpoints.save(1, state)
{code}
"""
    arguments = [sys.executable, "-W", "error", "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)


def test_a_disk_that_is_full_is_told_and_the_next_save_succeeds(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; the kernel refuses to write beyond."""
    done = in_a_process(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, state)
except CheckpointError as error:
    print(error)
print(sorted(os.listdir(checkpoints.folder)), checkpoints.latest())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, state)
print(checkpoints.latest())
""",
        tmp_path,
    )
    told, rest = done.stdout.split("\n", 1)
    assert told.startswith(f"The checkpoint of step 2 in {tmp_path} could not be saved: ")
    assert "File too large" in told
    assert (rest, done.stderr, done.returncode) == ("['1'] 1\n3\n", "", 0)


KILLED_AT = {
    "while orbax writes": "owner, name = ocp.type_handlers.NumpyHandler, 'serialize'",
    "before orbax is done": "owner, name = ocp.PyTreeCheckpointHandler, 'finalize'",
    "before all is described": "owner, name = checkpoint, 'seal'",
    "before it has its name": "owner, name = checkpoint.Path, 'rename'",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_process_that_is_killed_while_saving_leaves_the_earlier_ones(moment: str, tmp_path: Path) -> None:
    done = in_a_process(
        f"""
{KILLED_AT[moment]}
setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
checkpoints.save(2, state)
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert len(names(tmp_path)) == 2
    checkpoints = Checkpoints(tmp_path)
    assert names(tmp_path) == ["1"]
    assert checkpoints.latest() == 1
    expect_same(checkpoints.restore(1, [np.zeros(100_000, np.int64)]), [np.arange(100_000)])


def test_what_a_living_process_writes_is_left_alone_when_the_folder_is_opened(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = [f".writing-2-{os.getpid()}", f".removing-1-{os.getppid()}"]
    for name in (*living, f".writing-2-{dead.pid}", ".writing-2-nobody"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).latest() is None
    assert names(tmp_path) == sorted(living)


def test_an_older_one_that_cannot_be_removed_is_told_though_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, [1])

    def refuse(self: Checkpoints, path: Path) -> None:
        raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(Checkpoints, "_remove", refuse)
    with pytest.raises(tensile.CheckpointError, match="not allowed"):
        checkpoints.save(2, [2])
    assert checkpoints.latest() == 2
