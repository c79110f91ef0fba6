"""What a jobs file may say, and where it is told that it may not."""

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.cli.jobs_file import AfterJob, DeviceTable, JobEntry, JobsFile, read_jobs_file
from tensile_jax.installed_models import MODELS

GOOD = """\
[device]
budget = "50%"
host_budget = "1GiB"
device_profile = "cpu"

[defaults]
steps = 20
args = {batch_size = 8, seed = 1}
model = "cnn"
checkpoint_every = 5

[[jobs]]

[[jobs]]
name = "late"
entrypoint = "package.module:Maker.make_job"
steps = 30
priority = 2
start_after = "cnn:10"
max_swap_rate = 0.5
max_slowdown = 1.5
checkpoint_every = 10
isolation = "process"
policy = "vdnn"
devices = 4
count = 2
[jobs.args]
seed = 2
"""


def read(tmp_path: Path, text: str) -> JobsFile:
    (tmp_path / "jobs.toml").write_text(text)
    return read_jobs_file(tmp_path / "jobs.toml")


def with_jobs(text: str) -> str:
    """A file of which line 3 is the first of `text`."""
    return '[device]\nbudget = "8GiB"\n' + text


def test_a_good_file_is_read_with_every_default_filled_in(tmp_path: Path) -> None:
    file = str(tmp_path / "jobs.toml")
    late = JobEntry(
        where=f"{file}, line 14: jobs[1]",
        name="late-1",
        model=None,
        entrypoint="package.module:Maker.make_job",
        args={"batch_size": 8, "seed": 2},
        steps=30,
        priority=2.0,
        start_after=AfterJob("cnn", 10),
        max_swap_rate=0.5,
        max_slowdown=1.5,
        checkpoint_every=10,
        isolation="process",
        policy="vdnn",
        devices=4,
    )
    first = JobEntry(
        where=f"{file}, line 12: jobs[0]",
        name="cnn",
        model="cnn",
        entrypoint=None,
        args={"batch_size": 8, "seed": 1},
        steps=20,
        priority=1.0,
        start_after=0.0,
        max_swap_rate=1.0,
        max_slowdown=None,
        checkpoint_every=5,
        isolation="thread",
        policy="auto",
    )
    assert read(tmp_path, GOOD) == JobsFile(
        file, DeviceTable(Budget(None, 0.5), 2**30, "cpu"), (first, late, dataclasses.replace(late, name="late-2"))
    )


def test_what_was_read_is_written_and_read_as_json(tmp_path: Path) -> None:
    jobs = read(tmp_path, GOOD)
    assert msgspec.json.decode(msgspec.json.encode(jobs), type=JobsFile) == jobs


def test_jobs_may_be_inline_tables_and_the_budget_bytes(tmp_path: Path) -> None:
    text = """device = {budget = 1000}
jobs = [
  {model = "mlp", steps = 1},
  {entrypoint = "m:f", steps = 2, start_after = "mlp"},
]"""
    jobs = read(tmp_path, text)
    assert jobs.device == DeviceTable(Budget(1000, None), None, None)
    assert [(job.name, job.steps, job.start_after) for job in jobs.jobs] == [("mlp", 1, 0.0), ("f", 2, AfterJob("mlp", None))]
    assert jobs.jobs[1].where.endswith("jobs.toml, line 4: jobs[1]")


