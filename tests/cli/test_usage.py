"""Whatever is typed: one line on stderr and an exit code. Nothing here trains, and nothing that is refused is read or written."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tensile_jax.cli.main import main
from tests.cli.plans import PLAN

_BEYOND = "9" * 400


def tensile(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def refused_in_one_line(result: Result, *, exit_code: int = 2) -> str:
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    return lines[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what cannot be read: binary, empty, a folder, a link to nowhere; each as .json and as .toml."""
    for suffix in ("json", "toml"):
        (tmp_path / f"binary.{suffix}").write_bytes(bytes(range(256)))
        (tmp_path / f"empty.{suffix}").write_bytes(b"")
        (tmp_path / f"folder.{suffix}").mkdir()
        (tmp_path / f"dangling.{suffix}").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", ["-1", str(2**63), str(2**64), _BEYOND, "9" * 5000, "1e3", "nan", ""])
@pytest.mark.parametrize("option", ["--seed", "--steps", "--batch-size", "--image-size"])
def test_a_number_beyond_its_range_is_refused(option: str, number: str) -> None:
    assert option in refused_in_one_line(tensile("run", "mlp", option, number))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "0.5", _BEYOND])
def test_a_slowdown_that_cannot_be_is_refused(value: str) -> None:
    refused = tensile("plan", "mlp", "--max-slowdown", value)
    assert refused.exit_code == 2
    assert [line for line in refused.stderr.splitlines() if line.startswith("Error: --max-slowdown must be")]


@pytest.mark.parametrize("kind", ["binary", "empty", "folder", "dangling"])
def test_a_file_that_cannot_be_read_is_refused_by_its_name(here: Path, kind: str) -> None:
    assert f"{kind}.json" in refused_in_one_line(tensile("show", f"{kind}.json"))
    assert f"{kind}.json" in refused_in_one_line(tensile("run", "mlp", "--plan", f"{kind}.json"))
    for command in ("run", "plan"):
        refused = tensile(command, f"{kind}.toml")
        assert (refused.exit_code, refused.stdout) == (2, "") and refused.stderr.startswith("Error: ")
        assert all(f"{kind}.toml" in line for line in refused.stderr.splitlines())
    (here / "jobs.toml").write_text(f'[device]\nbudget = 1\ndevice_profile = "{kind}.toml"\n[[jobs]]\nmodel = "mlp"\nsteps = 1\n')
    assert f"{kind}.toml" in refused_in_one_line(tensile("plan", "jobs.toml"))


@pytest.mark.parametrize(
    "line", [f"steps = {_BEYOND}", f"count = {_BEYOND}", f"priority = {_BEYOND}", f"start_after = {_BEYOND}", "steps = 1e400"]
)
def test_a_number_beyond_its_range_in_a_jobs_file_is_refused_by_its_line(here: Path, line: str) -> None:
    steps = "" if line.startswith("steps") else "\nsteps = 1"
    (here / "jobs.toml").write_text(f'[device]\nbudget = "1MiB"\n[[jobs]]\nmodel = "mlp"\n{line}{steps}\n')
    assert "jobs.toml, line 5" in refused_in_one_line(tensile("plan", "jobs.toml"))


@pytest.mark.parametrize("file", [".", "x" * 300, "none/plan.json", "empty.json/plan.json", "/proc/plan.json"])
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_done(here: Path, file: str) -> None:
    before = sorted(path.name for path in here.iterdir())
    for arguments in (["plan", "mlp", "-o"], ["run", "mlp", "--save-plan"], ["compare", "mlp", "--picture"]):
        assert arguments[-1].removeprefix("-o") in refused_in_one_line(tensile(*arguments, file))
    assert sorted(path.name for path in here.iterdir()) == before


def test_a_folder_for_what_is_compiled_that_cannot_be_made_is_refused(here: Path) -> None:
    assert "--compile-cache=/proc/here" in tensile("run", "mlp", "--compile-cache", "/proc/here").stderr
    refused = tensile("run", "mlp", "--compile-cache", "empty.json/here")
    assert refused.exit_code == 2 and "Traceback" not in refused.stderr


@pytest.mark.parametrize(("typed", "meant"), [("mpl", "mlp"), ("resnet", "resnet50"), ("GPT", "gpt"), ("vgg", "vgg16")])
@pytest.mark.parametrize("command", ["run", "plan", "compare"])
def test_a_model_that_does_not_exist_is_refused_with_the_one_that_was_meant(command: str, typed: str, meant: str) -> None:
    assert refused_in_one_line(tensile(command, typed)).endswith(f"Did you mean {meant}?")


