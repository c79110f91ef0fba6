"""Every code block of the README, of CONTRIBUTING and of the pages in docs/ is run, so that what a reader copies works.

    python     is executed, each block by itself
    console    its `tensile` commands are run; of `make`, `pip` and `git` it is checked that what they name exists
    toml       is read as a jobs file
    text       is what the block above prints, but for numbers, lines of code and the segment's name

The blocks of a page are run in one folder, in their order. A comment above a block says what is different for the test:

    <!-- test: continues -->         a python block that goes on with the names of the block before
    <!-- test: file NAME -->         a python block that is also written to a file, which the commands of the page find
    <!-- test: a run in FOLDER -->   the commands steer a run, for which something stands in
    <!-- test: a cluster -->         there is a Ray cluster with two devices, which `--ray auto` finds
    <!-- test: needs PACKAGE -->     a python block that goes on, too, and is run only where the package is installed
    <!-- test: eight devices -->     the block runs in a process of its own, whose CPU stands in for eight devices
    <!-- test: two processes -->     the block runs in two processes, each with a CPU that stands in for four devices
    <!-- test: exit code N, ... -->  how the commands end

Commands are given a small model in the place of a large one, and a small jobs.toml. Programs are given fewer layers.
"""

import importlib
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from click.testing import CliRunner

from tensile_jax.cli.jobs_file import read_jobs_file
from tensile_jax.cli.main import main
from tensile_jax.cli.run.control import serving
from tests.builders import slow_if
from tests.cli.fake_run import FakeRun
from tests.cli.small_models import small_models
from tests.ray.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LONG = [
    ROOT / "docs" / f"{name}.md" for name in ("budgets-and-plans", "cluster", "command-line", "sharded")
]  # half a minute each
BLOCK = re.compile(r"(?:^<!-- test: (?P<note>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = re.compile(r"in [^\n]+ \(plain jit|at \w+\.(?:md|py):[\d:]+| *\d+(\.\d+)?( [KMG]?i?B)?")  # from machine to machine

SMALLER = {"resnet50": "mlp", "gpt": "mlp", "50%": "90%", "gs://bucket/runs/mine": "file://bucket"}
FEWER_LAYERS = {"(16, 128, 128)": "(8, 128, 128)", '"30%"': '"45%"', '"40%"': '"90%"'}  # where the least memory is a larger part
SMALL_JOBS = """
[device]
budget = "1GiB"
[[jobs]]
name = "cnn"
model = "mlp"
args = {batch_size = 8}
steps = 2
"""
OWN_JOB = """
[[jobs]]
entrypoint = "train:make_job"
steps = 2
"""


@dataclass(frozen=True)
class Block:
    """`place`: page and line, as an editor jumps to them."""

    place: str
    kind: str
    note: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("kind")) + 1
        yield Block(f"{page.name}:{line}", found["kind"], found["note"] or "", found["text"])


def programs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind == "python"]


