"""Draws the experiments' figures: Markdown tables in `benchmarks/README.md`, whose text is `page.md`, and pictures.

A table holds one kind of figures only: predicted for a device, measured on a CPU, or measured on a GPU; the paper's own stand in
columns of their own. A cell such as `0.43 / 1.10` is MSR / EOR.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.markdown import table
from benchmarks.paper.published import FIRST, MIXED, MODELS, PHASES, SINGLE, TITLES, Figures
from tensile_jax.pages.policy_looks import LOOKS
from tensile_jax.pages.traces import GRAY

Document = Mapping[str, Any]


def draw(results: Path) -> None:
    """Write the page and its pictures from the files in `results`."""
    documents = read(results)
    for document in documents:
        if "curve" in document:
            _curves(document, results)
    (results.parents[1] / "README.md").write_text(text(documents))


def read(results: Path) -> Sequence[Document]:
    """The files in `results`, in the order in which the page shows them."""
    documents = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    documents.sort(key=lambda one: ("simulation" in one["measured_on"], "cpu" in one["measured_on"], one["measured_on"]))
    return documents


def text(documents: Sequence[Document]) -> str:
    """The page in Markdown."""
    pictures = [(f"{_title(one)}: time over memory saved", _picture(one)) for one in documents if "curve" in one]
    page = Path(__file__).with_name("page.md").read_text()
    page = page.replace("{origins}", table(("", "jax", "made", "sizes"), map(_origin, documents)).strip())
    page = page.replace("{pictures}", "\n\n".join(f"![{alt}](results/paper/{name})" for alt, name in pictures))
    for place, draw_one in _TABLES.items():
        drawn = ((_title(document), draw_one(document)) for document in documents)
        tables = "\n".join(f"**{title}**\n\n{one}" for title, one in drawn if one)
        page = page.replace(f"{{{place}}}", tables.strip() or "*Not measured yet.*")
    return page


# -- cells and tables -----------------------------------------------------------------------------------------------------------


def _is_predicted(document: Document) -> bool:
    return "simulation" in document["measured_on"]


def _title(document: Document) -> str:
    on = document["measured_on"]
    if on.startswith("compiled"):
        return "Memory of programs compiled for an H200, times predicted"
    if not _is_predicted(document):
        return "Measured on " + (
            f"a CPU{on.removeprefix('cpu')}" if on.startswith("cpu") else f"an {on.upper().replace('-', ' ')}"
        )
    return "Predicted for " + ("the paper's RTX A6000" if "a6000" in on else "an H200")


def _origin(document: Document) -> Sequence[str]:
    made = sorted(document["made"].values())
    sizes = document.get("sizes")
    small = "; ".join(f"{m}: {' '.join(f'{k}={v}' for k, v in one.items())}" for m, one in (sizes or {}).items() if one)
    return (
        _title(document),
        document["jax"],
        " to ".join(dict.fromkeys((made[0][:10], made[-1][:10]))),
        f"smaller: {small}" if small else "the paper's",
    )


def _pair(row: Any) -> str:
    """MSR / EOR of the paper's figures or of ours; a dash if there are none, and `fails` if it could not run."""
    if isinstance(row, Figures):
        return f"{row.msr:.2f} / {row.eor:.2f}"
    if not row:
        return "–"
    return f"{max(row['msr'], 0.0):.2f} / {row['eor']:.2f}" if "msr" in row else "does not fit" if "too_small" in row else "fails"


def _rows_of(document: Document, experiment: str) -> list[tuple[str, Any]]:
    """(model, figures) of every model of the paper that the experiment was run on."""
    found = document.get(experiment, {})
    return [(model, found[model]) for model in MODELS if found.get(model)]


# -- the experiments ------------------------------------------------------------------------------------------------------------


def _phases(document: Document) -> str:
    rows: list[Sequence[str]] = []
    for model, found in _rows_of(document, "phases"):
        for name, label in (("tensile", "TENSILE"), ("auto", "`auto`")):
            ours = [_pair(found[name][phase]) for phase in ("whole", "cold start", "updated")]
            paper = [_pair(one) if name == "tensile" else "" for one in PHASES[model]]
            rows.append((TITLES[model] if name == "tensile" else "", label, *paper, *ours))
    for model, found in [] if _is_predicted(document) else _rows_of(document, "single"):
        for name, label in (("tensile", "TENSILE"), ("auto", "`auto`")) if "tensile" in found else ():
            one = found.get(name, {})
            keys = ("whole_eor", "cold_eor", "eor")
            ours = [_pair({**one, "eor": one[key]} if "msr" in one else one) for key in keys]
            paper = [_pair(p) if name == "tensile" else "" for p in PHASES[model]]
            rows.append((TITLES[model] if name == "tensile" else "", label, *paper, *ours))
    head = ("model", "method", "paper: whole", "cold start", "after updating", "here: whole", "cold start", "after updating")
    return table(head, rows) if rows else ""


