"""What commands show: lines and tables, styled and updated in place on a terminal, aligned plain text elsewhere.

Rules that hold here:

- Nothing that somebody else chose can reach the terminal as anything but text: what is not printable is escaped.
- Amounts are short and have a unit; a cell is one word where it can be, so that columns can be cut.
- rich is imported when there is a terminal, and not before.

This file must not know what the tables are about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {
    "active": "green",
    "ready": "green",
    "draining": "yellow",
    "drained": "cyan",
    "final": "magenta",
    "stopping": "magenta",
    "unknown": "red",
}


@dataclass(frozen=True, slots=True)
class Table:
    """``columns`` are headings; those that begin with ``>`` are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Part = str | Table


def on_terminal() -> bool:
    """Whether somebody looks at it now."""
    return sys.stdout.isatty()


def show(*parts: Part) -> None:
    """Print them, one below the other."""
    if on_terminal():
        from rich.console import Console

        Console(highlight=False).print(*map(_styled, parts), sep="\n")
    else:
        click.echo("\n".join(line for part in parts for line in plain(part)))


@contextmanager
def updating(*, live: bool = True) -> Iterator[Callable[..., None]]:
    """What is called like ``show``; if ``live``, and on a terminal, it replaces what it showed before."""
    if not (live and on_terminal()):
        yield show
        return
    from rich.console import Console, Group
    from rich.live import Live

    with Live(console=Console(highlight=False), auto_refresh=False) as display:
        yield lambda *parts: display.update(Group(*map(_styled, parts)), refresh=True)


def plain(part: Part) -> Iterable[str]:
    """The lines of a part, without any style."""
    if isinstance(part, str):
        return [clean(part)]
    cells = [[clean(cell) for cell in row] for row in ([name.lstrip(">") for name in part.columns], *part.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    fills = [str.rjust if name.startswith(">") else str.ljust for name in part.columns]
    return ["  ".join(map(_filled, fills, row, widths)).rstrip() for row in cells]


def _filled(fill: Callable[[str, int], str], cell: str, width: int) -> str:
    return fill(cell, width)


def _styled(part: Part) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(part, str):
        return Text(clean(part))
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in part.columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in part.rows:
        table.add_row(*(Text(clean(cell), _STYLES.get(cell, "")) for cell in row))
    return table


def clean(text: str) -> str:
    """The text with everything that is not printable escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def amount(size: float) -> str:
    """So many bytes, like ``12B`` or ``1.5MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f}{unit}" if unit == "B" else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}TiB"


def duration(seconds: float) -> str:
    """So many seconds, like ``1.5s``, ``3m07s``, ``5h02m`` or ``3d04h``."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for big, small, size, limit in (("m", "s", 60, 3600), ("h", "m", 3600, 86400)):
        if whole < limit:
            return f"{whole // size}{big}{whole % size * 60 // size:02d}{small}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
