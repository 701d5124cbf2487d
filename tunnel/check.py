"""``tunnel check``: every problem of a configuration file, each with its line, without starting anything.

Rules that hold here:

- Nothing is known here of sections, keys or values: the parsers of the commands' own options are asked, and then each
  command itself, with all that its section says. So what is ``ok`` here is taken there, and the reverse.
- Variables are left out: the file is looked at alone, and those that it names are not opened. What it leaves out is no
  problem, a flag may say it.

This file must not know which commands there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from tunnel.configfile import ConfigFile, Keys, Problem
from tunnel.errors import ConfigError

Rehearsal = Callable[[str, Mapping[str, Any]], None]
"""Has a command look at its section as if it were to begin; raises ``ConfigError`` or ``click.UsageError``."""


def problems(path: str, commands: Mapping[str, click.Command], keys: Keys, rehearse: Rehearsal) -> list[Problem]:
    """All that is wrong with a file, in the order of its lines."""
    try:
        file = ConfigFile(path)
    except ConfigError as error:
        return [Problem(path, None, "", str(error))]
    found = list(file.misfits(keys))
    misfits = {problem.key for problem in found}
    for section, table in file.sections.items():
        if section not in misfits:
            fitting = {key: value for key, value in table.items() if f"{section}.{key}" not in misfits}
            of_values = list(_of_values(file, section, fitting, commands[section]))
            whole = len(fitting) == len(table) and not of_values
            found += _of_all(file, section, table, rehearse) if whole else of_values
    return sorted(found, key=lambda problem: problem.line or 0)


def _of_values(file: ConfigFile, section: str, table: Mapping[str, Any], command: click.Command) -> Iterator[Problem]:
    """What the readers of the options say to each value alone."""
    for key, value in table.items():
        option = next(each for each in command.params if f"--{key}" in each.opts)
        for item in value if isinstance(value, list) else [value]:
            try:
                option.type.convert(item, option, click.Context(command))
            except click.BadParameter as error:
                yield file.problem((section, key), error.message)


def _of_all(file: ConfigFile, section: str, table: Mapping[str, Any], rehearse: Rehearsal) -> Iterator[Problem]:
    """What the command says to its section as a whole."""
    try:
        rehearse(section, table)
    except (ConfigError, click.UsageError) as error:
        text = error.message if isinstance(error, click.UsageError) else str(error)
        named = [key for key in re.findall(r"--([a-z-]+)", text) if key in table]
        yield file.problem((section, *named[:1]), text)
