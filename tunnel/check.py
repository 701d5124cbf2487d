"""``tunnel check``: every problem of a configuration file, each with its line, without starting anything.

Rules that hold here:

- Nothing is known here of sections, keys or values: the parsers of the commands' own options are asked, and then each
  command itself, with all that its section says. So what is ``ok`` here is taken there, and the reverse.
- Variables are left out: the file is looked at alone. What it leaves out is no problem, a flag may say it.

This file must not know which commands there are.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from tunnel.config import load_file
from tunnel.errors import ConfigError

_TAKEN_TYPES = {str: "a text", bool: "true or false", int: "a whole number", list: "a list of texts"}

Rehearsal = Callable[[str, Mapping[str, Any]], None]
"""Has a command look at its section as if it were to begin; raises ``ConfigError`` or ``click.UsageError``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is not taken, and where: ``line`` is None if it is the whole file."""

    path: str
    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.key}: {self.text}" if self.line else self.text


def problems(
    path: str, commands: Mapping[str, click.Command], keys: Mapping[str, Mapping[str, type]], rehearse: Rehearsal
) -> list[Problem]:
    """All that is wrong with a file. ``keys`` are those of each section, with the types of their values."""
    try:
        load_file(path, keys)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, ValueError):
        return [Problem(path, None, "", refused)]
    found = list(_Check(path, commands, keys, rehearse, lines_of(text)).document(document))
    return found or ([Problem(path, None, "", refused)] if refused else [])


@dataclass(frozen=True, slots=True)
class _Check:
    path: str
    commands: Mapping[str, click.Command]
    keys: Mapping[str, Mapping[str, type]]
    rehearse: Rehearsal
    lines: Mapping[tuple[str, ...], int]

    def document(self, document: Mapping[str, Any]) -> Iterator[Problem]:
        for section, table in document.items():
            if section not in self.keys:
                yield self._problem((section,), _unknown("section", section, self.keys))
            elif not isinstance(table, dict):
                yield self._problem((section,), f"is a value; taken: a section [{section}]")
            else:
                found = [problem for key in table for problem in self._key(section, key, table[key])]
                yield from found or self._section(section, table)

    def _key(self, section: str, key: str, value: object) -> Iterator[Problem]:
        wanted = self.keys[section].get(key)
        if wanted is None:
            yield self._problem((section, key), _unknown("key", key, self.keys[section]))
        elif not _fits(value, wanted):
            yield self._problem((section, key), f"{_shown(value)}; taken: {_TAKEN_TYPES[wanted]}")
        else:
            command = self.commands[section]
            option = next(each for each in command.params if f"--{key}" in each.opts)
            for item in value if isinstance(value, list) else [value]:
                try:
                    option.type.convert(item, option, click.Context(command))
                except click.BadParameter as error:
                    yield self._problem((section, key), error.message)

    def _section(self, section: str, table: Mapping[str, Any]) -> Iterator[Problem]:
        """What the command says to its section as a whole."""
        try:
            self.rehearse(section, table)
        except (ConfigError, click.UsageError) as error:
            text = error.message if isinstance(error, click.UsageError) else str(error)
            named = [key for key in re.findall(r"--([a-z-]+)", text) if key in table]
            yield self._problem((section, *named[:1]), text)

    def _problem(self, where: tuple[str, ...], text: str) -> Problem:
        line = self.lines.get(where) or self.lines.get(where[:1])
        return Problem(self.path, line, ".".join(where), text)


def _fits(value: object, wanted: type) -> bool:
    if wanted is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is wanted


def _unknown(what: str, word: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"is an unknown {what}; " + (f"did you mean {close[0]}?" if close else f"taken: {', '.join(known)}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def lines_of(text: str) -> dict[tuple[str, ...], int]:
    """The first line of each section and each key of a TOML text, however it is spelled.

    Lines are read until they make a statement; the reader of TOML says what that holds.
    """
    found: dict[tuple[str, ...], int] = {}
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


def _places(parsed: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for section, table in parsed.items():
        yield (section,)
        if isinstance(table, dict):
            yield from ((section, key) for key in table)
