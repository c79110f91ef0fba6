"""`tensile schema`: the JSON Schema of what the other commands write."""

import click
import msgspec

from tensile_jax.cli.jobs_outcome import jobs_outcome_schema
from tensile_jax.cli.jobs_plan import jobs_plan_schema
from tensile_jax.cli.outcome import outcome_schema
from tensile_jax.plan_format import plan_schema

_SCHEMAS = {"plan": plan_schema, "plan-jobs": jobs_plan_schema, "run": outcome_schema, "run-jobs": jobs_outcome_schema}


@click.command(short_help="Print a JSON Schema.")
@click.argument("document", metavar="plan|plan-jobs|run|run-jobs", type=click.Choice(sorted(_SCHEMAS)))
def schema(document: str) -> None:
    """Print the JSON Schema of what plan and run write, for a model or (plan-jobs, run-jobs) for a file of jobs."""
    click.echo(msgspec.json.format(msgspec.json.encode(_SCHEMAS[document]()), indent=1))
