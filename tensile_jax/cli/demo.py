"""`tensile demo`, the main job: real training under a budget, beside plain `jax.jit`."""

from pathlib import Path

import click
import msgspec
from rich.console import Console

from tensile_jax.cli.demo_table import Case, Comparison, comparison_table
from tensile_jax.cli.progress import Live

# Digits: some twenty times through the 1,437 of them, at twice their size so that activations outweigh parameters by far.
CASES = (
    Case("digits CNN", "cnn", batch_size=256, image_size=16, steps=120, share=0.6, least_accuracy=0.97),
    Case("ResNet-50", "resnet50", batch_size=8, image_size=224, steps=3, share=0.5),
)


@click.command(short_help="The main job: train under a budget, beside plain jax.jit.")
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where the plans and the figures go.",
)
def demo(output: Path) -> None:
    """Train a CNN on handwritten digits and ResNet-50 on photographs, each plain and under a budget.

    Both ways begin with the same state and see the same batches. Exit code 1 if the CNN ends below 97 % test accuracy, or a
    budget is not kept. Takes a few minutes on two cores.
    """
    output.mkdir(parents=True, exist_ok=True)
    from tensile_jax.cli.demo_case import compare  # imports JAX

    with Live(Console(stderr=True)) as live:
        comparisons = [compare(case, folder=output, live=live) for case in CASES]
    results = output / "results.json"
    results.write_bytes(msgspec.json.format(msgspec.json.encode(comparisons), indent=1) + b"\n")
    report(comparisons)
    click.echo(f"Figures: {results}")
    shortcomings = [line for one in comparisons for line in one.shortcomings()]
    if shortcomings:
        raise click.ClickException(" ".join(shortcomings))  # exit code 1
    click.echo("Every budget was kept.")


def report(comparisons: list[Comparison]) -> None:
    """The table and the plans' files, on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 100)
    console.print(comparison_table(comparisons))
    for one in comparisons:
        click.echo(f"Plan of {one.case.name}: {one.plan_file}; see it with: tensile show {one.plan_file}")