class Reader:
    """Does what a reader of one page does, block by block, in the present folder."""

    def __init__(self, page: Path) -> None:
        self.names: dict[str, Any] = {}
        self.printed = ""
        own_job = ""
        for block in programs(page):
            if block.note.startswith("file "):
                file = Path(block.note.removeprefix("file "))
                file.write_text(block.text)
                sys.modules.pop(file.stem, None)  # the module of this name that another page has
                own_job = OWN_JOB
        Path("jobs.toml").write_text(SMALL_JOBS + own_job)

    def python(self, block: Block) -> None:
        if block.note == "eight devices":
            environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                [sys.executable, "-c", block.text], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            self.printed = done.stdout
            return
        if block.note == "two processes":
            self.printed = "".join(in_two_processes(fewer_layers(block.text)))
            return
        if block.note.startswith("needs ") and find_spec(block.note.removeprefix("needs ")) is None:
            compile(block.text, block.place, "exec")
            return
        if block.note != "continues" and not block.note.startswith("needs "):
            self.names = {"__name__": "__main__"}
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(fewer_layers(block.text), block.place, "exec"), self.names)  # noqa: S102 # our own page
        self.printed = printed.getvalue()
        if "last_loss" in self.names:
            assert self.names["last_loss"] < self.names["first_loss"], block.place
        if "job" in self.names:
            assert self.names["job"].status.state == "finished", block.place

    def text(self, block: Block) -> None:
        assert VARIES.sub("#", self.printed) == VARIES.sub("#", block.text), block.place

    def toml(self, block: Block) -> None:
        Path("of_the_page.toml").write_text(block.text)
        assert read_jobs_file("of_the_page.toml").jobs

    def console(self, block: Block) -> None:
        folder = Path(block.note.removeprefix("a run in "))
        code = re.match(r"exit code (\d+)", block.note)
        with serving(folder, FakeRun()) if block.note.startswith("a run in ") else nullcontext():
            for line in block.text.splitlines():
                assert line.startswith("$ "), f"{block.place}: {line!r} is no command"
                self.command(shlex.split(line[2:], comments=True), block.place, exit_code=int(code[1]) if code else 0)

    def command(self, words: list[str], place: str, *, exit_code: int) -> None:
        first, *rest = words
        if first == "tensile":
            with small_models() if rest[0] == "compare" else nullcontext():
                done = CliRunner().invoke(main, [SMALLER.get(word, word) for word in rest], catch_exceptions=False)
            assert done.exit_code == exit_code, f"{place}: {shlex.join(words)}: {done.stderr}"
            self.printed = done.stdout
        elif first == "ray":
            assert rest[0] == "start", place
        elif first == "make":
            targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in targets, f"{place}: there is no make {rest[0]}"
        elif first.endswith("pip"):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            asked = {name for word in rest for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")}
            assert asked <= set(extras), f"{place}: {asked}"
        else:
            assert first in ("git", ".venv/bin/python") or (ROOT / first).is_file(), f"{place}: {first}"


def fewer_layers(text: str) -> str:
    for many, fewer in FEWER_LAYERS.items():
        text = text.replace(many, fewer)
    return text


def in_two_processes(text: str) -> list[str]:
    """What a program prints in each of two processes, which take themselves for tasks of a Slurm job on this machine."""
    job = str(random.SystemRandom().randrange(2**20))  # jax.distributed takes the port from it
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",  # and compile quickly
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env={**environment, "SLURM_PROCID": task, "SLURM_LOCALID": task},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in ("0", "1")
    ]
    try:
        printed = [one.communicate(timeout=200) for one in running]
    finally:
        for one in running:
            one.kill()
    for one, (_, errors) in zip(running, printed, strict=True):
        assert one.returncode == 0, errors
    return [out for out, _ in printed]


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of one node with two devices."""
    ray: Any = pytest.importorskip("ray")
    with LocalCluster({"resources": {"tensile_device": 2}}) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        try:
            yield
        finally:
            ray.shutdown()  # before the cluster ends: Ray ends a process that is connected to a cluster that has ended


@pytest.mark.parametrize("page", slow_if(PAGES, *LONG), ids=lambda page: page.stem)
def test_every_block_of_the_page_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(page)
    needs_cluster = any(block.note == "a cluster" for block in blocks(page))
    with ray_cluster(monkeypatch) if needs_cluster else nullcontext():
        read(reader, page)


def read(reader: Reader, page: Path) -> None:
    for block in blocks(page):
        assert block.kind in ("python", "console", "toml", "text"), f"{block.place}: a block of kind {block.kind!r}"
        getattr(reader, block.kind)(block)


class Written:
    """Stands in for a writer of tensorboardX, or for a run of wandb. Keeps (step, loss) of each call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.losses: list[tuple[int, float]] = []
        self.is_open = False
        WRITTEN.append(self)

    def __enter__(self) -> "Written":
        self.is_open = True
        return self

    def __exit__(self, *_: Any) -> None:
        self.is_open = False

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:  # as tensorboardX has it
        assert self.is_open and tag == "loss"
        self.losses.append((global_step, float(scalar_value)))

    def log(self, data: dict[str, Any], *, step: int) -> None:  # as wandb has it
        assert self.is_open and list(data) == ["loss"] and isinstance(data["loss"], float)
        self.losses.append((step, data["loss"]))


WRITTEN: list[Written] = []


@pytest.mark.parametrize(("package", "name", "seed"), [("tensorboardX", "SummaryWriter", 2), ("wandb", "init", 3)])
def test_the_recipe_writes_the_loss_of_each_step(
    package: str, name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "several-jobs.md"
    first, *_ = programs(page)
    (recipe,) = [block for block in programs(page) if block.note == f"needs {package}"]
    assert len([line for line in recipe.text.splitlines() if line]) <= 5
    reader = Reader(page)
    reader.python(first)
    module: Any = ModuleType(package)
    setattr(module, name, Written)
    monkeypatch.setitem(sys.modules, package, module)
    exec(compile(recipe.text, recipe.place, "exec"), reader.names)  # noqa: S102 # our own page
    written, state, expected = WRITTEN.pop(), reader.names["weights"](seed), []
    for step in range(1, 21):
        state, metrics = jax.jit(reader.names["train_step"])(state, reader.names["images"][0])
        expected.append((step, pytest.approx(float(metrics["loss"]), rel=1e-5)))
    assert written.losses == expected and not written.is_open


def test_the_recipe_for_tensorboard_leaves_files_with_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    event: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "several-jobs.md"
    reader = Reader(page)
    for block in [programs(page)[0], *(block for block in programs(page) if block.note == "needs tensorboardX")]:
        reader.python(block)
    (file,) = (path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    content, steps = file.read_bytes(), []
    while content:  # a record: its length, a checksum of 4 bytes, an event, a checksum of 4 bytes
        length = int.from_bytes(content[:8], "little")
        found = event.FromString(content[12 : 12 + length])
        steps += [found.step for value in found.summary.value if value.tag == "loss"]
        content = content[16 + length :]
    assert steps == list(range(1, 21))


def test_the_page_of_frameworks_has_a_program_for_each() -> None:
    page = ROOT / "docs" / "frameworks.md"
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == ["Flax Linen", "Flax NNX", "Equinox", "Keras"]
    assert len([block for block in programs(page) if block.note != "continues"]) == 5
