"""What a notebook shows of plans, reports, comparisons and statuses."""

from dataclasses import dataclass, replace
from html.parser import HTMLParser

import pytest

import tensile_jax as tensile
from tensile_jax import html_tables
from tensile_jax.runtime_records import JobReport, JobStatus, Status
from tests.builders import batch, planned, sgd_step, weights

ARGUMENTS = weights(3, 64), batch(rows=64, width=64)


class Cells(HTMLParser):
    """The rows of a table, each with the text of its cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@dataclass
class Run:
    peak_bytes: int
    step_us: float | None
    total_s: float
    steps_per_s: float
    name: str
    jobs: tuple[int, ...] = ()


def test_a_record_is_a_table_of_its_fields_with_units() -> None:
    assert Cells(html_tables.of_record(Run(1536, 2500.0, 1.25, 400.0, "<a> & b", (1, 2)))).rows == [
        ["peak", "1.5 KiB"], ["step", "2.5 ms"], ["total", "1.25 s"], ["steps a second", "400"], ["name", "<a> & b"],
    ]  # fmt: skip


def test_records_are_rows_of_one_table() -> None:
    found = html_tables.of_records([Run(0, None, 1.0, 2.0, "one"), Run(1024, 1.0, 1.0, 2.0, "two")])
    assert Cells(found).rows == [
        ["peak", "step", "total", "steps a second", "name", "jobs"],
        ["0 B", "-", "1 s", "2", "one", "()"],
        ["1 KiB", "0.001 ms", "1 s", "2", "two", "()"],
    ]
    assert html_tables.of_records([]) == ""


def test_a_plan_is_shown_as_it_is_printed() -> None:
    step = planned(sgd_step, ARGUMENTS, part=0.5, donate_argnums=0)
    plan = step.plan(*ARGUMENTS)
    assert repr(plan) == str(plan) and len(repr(plan)) < 2000
    assert "<pre>Plan of &#x27;sgd_step&#x27;" in plan._repr_html_()
    report = step.report()
    assert repr(report) == str(report) and "<pre>&#x27;sgd_step&#x27;: " in report._repr_html_()


@pytest.mark.slow
def test_a_comparison_has_a_row_for_each_plan() -> None:
    made = tensile.jit(sgd_step, donate_argnums=0).compare(*ARGUMENTS)
    rows = Cells(made._repr_html_()).rows
    assert rows[0] == ["budget", "policy", "peak", "step", "MSR", "EOR", "CBR", "swapped", "recomputed", "segments"]
    assert len(rows) == 3 + sum(len(at.entries) for at in made.budgets)


def test_a_status_has_a_table_of_the_runtime_and_one_of_its_jobs() -> None:
    job = JobStatus("train", "running", 1.0, 3, 10, 0.5, 2.0, 1024, 2048, 2048, 0, 0.0, 0, "")
    rows = Cells(Status(1.0, 4096, 0, 1024, 2048, 0, 0.0, 0.0, (job,))._repr_html_()).rows
    assert ["budget", "4 KiB"] in rows and ["peak", "2 KiB"] in rows
    assert rows[-1][:5] == ["train", "running", "1", "3", "10"]
    assert ["state", "running"] in Cells(job._repr_html_()).rows


def test_a_report_of_a_job_names_each_of_its_times() -> None:
    report = JobReport("a", 7, 1024, 2048, 3500.0, 2000.0, 1600.0, 512, 250.0, 0, 1, 12, 2)
    assert str(report).splitlines() == [
        "Job 'a': 1.25 times plain jit's time, predicted, both without other jobs",
        "  peak            1 KiB measured, 2 KiB predicted",
        "  a step takes",
        "          3.5 ms  measured from its begin to its end, with other jobs' launches in between",
        "          2.0 ms  predicted by the plan, without other jobs",
        "          1.6 ms  predicted of plain jit, without other jobs",
        "  in it           0.2 ms of waiting for copies",
        "  copies          512 B a step, both directions added up",
        "  so far          7 steps, 12 segments in the plan, 2 plans used",
        "  out of memory   1 allocation refused by the device; the step recovered",
    ]
    assert repr(report) == str(report) and "<pre>Job &#x27;a&#x27;: " in report._repr_html_()
    begun = replace(report, step_us=None, predicted_jit_step_us=None)
    assert str(begun).startswith("Job 'a': the time of plain jit is not known\n") and "of plain jit," not in str(begun)