def test_a_file_may_begin_with_a_byte_order_mark_and_end_its_lines_as_on_windows(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_jobs_file(tmp_path / "jobs.toml") == read(tmp_path, GOOD)


def test_jobs_may_wait_for_each_other_in_a_chain_and_for_a_copy(tmp_path: Path) -> None:
    text = """
[[jobs]]
name = "c"
model = "mlp"
steps = 4
start_after = "b-2:4"
[[jobs]]
name = "b"
count = 2
model = "mlp"
steps = 4
start_after = "a"
[[jobs]]
name = "a"
model = "mlp"
steps = 4
start_after = 2.5
"""
    starts = {job.name: job.start_after for job in read(tmp_path, with_jobs(text)).jobs}
    assert starts == {"c": AfterJob("b-2", 4), "b-1": AfterJob("a", None), "b-2": AfterJob("a", None), "a": 2.5}


NEITHER = "jobs[0] has neither model nor entrypoint. Add one"
JOB = '[[jobs]]\nmodel = "mlp"\n'  # lines 3 and 4
STEPS = JOB + "steps = 9\n"


@pytest.mark.parametrize(
    ("bad", "story"),
    [
        ("args = 3", "args must be a table of keyword arguments: got 3. For example: args = {batch"),
        ("args = {\"batch size\" = 3}", "args.batch size is not the name of an argument."),
        ("priority = 0", "priority must be a number above 0: got 0."),
        ("priority = inf", "priority must be a number above 0: got inf."),
        ("priority = nan", "priority must be a number above 0: got nan."),
        ("max_swap_rate = 1.1", "max_swap_rate must be a number above 0, at most 1: got 1.1."),
        ("max_swap_rate = 0", "max_swap_rate must be a number above 0, at most 1: got 0."),
        ("max_slowdown = 0.9", "max_slowdown must be a number of at least 1: got 0.9."),
        ("checkpoint_every = 0", "checkpoint_every must be a whole number of at least 1, of at most 18 digits: got 0."),
        ("isolation = 'fork'", 'isolation must be "thread" or "process": got "fork".'),
        ("policy = 'best'", 'policy must be one of: auto, capuchin, checkpoint, none, tensile, vdnn: got "best"'),
        ("devices = 0", "devices must be a whole number of at least 1, of at most 18 digits: got 0."),
        ("count = 0", "count must be a whole number from 1 to 1000: got 0."),
        ("name = 'a/b'", 'name must be 1 to 100 letters, digits, _, - and ., and begin with a letter'),
        ("name = '..'", 'name must be'),
        ("name = '-x'", 'name must be'),
        ("name = ''", 'name must be'),
        ("start_after = -1", "start_after must be seconds of at least 0, the name of another job, or"),
        ("start_after = 'a:0'", "start_after must be"),
        ("start_after = 'a b'", "start_after must be"),
        ("start_after = true", "start_after must be"),
        ("start_after = inf", "start_after must be"),
    ],
)  # fmt: skip
def test_a_value_that_a_key_cannot_have_is_named_with_its_line(bad: str, story: str, tmp_path: Path) -> None:
    with pytest.raises(tensile.JobsFileError) as caught:
        read(tmp_path, with_jobs(STEPS + bad))
    assert str(caught.value).startswith(f"{tmp_path}/jobs.toml, line 6: jobs[0].{story}")


@pytest.mark.parametrize(
    ("text", "line", "story"),
    [
        # tables
        ("", 1, "device.budget is missing: the memory that all jobs share. Add below [device], for example: budget = "),
        ("\n[device]\n[[jobs]]", 2, "device.budget is missing"),
        ("\ndevice = 3", 2, "device must be a table: got 3. Write its keys below [device]."),
        ("[device]\nbudget=1\n[devices]", 3, "devices is not a table of a jobs file. Did you mean device? Known: defaults, "),
        ("steps = 4", 1, "steps is not a table of a jobs file. Known: defaults, device, jobs."),
        (with_jobs("[jobs]\n"), 3, "jobs must be tables, one for each job: got one table. Head each of them with [[jobs]]."),
        (with_jobs(""), 1, "jobs must be tables, one for each job: there is none. Head"),
        (with_jobs("jobs = []").replace("[device]\n", "", 1).replace("budget", "device.budget"), 2, "jobs must be tables"),
        (with_jobs("[defaults]\nname = 'a'"), 4, "defaults.name is not a key of [defaults]. Known: args"),
        (with_jobs(JOB + "# stpes = 1\nstpes = 10"), 6, "jobs[0].stpes is not a key of a job. Did you mean steps? Known: args, "),
        (with_jobs(STEPS + JOB + "stpes = 10"), 8, "jobs[1].stpes is not a key of a job. Did you mean steps?"),
        # [device]
        ("[device]\nbudjet = 3", 2, "device.budjet is not a key of [device]. Did you mean budget?"),
        ("[device]\nbudget = 0", 2, "device.budget must be a number of bytes above zero, a size, or a share of the sum"),
        ("[device]\nbudget = 'lots'", 2, 'peaks: got "lots". For example: budget = "8GiB" or "50%"'),
        ("[device]\nbudget = 0.5", 2, "peaks: got 0.5. For example"),
        ("[device]\nbudget = true", 2, "peaks: got true. For example"),
        ("[device]\nbudget = 1\nhost_budget = '50%'", 3, 'above zero, or a size: got "50%"'),
        ("[device]\nbudget = 1\n\ndevice_profile = 'x'", 4, "device.device_profile: 'x' is not known. Known: a100, b200,"),
        # one job's keys
        (with_jobs(JOB + "steps = 0"), 5, "1, of at most 18 digits: got 0. For example: steps = 100"),
        (with_jobs(JOB + "steps = 1.5"), 5, "jobs[0].steps must be a whole number of at least 1, of at most 18 digits: got 1.5."),
        (with_jobs(JOB + "steps = true"), 5, "must be a whole number of at least 1, of at most 18 digits: got true."),
        (with_jobs(JOB), 3, "jobs[0].steps is missing. Add it here or to [defaults], for example: steps = 100"),
        (with_jobs("[[jobs]]\nmodel = 'alexnet'"), 4, f'a known model: {", ".join(MODELS)}: got "alexnet"'),
        (with_jobs("[[jobs]]\nentrypoint = 'no.colon'"), 4, 'must be a module and a function in it: got "no.colon"'),
        (with_jobs("[[jobs]]\nentrypoint = '../x:f'"), 4, "jobs[0].entrypoint must be"),
        (with_jobs("[[jobs]]\nsteps = 4"), 3, NEITHER),
        (with_jobs(JOB + "entrypoint = 'm:f'"), 5, 'jobs[0].entrypoint = "m:f": model and entrypoint exclude each other.'),
        (with_jobs("[defaults]\nentrypoint = 'm:f'\nmodel = 'mlp'"), 5, 'defaults.model = "mlp": model and entrypoint exclude'),
        (with_jobs("[defaults.args]\n1x = 3"), 4, "defaults.args.1x is not the name of an argument."),
        (with_jobs("[defaults]\n\npriority = -1"), 5, "defaults.priority must be a number above 0: got -1."),
        (with_jobs("[[jobs]]\nmodel = 'mlp'\nargs = {a = '''\n\n'''}\nsteps = 0"), 8, "jobs[0].steps must be"),
        # names
        (with_jobs(STEPS + STEPS), 6, 'jobs[1] has no name of its own and would be called "mlp", as is jobs[0], line 3.'),
        (with_jobs(STEPS + STEPS + "name = 'mlp'"), 9, 'jobs[1].name: "mlp" is the name of jobs[0], line 3, already.'),
        (with_jobs(STEPS + "count = 2\n" + STEPS + "name = 'mlp-2'"), 10, 'jobs[1].name: "mlp-2" is the name of jobs[0], line 3'),
        (with_jobs("[[jobs]]\nentrypoint = 'm:f\u00e4'\nsteps = 1"), 3, 'name is missing, and "f\u00e4" cannot be one.'),
        # start_after
        (with_jobs(STEPS + "name='a'\nstart_after = 'b'"), 7, ' waits for "b", and there is no such job. Known: a.'),
        (with_jobs(STEPS + "name='one'\nstart_after = 'ones'"), 7, "Did you mean one? Known: one."),
        (with_jobs(STEPS + STEPS + "name='b'\nstart_after = 'mlp:10'"), 10, "waits for step 10 of mlp, which does 9."),
        (with_jobs(STEPS + "start_after = 'mlp'"), 6, "jobs[0].start_after: mlp waits for itself: none would ever start."),
        (with_jobs("[defaults]\nstart_after = 'mlp'\n" + STEPS), 4, "defaults.start_after: mlp waits for itself"),
        (
            with_jobs(STEPS + "start_after = 'b:2'\n" + STEPS + "name = 'b'\nstart_after = 'mlp'"),
            6,
            "jobs[0].start_after: mlp waits for b, which waits for mlp: none would ever start.",
        ),
        # TOML itself
        ("[device]\nbudget = \n", 2, "Invalid value. Write it as TOML."),
        ("[device]\nbudget = 1\nbudget = 2\n", 3, "Cannot overwrite a value. Write it as TOML."),
        ("[device]\nbudget = '''\n", 2, "Expected \"'''\". Write it as TOML."),
        ("[device]\nbudget = 1" + "0" * 5000, 1, "Exceeds the limit"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, story: str, tmp_path: Path) -> None:
    with pytest.raises(tensile.JobsFileError) as caught:
        read(tmp_path, text)
    place = re.compile(rf"{re.escape(str(tmp_path))}/jobs\.toml, line {line}(, column \d+)?: ")
    messages = str(caught.value).splitlines()
    assert any(place.match(message) and story in message for message in messages), messages
    assert isinstance(caught.value, ValueError)


MISTAKEN = """\
[device]
budget = "lots"
[defaults]
polcy = "auto"
[[jobs]]
model = "mlpp"
stpes = 3
[[jobs]]
model = "cnn"
steps = 0
policy = "atuo"
isolation = "proces"
[[jobs]]
entrypoint = "m:f"
steps = 3
start_after = "cnn"
[[jobs]]
steps = 4
"""


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file_with_guesses_and_none_that_follows(tmp_path: Path) -> None:
    with pytest.raises(tensile.JobsFileError) as caught:
        read(tmp_path, MISTAKEN)
    places, guesses = [], []
    for message in str(caught.value).splitlines():
        found = re.fullmatch(rf"{re.escape(str(tmp_path))}/jobs\.toml, line (\d+): ([\w.\[\]]+).*", message)
        assert found, message
        places.append((int(found[1]), found[2]))
        guesses += re.findall(r"Did you mean (\w+)\?", message)
    assert places == [
        (2, "device.budget"), (4, "defaults.polcy"), (6, "jobs[0].model"), (7, "jobs[0].stpes"), (10, "jobs[1].steps"),
        (11, "jobs[1].policy"), (12, "jobs[1].isolation"), (17, "jobs[3]"),
    ]  # fmt: skip
    assert guesses == ["policy", "mlp", "steps", "auto", "process"]


def test_a_circle_of_jobs_is_one_mistake(tmp_path: Path) -> None:
    text = STEPS + "start_after = 'b'\n" + STEPS + "name = 'b'\nstart_after = 'mlp'\n" + STEPS + "name = 'c'\nstart_after = 'x'"
    with pytest.raises(tensile.JobsFileError) as caught:
        read(tmp_path, with_jobs(text))
    circle, unknown = str(caught.value).splitlines()
    assert "none would ever start" in circle and "there is no such job" in unknown


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tensile.JobsFileError, match="nowhere.toml cannot be read: No such file or directory"):
        read_jobs_file(tmp_path / "nowhere.toml")
    with pytest.raises(tensile.JobsFileError, match="cannot be read: Is a directory"):
        read_jobs_file(tmp_path)
    (tmp_path / "noise.toml").write_bytes(b"[device]\n# \xff")
    with pytest.raises(tensile.JobsFileError, match="noise.toml, line 2: byte 0xff is not UTF-8"):
        read_jobs_file(tmp_path / "noise.toml")


def test_a_job_may_replace_the_default_kind_of_source(tmp_path: Path) -> None:
    text = "[defaults]\nentrypoint = 'm:f'\nsteps = 1\n[[jobs]]\n[[jobs]]\nmodel = 'mlp'"
    jobs = read(tmp_path, with_jobs(text)).jobs
    assert [(job.name, job.model, job.entrypoint) for job in jobs] == [("f", None, "m:f"), ("mlp", "mlp", None)]