_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
_VALUES = st.one_of(
    _TEXTS,
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "-", "--", "-1", "1e400", _BEYOND, "50%", "8GiB", ".", "..", "/", "plan.json", "mlp", "a.toml", "\x1b[2J"]
    ),
)


@st.composite
def command_lines(draw: st.DrawFn, known: dict[str, click.Command]) -> list[str]:
    """A command, some of its options with any values, and anything between them."""
    name = draw(st.sampled_from(sorted(known)))
    options = [option for parameter in known[name].params for option in parameter.opts if option.startswith("-")]
    pieces = st.one_of(
        _VALUES.map(lambda value: [value]),
        *([st.tuples(st.sampled_from(options), _VALUES).map(list)] if options else []),
        *([st.tuples(st.sampled_from(options), _VALUES).map(lambda pair: [f"{pair[0]}={pair[1]}"])] if options else []),
    )
    return [name, *(part for piece in draw(st.lists(pieces, max_size=4)) for part in piece)]


def check_a_line(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            PLAN.save("plan.json")
            result = tensile(*arguments)
        finally:
            os.chdir(before)
    assert result.exit_code in (0, 1, 2, 3)
    if result.exit_code:
        refused_in_one_line(result, exit_code=result.exit_code)


@given(
    command_lines({name: main.commands[name] for name in ("show", "schema", "status", "pause", "cancel", "budget", "picture")})
)
@settings(deadline=None, max_examples=60)
def test_no_arguments_are_more_than_one_line_for_commands_that_compute_nothing(arguments: list[str]) -> None:
    check_a_line(arguments)


@given(command_lines({name: main.commands[name] for name in ("run", "plan", "compare", "demo")}))
@settings(deadline=None, max_examples=60)
def test_no_arguments_are_more_than_one_line_with_help(arguments: list[str]) -> None:
    check_a_line([*arguments, "--help"])


# -- in a process of its own: the whole program, with its stdin, stdout and stderr --------------------------------------------


def run_in_a_shell(line: str, here: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`tensile` in the line of a shell stands for the program."""
    script = 'tensile() { "$PYTHON" -c "from tensile_jax.cli.program import start; start()" "$@"; }\n' + line
    known = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["bash", "-c", script], cwd=here, env={**known, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("line", "exit_code", "errors"),
    [
        ("tensile show plan.json | head -1; exit ${PIPESTATUS[0]}", 1, []),
        ("tensile show plan.json > /dev/full", 1, ["Error: No space left on device."]),
        ("tensile schema plan > /dev/full", 1, ["Error: No space left on device."]),
        ("tensile --help > /dev/full", 1, ["Error: No space left on device."]),
        ("tensile show plan.json >&- 2>&-", 0, []),
        ("tensile show nowhere.json 2> /dev/full", 1, []),
    ],
)
def test_what_is_printed_and_nobody_takes_ends_in_a_line_at_most(
    tmp_path: Path, line: str, exit_code: int, errors: list[str]
) -> None:
    PLAN.save(tmp_path / "plan.json")
    done = run_in_a_shell(line, tmp_path)
    assert (done.returncode, done.stderr.splitlines()) == (exit_code, errors)


@pytest.mark.parametrize(
    "stderr", ["2> >(true)", pytest.param("2> /dev/full", marks=pytest.mark.slow), pytest.param("2>&-", marks=pytest.mark.slow)]
)
def test_a_training_goes_on_when_nobody_reads_how_it_goes_on(tmp_path: Path, stderr: str) -> None:
    done = run_in_a_shell(f"tensile run mlp --batch-size 8 --steps 2 --json {stderr}", tmp_path)
    assert (done.returncode, done.stdout[:14]) == (0, '{"model":"mlp"')


_MISTAKE = """
from tensile_jax.cli.program import start
from tensile_jax.cli.commands.show import show
def mistaken(**arguments):
    raise LookupError("of our own")
show.callback = mistaken
start()
"""


def test_a_mistake_of_our_own_is_one_line_that_says_how_to_see_more(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    line = f"\"$PYTHON\" -c '{_MISTAKE.replace(chr(39), chr(34))}' show plan.json"
    short = run_in_a_shell(line, tmp_path)
    assert (short.returncode, short.stderr) == (1, "Error: LookupError: of our own. Set TENSILE_TRACEBACK=1 to see where.\n")
    long = run_in_a_shell(line, tmp_path, TENSILE_TRACEBACK="1")
    assert long.returncode == 1
    assert long.stderr.startswith("Traceback") and "in mistaken" in long.stderr


def test_a_mistake_of_our_own_is_not_hidden_from_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(**arguments: object) -> None:
        raise LookupError("of our own")

    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setattr(main.commands["show"], "callback", mistaken)
    with pytest.raises(LookupError):
        tensile("show", tmp_path / "plan.json")
