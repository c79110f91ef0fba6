"""The pages of results: takes the JSON files in `benchmarks/results`, gives `docs/results.md` and `docs/predicted.md`.

    python -m benchmarks.results_pages

Each section is one function that reads its file and returns a `Section` (`section.py`). To add a section, write such a function,
and add it to `SECTIONS` at the end of the file that it belongs to: `on_h200.py`, `steps_on_cpu.py`, `jobs_on_cpu.py`,
`planning_on_cpu.py`, `compiled.py` or `simulated.py`.
"""