def _first(document: Document) -> str:
    rows: list[Sequence[str]] = []
    for model, found in _rows_of(document, "first"):
        ours = (f"{found['tensile']:.2f}", f"{found['auto']:.2f}", f"{found['capuchin']:.2f}")
        rows.append((*_first_of_paper(model), *ours, f"{found['tensile_planning_s']:.1f} s", f"{found['auto_planning_s']:.1f} s"))
    for model, found in [] if _is_predicted(document) else _rows_of(document, "single"):
        if "msr" in found.get("tensile", {}) and "msr" in found.get("auto", {}):
            tensile, auto = found["tensile"], found["auto"]
            ours = (f"{tensile['first_eor']:.2f}", f"{auto['first_eor']:.2f}", "–")
            rows.append((*_first_of_paper(model), *ours, f"{tensile['plan_s']:.1f} s", f"{auto['plan_s']:.1f} s"))
    head = ("model", "paper: TENSILE", "Capuchin", "prediction", "here: TENSILE", "`auto`", "Capuchin", "plan: TENSILE", "`auto`")
    return table(head, rows) if rows else ""


def _first_of_paper(model: str) -> Sequence[str]:
    paper = FIRST[model]
    return TITLES[model], f"{paper.tensile:.2f}", f"{paper.capuchin:.2f}", f"{paper.prediction_s:.1f} s"


def _single(document: Document) -> str:
    rows: list[Sequence[str]] = []
    for model, found in _rows_of(document, "single"):
        auto = found.get("auto at tensile's peak", found.get("auto"))
        names = ("unplanned", "vdnn", "capuchin", "tensile", "checkpoint")
        paper = [_pair(SINGLE[model][name]) for name in ("vdnn", "capuchin", "tensile")]
        rows.append((TITLES[model], *paper, *(_pair(found.get(name)) for name in names), f"**{_pair(auto)}**"))
    head = (
        "model",
        "paper: vDNN",
        "Capuchin",
        "TENSILE",
        "here: `unplanned`",
        "vDNN",
        "Capuchin",
        "TENSILE",
        "`checkpoint`",
        "`auto`",
    )
    return table(head, rows) if rows else ""


def _methods(found: Mapping[str, Any]) -> Sequence[str]:
    """vDNN, Capuchin, TENSILE, checkpoint, `auto` at TENSILE's peak, and under a budget of its own."""
    budget = next((row for name, row in found.items() if name.startswith("auto, ")), None)
    names = ("vdnn", "capuchin", "tensile", "checkpoint")
    return *(_pair(found.get(name)) for name in names), f"**{_pair(found.get('auto'))}**", _pair(budget)


_METHODS = ("vDNN", "Capuchin", "TENSILE", "`checkpoint`", "`auto`", "`auto` under its own budget")


def _scalability(document: Document) -> str:
    rows = [
        (TITLES[model] if jobs == "1" else "", jobs, *_methods(methods))
        for model, found in _rows_of(document, "scalability")
        for jobs, methods in found.items()
        if "error" not in methods
    ]
    return table(("model", "jobs", *_METHODS), rows) if rows else ""


def _mixed(document: Document) -> str:
    found = document.get("mixed")
    if not found or "error" in found:
        return ""
    if isinstance(found, list):  # one entry for each order
        names = found[0]["methods"]
        found = {
            name: {key: mean(one["methods"][name][key] for one in found) for key in ("msr", "eor")} for name in names
        }  # fmt: skip
    paper = (*(_pair(MIXED[name]) for name in ("vdnn", "capuchin", "tensile")), "–", "–", "–")
    return table(("", *_METHODS), [("paper", *paper), ("here", *_methods(found))])


def _batch(document: Document) -> str:
    rows = [
        (TITLES[model] if not index else "", str(row["batch_size"]), *(_pair(row.get(n)) for n in ("capuchin", "tensile")),
         f"**{_pair(row.get('auto'))}**")
        for model, found in _rows_of(document, "batch")
        for index, row in enumerate(found)
    ]  # fmt: skip
    return table(("model", "batch", "Capuchin", "TENSILE", "`auto`"), rows) if rows else ""


def _overhead(document: Document) -> str:
    rows: list[Sequence[str]] = []
    for model, found in _rows_of(document, "overhead"):
        for jobs, one in found.items():
            parts = (f"{one[key]:.2f}" for key in ("first_iteration", "waits_for_tensors", "recomputed"))
            rows.append((TITLES[model] if jobs == "1" else "", jobs, *parts, f"{one['swapped_bytes'] / 1e6:.0f} MB"))
    if rows:
        return table(("model", "jobs", "first iteration", "idle: waits for tensors", "recomputed", "copied"), rows)
    for model, found in _rows_of(document, "scalability"):
        for jobs, methods in found.items():
            one = methods.get("capuchin", {})
            if "idle" in one:
                idle = one["idle"] * one["eor"]
                rows.append((TITLES[model] if jobs == "1" else "", jobs, f"{idle:.2f}", f"{one['swapped_bytes'] / 1e6:.0f} MB"))
    return table(("model", "jobs", "idle: waits for tensors, and dispatch", "copied"), rows) if rows else ""


