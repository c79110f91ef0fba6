"""A hook of MkDocs: `benchmarks/README.md` and `benchmarks/results`, which lie outside of `docs`, become part of the site.

A page links to them as they lie in the repository, `../benchmarks/results/NAME`, so that the link also works where the page is
read as a file.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (".png", ".json")


def on_files(files: Files, config: Any) -> Files:
    """Add the page, the pictures and the tables."""
    page = ROOT / "benchmarks" / "README.md"
    files.append(File.generated(config, page.relative_to(ROOT).as_posix(), abs_src_path=str(page)))
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*")):
        if path.suffix in SHOWN:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them from a page of the site."""
    return markdown.replace("](../benchmarks/", "](benchmarks/")
