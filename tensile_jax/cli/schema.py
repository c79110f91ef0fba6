"""`tensile schema`: the JSON Schema of what the other commands write."""

import click
import msgspec

from tensile_jax.cli.outcome import outcome_schema
from tensile_jax.schedule import plan_schema

_SCHEMAS = {"plan": plan_schema, "run": outcome_schema}


@click.command(short_help="Print a JSON Schema.")
@click.argument("document", metavar="plan|run", type=click.Choice(sorted(_SCHEMAS)))
def schema(document: str) -> None:
    """Print the JSON Schema of a saved plan, or of what `tensile run --json` prints."""
    click.echo(msgspec.json.format(msgspec.json.encode(_SCHEMAS[document]()), indent=1))
