"""The book of what is open."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tunnel.book import Book, view_of
from tunnel.core import Stream
from tunnel.session import Session


def stream() -> Stream:
    session = Session(opener=True, window=100, on_dial=_never, on_control=_never, on_streams=lambda _: None)
    return Stream(session, 1, 100)


def _never(*_: object) -> None:
    raise AssertionError


async def test_an_entry_is_there_for_as_long_as_the_block(autojump_clock: MockClock) -> None:
    book = Book()
    with book.entry("connect", "db:5432", "one", stream()) as entry:
        assert book.page(0, 10) == [entry]
    assert book.page(0, 10) == []


async def test_an_entry_ends_with_a_block_that_fails(autojump_clock: MockClock) -> None:
    book = Book()
    with pytest.raises(ZeroDivisionError), book.entry("connect", "db:5432", "one", stream()):
        raise ZeroDivisionError
    assert repr(book) == "<Book entries=0>"


async def test_numbers_grow_and_are_never_used_again(autojump_clock: MockClock) -> None:
    book = Book()
    with book.entry("connect", "a:1", "one", stream()) as first:
        pass
    with book.entry("connect", "a:1", "one", stream()) as second:
        assert second.number > first.number


async def test_pages_follow_each_other_without_a_gap(autojump_clock: MockClock) -> None:
    book = Book()
    entries = [book.entry("connect", f"a:{number}", "one", stream()) for number in range(1, 8)]
    opened = [entry.__enter__() for entry in entries]
    assert book.page(0, 3) == opened[:3]
    entries[2].__exit__(None, None, None)  # the last one that was seen may end meanwhile
    assert book.page(opened[2].number, 3) == opened[3:6]
    assert book.page(opened[5].number, 3) == opened[6:]
    assert book.page(opened[6].number, 3) == []


async def test_a_view_is_a_copy(autojump_clock: MockClock) -> None:
    book, one = Book(), stream()
    with book.entry("forward", "db:5432", "one", one) as entry:
        await trio.sleep(7)
        before = view_of(entry)
        one.sent, one.received = 5, 6
        after = view_of(entry)
    assert (before.use, before.target, before.agent, before.state) == ("forward", "db:5432", "one", "dialling")
    assert before.age_s == 7
    assert (before.sent, before.received) == (0, 0)
    assert (after.sent, after.received) == (5, 6)
