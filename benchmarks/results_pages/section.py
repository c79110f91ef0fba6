"""A section of a page of results, and the page that some sections make.

A section has one heading, one line that says on what, when, by which command and in which file, one table, and at most three
conclusions. A page begins with a table of its sections.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.paper.published import TITLES

RESULTS = Path(__file__).parents[1] / "results"
CPU = "CPU, 2 cores"
COMPILED = "compiled for an H200"
SIMULATED = "simulated H200"
MODELS: Mapping[str, str] = {
    **TITLES,
    "bert": "encoder",
    "cnn": "CNN",
    "gpt": "GPT-style decoder",
    "gpt_scan": "decoder, layers in a loop",
    "mlp": "MLP",
    "nnx_mixer": "Flax NNX MLP-mixer",
}


@dataclass(frozen=True, slots=True)
class Section:
    """What was measured, and its table.

    Args:
        title: The heading.
        on: The device, in a few words.
        when: A date, as `2026-11-26`, or two with "to" between them.
        command: What measures it again.
        file: The JSON file below `benchmarks/results`.
        headline: The figure that the summary shows.
        reading: How to read the table: the case, and what each column is relative to.
        table: The table in Markdown.
        conclusions: At most three, each of one sentence or a few.
    """

    title: str
    on: str
    when: str
    command: str
    file: str
    headline: str
    reading: str
    table: str
    conclusions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.conclusions) > 3:
            raise ValueError(f"Section {self.title!r} has {len(self.conclusions)} conclusions. At most three are read.")


@dataclass(frozen=True, slots=True)
class Group:
    """Sections that share a device: their heading, a line about them, and the functions that make them."""

    title: str
    about: str
    sections: Sequence[Callable[[], Section]]


def read(file: str) -> Mapping[str, Any]:
    """The JSON file below `benchmarks/results`."""
    return json.loads((RESULTS / file).read_text())


def day(document: Mapping[str, Any]) -> str:
    """The date on which a file was made."""
    return document["made"][:10]


def percent(share: float) -> str:
    """`0.75` as `75 %`."""
    return f"{100 * share:.0f} %"


def budget(text: str) -> str:
    """A budget as a benchmark notes it, for a cell."""
    return "none" if text == "none" else text.replace("%", " %")


def page(title: str, intro: str, groups: Iterable[Group]) -> str:
    """The page in Markdown."""
    made = [(group, [make() for make in group.sections]) for group in groups]
    rows = [
        (f"[{one.title}](#{_address(one.title)})<br>`{one.command}`", f"{one.on}<br>{one.when}", one.headline)
        for _, all_ in made
        for one in all_
    ]
    parts = [f"# {title}\n", intro.strip() + "\n", table(("what, and its command", "on, when", "result"), rows)]
    for group, sections in made:
        parts += [f"## {group.title}\n", group.about.strip() + "\n", *map(_written, sections)]
    return "\n".join(parts)


def _address(title: str) -> str:
    """The address of a heading, as MkDocs and GitHub write it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def _written(section: Section) -> str:
    name = section.file.rpartition("/")[2]
    origin = f"{section.on}, {section.when}, `{section.command}`, [`{name}`](../benchmarks/results/{section.file})."
    parts = [f"### {section.title}\n", f"*{origin[0].upper()}{origin[1:]}*\n", section.reading.strip() + "\n", section.table]
    if section.conclusions:
        parts.append("".join(f"- {one}\n" for one in section.conclusions))
    return "\n".join(parts)
