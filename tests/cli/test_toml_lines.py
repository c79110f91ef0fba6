"""The lines of keys, in TOML that tries to mislead whoever looks for them with a regular expression."""

import tomllib
from typing import Any

import pytest

from tensile_jax.cli.toml_lines import KeyPath, find_lines

MISLEADING = '''\
# steps = 0
title = "[[jobs]] # no comment \\" steps = 1"
"quoted key" = 'C:\\'
text = """
[[jobs]]
steps = 2 \\"""
""\"""
raw = \'\'\'
[jobs]
\'\'\'\'

[ device ]  # comment with "a quote
budget = 1.5
when = 2026-01-01 12:00:00

[[jobs]]
steps = 3
args.seed = 1
args."a.b" = [
  1, # one
  {x = 2, y.z = [3]},

  [4, 5],
]
[jobs.more]
deep = {}
[[jobs]]
[[jobs.parts]]
[[jobs.parts]]
steps = 4
'''

EXPECTED = {
    ("title",): 2,
    ("quoted key",): 3,
    ("text",): 4,
    ("raw",): 8,
    ("device",): 12,
    ("device", "budget"): 13,
    ("device", "when"): 14,
    ("jobs",): 16,
    ("jobs", 0): 16,
    ("jobs", 0, "steps"): 17,
    ("jobs", 0, "args"): 18,
    ("jobs", 0, "args", "seed"): 18,
    ("jobs", 0, "args", "a.b"): 19,
    ("jobs", 0, "args", "a.b", 0): 20,
    ("jobs", 0, "args", "a.b", 1): 21,
    ("jobs", 0, "args", "a.b", 1, "x"): 21,
    ("jobs", 0, "args", "a.b", 1, "y"): 21,
    ("jobs", 0, "args", "a.b", 1, "y", "z"): 21,
    ("jobs", 0, "args", "a.b", 1, "y", "z", 0): 21,
    ("jobs", 0, "args", "a.b", 2): 23,
    ("jobs", 0, "args", "a.b", 2, 0): 23,
    ("jobs", 0, "args", "a.b", 2, 1): 23,
    ("jobs", 0, "more"): 25,
    ("jobs", 0, "more", "deep"): 26,
    ("jobs", 1): 27,
    ("jobs", 1, "parts"): 28,
    ("jobs", 1, "parts", 0): 28,
    ("jobs", 1, "parts", 1): 29,
    ("jobs", 1, "parts", 1, "steps"): 30,
}


def paths(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """The path of everything in a parsed text."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path, *(found for key, one in inner for found in paths(one, (*path, key)))}


def test_every_key_is_found_on_its_line() -> None:
    assert find_lines(MISLEADING) == EXPECTED


def test_the_keys_are_those_that_tomllib_reads() -> None:
    assert paths(tomllib.loads(MISLEADING)) - {()} == set(EXPECTED)


def test_lines_that_end_as_on_windows_count_once() -> None:
    assert find_lines(MISLEADING.replace("\n", "\r\n")) == EXPECTED


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_a_text_without_keys_has_no_lines(text: str) -> None:
    assert find_lines(text) == {}
