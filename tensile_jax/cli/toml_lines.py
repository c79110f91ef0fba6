"""On which line of a TOML text each key stands, which `tomllib` does not say.

    text      ::= (header | pair | newline)*
    header    ::= "[" key "]" | "[[" key "]]"
    pair      ::= key "=" value
    key       ::= part ("." part)*
    value     ::= scalar | "[" value* "]" | "{" pair* "}"

A key is the path to its value: `("jobs", 1, "args", "seed")` is `seed` in the table `args` of the second `[[jobs]]`. Lines
count from one. The text must be one that `tomllib` has read: what is not TOML is not found out here.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def find_lines(text: str) -> Mapping[KeyPath, int]:
    """The line of every table, key and element of an array in `text`.

    >>> find_lines("[[jobs]]\\nsteps = 3 # not 4\\nargs = {seed = 1}")
    {('jobs',): 1, ('jobs', 0): 1, ('jobs', 0, 'steps'): 2, ('jobs', 0, 'args'): 3, ('jobs', 0, 'args', 'seed'): 3}
    """
    return _Walk(_tokens(text)).lines


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    line = 1
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "blank":
            found.append(_Token(match.lastgroup or "", match[0], line))
        line += match[0].count("\n")
    return [*found, _Token("newline", "\n", line)]


class _Walk:
    """Goes through the tokens once, from the first to the last."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = tokens
        self._at = 0
        self._counts: dict[KeyPath, int] = {}  # of the tables in each array of tables
        table: KeyPath = ()
        while self._at < len(tokens):
            if tokens[self._at].kind == "newline":
                self._at += 1
            elif self._next_is("["):
                table = self._header()
            else:
                self._pair(table)

    def _next_is(self, mark: str) -> bool:
        token = self._tokens[self._at]
        return token.kind == "mark" and token.text == mark

    def _take(self, mark: str) -> bool:
        found = self._next_is(mark)
        self._at += found
        return found

    def _header(self) -> KeyPath:
        line = self._tokens[self._at].line
        self._take("[")
        is_array = self._take("[")
        path: KeyPath = ()
        parts = self._key()
        for depth, part in enumerate(parts):
            path = (*path, part)
            self.lines.setdefault(path, line)
            if is_array and depth == len(parts) - 1:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self.lines.setdefault(path, line)
        self._take("]")
        self._take("]")
        return path

    def _key(self) -> list[str]:
        parts: list[str] = []
        while not parts or self._take("."):
            token = self._tokens[self._at]
            parts.append(token.text if token.kind == "word" else tomllib.loads(f"key = {token.text}")["key"])
            self._at += 1
        return parts

    def _pair(self, table: KeyPath) -> None:
        line = self._tokens[self._at].line
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._take("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._take("{"):
            while not self._take("}"):
                if not self._skip():
                    self._pair(path)
        elif self._take("["):
            count = 0
            while not self._take("]"):
                if not self._skip():
                    element = (*path, count)
                    self.lines[element] = self._tokens[self._at].line
                    self._value(element)
                    count += 1
        else:  # 1.5 and 2026-01-01 12:00:00 are several tokens
            while self._tokens[self._at].kind in ("string", "word") or self._next_is("."):
                self._at += 1

    def _skip(self) -> bool:
        """Whether there was something between two elements."""
        between = self._tokens[self._at].kind == "newline" or self._next_is(",")
        self._at += between
        return between
