"""docs/operations.md says what is there: every path, every line of the log, every exit code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path

import pytest

from tunnel import core, frontends, lifecycle, outbox, programs
from tunnel.admin.openapi import document
from tunnel.limits import Limits, Timeouts
from tunnel.sync import SyncState

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BOUNDS = PAGE.split("\n## Bounds\n")[1].split("\n## ")[0]

LEVELS = {
    "trace": "trace",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
}
NAMED_ELSEWHERE = {"drain deadline, cutting", "second signal, cutting", *(f"sync {state.value}" for state in SyncState)}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def logged() -> dict[str, set[str]]:
    """Events by name, with their levels; a level that depends on something is ``?``."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tunnel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Attribute(value=logger, attr=level), [ast.Constant(str(event)), *_]):
                    if level in LEVELS and ast.unparse(logger).startswith("log"):
                        found[event].add(LEVELS[level])
                case ast.Call(ast.Name("say"), [ast.Constant(str(event)), *_]):
                    found[event].add("?")
    return found


def test_every_event_is_in_the_manual_with_its_levels() -> None:
    documented = {event: set(levels.split(", ")) for cells in table("The log") for event, levels in named(cells)}
    events = logged()
    assert {*documented} == {*events} | NAMED_ELSEWHERE
    for event, levels in events.items():
        if "?" not in levels:
            assert documented[event] == levels, event


def named(cells: list[str]) -> list[tuple[str, str]]:
    return [(event, cells[1]) for event in re.findall(r"`([^`]+)`", cells[0])]


def test_every_exit_code_is_in_the_manual() -> None:
    codes = {code for cells in table("Exit codes") for code in cells[0].split(", ")}
    ours = {value for name, value in vars(lifecycle).items() if name.startswith("EXIT_")}
    assert codes == {str(code) for code in {*ours, programs.EXIT_CANNOT_START, 2, 128 + 2, 128 + 15}}


def bitten() -> set[str]:
    """The names of bounds that the source says have bitten."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tunnel").rglob("*.py"))
    named = re.findall(r'(?:hit\(|_bound\(|bound=|Rate\(bounds, )"(\w+)"', source)
    crowds = re.findall(r'Crowd\(self, "(\w+)", "(\w+)"\)', source)
    return {*named, *chain(*crowds), *frontends._BOUNDS.values(), "body_before_auth"}


def bounds(text: str) -> dict[str, float]:
    """The bounds of tables, and their defaults."""
    units = {"": 1, " s": 1, " KiB": 1024, " MiB": 1024**2, " GiB": 1024**3}
    rows = re.findall(r"^\| `(\w+)` \| ([0-9,]+)( \w+)? \|", text, re.MULTILINE)
    return {name: int(number.replace(",", "")) * units[unit] for name, number, unit in rows}


def test_every_bound_that_bites_is_in_the_manual() -> None:
    counted, shaping = BOUNDS.split("Some bounds only shape")
    assert {*bounds(counted)} == bitten()
    assert {*bounds(shaping)} == {field.name for field in fields(Limits)} - bitten()


def test_the_manual_has_the_defaults_of_all_bounds() -> None:
    wanted = {**asdict(Limits()), "answers": outbox._MAX_CONTROL, "credit": core._MAX_CREDIT}
    wanted |= {"handshake_time": Timeouts().handshake, "head_time": Timeouts().head}
    assert bounds(BOUNDS) == wanted


@pytest.mark.parametrize("role", ["server", "agent"])
def test_every_path_is_in_the_manual(role: str) -> None:
    for path, methods in document(role, "0")["paths"].items():
        for method in {*methods} - {"parameters"}:
            assert re.search(rf"`{method.upper()} {re.escape(path)}(\?[^`]*)?`", PAGE), (method, path)


def test_every_error_code_is_in_the_manual() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tunnel" / "admin").glob("*.py"))
    raised = set(re.findall(r'Problem\((\d+), "(\w+)"', source))
    assert len(raised) > 5
    for status, code in raised:
        assert f"| {status} | `{code}` |" in PAGE
