"""Finds the line on which each key of a TOML text stands. Error messages name the line, and `tomllib` does not tell it.

    text      ::= (header | pair | newline)*
    header    ::= "[" key "]" | "[[" key "]]"
    pair      ::= key "=" value
    key       ::= part ("." part)*
    part      ::= a name with or without quotes
    value     ::= scalar | "[" value* "]" | "{" pair* "}"
    scalar    ::= a string, a number, a date or time, or a Boolean

Spaces and comments may stand anywhere and are skipped, and so are commas and newlines inside brackets and braces.

The result names a key by its path: `("jobs", 1, "args", "seed")` is `seed` in the table `args` of the second `[[jobs]]`. Lines
count from one. This module looks for no errors in the text, so `tomllib` must have accepted it first.
"""

import re
import tomllib
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'''
      (?P<blank>    [ \t\r]+ | \#[^\n]* )
    | (?P<newline>  \n )
    | (?P<string>   """(?:[^\\]|\\.)*?"{3,5} | \'\'\'.*?\'{3,5} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*' )
    | (?P<mark>     [\[\]{}=,.] )
    | (?P<word>     [^\s\#\[\]{}=,."']+ )
    ''',
    re.VERBOSE | re.DOTALL,
)


def find_lines(text: str) -> Mapping[KeyPath, int]:
    """The line of every table, key and element of an array in `text`.

    >>> find_lines("[[jobs]]\\nsteps = 3 # not 4\\nargs = {seed = 1}")
    {('jobs',): 1, ('jobs', 0): 1, ('jobs', 0, 'steps'): 2, ('jobs', 0, 'args'): 3, ('jobs', 0, 'args', 'seed'): 3}
    """
    return _Walk(text).lines


class _Walk:
    """Parses the tokens in one pass. The list of tokens is in reverse order, so that the next token is the last of the list."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = [("newline", "\n", 0)]  # (kind, text, line); this one stays, so that there is always a next token
        self._counts: dict[KeyPath, int] = {}  # of the tables in each array of tables
        line = 1
        for match in _TOKEN.finditer(text):
            if match.lastgroup != "blank":
                self._tokens.append((match.lastgroup or "", match[0], line))
            line += match[0].count("\n")
        self._tokens[1:] = self._tokens[:0:-1]
        table: KeyPath = ()
        while len(self._tokens) > 1:
            if self._take("["):
                table = self._header()
            elif not self._take("\n"):
                self._pair(table)

    def _take(self, text: str) -> bool:
        """Consume the next token if it is this mark, or the end of a line; return whether it was."""
        found = self._tokens[-1][:2] in (("mark", text), ("newline", text))
        if found and len(self._tokens) > 1:
            self._tokens.pop()
        return found

    def _header(self) -> KeyPath:
        is_array = self._take("[")
        path: KeyPath = ()
        parts, line = self._key()
        for depth, part in enumerate(parts, start=1):
            path = (*path, part)
            self.lines.setdefault(path, line)
            if is_array and depth == len(parts):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self.lines.setdefault(path, line)
        while self._take("]"):
            pass
        return path

    def _key(self) -> tuple[list[str], int]:
        """The parts of the next key, and its line."""
        parts: list[str] = []
        line = self._tokens[-1][2]
        while not parts or self._take("."):
            kind, text, _ = self._tokens.pop()
            parts.append(text if kind == "word" else tomllib.loads(f"key = {text}")["key"])
        return parts, line

    def _pair(self, path: KeyPath) -> None:
        parts, line = self._key()
        for part in parts:
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._take("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._take("{"):
            while not self._take("}"):
                if not (self._take(",") or self._take("\n")):
                    self._pair(path)
        elif self._take("["):
            count = 0
            while not self._take("]"):
                if not (self._take(",") or self._take("\n")):
                    element = (*path, count)
                    self.lines[element] = self._tokens[-1][2]
                    self._value(element)
                    count += 1
        else:  # 1.5 and 2026-01-01 12:00:00 are several tokens
            while self._tokens[-1][0] in ("string", "word") or self._tokens[-1][1] == ".":
                self._tokens.pop()
