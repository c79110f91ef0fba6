"""`tensile schema`: prints the JSON Schema (version 2020-12) of what `tensile check`, `memory`, `plan` and `run` write."""

import click
import msgspec

from tensile_jax.cli.run.report import JobsOutcome, JointPlan, Outcome
from tensile_jax.plan_format import Plan

_WRITTEN = {
    "plan": ("tensile_jax plan", Plan),
    "plan-jobs": ("tensile plan JOBS.toml", JointPlan),
    "run": ("tensile run", Outcome),
    "run-jobs": ("tensile run JOBS.toml", JobsOutcome),
}


@click.command(short_help="Print a JSON Schema.")
@click.argument("document", metavar="check|memory|plan|plan-jobs|run|run-jobs", type=click.Choice(["check", "memory", *_WRITTEN]))
def schema(document: str) -> None:
    """Print the JSON Schema of what check, memory, plan and run write, for a step or (plan-jobs, run-jobs) a file of jobs."""
    if document == "memory":
        from tensile_jax.memory_report.report import MemoryReport

        title, written = "tensile_jax memory report", MemoryReport
    elif document == "check":
        from tensile_jax.checking.report import CheckReport

        title, written = "tensile_jax check", CheckReport
    else:
        title, written = _WRITTEN[document]
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **msgspec.json.schema(written)}
    click.echo(msgspec.json.format(msgspec.json.encode(made), indent=1))
