"""A configuration file: TOML with sections and keys, each problem of which has its line.

Rules that hold here:

- Whatever is not known is refused, with the name that may have been meant, or else all that are taken.
- Texts are not looked into: that is for those who know what they mean.

This file must not know which sections or keys there are.
"""

from __future__ import annotations

import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tunnel.errors import ConfigError

Keys = Mapping[str, Mapping[str, type]]
"""By section, its keys, and the type of each value: ``str``, ``bool``, ``int``, or ``list`` of texts."""

Where = tuple[str, ...]
"""A section, or a section and its key."""

_FOR_OTHERS = 0o077
_TAKEN_TYPES = {str: "a text", bool: "true or false", int: "a whole number", list: "a list of texts"}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is not taken, and where: ``line`` is None if it is the whole file."""

    path: str
    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.key}: {self.text}" if self.line else self.text


class ConfigFile:
    """A file that is TOML.

    Attributes:
        sections: what it says.

    Raises:
        ConfigError: it cannot be read, or is not TOML in UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._text = read_text(path)
        self.sections = parse_toml(path, self._text)
        self._lines: dict[Where, int] = {}

    def problem(self, where: Where, text: str) -> Problem:
        """A problem with a section, or a key of it."""
        self._lines = self._lines or lines_of(self._text)
        line = self._lines.get(where) or self._lines.get(where[:1])
        return Problem(self.path, line, ".".join(where), text)

    def misfits(self, known: Keys) -> Iterator[Problem]:
        """Sections and keys that are not known, and values of another type."""
        for section, table in self.sections.items():
            if section not in known:
                yield self.problem((section,), _unknown("section", section, known))
            elif not isinstance(table, dict):
                yield self.problem((section,), f"is a value; taken: a section [{section}]")
            else:
                for key, value in table.items():
                    yield from self._misfit((section, key), value, known[section])

    def _misfit(self, where: Where, value: object, known: Mapping[str, type]) -> Iterator[Problem]:
        key = where[-1]
        if key not in known:
            yield self.problem(where, _unknown("key", key, known))
        elif not _fits(value, known[key]):
            yield self.problem(where, f"{reprlib.repr(value)}; taken: {_TAKEN_TYPES[known[key]]}")


def load(path: str | Path, known: Keys) -> dict[str, dict[str, Any]]:
    """What a file says, by section and key.

    Raises:
        ConfigError: it cannot be read, is not TOML, or something in it is not as ``known`` says; the first of it.
    """
    file = ConfigFile(path)
    for problem in file.misfits(known):
        raise ConfigError(str(problem))
    return file.sections


def read_text(path: str | Path, *, private: bool = False, errors: str = "strict") -> str:
    """A file's text; ``private``: one that nobody but its owner may use; ``errors`` as for ``bytes.decode``.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or others may use it.
    """
    try:
        with Path(path).open("rb") as file:
            for_others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & _FOR_OTHERS
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if private and for_others:
        raise ConfigError(f"{path}: others than its owner may use it; taken: a file of mode 600 or 400")
    try:
        return content.decode(errors=errors)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def parse_toml(path: str | Path, text: str) -> dict[str, Any]:
    """What the text of a file says.

    Raises:
        ConfigError: it is not TOML. What it holds is not shown.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at_line = re.search(r"at line (\d+)", str(error))
        line = int(at_line[1]) if at_line else text.count("\n") + 1  # otherwise "at end of document"
        raise ConfigError(f"{path}:{line}: not TOML: {error}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not TOML that can be read: nested too deep, or a number too long") from error


def _fits(value: object, wanted: type) -> bool:
    if wanted is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is wanted


def _unknown(what: str, word: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"is an unknown {what}; " + (f"did you mean {close[0]}?" if close else f"taken: {', '.join(known)}")


def lines_of(text: str) -> dict[Where, int]:
    """The first line of each section and each key of a TOML text, however it is spelled.

    Lines are read until they make a statement; the reader of TOML says what that holds.
    """
    found: dict[Where, int] = {}
    header, statement, begun = "", "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += f"{line}\n"
        try:
            alone = tomllib.loads(statement)
            parsed = alone if statement.lstrip().startswith("[") else tomllib.loads(header + statement)
        except tomllib.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            header = statement
        for where in _places(parsed):
            found.setdefault(where, begun)
        statement, begun = "", number + 1
    return found


def _places(parsed: Mapping[str, Any]) -> Iterator[Where]:
    for section, table in parsed.items():
        yield (section,)
        if isinstance(table, dict):
            yield from ((section, key) for key in table)