def _limits(document: Document) -> str:
    """The most memory that `auto` saves within two limits of the time."""
    rows: list[Sequence[str]] = []
    for model, found in [*_rows_of(document, "curve"), *_rows_of(document, "within")]:
        cells: list[str] = []
        for limit in (1.10, 1.60):
            within = [row for row in found if "msr" in row and row["eor"] <= limit]
            best = max(within, key=lambda row: row["msr"], default=None)
            # the bound grows as the share falls: no plan with as little memory as in these rows, or less, keeps the limit
            impossible = [1 - row["share"] for row in found if row.get("bound_eor", 0.0) > limit]
            cells += [_pair(best), f"{min(impossible):.2f}" if impossible else "–"]
        rows.append((TITLES[model], _pair(PHASES[model][2]), *cells))
    head = (
        "model",
        "paper, after updating",
        "`auto`: EOR up to 1.10",
        "no plan saves",
        "`auto`: EOR up to 1.60",
        "no plan saves",
    )
    return table(head, rows) if rows else ""


def _largest(document: Document) -> str:
    found = document.get("largest", {})
    if "error" in found:
        return ""
    by_model = {found["model"]: found} if "model" in found else found
    rows: list[Sequence[str]] = []
    for model, one in by_model.items():
        for index, (name, row) in enumerate(one["methods"].items()):
            label = f"{TITLES.get(model, model)}, {one['memory_bytes'] / 1e9:.2g} GB" if not index else ""
            rows.append((label, f"`{name}`", str(row["batch_size"]), f"{row.get('times_jit', 1):.2f}",
                         f"{row['samples_per_s']:.0f}", f"{row.get('speed', 1):.2f}"))  # fmt: skip
    return (
        table(("model, memory", "method", "largest batch", "over plain jit's", "samples/s", "over plain jit's"), rows)
        if rows
        else ""
    )


_TABLES: Mapping[str, Callable[[Document], str]] = {
    "phases": _phases,
    "first": _first,
    "single": _single,
    "scalability": _scalability,
    "mixed": _mixed,
    "batch": _batch,
    "overhead": _overhead,
    "limits": _limits,
    "largest": _largest,
}


# -- pictures -------------------------------------------------------------------------------------------------------------------


def _picture(document: Document) -> str:
    """The name of the picture's file."""
    on = document["measured_on"]
    if "simulation" not in on:
        return f"curve-measured-{on.split(',')[0]}.png"
    return f"curve-simulated-{'rtx_a6000' if 'a6000' in on else 'h200'}.png"


def _curves(document: Document, results: Path) -> None:
    """EOR over MSR of `auto`, with the bound and the other methods, a panel for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = _rows_of(document, "curve")
    figure, panels = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3.2), sharey=True, squeeze=False)
    marks = (("vdnn", "vDNN"), ("capuchin", "Capuchin"), ("tensile", "TENSILE"), ("checkpoint", "checkpoint"))
    auto = LOOKS["auto"]
    for panel, (model, rows) in zip(panels[0], models, strict=True):
        drawn = sorted((row for row in rows if "msr" in row), key=lambda row: row["msr"])
        x, y = [row["msr"] for row in drawn], [row["eor"] for row in drawn]
        panel.plot(x, y, color=auto.colour, marker=auto.marker, markersize=3.5, label="auto")
        bounds = sorted((1 - row["share"], row["bound_eor"]) for row in rows if "bound_eor" in row)
        if bounds:
            panel.plot([x for x, _ in bounds], [y for _, y in bounds], color=GRAY, linestyle=":", label="bound")
        single = document.get("single", {}).get(model, {})
        for name, label in marks:
            if "msr" in single.get(name, {}):
                look = LOOKS[name]
                panel.plot(single[name]["msr"], single[name]["eor"], look.marker, color=look.colour, label=label, markersize=6)
        panel.set_title(TITLES[model])
        panel.set_xlim(0, 1)
        panel.set_ylim(0.8, 3)
        panel.set_xlabel("memory saved (MSR)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("time over plain jit (EOR)")
    panels[0][-1].legend(fontsize=8, loc="upper left")
    figure.suptitle(_title(document))
    figure.tight_layout()
    figure.savefig(results / _picture(document), dpi=110, metadata={"Software": None})
    plt.close(figure)
