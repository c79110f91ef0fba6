"""Writes plans, memory reports, runs and comparisons as pages: HTML files that a browser shows without a network, in light and
dark.

page.py             a page: a heading, key values, plots and a table, written as one file with the script of plotly in it
traces.py           what plots are made of: stacked areas, bands, spans and lines, as plotly's traces
offsets.py          gives each tensor a place on the vertical axis, so that no two tensors overlap
levels.py           reduces a long recording to as many points as a picture can show
memory_page.py      the page of a `MemoryReport`
plan_page.py        the page of a `Plan`
run_page.py         the page of a run of several jobs
comparison_page.py  the page of a `Comparison` of policies

plotly draws, and comes with the extra `html`.
"""
