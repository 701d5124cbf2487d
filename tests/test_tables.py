"""What is shown where nobody looks: aligned, escaped, with units."""

from __future__ import annotations

import pytest

from tunnel.tables import Table, amount, clean, duration, plain


def test_a_table_is_aligned_by_its_headings() -> None:
    table = Table(("AGENT", ">STREAMS"), [("edge-7", "5"), ("b", "12345678")])
    assert plain(table) == [
        "AGENT    STREAMS",
        "edge-7         5",
        "b       12345678",
    ]


def test_a_table_without_rows_is_its_headings() -> None:
    assert plain(Table(("AGENT", "STATE"), [])) == ["AGENT  STATE"]


def test_nothing_can_break_out_of_its_cell() -> None:
    table = Table(("AGENT",), [("\x1b[2Jgone\nx",)])
    assert plain(table) == ["AGENT", r"\x1b[2Jgone\nx"]


@pytest.mark.parametrize("text", ["\x1b", "\n", "\x07", "\u202e", "\u2028", "\x9b"])
def test_what_is_not_printable_is_escaped(text: str) -> None:
    assert clean(text).isprintable()
    assert clean(text).startswith("\\")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.0KiB"),
        (1536 * 1024, "1.5MiB"),
        (3 * 1024**3, "3.0GiB"),
        (2**50, "1024.0TiB"),
    ],
)
def test_amounts_have_a_unit(size: int, shown: str) -> None:
    assert amount(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (187, "3m07s"),
        (3599.4, "59m59s"),
        (3600, "1h00m"),
        (18_150, "5h02m"),
        (86_400, "1d00h"),
        (273_600, "3d04h"),
    ],
)
def test_durations_have_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
